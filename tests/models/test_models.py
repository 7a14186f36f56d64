"""Real models, split in the usual ways over 8 simulated ranks, train as they do on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from checks import (
    assert_same_gradients,
    assert_same_loss,
    assert_sends_as_planned,
    curve,
    gradients,
    tolerance,
)
from torch import Tensor
from zoo import CASES, Case

import partway as pw

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("models")]

STEPS = 5
OPTIMIZERS: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.01, "momentum": 0.9},
    torch.optim.AdamW: {"lr": 1e-3, "weight_decay": 0.1},
}
Reference = tuple[Tensor, dict[str, Tensor | None], dict[Any, list[float]]]


@functools.cache
def reference(name: str, dtype: torch.dtype) -> Reference:
    """Loss, gradients and training curves on one device."""
    case = CASES[name]
    loss, found = gradients(case.build(dtype), case.batch(dtype))
    return loss, found, {o: curve(case.build(dtype), o, _batches(case, dtype), **k) for o, k in OPTIMIZERS.items()}


def _batches(case: Case, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [case.batch(dtype, step) for step in range(STEPS)]


def _batch_by_count(case: Case) -> dict[str, Any]:
    """The first input by split counts; the mesh is `device_num`'s, and the other inputs follow."""
    pw.set_auto_parallel_context(device_num=8)
    first = next(iter(case.ranks))
    return {"in_strategy": {first: case.batch_split(8)[first]}}


def _batch_by_name(case: Case) -> dict[str, Any]:
    return {"mesh": {"dp": 8}, "in_strategy": case.batch_split("dp")}


def _first_block(case: Case) -> dict[str, Any]:
    return {"mesh": {"tp": 8}, "parameter_plan": case.block_split("tp")}


def _both(case: Case) -> dict[str, Any]:
    return {
        "mesh": pw.Mesh({"dp": 2, "tp": 4}),
        "in_strategy": case.batch_split("dp"),
        "parameter_plan": case.block_split("tp"),
    }


def check(name: str, annotations: Any, dtype: torch.dtype) -> None:
    case = CASES[name]
    expected_loss, expected_gradients, expected_curves = reference(name, dtype)
    relative = tolerance(dtype, case.single)
    model: Any = pw.shard(case.build(dtype), **annotations(case))
    start = {key: value.clone() for key, value in model.state_dict().items()}

    loss, found = gradients(model, case.batch(dtype))
    assert_same_loss(loss, expected_loss, relative)
    assert_same_gradients(found, expected_gradients, relative)

    assert model.plan.collectives
    assert model.plan.unknown_operators == ()
    assert_sends_as_planned(model, case.batch(dtype))

    plan = model.plan
    for optimizer, options in OPTIMIZERS.items():
        model.load_state_dict(start)
        losses = curve(model, optimizer, _batches(case, dtype), **options)
        assert losses == pytest.approx(expected_curves[optimizer], rel=max(relative, 1e-9)), optimizer.__name__
        assert losses[0] != losses[-1]
    assert model.plan is plan  # planned once


@pytest.mark.parametrize(
    ("name", "annotations"),
    [
        *(
            pytest.param(name, _both, marks=[] if name != "llama_heads" else pytest.mark.slow)
            for name in CASES
            if name != "resnet50"
        ),
        *(
            pytest.param(name, _first_block, marks=[] if name == "mlp" else pytest.mark.slow)
            for name in CASES
            if name != "resnet50"
        ),
        *(pytest.param("resnet50", found, marks=pytest.mark.slow) for found in (_both, _first_block, _batch_by_name)),
        # of a deep network the search over all meshes takes longer than all else that is tested here
        *(
            pytest.param(name, _batch_by_count, marks=[] if name == "mlp" else pytest.mark.slow)
            for name in CASES
            if name != "resnet50"
        ),
        *((name, _batch_by_name) for name in ("mlp", "convnet")),
    ],
)
def test_training_equals_one_device_in_float64(name: str, annotations: Any) -> None:
    check(name, annotations, torch.float64)


@pytest.mark.parametrize(
    "name", [n if n in ("mlp", "convnet") else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_training_equals_one_device_in_float32(name: str) -> None:
    check(name, _both, torch.float32)
