"""Embeddings whose rows are pulled are what they were before: values, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partway.ps.service.tables import Embedding, RemoteTable
from partway.strategy.errors import RuntimeStateError

ROWS, WIDTH = 12, 4
IDS = torch.tensor([[3, 7, 3], [0, 11, 7]])


class Pair:
    """An embedding, and one like it whose rows come from elsewhere: its own are nothing."""

    def __init__(self, module: Embedding) -> None:
        self.plain = module
        self.remote = type(module)(ROWS, WIDTH, padding_idx=module.padding_idx, sparse=module.sparse, **_mode(module))
        with torch.no_grad():
            self.remote.weight.fill_(torch.nan)
        self.pulled: list[list[int]] = []
        self.weight = self.remote.weight
        self.table = RemoteTable(self.remote, "the table", self.pull)

    def pull(self, rows: Tensor) -> Tensor:
        self.pulled.append(rows.tolist())
        return self.plain.weight.detach()[rows]

    def backward(self, *inputs: Any, **options: Any) -> None:
        """The same forward and backward of both."""
        values = [module(*inputs, **options) for module in (self.plain, self.remote)]
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
        factors = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(3))
        for value in values:
            (value * factors).sum().backward()

    def check_gradients(self) -> list[int]:
        """The rows whose gradients there are, of which all others are nothing in the plain module."""
        pushed = self.table.gradient()
        assert isinstance(pushed, tuple)
        rows, gradient = pushed
        expected = self.plain.weight.grad
        assert expected is not None
        expected = expected.to_dense()
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert not gradient.is_sparse
        torch.testing.assert_close(torch.zeros(ROWS, WIDTH).index_copy(0, rows, gradient), expected)
        return list(rows.tolist())


def _mode(module: Embedding) -> dict[str, Any]:
    return {"mode": module.mode} if isinstance(module, nn.EmbeddingBag) else {}


@pytest.fixture(params=[False, True], ids=["dense", "sparse"])
def sparse(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_values_and_gradients_are_those_of_the_plain_embedding(sparse: bool) -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH, sparse=sparse))
    pair.backward(IDS)
    assert pair.pulled == [[0, 3, 7, 11]]  # each row once
    assert pair.check_gradients() == [0, 3, 7, 11]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_values_and_gradients_are_those_of_the_plain_bag(sparse: bool, mode: str) -> None:
    pair = Pair(nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode=mode))
    pair.backward(IDS)
    pair.backward(IDS.flatten(), torch.tensor([0, 2, 2]))
    assert pair.check_gradients() == [0, 3, 7, 11]


def test_a_bag_takes_weights_of_its_indices() -> None:
    pair = Pair(nn.EmbeddingBag(ROWS, WIDTH, mode="sum"))
    pair.backward(IDS, per_sample_weights=torch.rand(IDS.shape))
    assert pair.check_gradients() == [0, 3, 7, 11]


@pytest.mark.parametrize("padding", [3, -1])
def test_the_padding_has_no_gradient_and_is_not_pushed(sparse: bool, padding: int) -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH, padding_idx=padding, sparse=sparse))
    pair.backward(IDS)
    assert pair.remote.padding_idx == padding % ROWS
    assert pair.check_gradients() == sorted({0, 3, 7, 11} - {padding % ROWS})


def test_the_padding_of_a_bag_is_not_summed(sparse: bool) -> None:
    pair = Pair(nn.EmbeddingBag(ROWS, WIDTH, padding_idx=7, mode="mean", sparse=sparse))
    pair.backward(IDS)
    assert pair.check_gradients() == [0, 3, 11]


def test_an_index_that_is_not_in_a_batch_is_no_padding() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH, padding_idx=1))
    pair.backward(IDS)
    assert pair.check_gradients() == [0, 3, 7, 11]


def test_gradients_of_all_calls_of_a_step_are_summed(sparse: bool) -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH, sparse=sparse))
    for ids in (IDS, torch.tensor([7, 2]), torch.tensor(2)):
        pair.backward(ids)
    assert pair.pulled == [[0, 3, 7, 11], [2, 7], [2]]
    assert pair.check_gradients() == [0, 2, 3, 7, 11]


def test_a_grad_scaler_finds_the_gradients() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(pair.remote(IDS).square().sum()).backward()
    pair.plain(IDS).square().sum().backward()
    optimizer = torch.optim.SGD(pair.remote.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    assert pair.check_gradients() == [0, 3, 7, 11]


def test_indices_may_be_int32_and_come_by_name(sparse: bool) -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH, sparse=sparse))
    pair.backward(input=IDS.to(torch.int32))
    assert pair.check_gradients() == [0, 3, 7, 11]


def test_a_call_without_indices_is_one_of_no_rows() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    pair.backward(torch.zeros(2, 0, dtype=torch.int64))
    assert pair.pulled == [[]]
    assert pair.check_gradients() == []


def test_a_call_without_gradients_pushes_nothing() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    with torch.no_grad():
        assert torch.equal(pair.remote(IDS), pair.plain(IDS))
    pair.remote(IDS)  # whose backward does not come
    assert pair.table.gradient() is None


def test_gradients_that_are_dropped_are_not_pushed() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    pair.backward(IDS)
    pair.remote.zero_grad()
    assert pair.table.gradient() is None


def test_gradients_of_calls_before_a_drop_do_not_come_again() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    pair.backward(IDS)
    pair.remote.zero_grad()
    pair.plain.zero_grad()
    pair.backward(torch.tensor([1]))
    assert pair.check_gradients() == [1]


def test_a_frozen_table_has_no_gradients() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    pair.remote.weight.requires_grad_(False)
    assert not pair.remote(IDS).requires_grad
    assert pair.table.gradient() is None


@pytest.mark.parametrize(("ids", "asked"), [([3, 12], "3 to 12"), ([-1, 3], "-1 to 3")])
def test_an_index_that_is_none_of_its_rows_is_an_error(ids: list[int], asked: str) -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    with pytest.raises(IndexError) as error:
        pair.remote(torch.tensor(ids))
    assert str(error.value) == f"the table has 12 rows, and was asked for rows {asked}"
    assert pair.pulled == []
    assert pair.remote.weight is pair.weight


def test_the_weight_is_the_own_one_outside_of_calls() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH, padding_idx=3))
    pair.backward(IDS)
    assert pair.remote.weight is pair.weight
    assert dict(pair.remote.named_parameters()) == {"weight": pair.weight}
    assert pair.remote.padding_idx == 3


def test_the_weight_is_the_own_one_after_a_call_that_failed() -> None:
    pair = Pair(nn.EmbeddingBag(ROWS, WIDTH, padding_idx=3))
    with pytest.raises(ValueError, match="if input is 2D"):
        pair.remote(IDS, torch.tensor([0]))  # offsets are for one dim
    assert pair.remote.weight is pair.weight
    assert pair.remote.padding_idx == 3
    pair.backward(IDS)
    assert pair.check_gradients() == [0, 7, 11]


def test_the_weight_is_the_own_one_after_rows_did_not_come() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))

    def gone(rows: Tensor) -> Tensor:
        raise RuntimeStateError("the servers have gone")

    pair.table._pull = gone
    with pytest.raises(RuntimeStateError, match="the servers have gone"):
        pair.remote(IDS)
    assert pair.remote.weight is pair.weight


CAPTURED = (
    "the table is a table on the servers, whose rows are pulled by their numbers: it cannot be captured; shard the "
    "part of the model after it"
)


def test_it_cannot_be_captured() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    with pytest.raises(Exception, match="cannot be captured") as error:
        torch.export.export(nn.Sequential(pair.remote), (IDS,))
    assert CAPTURED in str(error.value)
    assert pair.remote.weight is pair.weight


def test_it_cannot_be_planned_with_tensors_without_values() -> None:
    pair = Pair(nn.Embedding(ROWS, WIDTH))
    with pytest.raises(RuntimeStateError) as error:
        pair.remote(IDS.to("meta"))
    assert str(error.value) == CAPTURED
