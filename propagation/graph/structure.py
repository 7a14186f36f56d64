"""Arguments and results as flat lists of tensors, and back: nested containers, dataclasses, objects with tensors (as
transformers' caches) and plain values; the names of a call's tensors and of a module's.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint

from ...strategy.errors import StrategyError
from ..torch_internals import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class _Opened:
    """An object that torch's pytree does not know, as the values of its fields."""

    template: Any
    fields: tuple[str, ...]
    structure: Structure
    is_given: bool = False  # in a result: whether the call was given an object of this type

    def close(self, tensors: list[Any], given: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """A copy of the object with `tensors` in its fields."""
        instance = copy.copy(self.template)
        for name, value in zip(self.fields, self.structure.build(tensors, given, numbers), strict=True):
            object.__setattr__(instance, name, value)
        return instance


@dataclass(frozen=True)
class _GivenTensor:
    """The tensor number `place` of the call, which the function returns."""

    place: int


@dataclass(frozen=True)
class _CountedNumber:
    """A number that changes from call to call and is passed as a tensor: number `place` of these."""

    place: int


Path = tuple[int, ...]  # the places of a leaf of a structure, from the outermost structure to the innermost

_TENSOR = object()
_NUMBER = object()

# During a capture: the types of numbers whose values torch.export does not know, and the dtypes of their tensors.
NUMBERS = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}
_READ_ALIKE = bool, int, float, complex, str, bytes, torch.dtype, torch.device


