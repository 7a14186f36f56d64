"""What a graph has, in numbers, and how two graphs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from partway.graphs.operators import word_of
from partway.propagation.graph.nodes import operator_name
from partway.propagation.ops.collectives import convert, convert_group
from partway.propagation.program.collective import Collective
from partway.propagation.program.step import calls_of

_NAMED = 5  # operators that came, and that went


@dataclass(frozen=True)
class Figures:
    """What a graph has: how often it calls which operator, its collectives by kind, and what a rank sends in them."""

    operators: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[str, int] = field(default_factory=dict)
    wire_bytes: float = 0.0

    @property
    def nodes(self) -> int:
        """How many operators it calls."""
        return sum(self.operators.values())

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            dict(Counter(self.operators) + Counter(other.operators)),
            dict(Counter(self.collectives) + Counter(other.collectives)),
            self.wire_bytes + other.wire_bytes,
        )


NOTHING = Figures()


def figures_of(graph: fx.Graph, collectives: Mapping[fx.Node, Collective]) -> Figures:
    """What is in `graph`, which issues `collectives`."""
    return Figures(
        dict(Counter(map(_called, calls_of(graph)))),
        dict(sorted(Counter(str(c.kind) for c in collectives.values()).items())),
        sum(c.wire_bytes for c in collectives.values()),
    )


def key_of(graph: fx.Graph) -> object:
    """What is equal for graphs that say the same."""
    return [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


def _called(node: fx.Node) -> str:
    if node.target in (convert, convert_group):
        word = word_of(node)
        return f"group of {word}" if node.target is convert_group else word
    return operator_name(node) if node.op == "call_function" else node.op


def changes(before: Figures, after: Figures) -> str:
    """Which operators came and went: `-1 aten.mean.default, +1 aten.sum.default`."""
    ours, theirs = Counter(before.operators), Counter(after.operators)
    return ", ".join([*_listed("-", ours - theirs), *_listed("+", theirs - ours)])


def _listed(sign: str, counts: Mapping[str, int]) -> Iterable[str]:
    order = sorted(counts, key=lambda name: (-counts[name], name))
    yield from (f"{sign}{counts[name]} {name}" for name in order[:_NAMED])
    if left := sum(counts[name] for name in order[_NAMED:]):
        yield f"{sign}{left} others"
