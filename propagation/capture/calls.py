"""What the forward of a module calls of PyTorch, noted, so that another module can be told to call the same.

A graph holds nothing of Python: only calls of PyTorch make nodes, and what they make follows from the function, from
what is known of its arguments beside values, from torch's settings, and from where the call stands. `Recording` notes
all of that for each call of one forward. `Replaying` runs another forward and answers each call, before PyTorch sees
it, with what the first one was answered, as long as the call is the same; where it is not, it raises UnlikeError. A
forward that was replayed to its end would have been traced as the first one was.

Python itself runs each time: counters count, lists grow, errors are raised. That is why nothing has to be proven about
code, attributes and closures.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodDescriptorType, MethodWrapperType
from types import WrapperDescriptorType as SlotType
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode

from ..graph.nodes import marked
from ..torch_internals import (
    CALL_OF_MODULE,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    fake_like,
    storage_key,
    without_modes,
)
from .stand_ins import ASKED, attributes_of

Token = tuple[Any, ...]

_VALUES = (int, bool, str, bytes, type(None), type(...), torch.Size, torch.dtype, torch.device, torch.layout,
           torch.memory_format)  # fmt: skip
_OF_TORCH = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, SlotType)
_NOTHING = ("value", type(None), None)


class UnlikeError(BaseException):
    """A forward that was taken for one like another is not. (No Exception, which the caller's code may catch.)"""


class _UnusableError(Exception):
    """What a forward does cannot be noted, or answered in its place."""


class _WritesError(_UnusableError):
    """It writes in place."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a tensor while it is captured."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int | torch.SymInt
    flags: tuple[bool, ...]
    requires_grad: bool


def known_of(tensor: Tensor) -> Known:
    """What is known of a tensor. Raises _UnusableError for one with symbols for sizes, or without strides, or that
    people gave attributes."""
    if tensor.layout is not torch.strided or attributes_of(tensor) or not all(type(n) is int for n in tensor.shape):
        raise _UnusableError
    flags = tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    return Known(
        type(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        flags, tensor.requires_grad,
    )  # fmt: skip


def looks_of(tensor: Tensor) -> Known | None:
    """What is known of a tensor, if that can be told."""
    try:
        return known_of(tensor)
    except _UnusableError:
        return None


@dataclass(frozen=True, eq=False)
class Place:
    """A call of a module that may be like others.

    inputs   the leaves of its arguments
    module   the module
    """

    module: torch.nn.Module
    inputs: Sequence[Any]

    def paths(self) -> dict[int, str]:
        """The paths of the modules inside, by their ids."""
        return {id(module): path for path, module in self.module.named_modules()}

    def at(self, where: Token) -> Any:
        """The tensor at a place that `places` names."""
        if where[0] == "input":
            return self.inputs[where[1]]
        if where[0] == "state":
            found: Any = self.module
            for name in where[1]:
                found = getattr(found, name)
            return found
        return where[1]

    def places(self) -> dict[int, Token]:
        """Where the tensors of the arguments and of the module are found, by their ids."""
        found: dict[int, Token] = {}
        for path, module in self.module.named_modules():
            names = path.split(".") if path else []
            for name, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ):
                found.setdefault(id(tensor), ("state", (*names, name)))
        for i, leaf in enumerate(self.inputs):
            if isinstance(leaf, Tensor):
                found.setdefault(id(leaf), ("input", i))
        return found


@dataclass(frozen=True, slots=True)
class _Outside:
    """The tensor itself: it is no argument of the call, and not the module's. Equal to itself only."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Outside) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True, eq=False)
class Record:
    """What one forward did.

    steps     its calls, in order: the function, the arguments, torch's settings, and the frames that it stands in
    answers   what each was answered
    outer     where the tensors are found that the forward did not make, in the order in which it used them
    known     what is known of these, and of those that it made
    results   the tensors that it returned, in order, each once or more
    made      stand-ins for the tensors that it made
    """

    steps: list[Token]
    answers: list[Token]
    outer: list[Token]
    known: tuple[list[Known], list[Known]]
    results: list[Token]
    made: list[Tensor] = field(default_factory=list)

    def is_like(self, other: Record) -> bool:
        """Whether another forward did the same."""
        ours, theirs = (
            (each.steps, each.answers, each.outer, each.known, each.results) for each in (self, other)
        )  # fmt: skip
        return ours == theirs

    def tensors_of(self, place: Place) -> list[Tensor] | None:
        """The tensors of `place` that stand where those did that were used; None if they are not like these."""
        found = []
        try:
            for where, known in zip(self.outer, self.known[0], strict=True):
                tensor = place.at(where)
                if not isinstance(tensor, Tensor) or known_of(tensor) != known:
                    return None
                found.append(tensor)
        except (_UnusableError, AttributeError, IndexError):
            return None
        return found if len({id(tensor) for tensor in found}) == len(found) else None


class _Calls(TorchFunctionMode):
    """Sees the calls of a forward that `outermost` runs, for the modules of `place`."""

    def __init__(self, place: Place, outermost: CodeType) -> None:
        super().__init__()
        self._outermost, self._paths = outermost, place.paths()
        self.known: dict[int, Token] = {}

    def step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Token:
        """What tells a call from others. Raises _UnusableError where something of it cannot be told."""
        return func, self.token(args), self.token(kwargs), _settings(), tuple(self._frames(sys._getframe(2)))

    def token(self, value: Any) -> Token:
        """What tells an argument from others."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self.known.get(id(value)) or self.unknown(value)
        if kind in _VALUES or kind is torch.Size:
            return ("value", kind, value)
        if kind in (float, complex):
            return ("value", kind, repr(value))
        if kind in (tuple, list):
            return (kind, *map(self.token, value))
        if kind is dict and all(type(key) is str for key in value):
            return (kind, *((key, self.token(each)) for key, each in value.items()))
        if kind is slice:
            return (kind, self.token(value.start), self.token(value.stop), self.token(value.step))
        raise _UnusableError

    def unknown(self, tensor: Tensor) -> Token:
        """The token of a tensor that has not been seen yet."""
        raise NotImplementedError

    def _frames(self, frame: FrameType | None) -> Iterator[Any]:
        """Where a call stands, from within: lines, and the modules that are called."""
        while frame is not None and frame.f_code is not self._outermost:
            yield frame.f_code
            yield frame.f_lasti
            if frame.f_code is CALL_OF_MODULE:
                module = frame.f_locals["self"]
                yield self._paths.get(id(module), id(module))
            frame = frame.f_back
        if frame is None:
            raise _UnusableError


class Recording(_Calls):
    """Notes what a forward does, while it is traced."""

    def __init__(self, place: Place, outermost: CodeType) -> None:
        super().__init__(place, outermost)
        self._places = place.places()
        self._steps: list[Token] = []
        self._answers: list[Token] = []
        self._outer: list[Token] = []
        self._known: tuple[list[Known], list[Known]] = [], []
        self.used: list[Tensor] = []
        self.made: list[Tensor] = []
        self._usable, self.writes = True, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._usable:
            return func(*args, **kwargs)
        try:
            _check_is_answerable(func, kwargs)
            with without_modes():
                self._steps.append(self.step(func, args, kwargs))
        except _UnusableError as error:
            self._usable, self.writes = False, isinstance(error, _WritesError)
        result = func(*args, **kwargs)
        if self._usable:
            try:
                with without_modes():
                    self._answers.append(self._answer(result, top=True))
            except _UnusableError:
                self._usable = False
        return result

    def unknown(self, tensor: Tensor) -> Token:
        """The token of a tensor that the forward did not make."""
        where = self._places.get(id(tensor))
        if where is None:
            if not isinstance(tensor, FakeTensor):  # a constant
                raise _UnusableError
            where = ("outside", _Outside(tensor))
        self._known[0].append(known_of(tensor))
        self._outer.append(where)
        self.used.append(tensor)
        token = self.known[id(tensor)] = ("outer", len(self._outer) - 1)
        return token

    def _answer(self, value: Any, top: bool = False) -> Token:
        """How to make again what a call was answered."""
        kind = type(value)
        if isinstance(value, Tensor):
            if id(value) not in self.known:
                if type(value) is not FakeTensor:
                    raise _UnusableError
                self._known[1].append(known_of(value))
                self.made.append(value)
                self.known[id(value)] = ("made", len(self.made) - 1)
            return self.known[id(value)]
        if kind in (tuple, list) or (isinstance(value, tuple) and kind.__module__ == "torch.return_types"):
            return ("sequence", kind, *map(self._answer, value))
        if kind in (*_VALUES, float, complex) and not (top and value is None):  # what gives None does something
            return ("value", kind, value)
        raise _UnusableError

    def finish(self, leaves: Sequence[Any]) -> Record | None:
        """What the forward did that returned `leaves`; None if it cannot be told or answered."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not self._usable or not all(id(tensor) in self.known for tensor in tensors):
            return None
        results = [self.known[id(tensor)] for tensor in tensors]
        new = {token[1]: self.made[token[1]] for token in results if token[0] == "made"}
        with without_modes():
            memory = [storage_key(tensor) for tensor in (*self.used, *new.values())]
            able = torch.is_grad_enabled() and any(known.requires_grad for known in self._known[0])
            if not new or len(set(memory[len(self.used) :]) - set(memory[: len(self.used)])) != len(new):
                return None
            for tensor in new.values():
                expected = able and (tensor.is_floating_point() or tensor.is_complex())
                if tensor.requires_grad != expected or attributes_of(tensor):
                    return None
            made = [fake_like(tensor, tensor.shape, tensor.stride()) for tensor in self.made]  # type: ignore[arg-type]
        return Record(self._steps, self._answers, self._outer, self._known, results, made)


class Replaying(_Calls):
    """Answers the calls of a forward with what another one was answered, and raises UnlikeError where it calls
    something else."""

    def __init__(self, place: Place, outermost: CodeType, record: Record, used: Sequence[Tensor]) -> None:
        super().__init__(place, outermost)
        self._record, self._next = record, 0
        self.known = {id(tensor): ("outer", i) for i, tensor in enumerate(used)}
        self.known |= {id(tensor): ("made", i) for i, tensor in enumerate(record.made)}
        self._used = used

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        steps = self._record.steps
        try:
            same = self._next < len(steps) and self.step(func, args, kwargs or {}) == steps[self._next]
        except _UnusableError:
            same = False
        if not same:
            raise UnlikeError
        self._next += 1
        return self._made(self._record.answers[self._next - 1])

    def unknown(self, tensor: Tensor) -> Token:
        """Raises _UnusableError: the other forward used no such tensor."""
        raise _UnusableError

    def _made(self, answer: Token) -> Any:
        kind, *rest = answer
        if kind == "value":
            return rest[1]
        if kind == "sequence":
            items = [self._made(each) for each in rest[1:]]
            return items if rest[0] is list else rest[0](items)
        return (self._used if kind == "outer" else self._record.made)[rest[0]]

    def finish(self, leaves: Sequence[Any]) -> None:
        """Raise UnlikeError unless the forward, which returned `leaves`, did all that the other one did."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = [self.known.get(id(tensor)) for tensor in tensors]
        if self._next != len(self._record.steps) or results != self._record.results:
            raise UnlikeError


def _check_is_answerable(func: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise _UnusableError for a function that writes in place (_WritesError), is not PyTorch's own, or tells what is
    not known of a tensor while it is captured."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        known = str(func).partition(".")[0] in ("aten", "prims") or str(func).startswith("aten::")
    else:
        known = isinstance(func, _OF_TORCH) or (
            isinstance(func, FunctionType) and func.__module__.partition(".")[0] == "torch"
            and not func.__module__.startswith("torch.autograd")  # what these give depends on history
        )  # fmt: skip
    name = str(getattr(func, "__name__", ""))
    writes = name.endswith("_") and not name.endswith("__")
    if writes or name in _WRITING or "out" in kwargs or kwargs.get("inplace"):
        raise _WritesError
    if not known or func in ASKED:
        raise _UnusableError


_WRITING = frozenset({"__set__", "__setitem__", "__delete__"} | {
    f"__i{name}__" for name in (
        "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift",
        "rshift",
    )
})  # fmt: skip


def _settings() -> Token:
    """The settings of torch that a call may follow from."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.are_deterministic_algorithms_enabled(), _annotations(),
    )  # fmt: skip


def _annotations() -> str:
    """What nodes are annotated with. The region of torch.utils.checkpoint is another one for each module (modes.py)."""
    custom = get_current_meta().get("custom") or {}
    return str([item for item in custom.items() if item[0] not in marked(0)])


def traces_of_use(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """What shows that somebody keeps one of the `tensors`, or put something into it."""
    return [(sys.getrefcount(tensor), weakref.getweakrefcount(tensor), len(vars(tensor))) for tensor in tensors]


def frames_above(frame: FrameType | None, outermost: CodeType) -> tuple[Any, ...]:
    """Where the call of a module stands, up to the frame that runs `outermost`."""
    found: list[Any] = []
    while frame is not None and frame.f_code is not outermost:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)
