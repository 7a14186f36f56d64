"""Results that are as large as values say: each size is a course, with the numbers and gradients of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import every_other
from torch import Tensor

import partway as pw


def self_loops(x: Tensor, edges: Tensor, *_: Tensor) -> Tensor:
    """A graph convolution as PyTorch Geometric computes it: loops go, and each node gets one."""
    edges = edges[:, edges[0] != edges[1]]
    nodes = torch.arange(max(int(edges.max()) + 1, x.shape[0]))
    edges = torch.cat((edges, torch.stack((nodes, nodes))), 1)
    degree = x.new_zeros(x.shape[0]).index_add(0, edges[1], x.new_ones(edges.shape[1]))
    norm = degree.pow(-0.5)
    weight = norm[edges[0]] * norm[edges[1]]
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * weight[:, None])


def writes(x: Tensor, _: Tensor, mask: Tensor, *__: Tensor) -> Tensor:
    y = x.clone()
    y[mask] = 1.0
    return y[mask] * x[mask]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "rows": lambda x, edges, mask, n: x[mask],
    "elements": lambda x, edges, mask, n: x[x > 0],
    "columns": lambda x, edges, mask, n: x.t()[:, mask] * 2,
    "the last dim": lambda x, edges, mask, n: x.t()[..., mask],
    "with a number": lambda x, edges, mask, n: x[mask, 1],
    "behind a dim": lambda x, edges, mask, n: x[None].expand(2, 8, 4)[:, x > 0],
    "of a matrix": lambda x, edges, mask, n: x[:, :, None].expand(8, 4, 3)[x > 0],
    "nonzero": lambda x, edges, mask, n: (x > 0).nonzero(),
    "nonzero of numbers": lambda x, edges, mask, n: torch.nonzero(n),
    "nonzero of one": lambda x, edges, mask, n: (x.sum() > -100).nonzero(),
    "argwhere": lambda x, edges, mask, n: torch.argwhere(mask),
    "where": lambda x, edges, mask, n: torch.where(x > 0),
    "where of three": lambda x, edges, mask, n: torch.where(mask[:, None], x, 0.0)[mask],
    "masked_select": lambda x, edges, mask, n: x.t().masked_select(mask) * 2,
    "repeated rows": lambda x, edges, mask, n: x.repeat_interleave(n, 0),
    "repeated alike": lambda x, edges, mask, n: torch.repeat_interleave(x, n[2:3]),
    "repeated numbers": lambda x, edges, mask, n: torch.repeat_interleave(n),
    "counts": lambda x, edges, mask, n: torch.bincount(n),
    "weighed counts": lambda x, edges, mask, n: torch.bincount(n, x[:, 0].detach(), minlength=6),
    "one hot": lambda x, edges, mask, n: F.one_hot(n),
    "writes": writes,
    "a graph with self-loops": self_loops,
}


def arguments(seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    x = torch.randn(8, 4, dtype=torch.float64)
    return x, torch.randint(8, (2, 12)), x.sum(1) > 0, torch.randint(4, (8,))


def outcome(fn: Any, given: tuple[Tensor, ...]) -> tuple[Any, Any]:
    x = given[0].clone().requires_grad_()
    result = fn(x, *given[1:])
    if isinstance(result, Tensor) and result.requires_grad:
        return result, torch.autograd.grad(result.square().sum(), x)
    return result, None


@pytest.mark.parametrize("name", every_other(PROGRAMS))
def test_a_size_that_values_say_is_that_of_one_device(name: str) -> None:
    fn = PROGRAMS[name]
    f = pw.shard(fn, mesh={"a": 2, "b": 2}, in_strategy=(("a", "b"), None, None, None))
    for seed in (0, 1, 0):
        given = arguments(seed)
        torch.testing.assert_close(outcome(f, given), outcome(fn, given), rtol=1e-12, atol=1e-14)


def test_no_element_may_be_marked() -> None:
    f = pw.shard(lambda x: x[x > 9], mesh={"x": 2})
    assert f(torch.ones(4)).shape == (0,)
    assert f(torch.full((4,), 10.0)).shape == (4,)
