"""Masks of attention that are causal, or hide nothing, without the mask.

Models build them as tensors of queries x keys: for 131,072 tokens, 34 GB in bfloat16. `scaled_dot_product_attention`
takes is_causal=True in their place, and no mask in place of one that hides nothing.

A mask that depends on no input is computed if it is small. A large one is never computed: it is put together of
elementwise steps on a column of the queries and a row of the keys, from which its pattern follows. Of

    positions: [0, 1, 2]    ones([]) & (positions[None, :] <= positions[:, None])

the comparison is true for keys up to the query since the row and the column are equal and ascending, and `&` with
what is true everywhere changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...torch_internals import OpOverload, schema_of

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
SMALL = 2**24  # elements of a tensor that is computed


@dataclass(frozen=True)
class Pattern:
    """A tensor whose last two dims are queries x keys, as many of each: `past` for keys up to the query, the others
    `future`. A tensor of one value has it as both."""

    past: float
    future: float


def drop_masks(module: fx.GraphModule) -> None:
    """Write attention with a causal mask, or one that hides nothing, without the mask (in place)."""
    masks, names = _Masks(), [argument.name for argument in schema_of(ATTENTION).arguments]
    for node in module.graph.find_nodes(op="call_function", target=ATTENTION):
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal") or not _is_square(node, mask):
            continue
        with torch.device("cpu"):  # whatever the default device is
            pattern = masks.pattern(mask)
        causal = pattern is not None and _hides(mask, pattern.future)
        if pattern is None or not _shows(mask, pattern.past) or not (causal or _shows(mask, pattern.future)):
            continue
        positional = {"query", "key", "value"}
        node.args = tuple(given[name] for name in names if name in positional)
        others = {name: each for name, each in given.items() if name not in positional | {"attn_mask", "is_causal"}}
        node.kwargs = others | ({"is_causal": True} if causal else {})


def _is_square(node: fx.Node, mask: fx.Node) -> bool:
    """Whether a mask has one row for each query and one column for each key, as many of each, known in numbers."""
    query, key = (node.args[place].meta["val"].shape[-2] for place in (0, 1))  # type: ignore[union-attr]
    shape = mask.meta["val"].shape
    return all(isinstance(size, int) for size in (query, key, *shape)) and query == key and shape[-2:] == (query, key)


def _shows(mask: fx.Node, value: float) -> bool:
    return value == (1.0 if mask.meta["val"].dtype is torch.bool else 0.0)


def _hides(mask: fx.Node, value: float) -> bool:
    """Whether attention gives weight 0 to keys whose element of the mask is `value`: exp of it is 0."""
    dtype = mask.meta["val"].dtype
    return value == 0.0 if dtype is torch.bool else value <= torch.finfo(dtype).min


class _Masks:
    """The patterns of the constant tensors of a module."""

    def __init__(self) -> None:
        self.computed: dict[fx.Node, Tensor | None] = {}
        self.patterns: dict[fx.Node, Pattern | None] = {}

    def pattern(self, node: Any) -> Pattern | None:
        """The pattern of a tensor or a number; None: it has none, or depends on an input of the call."""
        if isinstance(node, bool | int | float):
            return Pattern(float(node), float(node))
        if not isinstance(node, fx.Node):
            return None
        if node not in self.patterns:
            self.patterns[node] = self._pattern(node)
        return self.patterns[node]

    def _pattern(self, node: fx.Node) -> Pattern | None:
        if (known := self.value(node)) is not None:
            return _pattern_of(known)
        step = _STEPS.get(node.target)
        return step(self, node) if step and node.op == "call_function" else None

    def value(self, node: Any) -> Tensor | None:
        """The value of a small constant; None for others."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self.computed:
            self.computed[node] = self._value(node)
        return self.computed[node]

    def _value(self, node: fx.Node) -> Tensor | None:
        made = node.meta.get("val")
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not isinstance(made, Tensor):
            return None
        if not all(isinstance(size, int) for size in made.shape) or made.numel() > SMALL:
            return None
        if schema_of(node.target).is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        if node.target in _UNDEFINED or any(self.value(operand) is None for operand in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        result = node.target(*args, **kwargs)
        return result if isinstance(result, Tensor) and result.device.type == "cpu" else None


_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_UNDEFINED = {getattr(getattr(aten, name), overload) for name in _EMPTY for overload in getattr(aten, name).overloads()}


def _pattern_of(value: Tensor) -> Pattern | None:
    """The pattern of a tensor that is known."""
    if not value.numel() or value.is_complex():
        return None
    flat = value.reshape(-1)
    if bool((flat == flat[0]).all()):
        return Pattern(float(flat[0]), float(flat[0]))
    if value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return None
    past, future = value[..., 0, 0].reshape(-1)[0], value[..., 0, -1].reshape(-1)[0]
    lower = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    return Pattern(float(past), float(future)) if bool((torch.where(lower, past, future) == value).all()) else None


# -- Steps of large tensors


def _same(masks: _Masks, node: fx.Node) -> Pattern | None:
    """A copy, or a tensor with more leading dims of the same elements."""
    operand = node.all_input_nodes[0]
    found = masks.pattern(operand)
    last = tuple(operand.meta["val"].shape[-2:]) == tuple(node.meta["val"].shape[-2:])
    return found if found and (last or found.past == found.future) else None


def _cast(masks: _Masks, node: fx.Node) -> Pattern | None:
    """A copy in another dtype, which may round."""
    operand, dtype = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    found = masks.pattern(node.args[0])
    if found is None or dtype.is_complex or operand.is_complex:
        return None
    return Pattern(*(float(torch.tensor(each, dtype=operand).to(dtype)) for each in (found.past, found.future)))


def _by_element(function: Callable[[float, float], float]) -> Callable[[_Masks, fx.Node], Pattern | None]:
    def step(masks: _Masks, node: fx.Node) -> Pattern | None:
        a, b = (masks.pattern(each) for each in node.args[:2])
        return Pattern(function(a.past, b.past), function(a.future, b.future)) if a and b else None

    return step


def _compared(name: str, flipped: bool) -> Callable[[_Masks, fx.Node], Pattern | None]:
    """A comparison. `flipped`: it is true for keys up to the query if the first operand is the column of queries."""
    function = getattr(torch, name)

    def step(masks: _Masks, node: fx.Node) -> Pattern | None:
        first, second = node.args[:2]
        a, b = masks.pattern(first), masks.pattern(second)
        if a and b and a.past == a.future and b.past == b.future:
            true = float(function(torch.tensor(a.past), torch.tensor(b.past)))
            return Pattern(true, true)
        keys, queries = (second, first) if flipped else (first, second)
        row, column = masks.value(keys), masks.value(queries)
        if name not in ("le", "ge") or row is None or column is None:
            return None
        return Pattern(1.0, 0.0) if _ascend_alike(row, column) else None

    return step


def _ascend_alike(row: Tensor, column: Tensor) -> bool:
    """Whether the rows [..., 1, n] of keys and the columns [..., n, 1] of queries are one ascending list."""
    if row.dim() < 2 or column.dim() < 2 or row.shape[-2] != 1 or column.shape[-1] != 1:
        return False
    keys, queries = row[..., 0, :].reshape(-1, row.shape[-1]), column[..., 0].reshape(-1, column.shape[-2])
    first = keys[0]
    alike = keys.shape[-1] == queries.shape[-1] and bool((keys == first).all()) and bool((queries == first).all())
    return alike and bool((first[1:] > first[:-1]).all())


def _chosen(condition: Pattern | None, true: Pattern | None, false: Pattern | None) -> Pattern | None:
    """The pattern of `true` where that of `condition` is true, and of `false` elsewhere."""
    if not (condition and true and false):
        return None
    return Pattern(true.past if condition.past else false.past, true.future if condition.future else false.future)


def _where(masks: _Masks, node: fx.Node) -> Pattern | None:
    condition, true, false = map(masks.pattern, node.args[:3])
    return _chosen(condition, true, false)


def _filled(masks: _Masks, node: fx.Node) -> Pattern | None:
    tensor, condition, filling = map(masks.pattern, node.args[:3])
    return _chosen(condition, filling, tensor)


def _not(masks: _Masks, node: fx.Node) -> Pattern | None:
    found = masks.pattern(node.args[0])
    boolean = node.meta["val"].dtype is torch.bool
    return Pattern(float(not found.past), float(not found.future)) if found and boolean else None


def _one_value(masks: _Masks, node: fx.Node) -> Pattern | None:
    """A new tensor of one number."""
    return masks.pattern(node.args[2 if node.target is aten.new_full.default else 1])


def _ones(number: float) -> Callable[[_Masks, fx.Node], Pattern | None]:
    return lambda masks, node: Pattern(number, number)


def _triangle(lower: bool) -> Callable[[_Masks, fx.Node], Pattern | None]:
    def step(masks: _Masks, node: fx.Node) -> Pattern | None:
        found, diagonal = masks.pattern(node.args[0]), node.args[1] if len(node.args) > 1 else 0
        square = node.meta["val"].shape[-1] == node.meta["val"].shape[-2]
        if not found or not square or diagonal != (0 if lower else 1):
            return None
        return Pattern(found.past, 0.0) if lower else Pattern(0.0, found.future)

    return step


_and = _by_element(lambda a, b: float(bool(a) and bool(b)))
_or = _by_element(lambda a, b: float(bool(a) or bool(b)))
_STEPS: Mapping[Any, Callable[[_Masks, fx.Node], Pattern | None]] = {
    **dict.fromkeys((aten.expand.default, aten.clone.default, aten.alias.default, aten.unsqueeze.default), _same),
    aten._to_copy.default: _cast,
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.logical_and.default), _and),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.__or__.Tensor, aten.logical_or.default), _or),
    **{
        getattr(aten, name).Tensor: _compared(name, flipped)
        for name, flipped in {"le": False, "ge": True, "eq": False, "ne": False, "lt": False, "gt": False}.items()
    },
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten.logical_not.default: _not,
    aten.bitwise_not.default: _not,
    aten.full.default: _one_value,
    aten.full_like.default: _one_value,
    aten.new_full.default: _one_value,
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _ones(1.0)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _ones(0.0)),
    aten.tril.default: _triangle(lower=True),
    aten.triu.default: _triangle(lower=False),
}
