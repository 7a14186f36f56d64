"""A step as a list of actions: the work of each stage of a program, in order, with the microbatch of each action.

A stage is a program on a mesh of its own. With one stage and one microbatch the list is `STEP`: the forward, and then
the backward, which autograd calls by itself (`loaded.py`). Two stages, two microbatches:

    stage 0   forward 0   send 0 to 1   forward 1   send 1 to 1   receive 0 from 1   backward 0   ...
    stage 1   receive 0 from 0   forward 0   backward 0   send 0 to 0   receive 1 from 0   forward 1   ...

Results are sent to later stages, and their gradients to earlier ones. A process plays the list of its own stage; if all
stages are in one process, it plays each list as far as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..strategy.basics.choice import Choice
from ..strategy.errors import RuntimeStateError, StrategyError
from .executors.couriers import Courier, Route
from .loaded import Loaded
from .tensors.parameters import gradient_of


class Does(Choice):
    """The kind of an action."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage for a microbatch; `peer`: the stage to which it sends, or from which it receives."""

    does: Does
    microbatch: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        preposition = "to" if self.does is Does.SEND else "from"
        peer = "" if self.peer is None else f" {preposition} {self.peer}"
        return f"{self.does.value} {self.microbatch}{peer}"


STEP = (Action(Does.FORWARD), Action(Does.BACKWARD))


@dataclass(frozen=True)
class StageLink:
    """A result of one stage that is an input of another: their places, and the routes of the value and its gradient."""

    source: int
    output: int
    target: int
    input: int
    forward: Route
    backward: Route

    @classmethod
    def of(cls, stages: Mapping[int, Loaded], source: int, output: int, target: int, input: int) -> StageLink:
        """The link of two stages. Raises StrategyError if a gradient would be sent as partial sums."""
        out, into = stages[source].program.outputs[output], stages[target].program.inputs[input]
        name = f"{out.port.name} of stage {source}"
        there = Route(name, out.shape, out.dtype, out.layout, into.layout)
        back = Route(f"gradient of {name}", out.shape, out.dtype, into.layout.dual(), out.layout.dual())
        for route in (there, back):
            _ = route.transfers
        return cls(source, output, target, input, there, back)


