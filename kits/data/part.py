"""The part of a tensor that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partway.data.window import Window, is_int
from partway.options import current
from partway.propagation.graph import Role
from partway.propagation.plan import Plan, TensorPlan
from partway.requests import given_mesh
from partway.runtime import get_group_size, get_rank, launched
from partway.strategy import (
    DataError,
    Form,
    Layout,
    Mesh,
    StrategyError,
    counted,
    form_of,
    parse,
    placement_from_code,
    shown,
)

IMAGE_DIMS = (-2, -1)
"""Where height and width are in [N, C, H, W]; (1, 2) in [N, H, W, C]."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the equal parts of a tensor: along each dim it is number `index` of `splits` parts.

    Raises DataError unless there is an index from 0 up to the count for each dim.
    """

    index: tuple[int, ...]
    splits: tuple[int, ...]

    def __post_init__(self) -> None:
        pair = (self.index, self.splits)
        if (
            not all(isinstance(side, tuple) for side in pair)
            or len(self.index) != len(self.splits)
            or not all(is_int(i, 0) and is_int(n, 1) and i < n for i, n in zip(self.index, self.splits, strict=False))
        ):
            raise DataError(
                "a part has, for each dim, a count of parts and an index below it, not the indices "
                f"{shown(self.index)} and "
                f"the counts {shown(self.splits)}"
            )

    @classmethod
    def whole(cls, ndim: int) -> Part:
        """The part that is a whole tensor of `ndim` dims. Raises DataError unless `ndim` is 0 to 64."""
        if not is_int(ndim, 0) or ndim > 64:
            raise DataError(f"ndim is {shown(ndim)}; write how many dims the tensor has")
        return cls((0,) * ndim, (1,) * ndim)

    @classmethod
    def of_layout(cls, layout: Layout, ndim: int, rank: int) -> Part:
        """The part of `rank` in a tensor of `ndim` dims with this layout. Raises StrategyError for a rank outside its
        mesh, or a split dim that the tensor does not have."""
        splits = layout.splits(ndim)
        return cls(tuple(cut.start for cut in layout.slices(splits, rank)), splits)

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Its place in a tensor of global `shape`. Raises DataError, naming the dim, if the parts are uneven."""
        if len(shape) != len(self.splits):
            raise DataError(f"{self} is for tensors of {counted(len(self.splits), 'dim')}, not of shape {list(shape)}")
        local = [_divided(size, n, f"dim {dim}") for dim, (size, n) in enumerate(zip(shape, self.splits, strict=True))]
        return tuple(slice(i * size, (i + 1) * size) for i, size in zip(self.index, local, strict=True))

    def window(self, height: int, width: int, dims: tuple[int, int] = IMAGE_DIMS) -> Window:
        """Its rows and columns of an image of `height` and `width`, which are `dims` of the tensor. Raises DataError if
        the parts are uneven."""
        (y, rows), (x, columns) = self.along(dims[0]), self.along(dims[1])
        h, w = _divided(height, rows, "the height"), _divided(width, columns, "the width")
        return Window(y * h, (y + 1) * h, x * w, (x + 1) * w)

    def patch(self, dims: tuple[int, int] = IMAGE_DIMS) -> int:
        """Its number among the patches that `SlicePatches(rows, columns)` makes; height and width are `dims`."""
        (y, _), (x, columns) = self.along(dims[0]), self.along(dims[1])
        return y * columns + x

    def along(self, dim: int) -> tuple[int, int]:
        """Its index along `dim`, and the number of parts there. Raises DataError for a dim that it does not have."""
        if not is_int(dim) or not -len(self.splits) <= dim < len(self.splits):
            raise DataError(f"{self} has no dim {shown(dim)}, only {counted(len(self.splits), 'dim')}")
        return self.index[dim], self.splits[dim]

    def __str__(self) -> str:
        return f"part {self.index} of {self.splits}"