@dataclass(frozen=True)
class Structure:
    """Where the tensors of a value are: `build` puts other tensors in their places."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # _TENSOR, _NUMBER (a tensor's), _GivenTensor, _CountedNumber, _Opened, or a plain value

    def build(self, tensors: list[Any], given: Sequence[Any] = (), numbers: Sequence[Any] = ()) -> Any:
        """The value with `tensors` (consumed from the front) in the places of its tensors, tensors of the call from
        `given` where it returns one of them, and `numbers` for those passed as tensors."""
        values = []
        for leaf in self.leaves:
            if leaf is _TENSOR:
                values.append(tensors.pop(0))
            elif leaf is _NUMBER:
                values.append(_item(tensors.pop(0)))
            elif isinstance(leaf, _GivenTensor):
                values.append(given[leaf.place])
            elif isinstance(leaf, _CountedNumber):
                values.append(numbers[leaf.place])
            else:
                values.append(leaf.close(tensors, given, numbers) if isinstance(leaf, _Opened) else leaf)
        return tree_unflatten(values, self.spec)

    def count(self) -> int:
        """The number of tensors."""
        return sum(
            leaf.structure.count() if isinstance(leaf, _Opened) else leaf is _TENSOR or leaf is _NUMBER
            for leaf in self.leaves
        )

    def in_given_objects(self, inside: bool = False) -> Iterator[bool]:
        """Whether each tensor of a result is in an object of a type that the call was given, such as a cache."""
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                yield from leaf.structure.in_given_objects(inside or leaf.is_given)
            elif leaf is _TENSOR or leaf is _NUMBER:
                yield inside

    def plain(self) -> Iterator[Any]:
        """The plain values: neither tensors nor opened objects."""
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                yield from leaf.structure.plain()
            elif leaf is not _TENSOR and leaf is not _NUMBER and not isinstance(leaf, _GivenTensor | _CountedNumber):
                yield leaf

    def kinds(self) -> Iterator[type]:
        """The types of the opened objects."""
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                yield type(leaf.template)
                yield from leaf.structure.kinds()

    def returned_by(self, call: Structure) -> Structure:
        """This structure as the result of a call with the structure `call`: objects of a type in the call are marked as
        given."""
        return self._returned_by(frozenset(call.kinds()))

    def _returned_by(self, given: frozenset[type]) -> Structure:
        leaves = tuple(
            dataclasses.replace(
                leaf, structure=leaf.structure._returned_by(given), is_given=type(leaf.template) in given
            )
            if isinstance(leaf, _Opened)
            else leaf
            for leaf in self.leaves
        )
        return dataclasses.replace(self, leaves=leaves)

    def returning(self, places: Mapping[int, int]) -> Structure:
        """This structure, with the call's own tensors for those numbered by the keys of `places`: the values are their
        numbers in the call."""
        return self._returning(iter(range(self.count())), places)

    def _returning(self, numbers: Iterator[int], places: Mapping[int, int]) -> Structure:
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                leaf = dataclasses.replace(leaf, structure=leaf.structure._returning(numbers, places))
            elif leaf is _TENSOR or leaf is _NUMBER:
                place = places.get(next(numbers))
                leaf = leaf if place is None else _GivenTensor(place)
            leaves.append(leaf)
        return dataclasses.replace(self, leaves=tuple(leaves))

    def data(self, write: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The structure as nested tuples of texts, numbers, and the results of `write` for plain values and types.
        (PyTorch can write the spec as text, but reading it imports modules that the text names.)"""
        return _spec_data(self.spec, write), tuple(_leaf_data(leaf, write) for leaf in self.leaves)

    @staticmethod
    def of_data(data: Any, read: Callable[[Any], Any]) -> Structure:
        """The structure that `data` was written from; `read` is the inverse of `write`. An object is a new one of its
        type, whose fields are set whenever the structure is built."""
        spec, leaves = data
        return Structure(_spec_of_data(spec, read), tuple(_leaf_of_data(leaf, read) for leaf in leaves))

    def telling(self, values: Iterator[Any]) -> Structure:
        """This structure with plain values for its numbers. `values` has one item for each tensor and number: None for
        tensors and for numbers that stay."""
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                leaf = dataclasses.replace(leaf, structure=leaf.structure.telling(values))
            elif leaf is _TENSOR or leaf is _NUMBER:
                told = next(values)
                leaf = leaf if told is None or leaf is _TENSOR else told
            leaves.append(leaf)
        return dataclasses.replace(self, leaves=tuple(leaves))

    def counting(self, paths: Sequence[Path]) -> tuple[Structure, list[int]] | None:
        """This structure with the numbers at `paths` passed as tensors, and these numbers; None if one of them is not
        an integer of at least 2 (torch.export has no symbols for others) that a tensor of int64 can hold."""
        structure, numbers = self, list[int]()
        for place, path in enumerate(paths):
            found = structure._counting(path, place)
            if found is None:
                return None
            structure = found[0]
            numbers.append(found[1])
        return structure, numbers

    def _counting(self, path: Path, place: int) -> tuple[Structure, int] | None:
        here, *rest = path
        leaf: Any = self.leaves[here] if here < len(self.leaves) else None
        if not rest:
            if type(leaf) is not int or not 2 <= leaf < 2**62:
                return None
            changed, number = _CountedNumber(place), leaf
        else:
            inner = leaf.structure._counting(tuple(rest), place) if isinstance(leaf, _Opened) else None
            if inner is None:
                return None
            changed, number = dataclasses.replace(leaf, structure=inner[0]), inner[1]
        return dataclasses.replace(self, leaves=(*self.leaves[:here], changed, *self.leaves[here + 1 :])), number

    def is_like(self, other: Structure) -> bool:
        """Whether two calls have the same tree and plain values; values without plain equality count as different."""
        return (
            len(self.leaves) == len(other.leaves)
            and all(map(_are_alike, self.leaves, other.leaves))
            and self.spec == other.spec
        )

    def text(self) -> str:
        """A readable text, the same in every process: plain values, and the types of other objects."""
        texts = []
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                texts.append(f"{type(leaf.template).__name__}({leaf.structure.text()})")
            elif isinstance(leaf, _GivenTensor):
                texts.append(f"tensor {leaf.place} of the call")
            elif isinstance(leaf, _CountedNumber):
                texts.append("a number that changes")
            elif leaf is _TENSOR or leaf is _NUMBER:
                texts.append("a tensor")
            else:
                plain = leaf is None or isinstance(leaf, _READ_ALIKE)
                texts.append(repr(leaf) if plain else type(leaf).__name__)
        return f"{self.spec} of {', '.join(texts)}"

    def key(self) -> tuple[Any, ...]:
        """A key that two calls with the same graph share: the shape of the tree and the plain values."""
        plain: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Opened):
                plain.append((type(leaf.template), leaf.fields, leaf.structure.key()))
            elif isinstance(leaf, _CountedNumber):
                plain.append("number")
            else:
                plain.append("tensor" if leaf is _TENSOR else (type(leaf), _hashable(leaf)))
        return (str(self.spec), tuple(plain))


_PLAIN = frozenset({type(None), bool, int, float, str, _CountedNumber})  # types whose equal values are the same


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two leaves of structures are the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is _Opened:
        same = type(one.template) is type(other.template) and one.fields == other.fields
        return same and one.structure.is_like(other.structure)
    return type(one) in _PLAIN and bool(one == other)


