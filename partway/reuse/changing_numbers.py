"""The ints in a function's arguments that change from call to call, such as the length of a generated text so far.

A call that differs from an earlier one only in ints has a graph of the same operators with other numbers, unless the
function branches on them. So they become inputs of the graph (propagation/capture/counted.py), and one plan serves all
calls of the same course. A function without such a graph, because sizes depend on a number, is planned for each number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partway.propagation.graph.structure import Call, Path, numbers_between
from partway.reuse.replanning import Signature


class Numbers:
    """The changing numbers in the calls of one function."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Path, ...]] = {}  # by the structure of calls without them
        self._refused: set[tuple[Any, ...]] = set()

    def of(self, call: Call) -> Call:
        """`call`, with tensors in place of the numbers that are known to change."""
        for paths in dict.fromkeys(self._known.values()):
            counting = call.counting(paths)
            if counting is not None and counting.structure.key() in self._known:
                return counting
        return call

    def learn(self, call: Call, now: Call, key: Signature, known: Sequence[Signature]) -> bool:
        """Note the numbers that change if the call differs from one of the `known` ones only in numbers; returns
        whether it does. `now`: the call with tensors for the numbers known so far, of the signature `key`."""
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
        """Note that there is no graph of `call` for all its numbers."""
        alike = call.structure.key()
        self._known.pop(alike, None)
        self._refused.add(alike)
