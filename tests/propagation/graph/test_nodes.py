"""Operators that can draw random numbers, and calls of them that do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partway as pw
from partway.propagation.graph.nodes import draws_random_numbers


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("strategy", [("dp", "tp", None, None), ("dp", None, None, None), (None, "dp", None, None)])
def test_attention_without_dropout_is_split_and_every_rank_computes_its_own_part(strategy: tuple[str | None]) -> None:
    q, k, v = (torch.randn(4, 4, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    run = pw.shard(attention, mesh={"dp": 2, "tp": 2}, in_strategy=(strategy,) * 3, out_strategy=(strategy,))
    split, whole = run(q, k, v), attention(q, k, v)
    torch.testing.assert_close(split, whole)
    for a, b in zip(
        torch.autograd.grad(split.sum(), (q, k, v)), torch.autograd.grad(whole.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert all(run.plan.operators[0].factors)
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v), whole)


def test_a_call_draws_random_numbers_only_with_a_probability_and_in_training() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def draws(target: object, *args: object, **kwargs: object) -> bool:
        return draws_random_numbers(graph.call_function(target, args, kwargs))  # type: ignore[arg-type]

    assert not draws(aten.relu.default, x)
    assert not draws(aten.scaled_dot_product_attention.default, x, x, x)
    assert not draws(aten._scaled_dot_product_flash_attention_for_cpu.default, x, x, x, 0.0)
    assert draws(aten.scaled_dot_product_attention.default, x, x, x, None, 0.1)
    assert draws(aten.scaled_dot_product_attention.default, x, x, x, dropout_p=0.1)
    assert draws(aten.bernoulli.p, x, 0.5)
    assert draws(aten.dropout.default, x, 0.5, True)
    assert not draws(aten.dropout.default, x, 0.5, False)
