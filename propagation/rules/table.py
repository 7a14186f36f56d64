"""The rule table: the one visible merge of the rows and expansions of all families.

A new operator is a row in the file of its family, and a test. An operator without a row still computes the right
result: it runs replicated on every device (`rule_of` returns None), with a warning that shows the rule to write.

Before it is planned, `expand` replaces operators that cannot be computed from local parts by operators that can. A mean
is a sum divided by the *global* count; batch statistics are sums; a loss that averages over its valid targets is a sum
divided by a count. After this pass each of them splits like any sum, and conversions do the rest (the local element
count never enters).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import draws_random_numbers, is_pointwise, operands, results_of, value
from ..ops.random_numbers import RandomNumbers
from .builder import Builder, Expansion, Keys
from .custom import Rows, own_rule
from .layers import (
    adaptive_pools,
    attention,
    batch_norm,
    convolution,
    embedding_bag,
    experts,
    grouped_matmul,
    losses,
    norms,
    pools,
    recurrent,
    resampling,
)
from .row import Row, RowFunction, parse_row
from .rule import Rule
from .tensors import along, creation, fourier, hooks, indexing, linear_algebra, pointwise, random, reductions, shapes


def merged(families: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The entries of all `families`. Raises ValueError for an operator that two of them have."""
    table: dict[Any, Any] = {}
    for family in families:
        if doubled := sorted(str(operator) for operator in table.keys() & family.keys()):
            raise ValueError(f"two families of rules have {', '.join(doubled)}; leave each operator to one")
        table.update(family)
    return table


ROWS: dict[Any, Row | RowFunction] = merged(
    [
        adaptive_pools.ROWS,
        along.ROWS,
        attention.ROWS,
        batch_norm.ROWS,
        convolution.ROWS,
        embedding_bag.ROWS,
        experts.ROWS,
        fourier.ROWS,
        grouped_matmul.ROWS,
        hooks.ROWS,
        indexing.ROWS,
        linear_algebra.ROWS,
        losses.ROWS,
        norms.ROWS,
        pointwise.ROWS,
        pools.ROWS,
        random.ROWS,
        recurrent.ROWS,
        reductions.ROWS,
        resampling.ROWS,
        shapes.ROWS,
    ]
)

EXPANSIONS: dict[Any, Expansion] = merged(
    [
        adaptive_pools.EXPANSIONS,
        along.EXPANSIONS,
        attention.EXPANSIONS,
        batch_norm.EXPANSIONS,
        creation.EXPANSIONS,
        embedding_bag.EXPANSIONS,
        fourier.EXPANSIONS,
        indexing.EXPANSIONS,
        linear_algebra.EXPANSIONS,
        losses.EXPANSIONS,
        norms.EXPANSIONS,
        pointwise.EXPANSIONS,
        random.EXPANSIONS,
        recurrent.EXPANSIONS,
        reductions.EXPANSIONS,
        shapes.EXPANSIONS,
    ]
)

_NONE: Rows = {}


def rule_of(node: fx.Node, own: Rows = _NONE) -> Rule | None:
    """The rule of one call, or None for an operator without a row (and for one that draws random numbers). `own`: the
    rows that users gave to operators, which take precedence.

    Raises OperatorError for a user's row that does not fit the call."""
    if draws_random_numbers(node):
        return None
    if node.target in own:
        return _where_addends_add_up(own_rule(own[node.target], node), node)
    rule = _rule_by(ROWS.get(node.target), node)
    if rule is None:
        return None
    return _where_addends_add_up(pointwise.fill_padding(rule, node) if is_elementwise(node) else rule, node)


def _where_addends_add_up(rule: Rule, node: fx.Node) -> Rule:
    """`rule`, linear only in operands whose dtypes allow it (`add_up`)."""
    if not rule.linear:
        return rule
    results = [result.dtype for result in results_of(node)]
    given = [tensor.dtype for tensor in map(value, operands(node))]
    linear = tuple(both for both in rule.linear if all(add_up(given[i], dtype) for i in both for dtype in results))
    return rule if linear == rule.linear else replace(rule, linear=linear)


def add_up(given: torch.dtype, result: torch.dtype) -> bool:
    """Whether results of dtype `result`, computed from addends of dtype `given`, can add up to the result for their
    sum. Integers wrap around, so that addends determine their sum only modulo 2 to the number of bits, not as a wider
    integer or a fraction. Truncation to an integer does not distribute over sums; nor do truth values."""
    if torch.bool in (given, result):
        return False
    whole, cut = (not (dtype.is_floating_point or dtype.is_complex) for dtype in (given, result))
    return cut and result.itemsize <= given.itemsize if whole else not cut


def _rule_by(row: Row | RowFunction | None, node: fx.Node) -> Rule | None:
    if row is None:
        return pointwise.pointwise()(node) if is_elementwise(node) else None
    return parse_row(row, node) if isinstance(row, Row) else row(node)


def has_row(operator: Any) -> bool:
    """Whether there is a rule for `operator`; operators tagged as pointwise share one."""
    return operator in ROWS or is_pointwise(operator)


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result is the same function of one element of each operand."""
    if node.target in ROWS:
        return node.target in pointwise.ELEMENTWISE
    return has_row(node.target) and not draws_random_numbers(node)


# -- The pass that replaces operators by their expansions


def expand(
    module: fx.GraphModule,
    batch_norm_parts: int = 1,
    random_numbers: RandomNumbers = RandomNumbers.COUNTER,
    own: Collection[Any] = (),
) -> dict[fx.Node, fx.Node]:
    """Replace every node of `module` that has an expansion, recursively (in place; capture owns the module). Operators
    in `own` stay: users gave them rules.

    Returns the last value of each input that an operator wrote to without torch.export noticing. Raises StrategyError
    for a training BatchNorm whose batch `batch_norm_parts` does not divide.
    """
    written: dict[fx.Node, fx.Node] = {}
    by_torch = random_numbers is RandomNumbers.TORCH
    keys = None if by_torch else Keys(module.graph, stream=random_numbers is RandomNumbers.RANK)
    queue = deque(module.graph.nodes)
    while queue:
        node = queue.popleft()
        expansion = EXPANSIONS.get(node.target) if node.op == "call_function" else None
        if expansion is None or node.target in own:
            continue
        builder = Builder(module.graph, node, batch_norm_parts, written, keys)
        new = expansion(builder, node)
        queue.extendleft(reversed(builder.added))
        if new is not None:
            _replace(module.graph, node, new)
    return {old: new for old, new in written.items() if old.op == "placeholder"}


def _replace(graph: fx.Graph, node: fx.Node, new: fx.Node | tuple[fx.Node | None, ...]) -> None:
    """Replace `node` by `new`. With several results, each getitem is replaced by its own; one that is None stays."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for item in list(node.users):
            replacement = new[item.args[1]]  # type: ignore[index]
            if replacement is not None:
                item.replace_all_uses_with(replacement)
                graph.erase_node(item)
    if not node.users:
        graph.erase_node(node)
