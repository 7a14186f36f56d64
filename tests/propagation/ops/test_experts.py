"""The operators of a mixture of experts, on whole tensors."""

import pytest
import torch

from partway.propagation.ops.experts import arrival, combine, dispatch, give_rows, grouped_matmul, per_expert, route


def test_rows_are_sorted_by_expert_and_then_by_token():
    ids = torch.tensor([[2, 0], [0, 1], [2, 1]])
    rows, ends, where = dispatch(torch.tensor([[10.0], [20.0], [30.0]]), ids, 4)
    assert rows.flatten().tolist() == [10.0, 20.0, 20.0, 30.0, 10.0, 30.0]
    assert ends.tolist() == [2, 4, 6, 6]
    assert where.tolist() == [1, 2, 3, 5, 0, 4]


def test_a_rank_keeps_the_rows_of_its_own_experts():
    ids = torch.tensor([[2, 0], [0, 1], [2, 3]])
    where, counts = route(ids, [torch.tensor(1)], [1], [2], 4, 3)  # the experts with odd numbers
    assert where.tolist() == [3, 5]
    assert counts.tolist() == [1, 1]


def test_rows_that_arrive_by_sender_are_sorted_by_expert():
    received = torch.tensor([[1, 2], [2, 0], [0, 1]], dtype=torch.int32)  # of three senders, for two experts
    arrived = ["s0e0", "s0e1", "s0e1", "s1e0", "s1e0", "s2e1"]
    order = arrival(received, 6).tolist()
    assert [arrived[place] for place in order] == ["s0e0", "s1e0", "s1e0", "s0e1", "s0e1", "s2e1"]


def test_the_sums_of_short_floats_are_wide():
    """Two hundred rows of one token: in bfloat16 alone the sum would stop at 256 of these 300."""
    where = torch.arange(300)[torch.arange(300) != 7]
    rows = torch.ones(299, 2, dtype=torch.bfloat16)
    total = give_rows(rows, where, 300, 1)
    assert (total.float() - 299).abs().max() <= 1


def test_an_expert_that_there_is_not_is_refused():
    with pytest.raises(IndexError, match="expert 4 is out of range of 4 experts"):
        dispatch(torch.ones(1, 2), torch.tensor([[4]]), 4)


def test_second_derivatives_of_the_operators():
    torch.manual_seed(0)
    x, w = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.rand(6, 2, dtype=torch.float64)
    ids, up = torch.rand(6, 4).topk(2, -1).indices, torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    bias, w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), w.requires_grad_()

    def f(x, up, bias, w):
        rows, ends, where = dispatch(x, ids, 4)
        return combine(grouped_matmul(rows.sin(), up, ends) + per_expert(bias, ends, rows).cos(), where, w)

    assert torch.autograd.gradcheck(f, (x, up, bias, w))
    assert torch.autograd.gradgradcheck(f, (x, up, bias, w))