def numbers_between(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[Path] | None:
    """The paths of the integers in which the keys of two structures differ; None where they differ otherwise, too."""
    (spec, leaves), (other_spec, others) = one, other
    if spec != other_spec or len(leaves) != len(others):
        return None
    paths: list[Path] = []
    for place, (leaf, was) in enumerate(zip(leaves, others, strict=True)):
        if leaf == was:
            continue
        if len(leaf) != len(was) or isinstance(leaf, str) or isinstance(was, str) or leaf[0] is not was[0]:
            return None
        if len(leaf) == 3:
            inner = numbers_between(leaf[2], was[2]) if leaf[1] == was[1] else None
            if inner is None:
                return None
            paths += [(place, *path) for path in inner]
        elif leaf[0] is int and min(leaf[1], was[1]) >= 2:
            paths.append((place,))
        else:
            return None
    return paths


@dataclass(frozen=True, eq=False)
class Same:
    """Wraps a value without a hash: compared by the identity of the value, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_LEAF: TreeSpec = tree_flatten(0)[1]


def _spec_data(spec: TreeSpec, write: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The type of a container, its context in torch's pytree, and its elements; () for a leaf."""
    if spec.is_leaf():
        return ()
    return write(spec.type), write(spec.context), tuple(_spec_data(child, write) for child in spec.children())


def _spec_of_data(data: Any, read: Callable[[Any], Any]) -> TreeSpec:
    if data == ():
        return _LEAF
    kind, context, children = data
    return TreeSpec(read(kind), read(context), [_spec_of_data(child, read) for child in children])


def _leaf_data(leaf: Any, write: Callable[[Any], Any]) -> tuple[Any, ...]:
    if leaf is _TENSOR:
        return ("tensor",)
    if leaf is _NUMBER:
        return ("number",)
    if isinstance(leaf, _GivenTensor):
        return ("given", leaf.place)
    if isinstance(leaf, _Opened):
        return ("object", write(type(leaf.template)), leaf.fields, leaf.structure.data(write), leaf.is_given)
    return ("plain", write(leaf))


def _leaf_of_data(data: Any, read: Callable[[Any], Any]) -> Any:
    match data:
        case ("tensor",):
            return _TENSOR
        case ("number",):
            return _NUMBER
        case ("given", int(place)):
            return _GivenTensor(place)
        case ("object", kind, fields, inner, bool(is_given)):
            return _Opened(object.__new__(read(kind)), tuple(fields), Structure.of_data(inner, read), is_given)
        case ("plain", value):
            return read(value)
    raise ValueError(f"{data!r:.80} is no part of a structure")


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return value


def _item(tensor: Any) -> bool | int | float:
    whole = tensor.full_tensor() if hasattr(tensor, "placements") else tensor
    number: bool | int | float = whole.item()
    return number


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of `value` in order, and the structure whose `build` puts tensors back."""
    return _flatten(value, {})


def _flatten(value: Any, known: _Known) -> tuple[list[torch.Tensor], Structure]:
    leaves, spec = tree_flatten(value)
    tensors: list[torch.Tensor] = []
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            kept.append(_TENSOR)
        elif type(leaf) in NUMBERS:
            tensors.append(torch.scalar_tensor(leaf, dtype=NUMBERS[type(leaf)]))
            kept.append(_NUMBER)
        elif fields := _fields(leaf, known):
            inner, structure = _flatten(tuple(getattr(leaf, name) for name in fields), known)
            tensors += inner
            kept.append(_Opened(leaf, fields, structure))
        else:
            kept.append(leaf)
    return tensors, Structure(spec, tuple(kept))


def _fields(value: Any, known: _Known) -> tuple[str, ...]:
    """The attributes that `value` is opened into; () if it stays whole. `known`: see `_kinds`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    if isinstance(value, _ATOMS) or callable(value):
        return ()
    kinds = _kinds(value, (), known)
    apart = _CYCLE not in kinds and (_TENSOR in kinds or _OPAQUE not in kinds)
    return tuple(vars(value)) if apart and hasattr(value, "__dict__") else ()


_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, Enum, ModuleType)
_OPAQUE, _CYCLE = object(), object()
_Known = dict[int, tuple[Any, set[object]]]


