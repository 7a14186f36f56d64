"""The guard of the last call: a call like that one runs without lookups and further checks.

Every call pays for the guard, so it compares existing objects, by identity where possible, and builds nothing. A guard
that does not hold costs a lookup among the plans, never a wrong result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from partway.options.context import current_algo
from partway.options.parallel import ParallelContext
from partway.propagation.capture.export.dispatch_modes import attributes_of
from partway.propagation.graph.structure import Path, Structure, flatten
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.torch_internals import dispatch_modes, function_modes, parameters_in
from partway.requests.user_rules import version
from partway.reuse.code_names import Asks
from partway.reuse.kinds import fact
from partway.reuse.state import State
from partway.runtime.torch_internals import as_object, spec_of, spec_or_none

_NOTHING = fact({})
_TRAINING = attrgetter("training")
_FACTS = attrgetter("requires_grad", "dtype", "shape")


class Guard:
    """Everything that the plan of a call of `fn` depends on, as it was at that call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ParallelContext,
        state: State,
        numbers: Sequence[Path] = (),
    ) -> None:
        """Note a call. `numbers`: the paths of the changing numbers, which are passed as tensors."""
        self.numbers = numbers
        tensors, self._structure = _flat(args, kwargs, numbers)
        self.context, self._algo, self._state = context, current_algo(), state
        plain = not kwargs and all(isinstance(arg, Tensor) for arg in args)
        self._positional = [*map(type, args)] if plain else None
        self._tensors = [
            (type(t), t.shape, t.dtype, t.device, t.requires_grad, spec_or_none(t), fact(attributes_of(t)))
            for t in tensors
        ]
        asks = asked(state.reached.asks, context)
        self._asks = asks if asks != Asks() else None
        self._answers = asks.answers(tensors)
        self._modes, self._rules = modes(), version()
        modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        self._modules, self._training = modules, [m.training for m in modules]
        # torch.no_grad does not change the plan of a module in training
        self._by_mode = (bool(modules) and not any(self._training)) or any(t.requires_grad for t in tensors)
        self._inference = _inference(self._by_mode)
        self._stores = [parameters_in(m) for m in modules]  # the state watches the modules inside
        self._held = [store.values() for store in self._stores if store]
        self._parameters_in_order = list(chain.from_iterable(self._held))
        self._sizes = [*map(len, self._stores)]
        self._parameters = list({id(p): p for p in self._parameters_in_order if isinstance(p, Tensor)}.values())
        self._facts = [*map(_FACTS, self._parameters)]
        # the placements of DTensors, which another plan may have changed
        self._specs = [(p, spec_of(p)) for p in self._parameters if spec_or_none(p) is not None]

    def admits(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> list[Tensor] | None:
        """The tensors of a call if it has the same plan; else None."""
        if not self._specs:
            return self._admitted(args, kwargs, context)
        # otherwise reading the dtype of a split parameter takes microseconds
        found: list[Tensor] | None = as_object(self._admitted, (), (args, kwargs, context), {})
        return found

    def _admitted(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ParallelContext) -> list[Tensor] | None:
        if kwargs or [*map(type, args)] != self._positional:
            tensors, structure = _flat(args, kwargs, self.numbers)
            if not structure.is_like(self._structure):
                return None
        else:  # tensors by position, the usual case, need no comparison of structures
            tensors = list(args)
        same = (
            (context is self.context or context == self.context)
            and (current_algo() is self._algo or current_algo() == self._algo)
            and modes() == self._modes
            and _inference(self._by_mode) == self._inference
            and version() == self._rules
            and all(map(_is_like, tensors, self._tensors))
            and (self._asks is None or self._asks.answers(tensors) == self._answers)
            and [*map(_TRAINING, self._modules)] == self._training
            and [*map(len, self._stores)] == self._sizes
            and all(map(is_, chain.from_iterable(self._held), self._parameters_in_order))
            and [*map(_FACTS, self._parameters)] == self._facts
            and all(spec_of(p) is spec for p, spec in self._specs)
            and self._state.holds()
        )
        return tensors if same else None


def _flat(args: Any, kwargs: Any, numbers: Sequence[Path]) -> tuple[list[Tensor], Structure]:
    """The tensors of a call, those for `numbers` at the end, and its structure."""
    tensors, structure = flatten((args, kwargs))
    found = structure.counting(numbers) if numbers else None
    return (tensors, structure) if found is None else ([*tensors, *map(torch.tensor, found[1])], found[0])


def _inference(by_mode: bool) -> tuple[bool, bool]:
    """The modes that decide whether a gradient will be taken; `by_mode`: torch.no_grad is one of them."""
    return torch.is_inference_mode_enabled(), by_mode and torch.is_grad_enabled()


def asked(asks: Asks, context: ParallelContext) -> Asks:
    """The queries of code, and of Partway on its behalf: PyTorch draws random numbers in memory order."""
    return asks | Asks(memory=context.random_numbers is RandomNumbers.TORCH)


def modes() -> tuple[Any, ...]:
    """The settings of torch itself: the default dtype, whether algorithms must be deterministic, the dtypes of
    torch.autocast on a CPU and on a GPU (None if it is off), and the active function modes (such as that of
    torch.set_default_device) with their attributes."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        *[(type(mode), fact(vars(mode))) for mode in function_modes()],
    )


def warn_of_modes(name: str) -> None:
    """Warn of active dispatch modes that are not PyTorch's: they see a program and not the function `name`."""
    for mode in dispatch_modes():
        if type(mode).__module__.partition(".")[0] != "torch":
            warnings.warn(
                f"the TorchDispatchMode {type(mode).__name__} is on while {name} is planned: it sees the operators "
                "that Partway runs, on parts of tensors, instead of the function's own; its results may differ",
                stacklevel=6,
            )


def _is_like(tensor: Tensor, before: tuple[Any, ...]) -> bool:
    kind, shape, dtype, device, needs, spec, attributes = before
    return (
        type(tensor) is kind
        and tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.requires_grad is needs
        and (spec is None or spec_of(tensor) == spec)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and (attributes == _NOTHING if not vars(tensor) else fact(attributes_of(tensor)) == attributes)
    )
