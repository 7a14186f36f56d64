"""The side effects of a function in Python: undone after its capture, and repeated by each call."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from partway.propagation.capture.hooks import Noted
from partway.propagation.graph.structure import flatten, name_of
from partway.propagation.torch_internals import buffers_in, modules_in, parameters_in
from partway.reuse.kinds import elements_of, fact
from partway.reuse.reachable import OWN_STORES, Attribute, Reachable
from partway.reuse.state import State
from partway.strategy import CaptureError

_GONE: Any = object()  # stands for a value where there is none


class Effects:
    """The places that a function writes while it is captured: attributes of modules and objects, variables, elements of
    lists and dicts. After the capture the old values are restored; each call then writes its own values there."""

    def __init__(self, fn: Callable[..., Any], state: State) -> None:
        self._fn, self._state = fn, state
        self._outside = Snapshot(fn, state.reached)
        self._before: Snapshot | None = None
        self.writes: tuple[Write, ...] = ()

    def begin(self) -> None:
        """Take a snapshot before the function runs."""
        self._before = Snapshot(self._fn, self._state.reached)

    def end(self) -> list[Any]:
        """Restore the snapshot after the function has run, and return the values that it wrote. Raises CaptureError for
        writes that a call cannot repeat."""
        assert self._before is not None
        replaced, changed = self._before.replaced(), next(self._before.changed(), None)
        pairs = zip(self._before.parameters(), self._outside.parameters(), strict=True)
        self.writes = tuple(self._before.writes({id(stand_in): parameter for stand_in, parameter in pairs}))
        self._before.restore()
        if replaced:
            raise CaptureError(
                f"{name_of(self._fn)} replaces {', '.join(replaced)} while it runs, which a plan cannot do; keep what "
                "it computes in a buffer (register_buffer), or change parameters and modules between calls"
            )
        if changed is not None:
            label, drawn = changed
            raise CaptureError(
                f"{name_of(self._fn)} draws random numbers of {label}, and they would be the same in every call; draw "
                "them with torch (torch.rand([]) may decide a branch), or outside the sharded function"
                if drawn
                else f"{name_of(self._fn)} changes {label}, which later calls would not do; change it outside the "
                "sharded function, or keep what changes in an attribute or a buffer"
            )
        return [write.value for write in self.writes]

    def abort(self) -> None:
        """Restore the snapshot after the function raised an error."""
        if self._before is not None:
            self._before.restore()

    def finish(self) -> None:
        """After the capture, restore the lists and dicts that torch.export has replaced by copies."""
        self._outside.restore()

    def noted(self) -> Noted:
        """A snapshot of the current values."""
        return Snapshot(self._fn, self._state.reached)

    @property
    def kept(self) -> frozenset[str]:
        """The labels of the places to which it writes tensors."""
        return frozenset(write.label for write in self.writes if flatten(write.value)[0])

    def check(self, constants: Mapping[str, Tensor]) -> None:
        """Raise CaptureError if the function reads a tensor from a place to which it writes another one. `constants`:
        the tensors that it took from outside."""
        assert self._before is not None
        for write in self.writes:
            old = flatten(self._before.old.get(write.label))[0]
            if any(one is constant for one in old for constant in constants.values()):
                raise CaptureError(
                    f"{name_of(self._fn)} keeps a tensor in {write.label} from one call to the next, which would stay "
                    "what it was at the first; make it a buffer (register_buffer) or an argument that is returned, or "
                    "empty it before each call"
                )

    def put(self, values: Sequence[Any]) -> None:
        """Write the values of a call to the places that the function writes."""
        for write, value in zip(self.writes, values, strict=True):
            write.put(value)


@dataclass(frozen=True)
class Write:
    """A function's write of `value` to the place `label`; `put` writes a value there."""

    label: str
    put: Callable[[Any], None]
    value: Any


class _Store:
    """The values that something holds under names, at the time of creation.

    label     the prefix of the names in messages
    where     a dict, a class, or an Attribute
    counts    whether a name counts
    own       for a dict of torch, which keeps its order: "buffer", "parameter" or "module"
    """

    def __init__(self, label: str, where: Any, counts: Callable[[str], bool], own: str = "") -> None:
        self.label, self.where, self.own, self.counts = label, where, own, counts
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        held = vars(self.where) if isinstance(self.where, type) else self.where
        return {name: value for name, value in held.items() if self.counts(name)}

    def named(self, name: str) -> str:
        """The label of one name."""
        return self.label if isinstance(self.where, Attribute) else f"{self.label}{name}"

    def changes(self) -> list[tuple[str, Any, Any]]:
        """The differences: name, old value and new value (_GONE if there is none)."""
        now = self._now()
        pairs = ((name, self.before.get(name, _GONE), now.get(name, _GONE)) for name in (self.before | now))
        return [(name, old, new) for name, old, new in pairs if old is not new]

    def restore(self) -> None:
        """Put the old values back."""
        if self.own:
            _refill(self.where, self.before)
        else:
            for name, old, _ in self.changes():
                _put(self.where, name, old)