def _kinds(value: Any, within: tuple[Any, ...], known: _Known) -> set[object]:
    """The kinds of an object's contents: tensors, opaque values, the object itself (a cycle). An object with none of
    these is opened like one with tensors: a cache is empty at first, and the captured function fills it. `known`: the
    kinds of other objects by id, with the objects themselves, so that no id is reused."""
    if isinstance(value, torch.Tensor):
        return {_TENSOR}
    if isinstance(value, _ATOMS) or type(value) in NUMBERS or callable(value):
        return set()
    if id(value) in known:
        return known[id(value)][1]
    if any(value is outer for outer in within):
        return {_CYCLE}
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif getattr(value, "__dict__", None):
        parts = list(vars(value).values())
    else:
        return {_OPAQUE}
    kinds = set[object]().union(*(_kinds(part, (*within, value), known) for part in parts))
    known[id(value)] = value, kinds
    return kinds


@dataclass(frozen=True)
class Call:
    """One call of a function, flat: its tensors, their names, and the structure of (args, kwargs).

    `arguments[i]` is the name of the parameter that tensor i belongs to, `names[i]` the tensor's own name
    (`"x"`, or `"batch[0]"` when the argument holds several).

    paths   the places of the numbers that the last tensors stand for, since they change from call to call
    parts   for each tensor that stands for a whole, its parts, of which each rank holds one, else None; () if none does
    """

    tensors: tuple[torch.Tensor, ...]
    structure: Structure
    arguments: tuple[str, ...]
    names: tuple[str, ...]
    paths: tuple[Path, ...] = ()
    parts: tuple[Any, ...] = ()

    @property
    def own(self) -> dict[str, Any]:
        """The parts of the tensors that stand for a whole, by name."""
        return {name: parts for name, parts in zip(self.names, self.parts, strict=False) if parts is not None}

    @property
    def numbers(self) -> int:
        """How many of the tensors, the last ones, stand for numbers."""
        return len(self.paths)

    def counting(self, paths: Sequence[Path]) -> Call | None:
        """This call with tensors for the numbers at `paths`; None if `Structure.counting` rejects one."""
        found = self.structure.counting(paths)
        if found is None:
            return None
        structure, numbers = found
        names = tuple(f"numbers[{i}]" for i in range(len(numbers)))
        return Call(
            (*self.tensors, *map(torch.tensor, numbers)),
            structure,
            (*self.arguments, *names),
            (*self.names, *names),
            tuple(paths),
            self.parts,
        )

    def build(self, tensors: Sequence[Any]) -> Any:
        """The arguments of the call with `tensors` in place of its own."""
        count = len(tensors) - self.numbers
        return self.structure.build(list(tensors[:count]), numbers=[int(number) for number in tensors[count:]])


def flatten_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Flatten a call of `fn`. Arguments are named by its signature, if it has one."""
    try:
        tensors, structure = flatten((args, kwargs))
    except RecursionError:
        raise StrategyError(f"an argument of {name_of(fn)} is nested too deeply; give a flat list or dict") from None
    labelled = [(name, value) for name, value in _argument_names(fn, args)] + list(kwargs.items())
    arguments: list[str] = []
    names: list[str] = []
    for name, value in labelled:
        count = len(flatten(value)[0])
        arguments += [name] * count
        names += [name] if count == 1 and isinstance(value, torch.Tensor) else [f"{name}[{i}]" for i in range(count)]
    return Call(tuple(tensors), structure, tuple(arguments), tuple(names))


def name_of(fn: object) -> str:
    """The name of a function, or of a module's class, in messages."""
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that `fn` takes by position, or () if it has no signature."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)


def place_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of the first `count` arguments by position; fewer if `fn` takes no more.

    Those in `*args`, and all if `fn` has no signature, are `arg0`, `arg1`, ... by their position.
    """
    known = parameter_names(fn)[:count]
    more = _takes_more(fn)
    return (*known, *(f"arg{i}" for i in range(len(known), count))) if more else known


def optional_names(fn: Callable[..., Any]) -> frozenset[str]:
    """The arguments of `fn` whose default is None: a call may leave them out."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.default is None)


def _takes_more(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has `*args`, or no signature."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the arguments do not fit the signature of `fn`."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name_of(fn)} takes {signature}, and its call does not fit: {error}") from None


def _argument_names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    known = place_names(fn, len(args))
    return [(known[i] if i < len(known) else f"arg{i}", value) for i, value in enumerate(args)]


def state_of(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by all of their names; nothing for a function."""
    if not isinstance(fn, torch.nn.Module):
        return {}
    named: dict[str, torch.Tensor] = dict(fn.named_buffers(remove_duplicate=False))
    named.update(fn.named_parameters(remove_duplicate=False))
    return named
