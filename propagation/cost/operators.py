"""The choice of a profile's rates for a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes import argument, is_pointwise, is_view, source_of, tensor_of
from .profile import DeviceProfile
from .rates import OTHER, POINTWISE, VIEW, OperatorRates

_aten = torch.ops.aten
_WEIGHT: Mapping[Any, int] = {_aten.convolution.default: 1, _aten.convolution_backward.default: 2}  # its place
# Operators with the rates of another one: PyTorch's BatchNorm has those of our operator that calls it for each part.
_SAME: Mapping[str, str] = {
    "aten._native_batch_norm_legit_functional.default": "partway.part_norm.default",
    "aten.native_batch_norm_backward.default": "partway.part_norm_backward.default",
}
_SECOND: Mapping[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 2, _aten.bmm.default: 1}  # of a product
LOOKUPS = (_aten.embedding.default, _aten.index.Tensor, _aten.index_select.default, _aten.gather.default)
FEW = 8  # input channels of a convolution: with fewer its kernel does not fill the vectors
PLANE = 16  # pixels of an image that a kernel for 1x1 convolutions processes at once
ALIGNED = 8  # columns of a product: unless a multiple of these, its rows are not aligned

Shape = Callable[[fx.Node], Sequence[int]]


def kind_of_call(node: fx.Node) -> str:
    """The kind whose rates a call takes if its operator has none."""
    if is_view(node):
        return VIEW
    return POINTWISE if is_pointwise(node.target) else OTHER


def name_of_call(node: fx.Node, shape: Shape = lambda node: tensor_of(source_of(node)).shape) -> str:
    """The name of the rates of a call: its operator, with the kind of a convolution, a product or attention, since each
    kind runs another kernel. (A 1x1 convolution of images of 9 pixels took 6 times the usual time of its operations,
    of 36 or 49 pixels 1.4 times.) `shape`: gives the shape of an operand."""
    name = str(node.target)
    if node.target in _SECOND:
        columns = shape(node.args[_SECOND[node.target]])[-1]  # type: ignore[arg-type]
        return f"{name} of odd columns" if columns % ALIGNED and columns > ALIGNED else name
    if "scaled_dot_product" in name:
        return f"{name} causal" if argument(node, "is_causal") else name
    if node.target not in _WEIGHT:
        return _SAME.get(name, name)
    place = _WEIGHT[node.target]
    _, channels, *kernel = shape(node.args[place])  # type: ignore[arg-type]
    transposed, _, groups = node.args[place + 5 : place + 8]
    if transposed:
        return f"{name} transposed"
    if groups != 1:
        return f"{name} in groups"
    if channels < FEW:
        return f"{name} of few channels"
    if any(size != 1 for size in kernel):
        return name
    _, _, *plane = shape(node.args[place - 1])  # type: ignore[arg-type]
    pixels = math.prod(plane)
    if 1 < pixels < PLANE:
        return f"{name} of pixels in small planes"
    return f"{name} of pixels in odd planes" if pixels % PLANE and pixels > 1 else f"{name} of pixels"


def rates_of(node: fx.Node, profile: DeviceProfile, shape: Shape | None = None) -> OperatorRates | None:
    """The rates of a call; None if the profile has no rates of operators. `shape`: see `name_of_call`."""
    if not profile.operators:
        return None
    name = name_of_call(node, shape) if shape else name_of_call(node)
    return profile.rates_of(name, kind_of_call(node))
