"""Exchanges with neighbours, which differ by rank, as permutations that all ranks share.

The tensors that one rank sends to another in one exchange arrive in the order in which they are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ....strategy.errors import CaptureError
from ...graph.nodes import at_source, describe
from ...ops.by_hand import shapes_of


@dataclass(frozen=True)
class Message:
    """A tensor of shape and dtype `kind` that the rank at `source` sends as its tensor `number` and the rank at
    `target` receives as its tensor `into`."""

    source: int
    number: int
    target: int
    into: int
    kind: str


def messages_of(calls: Sequence[fx.Node], places: Sequence[int], axes: Sequence[str]) -> list[Message]:
    """The messages of an exchange. Raises CaptureError unless ranks at one place have the same neighbours and each
    tensor that is sent is received."""
    sent, expected = defaultdict[tuple[int, int], list[Any]](list), defaultdict[tuple[int, int], list[Any]](list)
    known: dict[int, tuple[Any, ...]] = {}
    for call, place in zip(calls, places, strict=True):
        arguments: tuple[Any, ...] = call.args
        xs, targets, sources, sizes, ndims, dtype, *_ = arguments
        shapes = shapes_of(sizes, ndims)
        table = targets, sources, shapes, [describe(x) for x in xs]
        if known.setdefault(place, table) != table:
            raise CaptureError(
                f"ranks at one place along {','.join(axes)} have different neighbours; exchange over all axes that the "
                f"neighbours depend on{at_source(call)}"
            )
        if known[place] is not table:
            continue
        for number, (x, target) in enumerate(zip(xs, targets, strict=True)):
            sent[place, target].append((number, describe(x)))
        kind = str(dtype).removeprefix("torch.")
        for into, (source, shape) in enumerate(zip(sources, shapes, strict=True)):
            expected[source, place].append((into, f"{kind}{shape}"))
    messages = []
    for source, target in dict.fromkeys([*sent, *expected]):
        gone, come = sent[source, target], expected[source, target]
        if [kind for _, kind in gone] != [kind for _, kind in come]:
            raise CaptureError(
                f"the rank at {source} along {','.join(axes)} sends {_kinds(gone)} to the one at {target}, which "
                f"expects {_kinds(come)}{at_source(calls[0])}"
            )
        messages += [
            Message(source, number, target, into, kind) for (number, kind), (into, _) in zip(gone, come, strict=True)
        ]
    return messages


def _kinds(tensors: Sequence[tuple[int, str]]) -> str:
    return ", ".join(kind for _, kind in tensors) or "nothing"


def rounds_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Group `messages` greedily into rounds of one kind, in which no rank sends or receives two."""
    rounds: list[list[Message]] = []
    for message in messages:
        for one in rounds:
            free = all(other.source != message.source and other.target != message.target for other in one)
            if free and one[0].kind == message.kind:
                one.append(message)
                break
        else:
            rounds.append([message])
    return rounds


def sent_in(call: fx.Node, place: int, messages: Sequence[Message]) -> fx.Node | None:
    """The tensor that the rank at `place` sends in a round, if any."""
    xs: Any = call.args[0]
    return next((xs[message.number] for message in messages if message.source == place), None)
