"""Group by overlap: choose the groups with the shortest predicted schedule.

Gradients   the groups of `gradient_overlap`, which no size and no index beats
Weights     the best of the proposal of `weight_overlap` and all sizes, by the prediction of the whole schedule
"""

from __future__ import annotations

from collections.abc import Iterator

from ..fusion import by_index, by_size
from .events import GradientEvents, best
from .gradient_overlap import best_groups
from .members import Groups
from .policy import COLLECTIVES, Outlook, Policy, takes_none
from .weight_overlap import needed


def group(outlook: Outlook) -> Groups:
    """The groups with the shortest predicted time; of equals the first proposed."""
    proposals = _of_weights(outlook) if outlook.weights else _of_gradients(outlook)
    return best((*proposals, ()), outlook.seconds)


def _of_gradients(outlook: Outlook) -> Iterator[Groups]:
    offers, members = outlook.offers(), outlook.members
    groups = best_groups(GradientEvents([members[i] for i in offers.order], outlook.costs, offers.events))
    yield tuple(sorted(tuple(sorted(offers.order[i] for i in positions)) for positions in groups))
    if offers.chained or list(offers.order) != sorted(offers.order):  # the events differ from the real schedule
        yield from by_size.powers(members)
        yield from by_size.every(members)


def _of_weights(outlook: Outlook) -> Iterator[Groups]:
    members = outlook.members
    yield by_index.group(members, needed(members, outlook.first_uses(), outlook.costs))
    yield from by_size.powers(members)
    yield from by_size.every(members)


OVERLAP = Policy(
    collectives=COLLECTIVES,
    problems=takes_none("the cost model chooses the groups"),
    group=by_size.auto,
    updates=by_size.auto,
    predict=group,
)
