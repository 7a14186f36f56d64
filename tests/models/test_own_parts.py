"""Each process is given its own part of the batch, as a DistributedSampler reads it: the numbers of one device."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import partway as pw
from partway.engine.engine import attached_engine
from partway.runtime.ranks.watch import end_watch

pytestmark = pytest.mark.gloo

Ranks = Callable[..., list[Any]]
Group = Callable[[int], int]  # of a rank: which part of a batch it is given
EXACT = 1e-12


class Net(nn.Module):
    """Its loss, of a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(x)))
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(x), y)


class Logits(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(x)


def pair(kind: type[Net], options: dict[str, Any], given: dict[str, Any]) -> tuple[Any, Any]:
    pw.set_auto_parallel_context(**options)
    torch.manual_seed(0)
    plain = kind().double()
    return plain, pw.shard(copy.deepcopy(plain), **given)


def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(count, 6, generator=generator).double(), torch.randint(3, (count,), generator=generator)


def assert_same(plain: Any, model: Any, losses: tuple[Tensor, Tensor]) -> None:
    """The losses, and the gradients that they leave."""
    for each, loss in zip((plain, model), losses, strict=True):
        each.zero_grad()
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=EXACT, atol=EXACT)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=EXACT, atol=EXACT)


def trains(options: dict[str, Any], given: dict[str, Any], steps: list[list[int]], group: list[int]) -> int:
    """`steps`: the sizes of the parts of each batch; `group`: by rank, which of them it is given. How many plans."""
    plain, model = pair(Net, options, given)
    for step, sizes in enumerate(steps):
        x, y = batch(sum(sizes), step)
        part = group[pw.get_rank()]
        assert_same(plain, model, (plain(x, y), model(x.split(sizes)[part], y.split(sizes)[part])))
    searched: int = attached_engine(model).searched
    return searched


PARTS = {"dataset_strategy": "data_parallel"}


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"parallel_mode": "data_parallel"}, {}),
        (PARTS, {}),
        (PARTS, {"mesh": {"dp": 2}, "in_strategy": (("dp", None),)}),  # the labels as the batch
        (PARTS, {"in_strategy": ((2, 1), (2,))}),
        ({"dataset_strategy": ((2, 1), (2,))}, {"mesh": {"dp": 2}, "in_strategy": (("dp", None), ("dp",))}),
    ],
    ids=str,
)
def test_processes_train_on_their_parts_as_one_device_on_the_batch(
    on_ranks: Ranks, options: dict[str, Any], given: dict[str, Any]
) -> None:
    """Batches end where they end: the parts of a rank alone get shorter, longer, or empty."""
    steps = [[4, 4], [4, 4], [4, 2], [4, 4], [1, 4], [4, 0], [3, 3]]
    on_ranks(2, trains, options, given, steps, [0, 1])


@pytest.mark.parametrize(
    ("mesh", "batch_axes", "group", "steps"),
    [
        ({"dp": 2, "tp": 2}, "dp", [0, 0, 1, 1], [[4, 4], [4, 3], [1, 4], [4, 4]]),
        ({"tp": 2, "dp": 2}, "dp", [0, 1, 0, 1], [[4, 4], [4, 3]]),
        # 9 rows that two axes cut as 3, 2, 3, 1
        ({"a": 2, "b": 2}, ("a", "b"), [0, 1, 2, 3], [[2, 2, 2, 2], [3, 3, 3, 0], [3, 2, 3, 1], [2, 1, 1, 1]]),
    ],
    ids=["dp, tp", "tp, dp", "two axes"],
)
def test_ranks_of_a_mesh_of_two_axes_train_on_their_parts(
    on_ranks: Ranks, mesh: dict[str, int], batch_axes: Any, group: list[int], steps: list[list[int]]
) -> None:
    given = {"mesh": mesh, "in_strategy": ((batch_axes, None),)}
    on_ranks(4, trains, PARTS, given, steps, group)


def told(options: dict[str, Any], given: dict[str, Any], part: list[int]) -> None:
    _, model = pair(Net, options, given)
    x, y = (tensor.chunk(max(part) + 1)[part[pw.get_rank()]] for tensor in batch(8, 0))
    said = r"input 'x': ranks 0 and 1 share a part \(\[dp:S0 tp:R\]\), and rank 1 was given other values than rank 0; "
    with pytest.raises(pw.RuntimeStateError, match=said + ".*distributed_sampler"):
        model(x, y)


