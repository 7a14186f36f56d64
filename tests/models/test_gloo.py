"""Real models, split over 2 and 4 gloo processes, train as they do on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, assert_sends_as_planned, curve, gradients, tolerance, whole
from torch import Tensor
from torch.distributed.tensor import DTensor
from zoo import CASES, Case

import partway as pw
from partway.strategy import to_dtensor

pytestmark = [pytest.mark.gloo, pytest.mark.deep]

Ranks = Callable[..., list[Any]]
STEPS = 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
}
MODELS = ("mlp", "gpt2", "llama", "vit", "resnet50")
BOTH = {2: {"dp": 1, "tp": 2}, 4: {"dp": 2, "tp": 2}}
Reference = tuple[Tensor, dict[str, Tensor | None], dict[str, list[float]]]


@functools.cache
def one_device(name: str, dtype: torch.dtype) -> Reference:
    """Loss, gradients and training curves without splitting."""
    case = CASES[name]
    loss, found = gradients(case.build(dtype), case.batch(dtype))
    curves = {
        o: curve(case.build(dtype), getattr(torch.optim, o), batches(case, dtype), **k) for o, k in OPTIMIZERS.items()
    }
    return loss, found, curves


def batches(case: Case, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [case.batch(dtype, step) for step in range(STEPS)]


def split(case: Case, how: str, n: int) -> dict[str, Any]:
    """The arguments of `shard` that split the batch, the first block, or both, over `n` processes."""
    match how:
        case "batch":
            return {"mesh": {"dp": n}, "in_strategy": case.batch_split("dp")}
        case "block":
            return {"mesh": {"tp": n}, "parameter_plan": case.block_split("tp")}
    return {"mesh": BOTH[n], "in_strategy": case.batch_split("dp"), "parameter_plan": case.block_split("tp")}


def trains_as(name: str, dtype: torch.dtype, how: str, n: int, expected: Reference) -> None:
    case = CASES[name]
    expected_loss, expected_gradients, expected_curves = expected
    relative = tolerance(dtype, case.single)
    plain = case.build(dtype)
    names = [p for p, _ in plain.named_parameters()], list(plain.state_dict())
    model: Any = pw.shard(plain, **split(case, how, n))

    loss, found = gradients(model, case.batch(dtype))
    assert_same_loss(loss, expected_loss, relative)
    assert_same_gradients(whole(found), expected_gradients, relative)
    start = {key: value.clone() for key, value in model.state_dict().items()}

    plan = model.plan
    assert ([p for p, _ in model.named_parameters()], list(model.state_dict())) == names
    for parameter, held in model.named_parameters():
        layout = plan.parameters[parameter]
        assert isinstance(held, DTensor), parameter
        assert held.device_mesh.mesh_dim_names == plan.mesh.axes
        assert held.placements == to_dtensor(layout), parameter
        assert held.grad is None or held.grad.placements == held.placements, parameter

    assert plan.collectives
    assert plan.unknown_operators == ()
    assert_sends_as_planned(model, case.batch(dtype))
    assert model.plan.parameters == plan.parameters
    plan = model.plan  # the first call of some models of transformers changes what the next one reads of their config

    for optimizer, options in OPTIMIZERS.items():
        model.load_state_dict(start)
        losses = curve(model, getattr(torch.optim, optimizer), batches(case, dtype), **options)
        assert losses == pytest.approx(expected_curves[optimizer], rel=max(relative, 1e-9)), optimizer
        assert losses[0] != losses[-1]
    assert model.plan is plan  # planned once


def cases() -> Iterator[Any]:
    """Every number of processes, model and split. Each process plans for itself, which takes long: of the large models
    all but one are for `make conformance`."""
    for n in (2, 4):
        for name in MODELS:
            for how in ("both", "batch", "block"):
                slow = (name, n, how) not in (("mlp", 4, "both"), ("gpt2", 2, "both"))
                yield pytest.param(n, name, how, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("n", "name", "how"), list(cases()))
def test_processes_train_as_one_device_in_float64(on_ranks: Ranks, n: int, name: str, how: str) -> None:
    on_ranks(n, trains_as, name, torch.float64, how, n, one_device(name, torch.float64))


@pytest.mark.slow
def test_processes_train_as_one_device_in_float32(on_ranks: Ranks) -> None:
    on_ranks(2, trains_as, "gpt2", torch.float32, "batch", 2, one_device("gpt2", torch.float32))


def fuses(name: str, options: dict[str, Any], expected: Reference) -> list[int]:
    pw.set_auto_parallel_context(parallel_mode="data_parallel", dataset_strategy="full_batch", **options)
    case = CASES[name]
    model: Any = pw.shard(case.build())
    loss, found = gradients(model, case.batch())
    assert_same_loss(loss, expected[0], 1e-10)
    assert_same_gradients(whole(found), expected[1], 1e-10)
    assert_sends_as_planned(model, case.batch())
    program = model.program.collectives
    assert len(program) < len(model.plan.collectives)
    return [len(c.members) for c in program if c.phase == "backward"]


def test_fused_collectives_run_as_the_program_says(on_ranks: Ranks) -> None:
    expected = one_device("mlp", torch.float64)
    for options, groups in (
        ({}, [6]),
        ({"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}, [6]),
        ({"comm_fusion": {"allreduce": {"mode": "index", "config": [2, 5]}}}, [2, 3, 1]),
        ({"all_reduce_fusion_config": [4]}, [4, 2]),
    ):
        assert on_ranks(2, fuses, "mlp", options, expected) == [groups] * 2


def test_fused_gathers_and_scatters_run_as_the_program_says(on_ranks: Ranks) -> None:
    expected = one_device("mlp", torch.float64)
    split = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    for fused in ({}, {"allgather": {"mode": "overlap"}, "reducescatter": {"mode": "overlap"}}):
        found = on_ranks(2, fuses, "mlp", {**split, "comm_fusion": fused}, expected)
        assert found[0] == found[1]
        assert max(found[0]) > 1
