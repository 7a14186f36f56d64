"""Which of a profile's rates a call has."""

from __future__ import annotations

from torch import fx

from ..graph.nodes import is_pointwise, is_view
from .profile import DeviceProfile
from .rates import OTHER, POINTWISE, VIEW, OperatorRates


def kind_of_call(node: fx.Node) -> str:
    """The kind whose rates a call has where its operator has none of its own."""
    if is_view(node):
        return VIEW
    return POINTWISE if is_pointwise(node.target) else OTHER


def rates_of(node: fx.Node, profile: DeviceProfile) -> OperatorRates | None:
    """The rates of a call; None: the profile has no rates of operators."""
    return profile.rates_of(str(node.target), kind_of_call(node))