def test_ranks_that_share_a_part_and_are_given_others_are_told(on_ranks: Ranks) -> None:
    on_ranks(4, told, PARTS, {"mesh": {"dp": 2, "tp": 2}, "in_strategy": (("dp", None),)}, [0, 1, 2, 3])


def end() -> None:
    """Raise what the ledgers found when they ended; these ranks are not used again."""
    raise RuntimeError(end_watch() or "nothing differs")


def told_later(later: bool) -> None:
    _, model = pair(Net, PARTS, {"mesh": {"dp": 2, "tp": 2}, "in_strategy": (("dp", None),)})
    rank = pw.get_rank()
    for step in range(4):
        x, y = (tensor.chunk(2)[rank // 2] for tensor in batch(8, step))
        if later and step == 2 and rank == 3:
            x = x + 1
        model(x, y)
    end()


def test_a_rank_that_is_given_another_part_later_is_told(on_ranks: Ranks) -> None:
    said = r"rank 3 was given another part of the batch than rank 2, at input 'x' of a call of Net; they share a part: "
    with pytest.raises(AssertionError, match=said):
        on_ranks(4, told_later, True)
    with pytest.raises(AssertionError, match="nothing differs"):
        on_ranks(4, told_later, False)


def with_labels_outside(options: dict[str, Any], given: dict[str, Any], steps: list[list[int]]) -> None:
    plain, model = pair(Logits, options, given)
    for step, sizes in enumerate(steps):
        x, y = batch(sum(sizes), step)
        own_x, own_y = (tensor.split(sizes)[pw.get_rank()] for tensor in (x, y))
        logits, labels = model(own_x), pw.data.whole_batch(own_y)
        assert torch.equal(labels, y)
        losses = (nn.functional.cross_entropy(plain(x), y), nn.functional.cross_entropy(logits, labels))
        assert_same(plain, model, losses)


@pytest.mark.parametrize("options", [{"parallel_mode": "data_parallel"}, PARTS], ids=str)
def test_a_loss_outside_of_the_model_takes_the_labels_of_the_whole_batch(
    on_ranks: Ranks, options: dict[str, Any]
) -> None:
    on_ranks(2, with_labels_outside, options, {}, [[4, 4], [4, 1], [2, 3], [3, 0]])


def with_own_rows() -> None:
    plain, model = pair(
        Logits, PARTS, {"mesh": {"dp": 2}, "in_strategy": (("dp", None),), "out_strategy": (("dp", None),)}
    )
    for sizes in ([4, 4], [4, 2]):
        x, y = batch(sum(sizes), 0)
        own_x, own_y = (tensor.split(sizes)[pw.get_rank()] for tensor in (x, y))
        logits = model(own_x)
        held = logits.to_local()
        if len(held) == len(own_y):
            loss = nn.functional.cross_entropy(held, own_y, reduction="sum") / len(logits)
            for each, of in ((plain, nn.functional.cross_entropy(plain(x), y)), (model, loss)):
                each.zero_grad()
                of.backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(one.grad), other.grad, rtol=EXACT, atol=EXACT)


def test_a_loss_of_own_rows_is_their_share_of_the_whole_batch(on_ranks: Ranks) -> None:
    on_ranks(2, with_own_rows)


def with_labels_of_its_own(alike: bool) -> None:
    """One row for each rank: the labels of a part broadcast against the results of the batch."""
    _, model = pair(Logits, PARTS, {})
    x, _ = batch(2, 0)
    own = x.chunk(2)[pw.get_rank()]
    target = torch.zeros(1, 3).double() if alike else own[:, :3]
    for _ in range(2):
        (model(own) - target).square().mean().backward()
    end()


def test_a_loss_of_labels_that_broadcast_against_the_batch_is_told(on_ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="nothing differs"):
        on_ranks(2, with_labels_of_its_own, True)
    said = (
        "rank 1 went on otherwise with a result that is whole on every rank than rank 0, at a call of Logits; compute"
    )
    with pytest.raises(AssertionError, match=said):
        on_ranks(2, with_labels_of_its_own, False)


def with_a_sampler(drop_last: bool) -> None:
    plain, model = pair(Net, {"parallel_mode": "data_parallel"}, {})
    x, y = batch(11, 0)
    data = TensorDataset(x, y)
    samplers = [DistributedSampler(data, 2, rank, shuffle=False, drop_last=drop_last) for rank in range(2)]
    loaders = [DataLoader(data, 2, sampler=sampler) for sampler in samplers]
    own = DataLoader(data, 2, sampler=samplers[pw.get_rank()])
    count = 0
    for mine, *parts in zip(own, *loaders, strict=True):
        every = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        assert_same(plain, model, (plain(*every), model(*mine)))
        count += 1
    assert count == 3


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_of_pytorch_reads_the_parts(on_ranks: Ranks, drop_last: bool) -> None:
    on_ranks(2, with_a_sampler, drop_last)


def refuses(options: dict[str, Any], given: dict[str, Any], said: str) -> None:
    _, model = pair(Net, options, given)
    x, y = (tensor.chunk(2)[pw.get_rank()] for tensor in batch(8, 0))
    with pytest.raises(pw.StrategyError, match=re.escape(said)):
        model(x, y)


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        (
            {"dataset_strategy": ((2, 1), (2,))},
            {"mesh": {"dp": 2}, "in_strategy": ((None, "dp"),)},
            "input 'x': dataset_strategy gives each process one of (2, 1) parts, and in_strategy splits it (1, 2); ",
        ),
        (
            PARTS,
            {"in_strategy": (("dp", None),)},
            "('dp', None) names axes, and there is no mesh; pass mesh= to shard",
        ),
    ],
    ids=["two ways", "no mesh"],
)
def test_what_does_not_go_together_is_refused(
    on_ranks: Ranks, options: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    on_ranks(2, refuses, options, given, said)


def given_whole(options: dict[str, Any]) -> None:
    plain, model = pair(Net, options, {"mesh": {"dp": 2}, "in_strategy": (("dp", None), ("dp",))})
    x, y = batch(8, 0)
    assert_same(plain, model, (plain(x, y), model(x, y)))
    assert [t.codes for t in model.plan.inputs if t.name in ("x", "y")] == [("S0",), ("S0",)]


@pytest.mark.parametrize("options", [{}, {"full_batch": True}, {"dataset_strategy": ((1, 1), (1,))}], ids=str)
def test_an_in_strategy_takes_the_parts_of_a_batch_that_each_process_has_all_of(
    on_ranks: Ranks, options: dict[str, Any]
) -> None:
    on_ranks(2, given_whole, options)


@pytest.mark.parametrize("mode", ["data_parallel", ""])
def test_one_process_has_the_whole_batch_in_any_case(mode: str) -> None:
    options = {"parallel_mode": mode} if mode else PARTS
    plain, model = pair(Logits, {**options, "device_num": 4}, {})
    x, y = batch(7, 0)
    losses = [nn.functional.cross_entropy(each(x), pw.data.whole_batch(y)) for each in (plain, model)]
    assert_same(plain, model, (losses[0], losses[1]))


# -- inputs that every rank holds, cut as no DTensor is


def differentiates(rows: int) -> None:
    x = torch.arange(rows * 6.0, dtype=torch.float64).reshape(rows, 6) / 10
    f = pw.shard(lambda v: v.sin() * 2, mesh={"a": 2, "b": 2}, in_strategy=((("a", "b"), None),))
    weights = torch.linspace(0, 1, rows * 6, dtype=torch.float64).reshape(rows, 6)
    for given in (x.clone().requires_grad_(), x.t().contiguous().t().requires_grad_()):
        (f(given) * weights).sum().backward()
        torch.testing.assert_close(given.grad, 2 * x.cos() * weights, rtol=EXACT, atol=EXACT)
    model = pw.shard(Net().double(), mesh={"a": 2, "b": 2}, in_strategy=((("a", "b"), None), (("a", "b"),)))
    given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = torch.arange(rows) % 3
    torch.manual_seed(0)
    reference = copy.deepcopy(Net().double())
    reference.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    losses = reference(plain * 1, y), model(given * 1, y)
    assert_same(reference, model, losses)
    torch.testing.assert_close(given.grad, plain.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("rows", [9, 5, 7, 3])
def test_an_input_that_two_axes_cut_unevenly_has_its_gradient(on_ranks: Ranks, rows: int) -> None:
    on_ranks(4, differentiates, rows)
