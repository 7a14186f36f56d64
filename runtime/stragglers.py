"""Which ranks the others wait for: where some are slower, the others spend more of their time in collectives.

A few times a second each rank looks at what its own code does (`doing.py`), from the thread of its ledger. Every
_LOOKS looks it leaves word of how many found it waiting in a collective, and of what else they found most often; the
first rank compares, and logs which ranks are slower than the others when those are other ones than before. Over NCCL
the host does not wait in collectives, so that nothing is seen.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .doing import Doing, named

_LOOKS = 120  # a minute of a ledger's turns: the share of waits is then within 0.05 of what it is
_CLEAR = 0.2  # the least difference between shares of waits that is not chance
_log = logging.getLogger("partway")


@dataclass(frozen=True)
class Seen:
    """What some looks at a rank have seen: the share of them, 0 to 1, at which it waited in a collective, and what it
    did most often at the others."""

    waits: float
    does: str


class Looks:
    """Those of one rank. `store` is a connection of the thread that looks; `doing` says what the rank does."""

    def __init__(self, store: Any, rank: int, size: int, doing: Callable[[], Doing]) -> None:
        self._store, self._rank, self._size, self._doing = store, rank, size, doing
        self._slow: tuple[int, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._count, self._does = 0, Counter[str]()

    def look(self) -> None:
        """Look once, and compare if it is time. Raises RuntimeError where the store has gone."""
        found = self._doing()
        self._count += 1
        if not found.waits_for:
            self._does[found.text] += 1
        if self._count < _LOOKS:
            return
        [(does, _)] = self._does.most_common(1) or [("", 0)]
        self._store.set(f"looks/{self._rank}", json.dumps([1 - self._does.total() / self._count, does]))
        self._begin()
        keys = [f"looks/{rank}" for rank in range(self._size)]
        if self._rank == 0 and self._store.check(keys):
            self._compare([Seen(*json.loads(self._store.get(key))) for key in keys])

    def _compare(self, seen: Sequence[Seen]) -> None:
        before, self._slow = self._slow, slow_in(seen)
        if self._slow and self._slow != before:
            _log.warning("%s", told(seen, self._slow))


def slow_in(seen: Sequence[Seen]) -> tuple[int, ...]:
    """The ranks that the others wait for, half of all at most: those below the widest gap between shares of waits, if
    that is clear. `seen` has what was seen of each rank."""
    ranks = sorted(range(len(seen)), key=lambda rank: seen[rank].waits)
    gaps = [seen[after].waits - seen[rank].waits for rank, after in itertools.pairwise(ranks)][: len(ranks) // 2]
    widest = max(gaps, default=0.0)
    return tuple(sorted(ranks[: gaps.index(widest) + 1])) if widest >= _CLEAR else ()


def told(seen: Sequence[Seen], slow: Sequence[int]) -> str:
    """What to say of the `slow` ranks."""
    others = [rank for rank in range(len(seen)) if rank not in slow]
    does = seen[slow[0]].does
    return (
        f"{named(slow)} {'is' if len(slow) == 1 else 'are'} slower than the others: of the last minute {named(others)} "
        f"waited in collectives for {_shares(seen, others)}, and {named(slow)} for {_shares(seen, slow)}"
        + (f"; at other times rank {slow[0]} most often {does}" if does else "")
    )


def _shares(seen: Sequence[Seen], ranks: Sequence[int]) -> str:
    least, most = (f(round(100 * seen[rank].waits) for rank in ranks) for f in (min, max))
    return f"{least} %" if least == most else f"{least} to {most} %"
