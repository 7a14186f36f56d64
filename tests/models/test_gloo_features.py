"""What a training script does around a model works on 2 gloo processes: every check is against one device."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import (
    assert_same_gradients,
    assert_same_loss,
    assert_sends_as_planned,
    counted,
    gradients,
    gradients_of,
    loss_of,
    whole,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.utils.checkpoint import checkpoint
from zoo import CASES, LAYERS, gpt2

import partway as pw

pytestmark = [pytest.mark.gloo, pytest.mark.deep]

CUDA = os.environ.get("PARTWAY_TEST_DEVICE") == "cuda"
Ranks = Callable[..., list[Any]]
EXACT = 1e-10


def pair(name: str, block: bool = True) -> tuple[nn.Module, Any]:
    """A model on one device, and the same split over two: the first block over `tp`, or the batch over `dp`."""
    case = CASES[name]
    given: dict[str, Any] = {"mesh": {"dp": 2, "tp": 1}, "in_strategy": case.batch_split("dp")}
    if block:
        given = {"mesh": {"dp": 1, "tp": 2}, "parameter_plan": case.block_split("tp")}
    return case.build(), pw.shard(case.build(), **given)


def assert_equal(found: Any, expected: Any, relative: float = EXACT) -> None:
    torch.testing.assert_close(whole(found), whole(expected), rtol=relative, atol=relative)


def assert_same_step(plain: nn.Module, model: Any, batch: Any, relative: float = EXACT, given: Any = None) -> None:
    """`given`: what the split model is called with, where it is not the whole batch."""
    torch.manual_seed(7)
    loss, expected = gradients(plain, batch)
    torch.manual_seed(7)
    found_loss, found = gradients(model, batch if given is None else given)
    assert_same_loss(whole(found_loss), loss, relative)
    assert_same_gradients(whole(found), expected, relative)


# -- the module stays the module it was


def ties() -> None:
    plain, model = pair("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_step(plain, model, CASES["gpt2"].batch())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.lm_head.weight, DTensor)
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_equal(model.lm_head.weight, plain.lm_head.weight)
    assert_same_step(plain, model, CASES["gpt2"].batch())


def test_tied_weights_stay_one_parameter(on_ranks: Ranks) -> None:
    on_ranks(2, ties)


def copies() -> None:
    plain, model = pair("mlp")
    batch = CASES["mlp"].batch()
    assert_same_step(plain, model, batch)
    other = copy.deepcopy(model)
    assert_same_step(plain, other, batch)
    assert other.plan is not model.plan
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same_step(plain, model, batch)


def test_a_deep_copy_plans_anew_and_trains_apart(on_ranks: Ranks) -> None:
    on_ranks(2, copies)


def nests() -> None:
    case = CASES["mlp"]
    model: Any = case.build()
    model.fc2 = pw.shard(model.fc2, in_strategy=((None, "tp"),))
    model = pw.shard(model, mesh={"tp": 2})
    assert_same_step(case.build(), model, case.batch())
    assert [o.operands for o in model.plan.operators if o.name == "constrain"] == [(("S1",),)]


@pytest.mark.slow
def test_a_sharded_module_inside_is_a_constraint(on_ranks: Ranks) -> None:
    on_ranks(2, nests)


def recomputes() -> None:
    plain, model = pair("mlp", block=False)
    batch = CASES["mlp"].batch()
    _, expected = gradients(plain, batch)
    for _ in range(2):  # planned inside, then only run
        model.zero_grad()
        checkpoint(model, *batch.values(), use_reentrant=False).backward()
        assert_same_gradients(whole(gradients_of(model)), expected, EXACT)


def test_activation_checkpointing_runs_a_sharded_module_again(on_ranks: Ranks) -> None:
    on_ranks(2, recomputes)


def checkpoints_layers() -> None:
    pw.set_auto_parallel_context(random_numbers="torch")
    case = CASES["gpt2"]
    split = {"mesh": {"dp": 1, "tp": 2}, "parameter_plan": case.block_split("tp")}
    model = gpt2(resid_pdrop=0.3, embd_pdrop=0.3).double().train()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that all versions have
        model.gradient_checkpointing_enable()
    sharded: Any = pw.shard(model, **split)
    for step in range(2):
        assert_same_step(plain, sharded, case.batch(step=step))
    backward = sharded.program.backward.graph
    assert sum("native_layer_norm.default" in str(node.target) for node in backward.nodes) == 2 * LAYERS
    assert_sends_as_planned(sharded, case.batch())


def test_checkpointed_layers_run_again_in_the_backward(on_ranks: Ranks) -> None:
    on_ranks(2, checkpoints_layers)


def freezes() -> None:
    plain, model = pair("mlp", block=False)
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(name.startswith("fc3"))
    assert_same_step(plain, model, CASES["mlp"].batch())
    assert model.fc1.weight.grad is None
    for each in (plain, model):
        each.requires_grad_(True)
    assert_same_step(plain, model, CASES["mlp"].batch())


def test_frozen_parameters_get_no_gradient_until_they_are_thawed(on_ranks: Ranks) -> None:
    on_ranks(2, freezes)


def evaluates() -> None:
    plain, model = pair("convnet", block=False)
    case = CASES["convnet"]
    for step in range(3):
        assert_same_step(plain, model, case.batch(step=step))
    with torch.no_grad():
        assert_equal(loss_of(model(**case.batch(step=3))), loss_of(plain(**case.batch(step=3))))
    buffers = dict(plain.named_buffers())
    assert all(b == 4 for n, b in model.named_buffers() if n.endswith("num_batches_tracked"))
    for each in (plain, model):
        each.eval()
    for size in (8, 4):
        assert_same_step(plain, model, case.batch(size=size))
        with torch.no_grad():
            assert_equal(loss_of(model(**case.batch(size=size))), loss_of(plain(**case.batch(size=size))))
    for name, buffer in model.named_buffers():
        assert_equal(buffer, buffers[name])


def test_batch_norm_keeps_the_statistics_of_one_device_in_training_and_in_evaluation(on_ranks: Ranks) -> None:
    on_ranks(2, evaluates)


def infers() -> None:
    plain, model = pair("mlp")
    case = CASES["mlp"]
    with torch.no_grad(), pw.record_collectives() as events:
        found = model(**case.batch())
    assert not found.requires_grad
    assert_equal(found, plain(**case.batch()).detach())
    assert counted(events) == counted(c for c in model.plan.collectives if c.phase == "forward")
    assert_same_step(plain, model, case.batch())
    first = model.plan
    assert_same_step(plain, model, case.batch(size=4))
    assert model.plan is not first
    assert model.plan.parameters == first.parameters
    assert_same_step(plain, model, case.batch())
    assert model.plan is first


def test_no_grad_and_a_second_shape(on_ranks: Ranks) -> None:
    on_ranks(2, infers)


def ends_an_epoch() -> None:
    """Batches that two ranks cannot share evenly, with a gradient of the input and an output that stays split."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    split = {"mesh": {"dp": 2}, "in_strategy": (("dp", None),), "out_strategy": (("dp", None),)}
    model: Any = pw.shard(copy.deepcopy(plain), **split)
    for batch in (8, 7, 3):
        x = torch.randn(batch, 6, dtype=torch.float64, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        plain.zero_grad()
        model.zero_grad()
        expected, found = plain(x), model(again)
        assert isinstance(found, DTensor)
        assert found.to_local().shape == (batch - batch // 2 if dist.get_rank() == 0 else batch // 2, 5)
        assert_equal(whole(found), expected)
        expected.pow(3).sum().backward()
        found.pow(3).sum().backward()
        assert_equal(whole(again.grad), x.grad)
        assert_same_gradients(whole(gradients_of(model)), gradients_of(plain), EXACT)


def test_the_last_batch_of_an_epoch_may_be_cut_unevenly(on_ranks: Ranks) -> None:
    on_ranks(2, ends_an_epoch)


def ends_with_one() -> None:
    """A batch of one has nothing to split: it is whole on every rank, and so is what comes out."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)).double()
    split = {"mesh": {"dp": 2}, "in_strategy": (("dp", None),), "out_strategy": (("dp",),)}
    model: Any = pw.shard(copy.deepcopy(plain), **split)
    for batch in (2, 1, 4, 1):
        x = torch.randn(batch, 6, dtype=torch.float64, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        plain.zero_grad()
        model.zero_grad()
        expected, found = plain(x), model(again)
        assert isinstance(found, DTensor) == (batch > 1)
        expected, found = expected.squeeze(), found.squeeze()
        assert_equal(whole(found), expected)
        expected.pow(3).sum().backward()
        found.pow(3).sum().backward()
        assert_equal(whole(again.grad), x.grad)
        assert_same_gradients(whole(gradients_of(model)), gradients_of(plain), EXACT)


def test_the_last_batch_of_an_epoch_may_be_a_single_sample(on_ranks: Ranks) -> None:
    on_ranks(2, ends_with_one)


class Normed(nn.Module):
    """A BatchNorm and a dropout in one region of torch.utils.checkpoint."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 3)
        self.double()

    def block(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=False)).square().sum()  # type: ignore[no-any-return]


def normalises_again() -> None:
    """PyTorch on one device moves the running statistics twice; so does the momentum that the warning tells."""
    pw.set_auto_parallel_context(random_numbers="torch")
    plain, other = Normed(), Normed(1 - 0.9**2)
    other.load_state_dict(plain.state_dict())
    model: Any = pw.shard(other, mesh={"dp": 2}, in_strategy=(("dp", None),))
    x = torch.randn(6, 4, dtype=torch.float64)
    for step in range(2):
        found = []
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                each(x).backward()
            told = [str(warning.message) for warning in caught if "torch.utils.checkpoint" in str(warning.message)]
            assert len(told) == (each is model and step == 0)
            found.append(torch.get_rng_state())
        assert torch.equal(*found)
        assert_same_gradients(whole(gradients_of(model)), gradients_of(plain), EXACT)
        for name in ("running_mean", "running_var"):
            assert_equal(model.norm.get_buffer(name), plain.norm.get_buffer(name))


def test_a_checkpointed_batch_norm_with_dropout_is_that_of_one_device_but_for_its_second_update(
    on_ranks: Ranks,
) -> None:
    on_ranks(2, normalises_again)


def drops() -> None:
    case, options = CASES["gpt2"], {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3, "n_layer": 1}
    plain = gpt2(**options).double()
    torch.manual_seed(0)
    pw.set_auto_parallel_context(random_numbers="torch")
    model: Any = pw.shard(gpt2(**options).double(), mesh={"dp": 2}, in_strategy=case.batch_split("dp"))
    for _ in range(2):  # planned, then only run: the generator stands where one device leaves it
        assert_same_step(plain, model, case.batch())
        after = torch.get_rng_state()
        assert_same_step(plain, plain, case.batch())
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.skipif(CUDA, reason="the fused attention of a GPU draws its mask inside: its dropout is refused")
def test_dropout_draws_the_numbers_of_one_device(on_ranks: Ranks) -> None:
    on_ranks(2, drops)


def accumulates(block: bool) -> None:
    plain, model = pair("mlp", block=block)
    case = CASES["mlp"]
    for each in (plain, model):
        for step in range(2):
            loss_of(each(**case.batch(step=step))).backward()
    assert_same_gradients(whole(gradients_of(model)), whole(gradients_of(plain)), EXACT)
    norms = [whole(nn.utils.clip_grad_norm_(each.parameters(), 0.1)) for each in (plain, model)]
    assert_equal(norms[1], norms[0])
    assert_same_gradients(whole(gradients_of(model)), whole(gradients_of(plain)), EXACT)
    for each in (plain, model):
        each.zero_grad()
        (loss_of(each(**case.batch(step=0))) + 2 * loss_of(each(**case.batch(step=1)))).backward()
    assert_same_gradients(whole(gradients_of(model)), whole(gradients_of(plain)), EXACT)


@pytest.mark.parametrize("block", [False, True], ids=["batch", "block"])
def test_gradients_accumulate_and_their_norm_is_clipped(on_ranks: Ranks, block: bool) -> None:
    on_ranks(2, accumulates, block)


# -- what each rank passes


def reads(name: str, strategy: Any, cut: dict[str, int]) -> None:
    """`cut`: the dim along which each rank reads its part of an input."""
    case = CASES[name]
    pw.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy=strategy)
    model: Any = pw.shard(case.build())
    batch = case.batch()
    part = {n: t.chunk(2, cut[n])[pw.get_rank()] if n in cut else t for n, t in batch.items()}
    plain = case.build()
    assert_same_step(plain, model, batch, given=part)
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_step(plain, model, batch, given=part)
    for found in model.plan.inputs:
        if found.name in batch:
            assert ("S" in str(found.codes)) == (found.name in cut), found
    assert_sends_as_planned(model, part)


