"""Refuses questions to, and changes of, a tensor that its stand-in can neither answer nor keep.

While a function is captured, fake tensors stand in for the caller's. They have the same shapes, dtypes and strides, and
the attributes that users set, but no gradients, no history and no memory: their answers would become constants of the
plan, and changes of them would be lost silently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....strategy.errors import CaptureError
from ...torch_internals import PRIVATE_STATE, version_of

ASKED: Mapping[Any, str] = {
    **{
        getattr(Tensor, name).__get__: name
        for name in (*PRIVATE_STATE, "grad", "grad_fn", "is_leaf", "output_nr", "retains_grad")
    },
    **{
        getattr(Tensor, name): f"{name}()"
        for name in ("is_pinned", "is_shared", "storage", "storage_offset", "untyped_storage")
    },
}
_DONE: Mapping[Any, str] = {
    Tensor.backward: "calls backward of a tensor",
    getattr(Tensor, "grad").__set__: "sets the grad of a tensor",  # noqa: B009 - its type says that of the value
}
_FLAG = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users set on a tensor, without those of its class."""
    own = [getattr(kind, "__annotations__", {}) for kind in type(tensor).__mro__]
    return {
        name: value
        for name, value in vars(tensor).items()
        if not name.startswith("_") and not any(name in names for names in own)
    }


class StandIns(TorchFunctionMode):
    """Gives the stand-ins of a call of the function `name` the attributes of the caller's tensors, and raises
    CaptureError where the caller's code (not PyTorch's) needs more than they have; `here` returns the line."""

    def __init__(self, name: str, here: Any) -> None:
        super().__init__()
        self._name, self._here = name, here

    def begin(self) -> None:
        """Start a run of the function; torch.export may run it more than once, each time with new stand-ins."""
        self._stand_ins: list[tuple[str, Tensor, dict[str, Any], Any]] = []
        self._generator = torch.get_rng_state()
        self._seed = torch.initial_seed()

    def stand(self, label: str, tensor: Tensor, attributes: Mapping[str, Any]) -> None:
        """Let `tensor` stand in for one with these attributes."""
        vars(tensor).update(attributes)
        self._stand_ins.append((label, tensor, attributes_of(tensor), _gradient(tensor)))

    def check(self, results: Iterable[Tensor]) -> None:
        """Raise CaptureError if the function set an attribute of a stand-in or a result, ran a backward, or seeded
        random numbers."""
        known = {id(tensor) for _, tensor, *_ in self._stand_ins}
        for tensor in results:
            if id(tensor) not in known and (added := attributes_of(tensor)):
                raise CaptureError(
                    f"{self._name} sets the attribute {next(iter(added))} of a tensor that it returns or keeps, which "
                    "would stay with what stands in for it; return what it keeps there"
                )
        if torch.initial_seed() != self._seed:
            torch.set_rng_state(self._generator)
            raise CaptureError(
                f"{self._name} seeds random numbers, which would do nothing to those that a plan draws; seed them "
                "before the call"
            )
        for label, tensor, before, gradient in self._stand_ins:
            now = attributes_of(tensor)
            changed = [name for name in {**before, **now} if now.get(name, self) is not before.get(name, self)]
            if changed:
                raise CaptureError(
                    f"{self._name} sets the attribute {changed[0]} of {label}, which would stay with what stands in "
                    "for it; return what it keeps there"
                )
            if _gradient(tensor) != gradient:
                raise CaptureError(
                    f"{self._name} runs a backward, whose gradients would stay with what stands in for {label}; call "
                    "backward of what it returns"
                )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ASKED and _is_of_caller(sys._getframe(1), func):
            self._refuse(
                f"asks for {ASKED[func]} of a tensor, which is not known while it is captured",
                "ask before the call, and pass what follows as an argument",
            )
        if func in _DONE and _is_of_caller(sys._getframe(1), func):
            self._refuse(_DONE[func], "do it outside, with what the function returns")
        if func in _FLAG and any(args[0] is tensor for _, tensor, *_ in self._stand_ins):
            wanted = next(iter((*args[1:], *(kwargs or {}).values())), True)
            if args[0].requires_grad != wanted:
                label = next(label for label, tensor, *_ in self._stand_ins if tensor is args[0])
                self._refuse(f"sets requires_grad of {label}", "set it before the call")
        return func(*args, **(kwargs or {}))

    def _refuse(self, what: str, instead: str) -> None:
        """Raise CaptureError."""
        raise CaptureError(f"{self._name} {what}; {instead}{self._here()}")


def _gradient(tensor: Tensor) -> tuple[int, int] | None:
    """The identity and version of a tensor's gradient, which change when a backward adds to it."""
    return None if not tensor.is_leaf or tensor.grad is None else (id(tensor.grad), version_of(tensor.grad))


def _is_of_caller(frame: FrameType | None, func: Any) -> bool:
    """Whether the call of `func` in `frame`, which our modes may have forwarded, is neither PyTorch's nor Partway's."""
    while frame is not None and frame.f_code.co_name == "__torch_function__" and frame.f_locals.get("func") == func:
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] not in ("torch", "partway")
