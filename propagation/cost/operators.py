"""Which of a profile's rates a call has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes import is_pointwise, is_view, source_of, tensor_of
from .profile import DeviceProfile
from .rates import OTHER, POINTWISE, VIEW, OperatorRates

_aten = torch.ops.aten
_WEIGHT: Mapping[Any, int] = {_aten.convolution.default: 1, _aten.convolution_backward.default: 2}  # where it is
_SECOND: Mapping[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 2, _aten.bmm.default: 1}  # of a product
LOOKUPS = (_aten.embedding.default, _aten.index.Tensor, _aten.index_select.default, _aten.gather.default)
FEW = 8  # channels into a convolution: of so few its kernel does not fill the vectors
ALIGNED = 8  # columns of a product: of another number than a multiple of these each row begins elsewhere

Shape = Callable[[fx.Node], Sequence[int]]


def kind_of_call(node: fx.Node) -> str:
    """The kind whose rates a call has where its operator has none of its own."""
    if is_view(node):
        return VIEW
    return POINTWISE if is_pointwise(node.target) else OTHER


def name_of_call(node: fx.Node, shape: Shape = lambda node: tensor_of(source_of(node)).shape) -> str:
    """The name of the rates that a call has: that of its operator, and of a convolution or a product its kind too, as
    each kind is computed in another way. `shape`: of the tensor of an operand."""
    name = str(node.target)
    if node.target in _SECOND:
        columns = shape(node.args[_SECOND[node.target]])[-1]  # type: ignore[arg-type]
        return f"{name} of odd columns" if columns % ALIGNED and columns > ALIGNED else name
    if node.target not in _WEIGHT:
        return name
    place = _WEIGHT[node.target]
    _, channels, *kernel = shape(node.args[place])  # type: ignore[arg-type]
    transposed, _, groups = node.args[place + 5 : place + 8]
    if transposed:
        return f"{name} transposed"
    if groups != 1:
        return f"{name} in groups"
    if channels < FEW:
        return f"{name} of few channels"
    return f"{name} of pixels" if all(size == 1 for size in kernel) else name


def rates_of(node: fx.Node, profile: DeviceProfile, shape: Shape | None = None) -> OperatorRates | None:
    """The rates of a call; None: the profile has no rates of operators. `shape`: see `name_of_call`."""
    if not profile.operators:
        return None
    name = name_of_call(node, shape) if shape else name_of_call(node)
    return profile.rates_of(name, kind_of_call(node))
