"""The interface of a fusion policy: pure functions from members to groups, and the configs that it takes.

A policy's own file makes one `Policy`, and the table in modes.py gives it a name. Most policies look at members only.
One that predicts also gets an `Outlook`, which answers from the predicted schedule of the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .events import Event
from .members import Groups, Key, Member

COLLECTIVES = ("allreduce", "allgather", "reducescatter")  # as in comm_fusion

Grouping = Callable[[Sequence[Member], Any], Groups]


@dataclass(frozen=True, slots=True)
class Offers:
    """The members in the order in which a backward produces their operands, and the events in between.

    order     the positions of the members, in that order
    events    the events of the backward; members are numbered by their place in `order`
    chained   whether a member needs the result of another one, which the events do not represent
    """

    order: tuple[int, ...]
    events: tuple[Event, ...]
    chained: bool


class Outlook(Protocol):
    """The predictions that a policy may ask for about the members of one kind; the groups of other kinds are fixed."""

    @property
    def members(self) -> Sequence[Member]:
        """The members to be grouped."""
        ...

    @property
    def weights(self) -> bool:
        """Whether they gather weights; otherwise they reduce gradients."""
        ...

    @property
    def costs(self) -> Mapping[Key, tuple[float, float]]:
        """For each key, the seconds of an empty message and of each byte."""
        ...

    def seconds(self, groups: Groups) -> float:
        """The duration of the graph with `groups`, in seconds."""
        ...

    def offers(self) -> Offers:
        """When gradients are ready, and the events in between."""
        ...

    def first_uses(self) -> Sequence[float]:
        """When each weight is first used if nothing waits for it, in seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to choose the boundaries between groups.

    collectives   those of `COLLECTIVES` that it can group
    problems      the problems of a config, as text that follows the mode's name; none if it is right
    group         the groups of members by a config. Each position is in one group.
    updates       the same for the AllReduces of buffer updates, which are not gradients
    predict       the groups by the predicted schedule, which replace those of `group` when all kinds have theirs;
                  None: those of `group` are final
    shorthand     the name of a config that may be written without its mode; "" if there is none
    """

    collectives: tuple[str, ...]
    problems: Callable[[Any], list[str]]
    group: Grouping
    updates: Grouping
    predict: Callable[[Outlook], Groups] | None = None
    shorthand: str = ""


def is_count(value: object) -> bool:
    """Whether `value` is an int of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def takes_none(why: str) -> Callable[[Any], list[str]]:
    """The `problems` of a policy without a config; `why`: the reason that it needs none, for the message."""

    def problems(config: Any) -> list[str]:
        return [] if config is None else [f"takes no config ({why}), not {config!r}; mode size takes a limit"]

    return problems
