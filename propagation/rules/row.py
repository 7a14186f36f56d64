"""A rule as text: one row of the rule table, and its Rule for a call.

    "... k, n k, +n -> ... n"    a spec for each tensor operand, and for each result

    m k          one factor for each dim                 ...    any leading dims, aligned from the right
    (b s)        a dim merged from two factors, major    1      a dim that cannot be split
                 first: only the major one can split
    +n           an operand that enters a sum once: Partial, not Broadcast, where a summed factor is split

A dim of size 1 whose factor is larger elsewhere broadcasts. A rule that text cannot express is a function of the call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..graph.nodes import is_tensor, results_of, shape, value
from ..torch_internals import schema_of
from .rule import Dims, Localize, Rule

# A row that is not text: the rule of a call, or None for a call that stays replicated
RowFunction = Callable[[fx.Node], Rule | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the rule table: the factors as text, and further properties.

    text          a spec for each operand and each result
    reduce        factors that are summed over
    whole         factors that cannot be split
    linear        sets of operands (their numbers) in which the operator is jointly linear
    contraction   it multiplies and adds over all its factors, and is priced so
    local         writes the local form, if it differs from the global call
    even          factors must be split evenly
    fill          the value of operands in the padding of uneven shards (see `Rule.fill`)
    """

    text: str
    reduce: str = ""
    whole: str = ""
    linear: tuple[str, ...] = ()
    contraction: bool = False
    local: Localize | None = field(default=None, compare=False, repr=False)
    even: bool = False
    fill: float | None = None


def parse_row(row: Row, node: fx.Node) -> Rule:
    """The Rule of `row` for one call: factors get their sizes, and absent optional operands drop out. The spec of a
    list of tensors applies to each of them, unless the row has a spec for every one."""
    specs, result_specs = specs_of(row.text)
    places = [tensors for _, tensors in schema_tensors(node)]
    if len(specs) > len(places):
        places = [tensors[i : i + 1] for tensors in places for i in range(max(len(tensors), 1))]
    present = [
        (spec, shape(tensor), position)
        for position, (spec, tensors) in enumerate(zip(specs, places, strict=False))
        for tensor in tensors
    ]
    sizes: dict[str, int] = {}
    dims = tuple(_dims(spec.lstrip("+"), size, sizes) for spec, size, _ in present)
    results = tuple(_dims(spec, size, sizes) for spec, size in specified_results(result_specs, node))
    dims = tuple(_spread(d, size, sizes) for d, (_, size, _) in zip(dims, present, strict=True))
    flops = 2.0 * math.prod(sizes.values()) if row.contraction else 0.0
    reduce, whole = (_named(text, sizes) for text in (row.reduce, row.whole))
    linear = [
        frozenset(i for i, (_, _, position) in enumerate(present) if position in map(int, text.split()))
        for text in row.linear
    ]
    return Rule(
        operands=tuple(_without(d, whole) for d in dims),
        results=tuple(_without(d, whole) for d in results),
        sizes={name: size for name, size in sizes.items() if name not in whole},
        reduce=reduce,
        additive=frozenset(i for i, (spec, _, _) in enumerate(present) if spec.startswith("+")),
        linear=tuple(together for together in linear if together),
        flops=flops,
        local=row.local,
        even=frozenset(sizes) - whole if row.even else frozenset(),
        fill=row.fill,
    )


def specs_of(text: str) -> tuple[list[str], list[str]]:
    """The specs of the operands, and of the results, in the text of a row."""
    operands, _, results = text.partition("->")
    return [spec.strip() for spec in operands.split(",")], [spec.strip() for spec in results.split(",")]


def tokens_of(spec: str) -> list[str]:
    """The dims in the spec of one tensor: names, `1`, `...` and merged dims."""
    return re.findall(r"\.\.\.|\([^)]*\)|\S+", spec)


def _named(text: str, sizes: Mapping[str, int]) -> frozenset[str]:
    """The factors that `text` names; `...` stands for those of all leading dims."""
    leading = {name for name in sizes if name.startswith("_")} if "..." in text.split() else set[str]()
    return frozenset(text.split()) - {"..."} | leading


def _without(dims: Dims, whole: frozenset[str]) -> Dims:
    return tuple(() if whole & set(parts) else parts for parts in dims)


def schema_tensors(node: fx.Node) -> list[tuple[str, tuple[fx.Node, ...]]]:
    """The tensor arguments of the operator's schema: their names, and the tensors that the call passes for each (none
    for an absent optional one)."""
    arguments: list[tuple[str, tuple[fx.Node, ...]]] = []
    for i, argument in enumerate(schema_of(node.target).arguments):
        if "Tensor" in str(argument.type):
            passed = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            every: Any = passed if isinstance(passed, list | tuple) else (passed,)
            arguments.append((argument.name, tuple(filter(is_tensor, every))))
    return arguments


def specified_results(specs: Sequence[str], node: fx.Node) -> list[tuple[str, tuple[int, ...]]]:
    """The spec and the size of each result of a call; the spec of a list applies to each of its tensors."""
    results = results_of(node)
    if isinstance(value(node), list) and len(specs) == 1:
        specs = [*specs] * len(results)
    return [(spec, tuple(t.shape)) for spec, t in zip(specs, results, strict=False)]


def _dims(spec: str, size: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    """The factors of a tensor of `size`, from its spec; adds their sizes to `sizes`."""
    tokens = tokens_of(spec)
    named = len([t for t in tokens if t != "..."])
    dims: list[tuple[str, ...]] = []
    for token in tokens:
        if token == "...":
            leading = len(size) - named
            dims += [(f"_{leading - i}",) for i in range(leading)]
        else:
            dims.append(() if token == "1" else tuple(token.strip("()").split()))
    for parts, extent in zip(dims, size, strict=True):
        if len(parts) == 1 and sizes.setdefault(parts[0], extent) == 1:
            sizes[parts[0]] = extent
    return tuple(dims)


def _spread(dims: Dims, size: tuple[int, ...], sizes: Mapping[str, int]) -> Dims:
    """The `dims` of an operand, without factors for dims of size 1 that broadcast."""
    same = (extent != 1 or len(parts) != 1 or sizes[parts[0]] == 1 for parts, extent in zip(dims, size, strict=True))
    return tuple(parts if kept else () for parts, kept in zip(dims, same, strict=True))