class Stage:
    """A stage while its actions run.

    loaded     the program that it runs; with a backward if there are actions for one
    given      the tensors of a microbatch, in the order of the program's inputs; None for inputs from another stage
    links      from its results to other stages, and from other stages to its inputs
    tangents   of a microbatch: those of the results that it differentiates and that have no link, in their order

    Raises StrategyError if a result or an input has two links.
    """

    def __init__(
        self,
        number: int,
        loaded: Loaded,
        given: Callable[[int], Sequence[Tensor | None]],
        links: Sequence[StageLink],
        courier: Courier,
        tangents: Callable[[int], Sequence[Tensor]] = lambda microbatch: (),
    ) -> None:
        self.number, self.loaded, self._given, self._courier, self._tangents = number, loaded, given, courier, tangents
        self._into = {link.input: link for link in links if link.target == number}
        self._out = {link.output: link for link in links if link.source == number}
        touching = [link for link in links if number in (link.source, link.target)]
        if len(self._into) + len(self._out) != len(touching):
            names = ", ".join(link.forward.name for link in touching)
            raise StrategyError(
                f"stage {number} has two links of one result or input ({names}); return the result once for each stage"
            )
        self._device = next(tensor.device for tensor in given(0) if tensor is not None)
        self._received: dict[tuple[Route, int], Any] = {}
        self._results: dict[int, list[Any]] = {}
        self._saved: dict[int, list[Any]] = {}
        self._gradients: dict[int, dict[int, Any]] = {}  # of inputs that came from other stages, by microbatch
        self._sums: dict[int, list[Tensor]] = {}  # of gradients of other inputs, over microbatches

    def can(self, action: Action) -> bool:
        """Return whether an action can run without waiting for another stage of this process."""
        routes = self._routes(action, receiving=True) if action.does is Does.RECEIVE else ()
        return all(self._courier.ready(route, action.microbatch) for route in routes)

    def act(self, action: Action) -> None:
        """Run the action."""
        with torch.no_grad():
            _ACTS[action.does](self, action)

    def finish(self) -> None:
        """Wait until everything that the stage sent has left."""
        self._courier.finish()

    def results(self, microbatch: int) -> list[Tensor]:
        """The results of a forward, as tensors."""
        shared = self.loaded.forward.code.shared[: len(self.loaded.results)]
        return self.loaded.executor.leave(self._results[microbatch], self.loaded.results, shared)

    def gradients(self) -> dict[int, Tensor]:
        """The gradients, summed over the microbatches, by the place of the input; of a DTensor it is one, too."""
        backward, given = self.loaded.backward, self._given(0)
        where = [k for k, place in enumerate(backward.places) if place in self._sums]
        values = self.loaded.executor.unpack([part for k in where for part in self._sums[backward.places[k]]])
        placed, shared = [backward.placed[k] for k in where], [False for _ in where]
        found = {}
        for k, gradient in zip(where, self.loaded.executor.leave(values, placed, shared), strict=True):
            primal = given[backward.places[k]]
            assert primal is not None
            found[backward.places[k]] = gradient_of(primal, gradient)
        return found

    def _routes(self, action: Action, receiving: bool) -> list[Route]:
        """The routes of the values that an action sends or receives: results to later stages, gradients to earlier."""
        assert action.peer is not None
        earlier = action.peer < self.number
        links = (self._into if earlier else self._out).values()
        linked = [link for link in links if action.peer == (link.source if earlier else link.target)]
        return [link.forward if earlier is receiving else link.backward for link in linked]

    def _forward(self, action: Action) -> None:
        loaded, n = self.loaded, action.microbatch
        tensors = self._given(n)
        own = [i for i in range(len(tensors)) if i not in self._into]
        placed = loaded.program.inputs
        entered = loaded.executor.enter([tensors[i] for i in own], [placed[i] for i in own])  # type: ignore[misc]
        values = dict(zip(own, entered, strict=True))
        values |= {i: self._received.pop((link.forward, n)) for i, link in self._into.items()}
        self._results[n], self._saved[n] = loaded.forward_of([values[i] for i in range(len(placed))])

    def _backward(self, action: Action) -> None:
        loaded, n = self.loaded, action.microbatch
        tangents, given = [], iter(self._tangents(n))
        for i, wanted in enumerate(loaded.program.wanted):
            if wanted and i in self._out:
                tangents.append(self._received.pop((self._out[i].backward, n)))
            elif wanted:
                tangents += loaded.executor.enter([next(given)], [loaded.program.outputs[i]])
        values = loaded.backward.values([*self._saved.pop(n), *tangents])
        for place, value in zip(loaded.backward.places, values, strict=True):
            if place in self._into:
                self._gradients.setdefault(n, {})[place] = value
                continue
            parts = loaded.executor.pack([value])
            before = self._sums.get(place)
            self._sums[place] = (
                [part.clone() for part in parts]
                if before is None
                else [a + b for a, b in zip(before, parts, strict=True)]
            )

    def _send(self, action: Action) -> None:
        for route in self._routes(action, receiving=False):
            self._courier.send(route, action.microbatch, self._value(route, action.microbatch))

    def _value(self, route: Route, microbatch: int) -> Any:
        for link in self._out.values():
            if link.forward is route:
                return self._results[microbatch][link.output]
        place = next(link.input for link in self._into.values() if link.backward is route)
        return self._gradients[microbatch].pop(place)

    def _receive(self, action: Action) -> None:
        for route in self._routes(action, receiving=True):
            self._received[route, action.microbatch] = self._courier.receive(route, action.microbatch, self._device)


_ACTS = {
    Does.FORWARD: Stage._forward,
    Does.BACKWARD: Stage._backward,
    Does.SEND: Stage._send,
    Does.RECEIVE: Stage._receive,
}


def play(schedule: Mapping[int, Sequence[Action]], stages: Mapping[int, Stage]) -> None:
    """Run the actions of the stages in this process, each stage's in order.

    Raises RuntimeStateError if stages wait for each other.
    """
    left = {number: list(schedule[number])[::-1] for number in stages}
    while any(left.values()):
        moved = False
        for number, actions in left.items():
            while actions and stages[number].can(actions[-1]):
                stages[number].act(actions.pop())
                moved = True
        if not moved:
            waits = "; ".join(f"stage {number} would {actions[-1]}" for number, actions in left.items() if actions)
            raise RuntimeStateError(f"the schedule comes to no end: {waits}; let each be sent before it is received")
    for stage in stages.values():
        stage.finish()
