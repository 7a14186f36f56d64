"""Rules of operators that move elements along a dim: interpolation, padding, slices, rolls.

Like those of convolutions their results depend on windows; for padding, slices and rolls the window is the result.

*Interpolation.* For an integer ratio, PyTorch's own kernel enlarges a window. In all other cases the places in the
operand that an element depends on, and their weights, vary with its position: they are computed here as PyTorch
computes them, and each rank takes its own from a list, one dim at a time. PyTorch's kernel interpolates the remaining
dims in one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from ....strategy.cut import REPEATS, Span
from ...graph.nodes import argument, argument_names, operands, shape, value
from ...ops.dtypes import wide
from ..dims import last_dims_whole, over_dims
from ..local_forms import constants, cropped, split_dims
from ..row import Row, RowFunction
from ..rule import Emitter, Rule
from ..windows import Reach, Strided

aten = torch.ops.aten

# -- Interpolation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mode:
    """How an operator interpolates, and its overload that takes sizes and scales."""

    name: str
    sized: Any


# The operators of torch.nn.functional.interpolate.
_MODES: dict[Any, Mode] = {
    aten.upsample_nearest1d.vec: Mode("nearest", aten.upsample_nearest1d.default),
    aten.upsample_nearest2d.vec: Mode("nearest", aten.upsample_nearest2d.default),
    aten.upsample_nearest3d.vec: Mode("nearest", aten.upsample_nearest3d.default),
    aten._upsample_nearest_exact1d.vec: Mode("nearest-exact", aten._upsample_nearest_exact1d.default),
    aten._upsample_nearest_exact2d.vec: Mode("nearest-exact", aten._upsample_nearest_exact2d.default),
    aten._upsample_nearest_exact3d.vec: Mode("nearest-exact", aten._upsample_nearest_exact3d.default),
    aten.upsample_linear1d.vec: Mode("linear", aten.upsample_linear1d.default),
    aten.upsample_bilinear2d.vec: Mode("linear", aten.upsample_bilinear2d.default),
    aten.upsample_trilinear3d.vec: Mode("linear", aten.upsample_trilinear3d.default),
    aten.upsample_bicubic2d.vec: Mode("cubic", aten.upsample_bicubic2d.default),
}
_MARGIN = {"nearest": 0, "nearest-exact": 0, "linear": 1, "cubic": 2}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The interpolation of one dim from `held` to `made` elements. `scale` is the user's, if any; `single`: places are
    computed in float32."""

    held: int
    made: int
    scale: float | None
    mode: str
    corners: bool
    single: bool

    def __call__(self, start: int, stop: int) -> Span:
        """The reach of a range of the result (see `windows.Reach`)."""
        places = taps(self)[0][start:stop]
        return int(places.min()), int(places.max()) + 1

    @property
    def ratio(self) -> int:
        """The number of elements that each element becomes, if it is the same for all, so that a part of the image is
        enlarged like the whole; else 0."""
        ratio = self.made // self.held
        if self.corners or ratio * self.held != self.made or self.scale not in (None, float(ratio)):
            return 0
        index = np.arange(self.made + ratio)
        return 0 if self.nearest and (np.floor(_sources(self, index)) != index // ratio).any() else ratio

    @property
    def nearest(self) -> bool:
        """Whether each element of the result is one of the operand."""
        return not _MARGIN[self.mode]

    @property
    def steady(self) -> bool:
        """Whether PyTorch's backward uses the places of its forward. (It copies where sizes are the same, and computes
        nearest places differently, like the forward on other devices.)"""
        if self.held == self.made:
            return self.scale in (None, 1.0)
        return not self.nearest or bool((_backward_places(self) == taps(self)[0][:, 0]).all())


@dataclass(frozen=True, slots=True)
class Enlarged:
    """The reach of an enlargement by `ratio` that also depends on `margin` elements on each side."""

    ratio: int
    margin: int

    def __call__(self, start: int, stop: int) -> Span:
        return start // self.ratio - self.margin, (stop - 1) // self.ratio + 1 + self.margin


@lru_cache(maxsize=1024)
def taps(s: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The places in the operand that each element of the result depends on, and their weights: two tables with a column
    for each of these places."""
    index = np.arange(s.made)
    if s.mode == "linear" and s.held == s.made:
        return index[:, None], np.ones((s.made, 1))
    places = _sources(s, index)
    first = np.minimum(np.floor(places.astype(np.float32)).astype(np.int64), s.held - 1)
    if s.nearest:
        return first[:, None], np.ones((s.made, 1))
    part = np.clip(places - first, 0, 1)
    if s.mode == "linear":
        both = np.stack([first, np.minimum(first + 1, s.held - 1)], 1)
        return both, np.stack([1 - part, part], 1).astype(np.float64)
    four = np.clip(first[:, None] + np.arange(-1, 3), 0, s.held - 1)
    weights = [_outer(1 + part), _inner(part), _inner(1 - part), _outer(2 - part)]
    return four, np.stack(weights, 1).astype(np.float64)


def _sources(s: Sampling, index: NDArray[Any]) -> NDArray[Any]:
    """The fractional place in the operand of each element `index` of the result: ATen's UpSample.h, in its precision. A
    product and a sum are rounded once, as in a fused multiply-add."""
    number: Any = np.float32 if s.single else np.float64
    whole: Any = index.astype(number)
    places: NDArray[Any]
    if s.corners:
        places = whole * (number(s.held - 1) / number(s.made - 1) if s.made > 1 else number(0))
    elif s.mode == "nearest":
        places = whole * _scale(s, number)
    else:
        places = (np.float64(_scale(s, number)) * (index + 0.5) - 0.5).astype(number)
        if s.mode != "cubic":
            places = np.maximum(places, number(0))
        if s.mode == "nearest-exact":
            places += number(0.5)
    return places


def _scale(s: Sampling, number: Any) -> Any:
    return number(1.0 / s.scale) if s.scale else number(s.held) / number(s.made)


def _backward_places(s: Sampling) -> NDArray[Any]:
    """The elements of the operand to which PyTorch's backward adds the gradients in the nearest modes."""
    index, scale = np.arange(s.made), _scale(s, np.float32)
    if s.mode == "nearest" and s.made == 2 * s.held:
        return index // 2
    places = index.astype(np.float32) * scale if s.mode == "nearest" else (index + 0.5) * np.float64(scale)
    return np.minimum(np.floor(places.astype(np.float32)), s.held - 1)


_A = -0.75  # the free parameter of cubic convolution


def _inner(x: NDArray[Any]) -> NDArray[Any]:
    weights: NDArray[Any] = ((_A + 2) * x - (_A + 3)) * x * x + 1
    return weights


def _outer(x: NDArray[Any]) -> NDArray[Any]:
    weights: NDArray[Any] = ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A
    return weights


def interpolation(node: fx.Node) -> Rule:
    """torch.nn.functional.interpolate without antialiasing."""
    samplings = _samplings(node)
    rounded = not value(node).dtype.is_floating_point  # once, after all dims
    whole = {d for d, sampling in samplings.items() if not sampling.steady or (rounded and not sampling.nearest)}
    if whole and _MODES[node.target].name == "cubic":  # its backward copies where both sizes are the same
        whole = set(samplings)
    reaches = {d: _reach_of(sampling) for d, sampling in samplings.items() if d not in whole}
    beyond = any(isinstance(reach, Enlarged) and reach.margin for reach in reaches.values())
    fill = "replicate" if beyond else 0.0
    linear = not rounded or all(sampling.nearest for sampling in samplings.values())
    return over_dims(node, reaches, fill, linear, _local_interpolation, whole)


def _samplings(node: fx.Node) -> dict[int, Sampling]:
    mode, size = _MODES[node.target].name, shape(operands(node)[0])
    corners = "align_corners" in argument_names(node) and bool(argument(node, "align_corners"))
    single = value(node).dtype != torch.float64
    scales = argument(node, "scale_factors") or [None] * (len(size) - 2)
    return {d: Sampling(size[d], shape(node)[d], scales[d - 2], mode, corners, single) for d in range(2, len(size))}


def _reach_of(sampling: Sampling) -> Reach:
    ratio = sampling.ratio
    return Enlarged(ratio, _MARGIN[sampling.mode]) if ratio else sampling


def _local_interpolation(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Interpolate the dims with listed places first, then all others at once, some with margins that are cut off."""
    node, split, samplings = emit.node, split_dims(emit), _samplings(emit.node)
    if not split:
        return emit.call(node.target, *args, **kwargs)
    x: fx.Node = args[0]
    sizes, scales = list[int](), list[float | None]()
    for dim, sampling in samplings.items():
        size, scale = sampling.made, sampling.scale
        if dim in split and sampling.ratio:
            size = emit.windows[0, split[dim]].width * sampling.ratio
        elif dim in split:
            x = _sampled(emit, x, dim, split[dim], sampling)
            size, scale = emit.cut(split[dim]).width, None
        sizes.append(size)
        scales.append(scale)
    if any(dim not in split or sampling.ratio for dim, sampling in samplings.items()):
        corners = (argument(node, "align_corners"),) if "align_corners" in argument_names(node) else ()
        x = emit.call(_MODES[node.target].sized, x, sizes, *corners, *scales)
    x = _without_margins(emit, x, split, samplings)
    dtype = value(node).dtype
    if wide(dtype) != dtype and any(not (samplings[dim].ratio or samplings[dim].nearest) for dim in split):
        x = emit.call(aten._to_copy.default, x, dtype=dtype)  # rounded once, as in one kernel
    return x


def _without_margins(emit: Emitter, x: fx.Node, split: dict[int, str], samplings: dict[int, Sampling]) -> fx.Node:
    """Crop each enlarged dim from the rank's enlarged window to its slice."""
    for dim, factor in split.items():
        ratio, cut = samplings[dim].ratio, emit.cut(factor)
        if ratio:
            spans = zip(cut.spans, emit.windows[0, factor].spans, strict=True)
            places = [begin - start * ratio if begin < end else 0 for (begin, end), (start, _) in spans]
            x = cropped(emit, x, dim, factor, places, cut.width)
    return x


def _sampled(emit: Emitter, x: fx.Node, dim: int, factor: str, sampling: Sampling) -> fx.Node:
    """The sum of the elements at the places of `taps`, times their weights, in the dtype of the weights."""
    places, weights = taps(sampling)
    window, cut, dtype = emit.windows[0, factor], emit.cut(factor), value(emit.node).dtype
    around = [cut.width if d == dim else 1 for d in range(len(emit.whole[0]))]
    total: fx.Node | None = None
    for column in range(places.shape[1]):
        index, factors = [], []
        for (start, stop), (first, _) in zip(cut.spans, window.spans, strict=True):
            missing = cut.width - (stop - start)
            index.append([*(places[start:stop, column] - first).tolist(), *[0] * missing])
            factors.append([*weights[start:stop, column].tolist(), *[0.0] * missing])
        taken = constants(emit, x, factor, index, torch.int64)
        addend = emit.call(aten.index_select.default, x, dim, taken)
        if places.shape[1] > 1:
            weight = constants(emit, x, factor, factors, wide(dtype))
            addend = emit.call(aten.mul.Tensor, addend, emit.call(aten.reshape.default, weight, around))
        total = addend if total is None else emit.call(aten.add.Tensor, total, addend)
    assert total is not None
    return total


# -- Padding, slices, rolls --------------------------------------------------------------------------------------------


def pad(node: fx.Node) -> Rule:
    """pad, constant_pad_nd: a number, or the image's own elements, beyond its ends; negative amounts cut off."""
    fill = _beyond(node)
    count, amounts = len(shape(node)), argument(node, "pad")
    reaches: dict[int, Reach] = {
        count - 1 - i: Strided(1, 1, amounts[2 * i])
        for i in range(len(amounts) // 2)
        if any(amounts[2 * i : 2 * i + 2])
    }
    # in circular mode PyTorch cuts first, and elements that were cut off do not wrap around
    cut = {d for d in reaches if fill == "circular" and min(amounts[2 * (count - 1 - d) :][:2]) < 0}
    if isinstance(fill, float) and fill != (argument(node, "value") or 0.0):  # NaN, or a whole number that no float is
        return over_dims(node, {}, linear=False, whole=reaches)
    return over_dims(node, reaches, fill, fill in (0.0, *REPEATS), _local_pad, cut)


def _beyond(node: fx.Node) -> float | str:
    """The fill beyond the ends: a number (NaN for a complex one), or the mode by which elements repeat."""
    mode = argument(node, "mode") if "mode" in argument_names(node) else "constant"
    if mode != "constant":
        return str(mode)
    number = argument(node, "value") or 0.0
    return math.nan if isinstance(number, complex) else float(number)


def _local_pad(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Pad only the dims without a window, which is already padded."""
    split, amounts = split_dims(emit), list(argument(emit.node, "pad"))
    for dim in split:
        place = 2 * (len(emit.whole[0]) - 1 - dim)
        amounts[place : place + 2] = [0, 0]
    if split and not any(amounts):
        return _window(args)
    return emit.call(emit.node.target, args[0], amounts, *args[2:], **kwargs)


def _window(args: tuple[Any, ...]) -> fx.Node:
    """The local first operand, whose window is the result."""
    window: fx.Node = args[0]
    return window


def sliced(node: fx.Node) -> Rule:
    """A slice along one dim, with any step."""
    size = shape(operands(node)[0])
    dim = (argument(node, "dim") or 0) % max(len(size), 1)
    start, _, step = _slice_of(node, size[dim])
    if shape(node)[dim] == size[dim]:
        return over_dims(node, {})
    return over_dims(node, {dim: Strided(1, step, -start)}, local=_local_slice)


def _slice_of(node: fx.Node, size: int) -> tuple[int, int, int]:
    return slice(argument(node, "start"), argument(node, "end"), argument(node, "step")).indices(size)


def _local_slice(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A window starts where the slice starts."""
    split, step = split_dims(emit), argument(emit.node, "step") or 1
    if not split:
        return emit.call(emit.node.target, *args, **kwargs)
    ((dim, factor),) = split.items()
    width = emit.windows[0, factor].width
    return _window(args) if step == 1 else emit.call(aten.slice.Tensor, args[0], dim, 0, width, step)


def roll(node: fx.Node) -> Rule:
    """roll: elements wrap around; without dims the tensor is rolled flat, and stays whole."""
    if not argument(node, "dims"):
        return over_dims(node, {}, whole=range(len(shape(node))))
    return over_dims(node, {d: Strided(1, 1, n) for d, n in _shifts(node).items()}, "circular", local=_local_roll)


def _shifts(node: fx.Node) -> dict[int, int]:
    """The shift of each dim, in the shorter direction."""
    size, shifts = shape(operands(node)[0]), dict[int, int]()
    for dim, shift in zip(argument(node, "dims") or [], argument(node, "shifts"), strict=False):
        shifts[dim % len(size)] = shifts.get(dim % len(size), 0) + shift
    return {d: (n + size[d] // 2) % size[d] - size[d] // 2 for d, n in shifts.items() if n % max(size[d], 1)}


def _local_roll(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Roll only the dims without a window, which is already rolled."""
    split = split_dims(emit)
    if not split:
        return emit.call(emit.node.target, *args, **kwargs)
    left = {d: n for d, n in _shifts(emit.node).items() if d not in split}
    return emit.call(aten.roll.default, args[0], list(left.values()), list(left)) if left else _window(args)


ROWS: dict[Any, Row | RowFunction] = {
    aten._upsample_bicubic2d_aa.default: last_dims_whole(2),
    aten._upsample_bicubic2d_aa.vec: last_dims_whole(2),
    aten._upsample_bilinear2d_aa.default: last_dims_whole(2),
    aten._upsample_bilinear2d_aa.vec: last_dims_whole(2),
    aten._upsample_nearest_exact1d.vec: interpolation,
    aten._upsample_nearest_exact2d.vec: interpolation,
    aten._upsample_nearest_exact3d.vec: interpolation,
    aten.constant_pad_nd.default: pad,
    aten.grid_sampler_2d.default: Row("n c i j, n h w t -> n c h w", whole="i j t", linear=("0",), fill=0.0),
    aten.grid_sampler_3d.default: Row("n c i j k, n d h w t -> n c d h w", whole="i j k t", linear=("0",), fill=0.0),
    aten.pad.default: pad,
    aten.roll.default: roll,
    aten.slice.Tensor: sliced,
    aten.upsample_bicubic2d.vec: interpolation,
    aten.upsample_bilinear2d.vec: interpolation,
    aten.upsample_linear1d.vec: interpolation,
    aten.upsample_nearest1d.vec: interpolation,
    aten.upsample_nearest2d.vec: interpolation,
    aten.upsample_nearest3d.vec: interpolation,
    aten.upsample_trilinear3d.vec: interpolation,
}
