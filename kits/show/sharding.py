"""`visualize_sharding`: draws which device holds which part of a tensor."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch

from partway.propagation.plan import Plan
from partway.requests import is_dtensor, layout_now
from partway.show.pictures.drawing import svg_of, text_of
from partway.show.pictures.parts import LayoutParts, parts_of
from partway.strategy import Layout, StrategyError, shown
from partway.strategy.basics import MARKS, human, save

_SIZES = re.compile(r"(\w*)\[([\d, ]*)\]")


@dataclass(frozen=True)
class ShardingPicture:
    """A picture of a tensor on the devices of a mesh: `text` for a terminal, `svg` for a page. A notebook shows the
    SVG."""

    title: str
    parts: LayoutParts = field(repr=False)

    @property
    def text(self) -> str:
        """The picture as lines of text."""
        return text_of(self.title, self.parts)

    @property
    def svg(self) -> str:
        """The picture as an `svg` element."""
        return svg_of(self.title, self.parts)

    def save_svg(self, path: str | PathLike[str]) -> None:
        """Write the SVG to a file. Raises StrategyError if it cannot be written."""
        save("the picture", path, f"{self.svg}\n{MARKS['the picture'][0]}\n")

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.text


def visualize_sharding(what: Any, shape: Sequence[int] | None = None, *, of: Any = None) -> ShardingPicture:
    """Show which device holds which part of a tensor.

    pw.visualize_sharding(model.up.weight, of=model)    # a tensor
    pw.visualize_sharding("up.weight", of=model)        # or its name: in a sharded module, or a Plan
    pw.visualize_sharding(layout, (4096, 1024))         # or a layout, of a shape

    what    a DTensor; a parameter of the sharded module `of`; a tensor that a call on virtual devices left split; a
            Layout; or the name of an input, an output or an operator's result in the plan of `of`
    shape   of the tensor, if `what` is a Layout
    of      the sharded module, or the plan

    In a script or a terminal it is printed, in a notebook it is drawn. Each box is a part, with its devices; the text
    above it explains each axis of the mesh. Returns the picture (`.text`, `.svg`, `.save_svg(path)`). Raises
    StrategyError for an object without a layout, an unknown name, or a shape that is missing or does not fit.
    """
    picture = _picture(what, shape, of)
    if not _in_notebook():
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(picture.text.encode(encoding, "replace").decode(encoding) + "\n")
    return picture


def _picture(what: Any, shape: Sequence[int] | None, of: Any) -> ShardingPicture:
    if isinstance(what, Layout):
        if shape is None:
            raise StrategyError("a Layout is of any shape; pass the shape of the tensor, as in (4096, 1024)")
        return _drawn("a tensor", "", what, shape)
    if shape is not None:
        raise StrategyError("shape is for a Layout only; a tensor and a name have their own")
    if isinstance(what, str):
        return _named(what, of)
    if isinstance(what, torch.Tensor):
        return _of_tensor(what, of)
    raise StrategyError(
        f"{shown(what)} has no layout; pass a tensor, the name of one with of=, or a Layout and a shape"
    )


def _of_tensor(tensor: torch.Tensor, of: Any) -> ShardingPicture:
    name = next((n for n, p in of.named_parameters() if p is tensor), "") if isinstance(of, torch.nn.Module) else ""
    if name and not is_dtensor(tensor):
        return _named(name, of)
    found = layout_now(tensor)
    if found is None:
        raise StrategyError(
            f"a tensor of the shape {list(tensor.shape)} is whole on every device: it is not a DTensor, not a split "
            "result, and not a parameter of a sharded module that was passed as of="
        )
    layout, devices = found
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _drawn(name or "a tensor", dtype, layout, tuple(tensor.shape), devices, chunked=is_dtensor(tensor))


def _named(name: str, of: Any) -> ShardingPicture:
    plan = of if isinstance(of, Plan) else getattr(of, "plan", None)
    if not isinstance(plan, Plan):
        raise StrategyError(f"{name!r} is a name; pass of=, the sharded module or the Plan that has it")
    for tensor in (*plan.inputs, *plan.outputs):
        if tensor.name == name:
            return _drawn(name, tensor.dtype, plan.layout_of(tensor.codes), tensor.shape)
    operator, _, number = name.partition("[")
    for planned in plan.operators:
        if planned.name == operator:
            made, index = _SIZES.findall(planned.result), int(number.rstrip("]") or 0)
            if index < len(made):
                dtype, sizes = made[index]
                shape = tuple(int(size) for size in sizes.split(",") if size.strip())
                return _drawn(name, dtype, plan.layout_of(planned.results[index]), shape)
    known = [tensor.name for tensor in (*plan.inputs, *plan.outputs)]
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    raise StrategyError(
        f"the plan has no tensor {name!r}; its inputs and outputs are {', '.join(known[:8])}{more}, and its operators "
        "are in print(plan)"
    )


def _drawn(
    name: str, dtype: str, layout: Layout, shape: Sequence[int], devices: Sequence[int] = (), chunked: bool = False
) -> ShardingPicture:
    parts = parts_of(layout, shape, devices, chunked)
    local = parts.local_shape
    share = f"each device holds {'' if parts.even else 'at most '}{list(local)}"
    if dtype and hasattr(torch, dtype):
        size = getattr(torch, dtype).itemsize
        share += f", {human(math.prod(local) * size)} of {human(math.prod(parts.shape) * size)}"
    return ShardingPicture(f"{name} {dtype}{list(parts.shape)} on {layout.mesh}: {layout}; {share}", parts)


def _in_notebook() -> bool:
    """Whether this runs in the kernel of a notebook, which shows the result of a cell."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return shell is not None and "IPKernelApp" in shell.config
