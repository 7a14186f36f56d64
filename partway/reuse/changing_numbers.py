"""The numbers of a function's calls that change from call to call, as the length of a text so far.

A call that differs from an earlier one in integers alone has a graph of the same operators, with other numbers in it,
unless the function decides something by them. So they become inputs of the graph (propagation/capture/counted.py), and
a plan serves all for which the function takes the same course. A function that has no such graph, since sizes follow
from a number, is planned for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partway.propagation.graph.structure import Call, Path, numbers_between
from partway.reuse.replanning import Signature


class Numbers:
    """Which numbers of the calls of one function change."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Path, ...]] = {}  # by what calls have in common
        self._refused: set[tuple[Any, ...]] = set()

    def of(self, call: Call) -> Call:
        """`call`, with tensors for the numbers that are known to change."""
        for paths in dict.fromkeys(self._known.values()):
            counting = call.counting(paths)
            if counting is not None and counting.structure.key() in self._known:
                return counting
        return call

    def learn(self, call: Call, now: Call, key: Signature, known: Sequence[Signature]) -> bool:
        """Whether the call differs from one of those that are `known` in numbers alone: these change. `now`: the call
        as it is so far, of the signature `key`."""
        for before in reversed(known):
            if key._replace(structure=()) != before._replace(structure=()):
                continue
            if paths := numbers_between(key.structure, before.structure):
                counting = call.counting((*now.paths, *paths))
                if counting is not None and (alike := counting.structure.key()) not in self._refused:
                    self._known[alike] = counting.paths
                    return True
        return False

    def refuse(self, call: Call) -> None:
        """There is no graph of `call` for all its numbers."""
        alike = call.structure.key()
        self._known.pop(alike, None)
        self._refused.add(alike)
