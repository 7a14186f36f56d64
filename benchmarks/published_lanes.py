"""A schedule with one communication lane for each set of axes, beside the package's with one lane for all.

Process groups have streams of their own, so that a collective of tensor parallelism inside a node does not wait for a
gather of weights between nodes that was issued before it. Two collectives, on other axes, of 4 s and 1 s, and an
operator that reads the second:

                                one lane    a lane for each
    gather(weight) over fsdp    0 to 4      0 to 4
    gather(x) over tp           4 to 5      0 to 1
    the operator starts         5           1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from partway.propagation.cost.profile import Together
from partway.propagation.program.schedule import COMPUTE

Order = Iterable[tuple[Any, ...]]


class _Lanes:
    """The compute lane up to `clock`, and for each set of axes the collectives sent, with the seconds left of each."""

    def __init__(self, together: Together) -> None:
        self.slow, self.clock = together.computing, 0.0
        self.under_way: dict[tuple[str, ...], deque[list[Any]]] = {}
        self.ended: set[Any] = set()

    def send(self, item: Any, axes: tuple[str, ...], seconds: float) -> None:
        """Issue a collective."""
        self.under_way.setdefault(axes, deque()).append([item, seconds])

    def pass_until_one_ends(self, most: float = float("inf")) -> float:
        """Let all lanes run until the first collective ends, or `most` seconds; return the seconds passed."""
        passed = min(most, *(lane[0][1] for lane in self.under_way.values()))
        for axes, lane in [*self.under_way.items()]:
            lane[0][1] -= passed
            if lane[0][1] <= 0.0:
                self.ended.add(lane.popleft()[0])
            if not lane:
                del self.under_way[axes]
        self.clock += passed
        return passed

    def wait_for(self, items: Iterable[Any]) -> None:
        """Keep the compute lane idle until these collectives have ended."""
        waited = [item for item in items if item not in self.ended]
        while any(item not in self.ended for item in waited):
            self.pass_until_one_ends()

    def compute(self, seconds: float) -> None:
        """Run operators that take `seconds` alone, and longer while a collective runs."""
        while self.under_way and seconds > 1e-12:
            seconds -= self.slow * self.pass_until_one_ends(seconds / self.slow)
        self.clock += max(seconds, 0.0)


def play(order: Order, work: Mapping[Any, Any], together: Together) -> tuple[list[Any], float]:
    """As the package's `play`, without the times of units: the second at which all have ended."""
    lanes = _Lanes(together)
    for (item,) in order:
        lanes.wait_for(item.all_input_nodes)
        if work[item].lane == COMPUTE:
            lanes.compute(work[item].seconds)
        else:
            lanes.send(item, item.message.axes, work[item].seconds)
    while lanes.under_way:
        lanes.pass_until_one_ends()
    return [], lanes.clock
