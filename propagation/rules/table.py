"""The rule table: the one visible merge of the rows and expansions of all families.

A new operator is a row in the file of its family, and a test. An operator without a row still computes the right
result: it runs replicated on every device (`rule_of` returns None), with a warning that shows the rule to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import draws_random_numbers, is_pointwise, operands, results_of, value
from .builder import Expansion
from .custom import Rows, own_rule
from .layers import (
    adaptive_pools,
    attention,
    batch_norm,
    convolution,
    embedding_bag,
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