@pytest.mark.parametrize(
    ("name", "strategy", "cut"),
    [
        ("mlp", "data_parallel", {"x": 0, "target": 0}),
        ("mlp", "full_batch", {}),
        ("mlp", ((1, 2), (1, 1)), {"x": 1}),
        pytest.param("gpt2", "data_parallel", {"input_ids": 0, "labels": 0}, marks=pytest.mark.slow),
        ("convnet", ((1, 1, 1, 2), (1,)), {"pixel_values": 3}),
        pytest.param("convnet", ((2, 1, 1, 1), (1,)), {"pixel_values": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_dataset_strategy_says_which_part_of_the_batch_a_rank_reads(
    on_ranks: Ranks, name: str, strategy: Any, cut: dict[str, int]
) -> None:
    on_ranks(2, reads, name, strategy, cut)


def takes_dtensors() -> None:
    case = CASES["mlp"]
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("dp",))
    model: Any = pw.shard(case.build(), mesh=mesh, in_strategy=case.batch_split("dp"))
    batch = case.batch()
    for placements in ((Split(0), Split(0)), (Split(1), Whole())):
        given = {
            name: distribute_tensor(tensor, mesh, [placement])
            for (name, tensor), placement in zip(batch.items(), placements, strict=True)
        }
        assert_same_step(case.build(), model, batch, given=given)


def test_inputs_may_be_dtensors(on_ranks: Ranks) -> None:
    on_ranks(2, takes_dtensors)


# -- what comes back


def double_layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ w.T


def returns_parts() -> None:
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    expected = [t.clone().requires_grad_() for t in (x, w)]
    result = double_layer(*expected)
    result.square().mean().backward()

    fn = pw.shard(mesh={"dp": 2}, in_strategy=(("dp", None), None), out_strategy=(("dp", None),))(double_layer)
    losses: tuple[Callable[[Any], Tensor], ...] = (
        lambda out: out.full_tensor().square().mean(),
        lambda out: out.square().mean(),
        lambda out: nn.functional.mse_loss(out, torch.zeros(8, 4, dtype=torch.float64)),
    )
    for loss in losses:
        given = [t.clone().requires_grad_() for t in (x, w)]
        out = fn(*given)
        assert isinstance(out, DTensor)
        assert out.shape == result.shape
        assert out.placements == (Split(0),)
        assert out.to_local().shape == (4, 4)
        assert_equal(out, result.detach())
        loss(out).backward()
        for one, other in zip(given, expected, strict=True):
            assert not isinstance(one.grad, DTensor)
            assert_equal(one.grad, other.grad)

    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("dp",))
    kept = distribute_tensor(x, mesh, [Split(0)]).requires_grad_()
    fn(kept, w).square().mean().backward()
    assert kept.grad is not None
    assert_equal(kept.grad, expected[0].grad)

    fn = pw.shard(double_layer, mesh={"dp": 2}, in_strategy=(("dp", None), None))
    given = [t.clone().requires_grad_() for t in (x, w)]
    out = fn(*given)
    assert not isinstance(out, DTensor)
    assert_equal(out, result.detach())
    out.square().mean().backward()
    assert_equal(given[0].grad, expected[0].grad)
    assert_equal(given[1].grad, expected[1].grad)


def test_a_split_output_is_a_dtensor_that_a_loss_outside_differentiates(on_ranks: Ranks) -> None:
    on_ranks(2, returns_parts)


def returns_logits() -> None:
    plain, model = pair("gpt2", block=False)
    batch = CASES["gpt2"].batch()
    expected, found = plain(**batch), model(**batch)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert isinstance(found.logits, DTensor)
    assert found.logits.shape == expected.logits.shape
    assert_equal(found.logits.detach(), expected.logits.detach())
    (found.loss + found.logits.square().mean()).backward()
    (expected.loss + expected.logits.square().mean()).backward()
    assert_same_gradients(whole(gradients_of(model)), whole(gradients_of(plain)), EXACT)


def test_what_is_returned_beside_a_loss_stays_split(on_ranks: Ranks) -> None:
    on_ranks(2, returns_logits)


# -- options


def optimizes_in_parallel(ranks: int, reshard: bool) -> None:
    pw.set_auto_parallel_context(
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0},
        reshard_after_forward=reshard,
        device_profile="cpu",
    )
    case, size = CASES["mlp"], 128 * ranks
    plain = case.build()
    model: Any = pw.shard(case.build(), mesh={"dp": ranks}, in_strategy=case.batch_split("dp"))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step in range(3):
        assert_same_step(plain, model, case.batch(step=step, size=size))
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.placements[0], Split), name
        assert parameter.to_local().numel() * ranks == parameter.numel()
        for state in ("exp_avg", "exp_avg_sq"):
            found = optimizers[1].state[parameter][state]
            assert found.placements == parameter.placements
            assert found.to_local().shape == parameter.to_local().shape
            assert_equal(found, optimizers[0].state[plain.get_parameter(name)][state])
        assert_equal(parameter, plain.get_parameter(name))
    kinds = {(c.phase, str(c.kind)) for c in model.plan.collectives if c.tensor in model.plan.parameters}
    again = {("backward", "all_gather")} if reshard else set()
    assert kinds == {("forward", "all_gather"), ("backward", "reduce_scatter"), *again}
    assert_sends_as_planned(model, case.batch(size=size))


