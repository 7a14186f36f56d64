"""The full backward hooks of a call of a module, as operators on the tensors that enter and leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....strategy.errors import RuntimeStateError
from ...graph.structure import name_of


class BackwardHooks:
    """The full backward (pre) hooks of one call of a module, called as torch.utils.hooks.BackwardHook calls them.

    inputs    the positions of the arguments that need a gradient
    results   the positions of the results that need one, of `count` in all
    """

    def __init__(self, path: str, module: Any, full: list[Any], first: list[Any], arguments: int) -> None:
        self._module, self._full, self._first, self._arguments = module, full, first, arguments
        names = ", ".join(name_of(hook) for hook in (*first, *full))
        self.words = f"the backward hook {names} of module {path!r}"
        self.inputs: list[int] = []
        self.results: list[int] = []
        self.count = 0
        self._gradients: tuple[Any, ...] | None = None

    def on_results(self, gradients: list[Tensor]) -> list[Tensor]:
        """Call the hooks as the gradients of the module's results arrive."""
        of_results = _packed(self.results, gradients, self.count)
        for hook in self._first:
            new = hook(self._module, of_results)
            of_results = of_results if new is None else self._checked(new, self.count)
        self._gradients = of_results
        if not self.inputs:
            for hook in self._full:
                hook(self._module, (None,) * self._arguments, of_results)
        return [of_results[i] for i in self.results]

    def on_inputs(self, gradients: list[Tensor]) -> list[Tensor]:
        """Call the hooks as the gradients of the module's arguments arrive."""
        of_inputs = _packed(self.inputs, gradients, self._arguments)
        of_results, self._gradients = self._gradients, None
        if of_results is not None:
            for hook in self._full:
                new = hook(self._module, of_inputs, of_results)
                of_inputs = of_inputs if new is None else self._checked(new, self._arguments)
        return [of_inputs[i] for i in self.inputs]

    def _checked(self, new: Any, count: int) -> tuple[Any, ...]:
        """The return value of a hook as a tuple of `count` gradients. Raises RuntimeStateError for another number."""
        gradients = new if isinstance(new, tuple) else tuple(new) if isinstance(new, list) else (new,)
        if len(gradients) != count:
            raise RuntimeStateError(f"{self.words} returned {len(gradients)} gradients in place of {count}")
        return gradients


def _packed(places: Sequence[int], values: Sequence[Any], count: int) -> tuple[Any, ...]:
    """A tuple of length `count` with `values` at `places`, and None elsewhere."""
    packed: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        packed[place] = value
    return tuple(packed)
