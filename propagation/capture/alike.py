"""Modules that are called alike are traced twice; the others take what that gave (copies.py puts it into the graph).

The first two calls of modules that look alike (repeated.py) are traced, and what their forwards call of PyTorch is
noted (calls.py). If both called the same, the forward of a third runs with what the first was answered, and where it
does the same to its end, one operator stands for it in the trace. (If they did not, it is the second and the third that
count: what is only done once, such as to fill a cache, the first has done.)

    partway::copied(outer, results, kind)     the results of a forward that is like the traced ones of this kind
    partway::traced(outer, results, kind)     after a traced one: which tensors it used, and which it returned; and
                                              before it, without any

Whatever is not the same, or cannot be told, ends the attempt, and the function is traced once more without any of
this. So is a function that writes in place anywhere: what is written to is not what is told apart here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ...strategy.afterwards import afterwards
from ..torch_internals import dispatch_modes, function_modes, tree_flatten, tree_unflatten, without_modes
from .calls import Place, Record, Recording, Replaying, UnlikeError, frames_above, looks_of, traces_of_use
from .repeated import repeated

_LIBRARY = torch.library.Library("partway", "FRAGMENT")
_LIBRARY.define("copied(Tensor[] outer, str[] results, int kind) -> Tensor[]")
_LIBRARY.define("traced(Tensor[] outer, Tensor[] results, int kind) -> Tensor")
copied = torch.ops.partway.copied.default
traced = torch.ops.partway.traced.default


@torch.library.register_fake("partway::copied")  # type: ignore[untyped-decorator]
def _fake_copied(outer: list[Tensor], results: list[str], kind: int) -> list[Tensor]:
    return [_empty(*text.split(";")) for text in results]


@torch.library.register_fake("partway::traced")  # type: ignore[untyped-decorator]
def _fake_traced(outer: list[Tensor], results: list[Tensor], kind: int) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


def _no_backward(*_: Any) -> Any:
    raise AssertionError("a call that stands for a module has no backward")


torch.library.register_autograd("partway::copied", _no_backward)


def _text(tensor: Tensor) -> str:
    """A tensor without its values, as `_empty` reads it."""
    sizes = (" ".join(map(str, each)) for each in (tensor.shape, tensor.stride()))
    return ";".join((str(tensor.dtype).removeprefix("torch."), str(tensor.device), *sizes))


def _empty(dtype: str, device: str, shape: str, strides: str) -> Tensor:
    sizes = ([int(n) for n in each.split()] for each in (shape, strides))
    return torch.empty_strided(*sizes, dtype=getattr(torch, dtype), device=device)


@dataclass
class _Kind:
    """Calls that look alike.

    records    what was noted of the traced ones
    texts      the results of one, as `_empty` reads them
    uses       who uses the stand-ins of the first record
    again      the first of all was unlike the next, and is forgotten
    hopeless   all others will be traced, too
    """

    number: int
    records: list[Record] = field(default_factory=list)
    uses: list[tuple[int, int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    again: bool = False
    hopeless: bool = False


class Alike:
    """Has modules of `fn` that look alike traced once, where code runs inside of a call of `outermost`; one for each
    attempt.

    notes    what is returned beside the results of the function, so that the notes stay in the trace
    copies   how many calls of modules something stands for
    failed   whether something was taken for what it is not
    """

    def __init__(self, fn: Any, outermost: CodeType) -> None:
        self._outermost = outermost
        self._thread = threading.get_ident()
        self._keys = {module: key for module, key in repeated(fn).items() if "forward" not in vars(module)}
        self.begin()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._keys)

    def begin(self) -> None:
        """The function begins to run."""
        self._kinds: dict[Hashable, _Kind] = {}
        self._numbers = itertools.count()
        self._met: set[nn.Module] = set()
        self._inside = self.failed = False
        self.notes: list[Tensor] = []
        self.copies = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile these modules are traced once."""

        def restore() -> None:
            for module in self._keys:
                vars(module).pop("forward", None)

        with afterwards(restore):
            for module in self._keys:
                vars(module)["forward"] = _as(module.forward, functools.partial(self._called, module, module.forward))
            yield

    def check(self) -> None:
        """Raise UnlikeError if a forward was stopped that was unlike the traced ones, whatever became of that."""
        if self.failed:
            raise UnlikeError

    def _called(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a module gives, traced or not."""
        if torch.compiler.is_dynamo_compiling():  # in a branch or a loop
            return forward(*args, **kwargs)
        whole = module in self._met  # torch counts the calls of a module
        whole = whole or any(map(_is_of_others, (*args, *kwargs.values())))
        if whole or self._inside or threading.get_ident() != self._thread or (modes := _modes()) is None:
            return forward(*args, **kwargs)
        self._met.add(module)
        self._inside = True
        try:
            leaves, spec = tree_flatten((args, kwargs))
            with without_modes():
                looks = tuple(map(_look, leaves))
            where = frames_above(sys._getframe(1), self._outermost)
            key = (self._keys[module], str(spec), looks, where, modes)
            kind = self._kinds.setdefault(key, _Kind(next(self._numbers)))
            run = functools.partial(forward, *args, **kwargs)
            if len(kind.records) == 2 and not kind.hopeless:
                return self._replayed(Place(module, leaves), kind, run)
            return run() if kind.hopeless else self._recorded(Place(module, leaves), kind, run)
        finally:
            self._inside = False

    def _recorded(self, place: Place, kind: _Kind, run: Callable[[], Any]) -> Any:
        """What a module gives that is traced."""
        recording = Recording(place, _run.__code__)
        self.notes.append(torch.ops.partway.traced([], [], kind.number))
        result = _run(recording, run)
        if recording.writes:  # then nothing is copied
            self.failed = True
            raise UnlikeError
        record = recording.finish(tree_flatten(result)[0])
        unlike = record is not None and bool(kind.records) and not record.is_like(kind.records[0])
        if record is None or (unlike and kind.again):
            kind.hopeless = True
            return result
        if unlike:
            kind.number, kind.records, kind.uses, kind.again = next(self._numbers), [], [], True
        results = [recording.made[token[1]] for token in _made(record)]
        kind.records.append(record)
        self.notes.append(torch.ops.partway.traced(recording.used, results, kind.number))
        if not kind.uses:
            with without_modes():
                kind.texts = [_text(record.made[token[1]]) for token in _made(record)]
            kind.uses = traces_of_use(record.made)
        return result

    def _replayed(self, place: Place, kind: _Kind, run: Callable[[], Any]) -> Any:
        """What a module gives that is like those traced."""
        record = kind.records[0]
        with without_modes():
            used = record.tensors_of(place)
        if used is None:
            kind.hopeless = True
            return run()
        replaying = Replaying(place, _run.__code__, record, used)
        try:
            given = _run(replaying, run)
            replaying.finish(tree_flatten(given)[0])
            results = torch.ops.partway.copied(used, kind.texts, kind.number)
            places = [token[1] for token in _made(record)]
            given = _with(given, {id(record.made[i]): each for i, each in zip(places, results, strict=True)})
            with without_modes():
                needing = [record.known[1][i].requires_grad for i in places]
                unlike = [each.requires_grad for each in results] != needing
            if unlike or traces_of_use(record.made) != kind.uses:  # it keeps a stand-in somewhere
                raise UnlikeError
        except BaseException:
            self.failed = True
            raise
        self.copies += 1
        return given


def _as(forward: Any, called: Any) -> Any:
    """`called`, which looks like `forward` to who asks for its signature or its module."""
    functools.update_wrapper(called, forward)
    for name in ("__self__", "__func__", "__code__"):
        if hasattr(forward, name):
            setattr(called, name, getattr(forward, name))
    return called


def _run(mode: Any, run: Callable[[], Any]) -> Any:
    """What `run` gives while the mode sees its calls."""
    with mode:
        return run()


def _made(record: Record) -> list[Any]:
    """The tensors that a forward made and returned, each once."""
    return [token for token in dict.fromkeys(record.results) if token[0] == "made"]


def _with(value: Any, new: Mapping[int, Tensor]) -> Any:
    """`value` with other tensors in the places of some, by their ids. What holds none of them stays the object that it
    is."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    whole = [value]
    parts, spec = tree_flatten(value, is_leaf=lambda part: part is not whole[0])
    whole.clear()  # the flattening leaves a cycle of functions, which would keep it
    if len(parts) == 1 and parts[0] is value:
        return value
    others = [_with(part, new) for part in parts]
    alike = all(one is other for one, other in zip(parts, others, strict=True))
    return value if alike else tree_unflatten(others, spec)


def _is_of_others(value: Any) -> bool:
    """Whether an argument is an object of a class that is neither Python's nor torch's, such as a cache, which would
    keep tensors that are only stand-ins."""
    return type(value).__module__.partition(".")[0] not in ("builtins", "torch", "partway")


def _modes() -> tuple[Hashable, ...] | None:
    """The modes that are on; None if they do what only their authors know."""
    modes = [*function_modes(), *dispatch_modes()]
    if not all(type(mode).__module__.partition(".")[0] in ("torch", "partway") for mode in modes):
        return None
    return tuple((type(mode), str(getattr(mode, "device", None))) for mode in modes)


def _look(leaf: Any) -> Any:
    """What an argument looks like."""
    if isinstance(leaf, Tensor):
        return looks_of(leaf)
    return (type(leaf), leaf) if isinstance(leaf, bool | int | str | float | None) else type(leaf)
