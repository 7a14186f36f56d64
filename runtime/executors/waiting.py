"""Gradients that wait for their reduction while several backwards add to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from ...propagation.program.accumulate import Accumulation
from ...propagation.torch_internals import version_of
from ..code.loaded_graph import Backward, Loader


class Accumulating:
    """The backwards of a program with waiting reductions: see `Accumulation`."""

    def __init__(self, accumulation: Accumulation, examples: Sequence[Any], loader: Loader) -> None:
        self.inputs = accumulation.inputs
        self.early = Backward(accumulation.early, examples, loader)
        places = [i in accumulation.inputs for i in itertools.compress(itertools.count(), accumulation.early.needed)]
        addends = [addend.contiguous() for addend in itertools.compress(self.early.examples, places)]
        self.last = Backward(accumulation.last, [*examples, *addends], loader)
        waiting = tuple(i in accumulation.inputs for i in range(len(accumulation.rest.needed)))
        self.rest = Backward(replace(accumulation.rest, needed=waiting), addends, loader)


class Reduces(Protocol):
    """An owner of waiting gradients: a Loaded."""

    def reduce(self, each: Sequence[WaitingGradient]) -> None:
        """Reduce the waiting gradients `each`, and add them to the `.grad` of their tensors."""


@dataclass
class Waiting:
    """The gradients of one module that wait for their reduction. Backwards of calls inside `blocks` add to them, and
    the next other backward reduces them all.

    A `.grad` tells whether its waiting gradient is still wanted: it is zero while all of it waits. Setting it to None
    (as an optimizer's zero_grad does) or filling it with zeros drops the waiting gradient."""

    blocks: set[object] = field(default_factory=set)
    kept: dict[Reduces, list[WaitingGradient]] = field(default_factory=dict)

    def drop(self) -> None:
        """Drop gradients that are no longer wanted."""
        for loaded, each in list(self.kept.items()):
            wanted = [kept.is_wanted() for kept in each]
            if not any(wanted):
                del self.kept[loaded]
            elif not all(wanted):
                self.kept[loaded] = [kept if want else kept.nothing() for kept, want in zip(each, wanted, strict=True)]

    def take(self) -> dict[Reduces, list[WaitingGradient]]:
        """Remove and return all waiting gradients."""
        self.drop()
        taken, self.kept = self.kept, {}
        for kept in chain(*taken.values()):
            kept.release()
        return taken


@dataclass(frozen=True)
class WaitingGradient:
    """The waiting part of the gradient of one tensor. `seen` and `version`: the `.grad` at the start, and its version;
    `made`: whether it was created for this."""

    primal: Tensor
    addends: list[Tensor]
    seen: Tensor
    version: int
    made: bool

    @classmethod
    def of(cls, primal: Tensor, addends: list[Tensor]) -> WaitingGradient:
        """Start to wait with `addends`, the first gradient of `primal`. Sets its `.grad` to zeros if it is None."""
        made = primal.grad is None
        if made:
            primal.grad = torch.zeros_like(primal, requires_grad=False)
        assert primal.grad is not None
        return cls(primal, addends, primal.grad, version_of(primal.grad), made)

    def plus(self, addends: list[Tensor]) -> WaitingGradient:
        """This gradient plus that of another backward."""
        return replace(self, addends=list(map(torch.add, self.addends, addends)))

    def nothing(self) -> WaitingGradient:
        """A zero gradient in place of a dropped one, beside others that still wait."""
        return WaitingGradient.of(self.primal, list(map(torch.zeros_like, self.addends)))

    def is_wanted(self) -> bool:
        """Whether the gradient has not been dropped."""
        gradient = self.primal.grad
        if gradient is None or not self._is_written():
            return gradient is not None
        total: Any = gradient.abs().sum()
        return bool(total.full_tensor() if hasattr(total, "full_tensor") else total)

    def release(self) -> None:
        """Stop waiting: remove a zero `.grad` that was created only for this."""
        if self.made and not self._is_written():
            self.primal.grad = None

    def _is_written(self) -> bool:
        return self.primal.grad is not self.seen or version_of(self.seen) != self.version
