"""Any sizes on any mesh: dims that the devices do not divide, and dims with fewer elements than there are devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, gradients
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from torch import Tensor, nn

import partway as pw
from partway import Shard

MESHES = [{"x": 3}, {"x": 4}, {"x": 8}, {"x": 2, "y": 2}, {"x": 2, "y": 4}]


class Tagger(nn.Module):
    """A language model with one block of everything that reads over a dim: rows, classes, sums, norms, softmax."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, hidden, 3, padding=1)
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.rows(ids))
        scores = (x @ x.transpose(1, 2)).softmax(-1)
        hidden = torch.relu(self.mix((scores @ x).transpose(1, 2))).transpose(1, 2)
        logits = self.down(x + torch.tanh(self.up(hidden)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.var()


@st.composite
def drawn(draw: Any) -> tuple[dict[str, int], tuple[int, ...], dict[str, Any], Any]:
    """A mesh, sizes (batch, sequence, vocabulary, width, hidden), and which dims of what are split over which axis."""
    mesh = draw(st.sampled_from(MESHES))
    sizes = tuple(draw(st.integers(2, 11)) for _ in range(5))
    axes = st.sampled_from([None, *mesh])

    def strategy(ndim: int) -> Any:
        given = [draw(axes) for _ in range(ndim)]
        return tuple(axis if axis not in given[:i] else None for i, axis in enumerate(given))

    ranks = {"rows.weight": 2, "norm.bias": 1, "mix.weight": 3, "up.weight": 2, "down.weight": 2, "down.bias": 1}
    plan = {name: strategy(ndim) for name, ndim in ranks.items() if draw(st.booleans())}
    return mesh, sizes, plan, draw(st.sampled_from([None, strategy(2)]))


def check(mesh: dict[str, int], sizes: tuple[int, ...], plan: dict[str, Any], batch: Any) -> None:
    count, length, vocabulary, width, hidden = sizes
    torch.manual_seed(sum(sizes))
    plain = Tagger(vocabulary, width, hidden).double()
    data = {"ids": torch.randint(vocabulary, (count, length)), "labels": torch.randint(vocabulary, (count, length))}
    expected_loss, expected = gradients(plain, data)
    copy = Tagger(vocabulary, width, hidden).double()
    copy.load_state_dict(plain.state_dict())
    strategies = None if batch is None else (batch, batch)
    loss, found = gradients(pw.shard(copy, mesh=mesh, parameter_plan=plan, in_strategy=strategies), data)
    assert_same_loss(loss, expected_loss, 1e-10)
    assert_same_gradients(found, expected, 1e-10)


@examples(6)
@given(case=drawn())
def test_any_sizes_split_any_way_give_the_loss_and_gradients_of_one_device(case: Any) -> None:
    check(*case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@examples(150)
@given(case=drawn())
def test_many_sizes_split_any_way_give_the_loss_and_gradients_of_one_device(case: Any) -> None:
    check(*case)


def test_dims_smaller_than_the_axis_stay_split_where_a_person_split_them() -> None:
    x, w = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    product: Any = pw.shard(torch.matmul, in_strategy=((8, 1), None), out_strategy=((8, 1),), mesh={"x": 8})
    torch.testing.assert_close(product(x, w), x @ w, rtol=1e-12, atol=1e-12)
    assert not product.plan.collectives


class Scorer(nn.Module):
    """What a batch of one changes: a squeeze of it, a mean over it, a class for each, and its shape itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.up(x))
        return self.down(x).squeeze(-1), (x - x.mean(0)).square().sum(1)


@pytest.mark.parametrize(
    "given",
    [
        {"in_strategy": (("a", None),)},
        {"in_strategy": ((2, 1),), "out_strategy": ((2,), (2,))},
        {"in_strategy": ((Shard(0), Shard(1)),), "out_strategy": (("b",), ("a",))},
        {"module_plan": {"up": {"in_strategy": (("a", "b"),), "out_strategy": ((("a", "b"), None),)}}},
    ],
)
def test_batches_down_to_one_sample_and_from_it_give_the_gradients_of_one_device(given: Any) -> None:
    torch.manual_seed(0)
    plain = Scorer().double()
    copy = Scorer().double()
    copy.load_state_dict(plain.state_dict())
    with pw.auto_parallel_context(enable_parallel_optimizer="out_strategy" in given):
        model: Any = pw.shard(copy, mesh={"a": 2, "b": 2}, **given)
        for count in (5, 1, 2, 1):
            x = torch.randn(count, 4, dtype=torch.float64)
            results = []
            for each in (plain, model):
                each.zero_grad()
                scores, spread = each(x)
                (scores.exp().sum() + spread.sum()).backward()
                found = [p.grad for p in each.parameters()]
                results.append([scores, spread, *found])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"dataset_strategy": ((8, 1),)}, {"parallel_mode": "semi_auto_parallel"}, {"parallel_mode": "data_parallel"}],
)
def test_a_last_batch_of_fewer_samples_than_devices_is_cut_as_far_as_it_goes(options: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    copy = nn.Linear(4, 3).double()
    copy.load_state_dict(plain.state_dict())
    with pw.auto_parallel_context(device_num=8, **options):
        model: Any = pw.shard(copy)
        for count in (8, 6, 1):
            x = torch.randn(count, 4, dtype=torch.float64)
            torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [("a", "b"), (Shard(0), Shard(1)), ("a", None), (("a", "b"), None)])
def test_an_axis_of_one_device_may_be_named_where_there_is_one_element(strategy: Any) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    plain = nn.Linear(4, 1).double()
    model: Any = pw.shard(copy.deepcopy(plain), mesh={"a": 1, "b": 2}, parameter_plan={"weight": strategy})
    if strategy == (("a", "b"), None):
        with pytest.raises(pw.StrategyError, match="parameter 'weight': dim 0 has size 1"):
            model(x)
        return
    for count in (3, 2):  # the second with the layout that the first has given it
        for each in (plain, model):
            each.zero_grad()
            each(x[:count]).square().sum().backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
    assert model.plan.parameters["weight"].splits(2) == (1, 2 if strategy[1] else 1)


def test_a_parameter_of_one_element_is_not_split() -> None:
    model: Any = pw.shard(nn.Linear(4, 1), mesh={"x": 2}, parameter_plan={"weight": ("x", None)})
    with pytest.raises(pw.StrategyError, match="parameter 'weight': dim 0 has size 1, which axis 'x' \\(2\\) does not"):
        model(torch.ones(2, 4))