def _divided(size: int, parts: int, name: str) -> int:
    if size % parts:
        raise DataError(
            f"{name} has size {size}, which {parts} parts do not divide; crop or pad it to a multiple of {parts}"
        )
    return size // parts


# -- from a person's strategy, or from a plan --------------------------------------------------------------------------


def part_of(strategy: Any, rank: int | None = None, *, mesh: Any = None, devices: int | None = None) -> Part:
    """The part of the input that `rank` holds under a strategy: an entry of a `dataset_strategy` or of an
    `in_strategy`.

    strategy   split counts (1, 1, 1, 8), or with `mesh` axis names ("dp", None, None, "w")
    rank       None: this process's; without a launcher the whole tensor, as the simulated ranks are given whole inputs
    mesh       the one that `shard` was given
    devices    their number; None: that of the mesh, of the launcher, or of the context

    Without a mesh the counts must split one dim over all devices, or nothing: the plan chooses which ranks share a
    part, and the order of two split dims. Raises StrategyError for other counts, and for a strategy that cannot be met.
    """
    _check_entry(strategy)
    own_mesh, ndim = given_mesh(mesh), len(strategy)
    total = _devices(own_mesh, devices)
    counts = [entry for entry in strategy if isinstance(entry, int)]
    split = [count for count in counts if count > 1]
    # every split on these devices divides such a shape: this checks only the strategy as written
    shape = (total * math.prod(counts),) * ndim
    layout, *others = parse(strategy, own_mesh or Mesh.flat(total), shape).layouts(shape)
    if others or (own_mesh is None and (len(split) > 1 or math.prod(split) not in (1, total))):
        fix = "write axis names instead of the counts" if own_mesh else "pass the mesh that shard was given, as mesh="
        raise StrategyError(
            f"which part of {shown(strategy)} each rank of {total} holds is chosen with the plan; {fix}, or "
            "ask the plan: planned_part(model)"
        )
    return _held(layout, ndim, rank)


def planned_part(planned: Any, input: int | str = 0, rank: int | None = None) -> Part:
    """The part of an input that `rank` holds in a plan: that of a sharded model or function, of the result of
    `compile`, or a Plan itself.

    input   its position among the tensors of the call, or its name
    rank    None: as for `part_of`

    With `dataset_strategy` set a rank is given its part; otherwise it is given whole inputs, and takes its part. Raises
    DataError for an unknown input, RuntimeStateError if there is no plan yet.
    """
    plan = planned if isinstance(planned, Plan) else getattr(planned, "plan", None)
    if not isinstance(plan, Plan):
        raise DataError(f"planned_part takes a Plan, or a sharded model, which has one, not {shown(planned)}")
    tensor = _input(plan, input)
    placements = tuple(map(placement_from_code, tensor.codes))
    return _held(Layout(plan.mesh, placements), len(tensor.shape), rank)


def to_global(part: torch.Tensor, strategy: Any, mesh: Any) -> torch.Tensor:
    """This rank's part of an input, in the form that a sharded model takes in place of the whole input: a DTensor if a
    launcher started this process; otherwise `part` itself, which is the whole input then. Every rank calls it.

    For an input that is split along several dims, as by in_strategy=(("dp", None, None, "w"),), and that no rank should
    read as a whole. `strategy` is its entry, in axis names, and `mesh` the one that `shard` was given. Raises
    StrategyError like `part_of`, for a part with another number of dims, and for parts that no DTensor has.
    """
    if given_mesh(mesh) is None:
        raise StrategyError("to_global takes the mesh that shard was given, such as mesh={'dp': 2, 'w': 4}")
    layout = _layout_of_parts("to_global", part, strategy, mesh)
    if not launched():
        return part
    from partway.runtime import as_dtensor, device_mesh
    from partway.runtime.tensors import parts_now, places_of, recut, whole_shape

    places = parts_now(part, f"to_global(part, {shown(strategy)})").places(layout)
    shape = whole_shape(places)
    if not layout.chunks(shape):
        raise StrategyError(f"to_global: no DTensor of shape {list(shape)} has the parts {layout}; give even ones")
    if places != places_of(layout, shape):
        part = recut(part, layout, shape, places, places_of(layout, shape))
    return as_dtensor(part, layout, shape, device_mesh(layout.mesh))


