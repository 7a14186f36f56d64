"""Mixtures of experts written with pw.ops, in plain code and in sharded functions."""

import pytest
import torch

import partway as pw

TOKENS, EXPERTS, WIDTH = 64, 16, 64


def mixture(x, ids, weights, matrices, biases):
    rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
    made = pw.ops.grouped_matmul(rows, matrices, ends) + pw.ops.per_expert(biases, ends, rows)
    return pw.ops.combine(made, where, weights)


def arguments():
    torch.manual_seed(0)
    ids, weights = torch.rand(TOKENS, EXPERTS).topk(2, -1).indices, torch.rand(TOKENS, 2)
    return torch.randn(TOKENS, WIDTH), ids, weights, torch.randn(EXPERTS, WIDTH, WIDTH), torch.randn(EXPERTS, WIDTH)


def test_a_mixture_is_each_token_times_each_of_its_experts():
    x, ids, weights, matrices, biases = arguments()
    every = torch.einsum("td,tkdf->tkf", x, matrices[ids]) + biases[ids]
    expected = (every * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(mixture(*arguments()), expected, rtol=1e-4, atol=1e-4)
    sharded = pw.shard(mixture, ((4, 1), (4, 1), None, (4, 1, 1), None), mesh={"x": 4})
    torch.testing.assert_close(sharded(*arguments()), expected, rtol=1e-4, atol=1e-4)
    assert "all_to_allv" in {str(c.kind) for c in sharded.plan.collectives}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pw.ops.dispatch(torch.ones(2, 3, 4), torch.zeros(6, 1, dtype=torch.int64), 2),
            r"dispatch takes x of \[tokens, features\] and ids of \[tokens, k\], not \[2, 3, 4\] and \[6, 1\]; flatten "
            "the dims of the tokens first",
        ),
        (
            lambda: pw.ops.dispatch(torch.ones(2, 3), torch.zeros(2, 1), 2),
            "dispatch takes ids of int64 or int32, as topk returns them, not torch.float32",
        ),
        (
            lambda: pw.ops.dispatch(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), 0),
            "dispatch takes the number of experts, 1 or more, not 0",
        ),
        (
            lambda: pw.ops.combine(torch.ones(3, 4), torch.arange(3), torch.ones(2, 2)),
            r"combine takes rows of \[tokens \* k, features\] and weights of \[tokens, k\], not \[3, 4\] and \[2, 2\]",
        ),
        (
            lambda: pw.ops.grouped_matmul(torch.ones(3, 4), torch.ones(2, 5, 4), torch.tensor([1, 3])),
            r"grouped_matmul takes rows of \[rows, inner\], weights of \[experts, inner, outer\] and ends of "
            r"\[experts\], not \[3, 4\], \[2, 5, 4\] and \[2\]",
        ),
        (
            lambda: pw.ops.per_expert(torch.ones(3, 4), torch.tensor([1, 3]), torch.ones(3, 4)),
            r"per_expert takes x of \[experts, features\] and ends of \[experts\], not \[3, 4\] and \[2\]",
        ),
    ],
)
def test_other_shapes_and_dtypes_are_refused(call, message):
    with pytest.raises(pw.StrategyError, match=message):
        call()