class Snapshot:
    """The values of all places that a function may write, at the time of creation."""

    def __init__(self, fn: Callable[..., Any], reachable: Reachable) -> None:
        modules = (
            [(f"{path}." if path else "", m) for path, m in fn.named_modules()] if isinstance(fn, nn.Module) else []
        )
        objects = {id(o.store): (o.label, o.store) for o in reachable.owners if o.kind is not None}
        objects |= {id(vars(module)): (path, vars(module)) for path, module in modules}
        torchs = (("buffer", buffers_in), ("parameter", parameters_in), ("module", modules_in))
        self._stores = [
            *(_Store(label, store, _is_no_store) for label, store in objects.values()),
            *(
                _Store(path if own == "buffer" else f"{own} {path}", held(module), _is_any, own)
                for own, held in torchs
                for path, module in modules
            ),
            *(_Store("global ", where, name.__eq__) for _, where, name in reachable.globals),
            *(_Store(o.label, o.where, _is_not_pythons) for o in reachable.owners if o.where is not None),
            *(_Store(label, at, _is_any) for label, at, _ in reachable.items if isinstance(at, Attribute)),
        ]
        self.old: dict[str, Any] = {s.named(name): value for s in self._stores for name, value in s.before.items()}
        kept = [(s.named(name), v) for s in self._stores if s.counts is _is_no_store for name, v in s.before.items()]
        known = {id(value): (label, value) for label, value in (*kept, *reachable.containers)}
        self._containers = [(label, value, _copy(value)) for label, value in known.values() if _is_mutable(value)]
        self._reads = [(label, read, draws, fact(read())) for label, read, draws in reachable.reads]
        self.old |= {label: copy for label, _, copy in self._containers}

    def parameters(self) -> list[Any]:
        """The parameters, in the order of the modules."""
        return [one for store in self._stores if store.own == "parameter" for one in store.before.values()]

    def writes(self, stand_ins: Mapping[int, Any] = types.MappingProxyType({})) -> Iterator[Write]:
        """The places that hold another object now. `stand_ins`: by the id of a stand-in, its parameter. A list of
        stand-ins in place of one of their parameters, such as an nn.LSTM makes of its weights, is no change."""
        known = {id(container) for _, container, _ in self._containers}

        def kept(value: Any) -> Any:
            """Mark a container of the snapshot, which stays the same object even in another place."""
            return _Kept(value) if id(value) in known else value

        for store in self._stores:
            for name, old, now in store.changes() if store.own in ("", "buffer") else ():
                if not _lists_same(old, now, stand_ins):
                    yield Write(store.named(name), functools.partial(_put, store.where, name), kept(now))
        for label, container, copy in self._containers:
            if not _holds_same(container, copy):
                yield Write(label, functools.partial(_refill, container), _copy(container, kept))

    def replaced(self) -> list[str]:
        """The parameters, and modules with tensors, that were replaced, removed or added."""
        return [
            store.named(name)
            for store in self._stores
            if store.own in ("parameter", "module")
            for name, old, now in store.changes()
            if _has_tensors(now) or _has_tensors(old)
        ]

    def changed(self) -> Iterator[tuple[str, bool]]:
        """The labels of changed values that no call can write, and whether random numbers were drawn from them."""
        for label, read, draws, before in self._reads:
            if fact(read()) != before:
                yield label, draws

    def left(self) -> list[Any]:
        """The values written since."""
        return [write.value for write in self.writes()]

    def restore(self) -> None:
        """Restore all values."""
        for store in self._stores:
            store.restore()
        for _, container, copy in self._containers:
            _refill(container, copy)


def _is_any(_: str) -> bool:
    return True


def _is_no_store(name: str) -> bool:
    return name not in OWN_STORES


def _is_not_pythons(name: str) -> bool:
    return not name.startswith("__")


def _has_tensors(value: Any) -> bool:
    """Whether `value` is a tensor, or a module with parameters or buffers."""
    return issubclass(type(value), Tensor) or (
        issubclass(type(value), nn.Module) and any(True for _ in chain(value.parameters(), value.buffers()))
    )


def _is_mutable(value: Any) -> bool:
    return issubclass(type(value), list | dict | set | deque)


def _holds_same(one: Any, other: Any) -> bool:
    """Whether two containers of one type hold the same objects."""
    if isinstance(one, set):
        return set(map(id, one)) == set(map(id, other))
    return len(one) == len(other) and all(a is b for a, b in zip(elements_of(one), elements_of(other), strict=True))


def _lists_same(old: Any, now: Any, stand_ins: Mapping[int, Any]) -> bool:
    """Whether `now` lists the stand-ins of the parameters that `old` lists, or weak references to them."""
    if not type(old) is type(now) is list or not old or len(old) != len(now):
        return False

    def referred(one: Any) -> tuple[Any, bool]:
        weak = isinstance(one, weakref.ref)
        return one() if weak else one, weak

    pairs = zip(map(referred, old), map(referred, now), strict=True)
    return all(a == b and stand_ins.get(id(other), _GONE) is one for (one, a), (other, b) in pairs)


def _put(where: Any, name: str, value: Any) -> None:
    """Write a value under a name of a dict, a class, or an Attribute; _GONE removes it."""
    is_class = isinstance(where, type)
    if value is _GONE:
        if not is_class:
            where.pop(name, None)
        elif name in vars(where):
            delattr(where, name)
    elif is_class:
        setattr(where, name, _unwrapped(value))
    else:
        where[name] = _unwrapped(value)


class _Kept:
    """Marks a container of the snapshot, which stays the same object."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def _unwrapped(value: Any) -> Any:
    return value.held if isinstance(value, _Kept) else value


def _refill(container: Any, content: Any) -> None:
    """Give a list, dict, set or deque the elements of `content`."""
    if _holds_same(container, content):
        return
    base = _base(container)
    base.clear(container)
    if isinstance(container, dict):
        for key, value in content.items():
            base.__setitem__(container, key, _unwrapped(value))
    elif isinstance(container, set):
        base.update(container, content)
    else:
        base.extend(container, map(_unwrapped, content))


def _base(container: Any) -> Any:
    """The built-in type of a container; the methods of a subclass may do more."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))


def _copy(container: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """A container of the built-in type with the same elements, each changed by `change`."""
    if isinstance(container, dict):
        return {key: change(value) for key, value in dict.items(container)}
    return _base(container)(container if isinstance(container, set) else map(change, container))
