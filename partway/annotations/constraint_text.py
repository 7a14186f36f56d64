"""Strategies as text: the form of a constraint inside a function in its captured graph."""

from __future__ import annotations

import json
from typing import Any

from partway.strategy import Layout, Mesh, Problem, placement_from_code
from partway.strategy.errors import raise_problems
from partway.strategy.notation import Form, form_of, placements_of, read_placement


def constraint_text(where: str, strategy: Any, mesh: Mesh | None, ndim: int) -> str:
    """A strategy for a tensor of `ndim` dims as JSON, for `partway::constrain`, which `constraint_of` reads.

    Raises StrategyError for placements that such a tensor cannot have.
    """
    value: dict[str, Any] = {"dims": strategy}
    if form_of(strategy) is Form.PLACEMENTS:
        mesh = strategy.mesh if isinstance(strategy, Layout) else mesh
        read = [read_placement(where, placement, ndim) for placement in placements_of(strategy)]
        raise_problems("a constraint cannot be met:", (p for p in read if isinstance(p, Problem)))
        value = {"placements": [str(placement) for placement in read]}
    return json.dumps({**value, "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)) if mesh else None})


def constraint_of(text: str) -> tuple[Any, Mesh | None]:
    """The strategy and the mesh that `constraint_text` wrote."""
    value = json.loads(text)
    mesh = Mesh(value["mesh"]) if value["mesh"] else None
    if "placements" in value:
        return tuple(placement_from_code(code) for code in value["placements"]), mesh
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value["dims"]), mesh