def whole_batch(part: torch.Tensor, strategy: Any = None, mesh: Any = None) -> torch.Tensor:
    """The whole of a tensor of which each process has its own part, such as the labels beside its part of the batch:
    the target of a loss outside of the model, since results are those of the whole batch. Parts may differ in size. In
    one process that stands for all devices it is `part` itself. Every process calls it.

    strategy   the part of each process, as for `part_of`; None: equally many parts along the first dim as processes, in
               their order
    mesh       the one that `shard` was given, if the strategy has axis names

    Gradients propagate back: that of the whole, which is the same on all ranks, gives each rank its part. Raises
    StrategyError like `part_of`, RuntimeStateError if ranks have parts of other dtypes or numbers of dims.
    """
    if isinstance(part, torch.Tensor) and strategy is None:
        strategy = (_devices(given_mesh(mesh), None), *[1] * (part.ndim - 1))
    layout = _layout_of_parts("whole_batch", part, strategy, mesh)
    if not launched():
        return part
    from partway.runtime.tensors import gathered, parts_now

    return gathered(part, layout, parts_now(part, "pw.data.whole_batch")) if layout.cuts else part


def _layout_of_parts(call: str, part: object, strategy: Any, mesh: Any) -> Layout:
    """The layout of the tensor of which each rank has a `part`."""
    if not isinstance(part, torch.Tensor):
        raise StrategyError(f"{call} takes a tensor, this rank's part of an input, not {shown(part)}")
    held = part_of(strategy, 0, mesh=mesh)
    if part.ndim != len(held.splits):
        raise StrategyError(
            f"the part has shape {list(part.shape)}, but {shown(strategy)} is for {counted(len(held.splits), 'dim')}"
        )
    on = given_mesh(mesh) or Mesh.flat(_devices(None, None))
    shape = (on.device_num**2,) * part.ndim  # every split divides it
    return parse(strategy, on, shape).layouts(shape)[0]


def _held(of: Layout, ndim: int, rank: int | None) -> Part:
    if rank is None:
        if not launched():
            return Part.whole(ndim)
        rank = get_rank()
    return Part.of_layout(of, ndim, rank)


def _check_entry(strategy: Any) -> None:
    """Raise StrategyError unless `strategy` looks like that of one input, in split counts or axis names."""
    if isinstance(strategy, tuple) and form_of(strategy) in (Form.INTS, Form.NAMES):
        return
    fix = "write the split counts of one input, such as (1, 1, 1, 8), or axis names with their mesh"
    if isinstance(strategy, tuple) and strategy and all(isinstance(entry, tuple) for entry in strategy):
        fix = f"give the entry of one input, such as {shown(strategy[0])}"
    raise StrategyError(f"part_of cannot read {shown(strategy)}; {fix}")


def _devices(mesh: Mesh | None, devices: int | None) -> int:
    if devices is not None and not is_int(devices, 1):
        raise StrategyError(f"devices is {shown(devices)}; write how many there are, an int of 1 or more")
    if mesh is not None:
        if devices not in (None, mesh.device_num):
            raise StrategyError(f"devices is {devices}, but the mesh ({mesh}) has {mesh.device_num}; omit devices")
        return mesh.device_num
    if devices is not None:
        return devices
    return get_group_size() if launched() else current().device_num


def _input(plan: Plan, wanted: int | str) -> TensorPlan:
    inputs = [tensor for tensor in plan.inputs if tensor.role is Role.INPUT]
    for i, tensor in enumerate(inputs):
        if wanted == tensor.name or (is_int(wanted) and wanted == i):
            return tensor
    names = ", ".join(f"{i} {shown(tensor.name)}" for i, tensor in enumerate(inputs))
    raise DataError(f"the plan has no input {shown(wanted)}; its inputs are {names or 'none'}")
