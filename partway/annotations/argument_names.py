"""The arguments and results of a call to which the entries of a request belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partway.propagation.graph.structure import optional_names, place_names
from partway.requests.request import Strategies
from partway.strategy import Problem
from partway.strategy.basics.suggest import either, nearest
from partway.strategy.notation import counted


def by_argument(fn: Any, strategies: Strategies, present: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """The strategy of each argument by name. `present`: the arguments with tensors in a call; an argument that is None
    by default may be missing (labels, in evaluation), and its strategy is then ignored."""
    if strategies is None:
        return {}
    if isinstance(strategies, Mapping):
        by_name = dict(strategies)
    else:
        places = place_names(fn, len(strategies))
        if len(strategies) > len(places):
            what = f"has {counted(len(strategies), 'entry', 'entries')} for {counted(len(places), 'argument')}"
            listed = f" ({', '.join(places)})" if places else ""
            problems.append(Problem("in_strategy", what + listed, "write one entry per argument, in order"))
        by_name = dict(zip(places, strategies, strict=False))
    known = place_names(fn, len(by_name) + 64)
    for name, strategy in by_name.items():
        if strategy is not None and name not in present and name not in optional_names(fn):
            what = "the call passes no tensor for it" if name in known else "there is no such argument"
            others = nearest(name, present) or present
            fix = f"annotate {either(map(repr, others))}" if others else "the call passes no tensors at all"
            problems.append(Problem(f"in_strategy[{name!r}]", what, fix))
    return by_name


def check_out_strategy(strategies: Sequence[Any] | None, results: int, problems: list[Problem]) -> None:
    """Add a problem if an out_strategy has more entries than there are output tensors (`results`)."""
    if strategies is not None and len(strategies) > results:
        what = f"has {counted(len(strategies), 'entry', 'entries')} for {counted(results, 'output tensor')}"
        problems.append(Problem("out_strategy", what, "write one entry per output tensor, in order"))
