"""Masks of attention that are causal, or hide nothing, are left out; all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.capture.rewrites import masks
from partway.propagation.graph.nodes import argument

N = 8
LOWEST = torch.finfo(torch.float64).min
Make = Callable[[Tensor], Tensor]  # the mask, for a tensor of the batch


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2])


def compared(x: Tensor) -> Tensor:
    at = positions(x)
    return at[None, :] <= at[:, None]


def of_a_library(x: Tensor) -> Tensor:
    """As transformers builds it: the positions of each row of the batch, and the documents that a row packs."""
    at = positions(x).unsqueeze(0).expand(x.shape[0], -1)
    before = torch.cat([at[:, :1] - 1, at], -1)
    document = (before[:, 1:] - before[:, :-1] != 1).cumsum(-1)
    row = torch.arange(x.shape[0])[:, None, None, None]
    i, j = positions(x)[None, None, :, None], positions(x)[None, None, None, :]
    mask = torch.ones((), dtype=torch.bool) & (document[row, i] == document[row, j]) & (at[row, j] <= at[row, i])
    return mask.expand(x.shape[0], -1, x.shape[-2], x.shape[-2])


CAUSAL: dict[str, Make] = {
    "compared": compared,
    "compared the other way": lambda x: positions(x)[:, None] >= positions(x)[None, :],
    "of a library": of_a_library,
    "tril": lambda x: torch.ones(N, N, dtype=torch.bool).tril(),
    "filled": lambda x: torch.zeros(N, N, dtype=x.dtype).masked_fill(~compared(x), -torch.inf),
    "the lowest number": lambda x: torch.full((N, N), LOWEST, dtype=x.dtype).triu(1),
    "where": lambda x: torch.where(compared(x), 0.0, -torch.inf).to(x.dtype).expand(x.shape[0], 1, N, N),
    "rounded": lambda x: torch.ones(N, N, dtype=torch.bool) & torch.where(compared(x), 1.0, 0.5).to(torch.int64).bool(),
    "not triu": lambda x: torch.ones(N, N, dtype=torch.bool).triu(1).logical_not(),
}
OPEN: dict[str, Make] = {
    "ones": lambda x: torch.ones(N, N, dtype=torch.bool),
    "zeros": lambda x: torch.zeros(x.shape[0], 1, N, N, dtype=x.dtype),
    "or": lambda x: compared(x) | (positions(x)[None, :] * 0 == 0),
}
OTHERS: dict[str, Make] = {
    "a window": lambda x: compared(x) & (positions(x)[None, :] > positions(x)[:, None] - 3),
    "strictly": lambda x: (positions(x)[None, :] < positions(x)[:, None]) | (positions(x)[:, None] == 0),
    "shifted": lambda x: positions(x)[None, :] <= positions(x)[:, None] + 1,
    "descending": lambda x: positions(x).flip(0)[None, :] <= positions(x).flip(0)[:, None],
    "equal positions": lambda x: (positions(x) // 2)[None, :] <= (positions(x) // 2)[:, None],
    "a bias": lambda x: torch.where(compared(x), 0.5, -torch.inf).to(x.dtype),
    "a soft future": lambda x: torch.where(compared(x), 0.0, -4.0).to(x.dtype),
    "of the input": lambda x: compared(x) & (x.detach()[0, 0, :, 0] < 9.0)[None, :],
    "one hole": lambda x: (
        torch.ones(N, N, dtype=torch.bool)
        .tril()
        .index_fill(1, torch.tensor([2]), False)
        .logical_or(torch.eye(N, dtype=torch.bool))
    ),
    "one row of the batch": lambda x: (
        compared(x) & ((torch.arange(x.shape[0]) != 1)[:, None, None, None] | torch.eye(N, dtype=torch.bool))
    ),
}


def attention(make: Make) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, make(x), scale=0.5)


def captured(make: Make, x: Tensor) -> Any:
    graph = capture(attention(make), (x,), {})
    (node,) = (n for n in graph.nodes if "scaled_dot_product" in str(n.target))
    return graph, node


@pytest.fixture(params=["computed", "from steps"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether masks of queries x keys are small enough to be computed."""
    if request.param == "from steps":
        monkeypatch.setattr(masks, "SMALL", N * N - 1)
    return str(request.param)


def batch() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 2, N, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_is_causal(name: str, size: str) -> None:
    graph, node = captured(CAUSAL[name], batch())
    assert argument(node, "is_causal")
    assert argument(node, "attn_mask") is None
    assert argument(node, "scale") == 0.5
    assert len(list(graph.nodes)) == 1  # nothing makes the mask


@pytest.mark.parametrize("name", OPEN)
def test_a_mask_that_hides_nothing_is_left_out(name: str, size: str) -> None:
    _, node = captured(OPEN[name], batch())
    assert not argument(node, "is_causal")
    assert argument(node, "attn_mask") is None


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_mask_stays(name: str, size: str) -> None:
    _, node = captured(OTHERS[name], batch())
    assert not argument(node, "is_causal")
    assert argument(node, "attn_mask") is not None


def test_a_mask_of_fewer_queries_than_keys_stays() -> None:
    """is_causal would start at the first key, and not end at the last."""
    x = batch()

    def last(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[..., -2:, :], x, x, compared(x)[-2:])

    (node,) = (n for n in capture(last, (x,), {}).nodes if "scaled_dot_product" in str(n.target))
    assert argument(node, "attn_mask") is not None


@pytest.mark.parametrize("name", [*CAUSAL, *OPEN, *OTHERS])
@pytest.mark.parametrize("split", [("dp", None, None), (None, "dp", None), (None, None, "dp")])
def test_results_and_gradients_are_those_of_the_mask(name: str, split: tuple[Any, ...]) -> None:
    x = batch().requires_grad_()
    plain = attention((CAUSAL | OPEN | OTHERS)[name])
    expected = torch.autograd.grad(plain(x).square().sum(), x)[0]
    sharded = pw.shard(plain, mesh={"dp": 2}, in_strategy=((*split, None),))
    result = sharded(x)
    torch.testing.assert_close(result, plain(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(result.square().sum(), x)[0], expected, rtol=1e-12, atol=1e-12)
