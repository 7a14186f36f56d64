"""A mixture of experts, written out: the rows of tokens for their experts, products of rows, and the sums of rows."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from partway.propagation.ops import experts as operators
from partway.strategy.errors import StrategyError, shown

Rows: TypeAlias = tuple[Tensor, Tensor, Tensor]
_INTEGERS = (torch.int32, torch.int64)


def dispatch(x: Tensor, ids: Tensor, experts: int, weights: Tensor | None = None) -> Rows:
    """The rows of a mixture: a copy of each token for each of its experts, sorted by expert.

    x         [tokens, features]
    ids       [tokens, k], the numbers of the k experts of each token, from 0 to `experts` - 1
    experts   how many there are
    weights   [tokens, k], by which the rows are multiplied before their experts; None: they are copies

    Returns the rows [tokens * k, features]; the end of each expert's rows, int32 [experts]; and what `combine` takes.
    In a sharded function the rows of a rank are those of its tokens, or, after an exchange, those of its experts:
    between `dispatch` and `combine` use `grouped_matmul`, `per_expert`, and operators on each row by itself.

    Raises StrategyError for other shapes or dtypes, and IndexError, on the CPU when it runs, for an expert that there
    is not.
    """
    if x.ndim != 2 or ids.ndim != 2 or x.shape[0] != ids.shape[0]:
        raise StrategyError(
            f"dispatch takes x of [tokens, features] and ids of [tokens, k], not {list(x.shape)} and "
            f"{list(ids.shape)}; flatten the dims of the tokens first"
        )
    if ids.dtype not in _INTEGERS:
        raise StrategyError(f"dispatch takes ids of int64 or int32, as topk returns them, not {ids.dtype}")
    if not isinstance(experts, int) or isinstance(experts, bool) or experts < 1:
        raise StrategyError(f"dispatch takes the number of experts, 1 or more, not {shown(experts)}")
    if weights is not None and weights.shape != ids.shape:
        raise StrategyError(f"dispatch takes weights of {list(ids.shape)}, as ids are, not {list(weights.shape)}")
    rows, ends, where = operators.dispatch(x, ids, experts, weights)
    return rows, ends, where


def combine(rows: Tensor, where: Tensor, weights: Tensor) -> Tensor:
    """For each token the sum of its rows, each times its weight.

    rows      [tokens * k, features], those of `dispatch` after the experts
    where     the third result of `dispatch`
    weights   [tokens, k]

    Returns [tokens, features]. Raises StrategyError for other shapes.
    """
    if rows.ndim != 2 or weights.ndim != 2 or rows.shape[0] != weights.numel():
        raise StrategyError(
            f"combine takes rows of [tokens * k, features] and weights of [tokens, k], not {list(rows.shape)} and "
            f"{list(weights.shape)}"
        )
    sums: Tensor = operators.combine(rows, where, weights)
    return sums


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The product of each row with the matrix of its expert, in any dtype.

    rows      [rows, inner], sorted by expert
    weights   [experts, inner, outer]
    ends      [experts], the second result of `dispatch`

    Returns [rows, outer]. Raises StrategyError for other shapes.
    """
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[1] or ends.shape != weights.shape[:1]:
        raise StrategyError(
            "grouped_matmul takes rows of [rows, inner], weights of [experts, inner, outer] and ends of [experts], not "
            f"{list(rows.shape)}, {list(weights.shape)} and {list(ends.shape)}"
        )
    products: Tensor = operators.grouped_matmul(rows, weights, ends)
    return products


def per_expert(x: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
    """For each of `rows` what its expert has of `x`, [experts, features]: a bias, for example. `ends`: as in
    `grouped_matmul`. Returns [rows, features]. Raises StrategyError for other shapes."""
    if x.ndim != 2 or ends.shape != x.shape[:1]:
        raise StrategyError(
            f"per_expert takes x of [experts, features] and ends of [experts], not {list(x.shape)} and "
            f"{list(ends.shape)}"
        )
    each: Tensor = operators.per_expert(x, ends, rows)
    return each