@pytest.mark.parametrize("reshard", [False, True], ids=["kept", "gathered again"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_parallel_optimizer_keeps_parameters_and_states_split(on_ranks: Ranks, ranks: int, reshard: bool) -> None:
    on_ranks(ranks, optimizes_in_parallel, ranks, reshard)


def disagrees(seed_model: bool, seed_after: bool, options: dict[str, Any]) -> str:
    """The error that sharding gives if ranks seed their generators differently before or after building the model."""
    pw.set_auto_parallel_context(**options)
    case = CASES["convnet"]
    if seed_model:
        torch.manual_seed(dist.get_rank())
    model: Any = case.model().double()
    torch.manual_seed(dist.get_rank() if seed_after else 3)
    try:
        pw.shard(model, mesh={"dp": 2}, in_strategy=case.batch_split("dp"))
    except RuntimeError as error:
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        model(**case.batch())  # as it was
        return str(error)
    torch.manual_seed(0)
    plain = case.model().double()  # rank 0's values
    assert_same_step(plain, model, case.batch())
    return ""


def test_ranks_that_differ_are_refused_on_every_rank(on_ranks: Ranks) -> None:
    said = "the ranks differ:\n  - conv1.weight has other values on rank 1 than on rank 0; "
    said += "seed every rank alike, or set parameter_broadcast=True\n"
    first, second = on_ranks(2, disagrees, True, False, {})
    assert first == second
    assert first.startswith(said)
    said = "the random generator has other values on rank 1 than on rank 0; "
    said += "seed every rank alike with torch.manual_seed"
    first, second = on_ranks(2, disagrees, False, True, {})
    assert first == second
    assert said in first


def reads_its_own_batch() -> str:
    """The error of a first call in which every rank gives another batch, none of them said to be a part."""
    case = CASES["mlp"]
    model: Any = pw.shard(case.build(), mesh={"dp": 2}, in_strategy=case.batch_split("dp"))
    with pytest.raises(pw.RuntimeStateError) as error:
        model(**case.batch(step=dist.get_rank()))
    assert_same_step(case.build(), model, case.batch())
    return str(error.value)


def test_ranks_that_give_different_whole_batches_are_refused(on_ranks: Ranks) -> None:
    fix = "give every rank the same whole batch, or set dataset_strategy where each has its own part"
    lines = [f"  - input {name!r} has other values on rank 1 than on rank 0; {fix}" for name in ("x", "target")]
    assert on_ranks(2, reads_its_own_batch) == ["\n".join(["the ranks differ:", *lines])] * 2


def computes_something_else() -> str:
    scale = 2.0 + dist.get_rank()
    f = pw.shard(lambda x: (x * scale).sum(), mesh={"dp": 2}, in_strategy=(("dp", None),))
    with pytest.raises(pw.RuntimeStateError) as error:
        f(torch.ones(4, 2))
    return str(error.value)


def test_ranks_whose_forwards_differ_are_refused(on_ranks: Ranks) -> None:
    first, second = on_ranks(2, computes_something_else)
    assert first == second
    assert "the captured graph differs, first in line" in first
    assert "the model's code, or what it reads, differs between ranks: run the same on every rank" in first


def is_seeded_before_a_call(draws: bool) -> str:
    torch.manual_seed(dist.get_rank())
    f = pw.shard(
        lambda x: nn.functional.dropout(x, 0.5 if draws else 0.0, draws).sum(), mesh={"dp": 2},
        in_strategy=(("dp", None),),
    )  # fmt: skip
    try:
        f(torch.ones(4, 2))
    except pw.RuntimeStateError as error:
        return str(error)
    return ""


def test_ranks_that_are_seeded_otherwise_before_a_call_that_draws_are_refused(on_ranks: Ranks) -> None:
    said = (
        "the random generator has other values on rank 1 than on rank 0; seed every rank alike with torch.manual_seed"
    )
    assert on_ranks(2, is_seeded_before_a_call, True) == [said] * 2
    assert on_ranks(2, is_seeded_before_a_call, False) == [""] * 2


def gets_a_parameter() -> str:
    torch.manual_seed(0)
    model: Any = pw.shard(nn.Linear(2, 2), mesh={"dp": 2}, in_strategy=(("dp", None),))
    model(torch.ones(4, 2))
    model.more = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    with pytest.raises(pw.RuntimeStateError) as error:
        model(torch.ones(4, 2))
    return str(error.value)


def test_parameters_that_are_added_and_differ_are_refused(on_ranks: Ranks) -> None:
    said = "more has other values on rank 1 than on rank 0; seed every rank alike"
    assert on_ranks(2, gets_a_parameter) == [said] * 2


def test_parameter_broadcast_makes_ranks_agree(on_ranks: Ranks) -> None:
    assert on_ranks(2, disagrees, True, False, {"parameter_broadcast": True}) == [""] * 2
    assert on_ranks(2, disagrees, True, True, {"parameter_broadcast": True}) == [""] * 2


# -- checkpoints


def saves_and_loads(folder: str) -> None:
    case = CASES["mlp"]

    def start(block: bool) -> tuple[Any, Any]:
        _, model = pair("mlp", block=block)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            loss, _ = gradients(model, case.batch(step=number))
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = start(True)
    steps(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    assert list(states[0]) == list(case.build().state_dict())
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    kept = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    expected = steps(model, optimizer, range(2, 4))

    for block in (True, False):  # into the same placements, and into others
        for planned in (True, False):  # before the first call, parameters are whole on every rank
            model, optimizer = start(block)
            if planned:
                steps(model, optimizer, range(7, 8))
            states = get_state_dict(model, optimizer)
            loaded = {"model": states[0], "optimizer": states[1]}
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor.full_tensor(), kept[name]), name
            assert steps(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=EXACT)


def test_checkpoints_of_model_and_optimizer_are_saved_and_loaded(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(2, saves_and_loads, str(tmp_path / "checkpoint"))


def takes_whole_values() -> None:
    plain, model = pair("mlp")
    for step in range(2):
        torch.manual_seed(step)
        state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
        plain.load_state_dict(state)
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        assert_same_step(plain, model, CASES["mlp"].batch())


def test_a_checkpoint_of_one_device_is_loaded(on_ranks: Ranks) -> None:
    on_ranks(2, takes_whole_values)


# -- errors


def refused() -> str:
    case = CASES["mlp"]
    model: Any = case.build()
    try:
        pw.shard(model, mesh={"dp": 4}, in_strategy=case.batch_split("dp"))
    except pw.PartwayError as error:
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        model(**case.batch())  # as it was
        return str(error)
    return ""


def test_a_mesh_of_another_number_of_devices_than_processes_is_refused(on_ranks: Ranks) -> None:
    said = "the mesh (dp=4) has 4 devices, but there are 2 ranks; start 4 processes or use a mesh of 2 devices"
    assert on_ranks(2, refused) == [said] * 2


# -- what is asked of values


class Asks(nn.Module):
    """A module whose course depends on its input and on its state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise FloatingPointError("x is not a number")
        y = torch.relu(self.up(x)) if x.sum() > 0 else torch.tanh(self.up(x))
        if self.calls > 2 or torch.rand([]) < 0.3:
            y = 2 * y
        self.calls.add_(1)
        return self.down(y).square().sum()


def takes_courses() -> None:
    plain = Asks().double()
    given: dict[str, Any] = {"in_strategy": (("dp", None),), "parameter_plan": {"up.weight": ("tp", None)}}
    model = pw.shard(copy.deepcopy(plain), mesh={"dp": 1, "tp": 2}, **given)
    x = torch.randn(6, 4, dtype=torch.float64)
    for batch in (x.abs(), -x.abs(), -x.abs(), x.abs(), x.abs()):
        assert_same_step(plain, model, {"x": batch})
    with pytest.raises(FloatingPointError, match="x is not a number"):
        model(x * torch.nan)
    assert_same_step(plain, model, {"x": x.abs()})
    pw.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="data_parallel")
    with pytest.raises(pw.CaptureError, match="input 'x', and each process has a part"):
        pw.shard(Asks().double(), mesh={"dp": 2})(x)


@pytest.mark.skipif(CUDA, reason="a course that random numbers of a GPU choose is refused")
def test_every_rank_takes_the_course_of_the_whole_batch(on_ranks: Ranks) -> None:
    on_ranks(2, takes_courses)


# -- one script, unchanged

SCRIPT = """
import sys
import torch
import partway as pw

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
model = pw.shard(model, mesh={"dp": 1, "tp": 2}, in_strategy=(("dp", None),), parameter_plan={"0.weight": ("tp", None)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    torch.manual_seed(step)
    x, y = torch.randn(8, 8).double(), torch.randn(8, 4).double()
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if pw.get_rank() == 0:
        print(repr(loss.item()))
sys.stderr.write(f"{pw.get_group_size()}\\n")
pw.shutdown()
"""


@pytest.mark.slow
def test_a_script_that_never_calls_init_runs_on_virtual_devices_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = []
    for launcher, processes in (((), 1), (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), 2)):
        done = subprocess.run(
            [sys.executable, *launcher, str(script)],
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines().count(str(processes)) == processes, done.stderr
        found.append([float(line) for line in done.stdout.split()])
    assert len(found[0]) == 5
    assert found[1] == pytest.approx(found[0], rel=1e-12)
