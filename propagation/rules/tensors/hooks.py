"""Hooks of modules and tensors, which call Python: they see whole tensors and whole gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from ...ops.python.hooked import hooked, observed
from ..dims import whole
from ..row import Row, RowFunction
from ..rule import Rule


def _hooked_rule(node: fx.Node) -> Rule:
    """Nothing is split."""
    return replace(whole(node), whole_gradients=True)


ROWS: dict[Any, Row | RowFunction] = {
    hooked: _hooked_rule,
    observed: _hooked_rule,
}
