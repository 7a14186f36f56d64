"""A number of devices and no mesh: the mesh is part of what is searched, and stays once parameters lie on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bend import bend
from checks import assert_same_gradients, assert_same_loss, gradients, gradients_of, whole
from torch import Tensor
from torch.distributed.tensor import DTensor
from zoo import CASES

import partway as pw
from partway.strategy import to_dtensor

pytestmark = pytest.mark.deep

EXACT = 1e-10
MESHES_OF_8 = ({"d0": 8}, {"d0": 2, "d1": 4}, {"d0": 4, "d1": 2}, {"d0": 2, "d1": 2, "d2": 2})


def assert_same_step(model: Any, batch: Any, name: str = "mlp") -> None:
    """The loss and the gradients of `model`, made as the zoo makes `name`, are those of one device."""
    expected_loss, expected = gradients(CASES[name].build(), batch)
    loss, found = gradients(model, batch)
    assert_same_loss(loss, expected_loss, EXACT)
    assert_same_gradients(found, expected, EXACT)


def splits(plan: pw.Plan, name: str, ndim: int) -> tuple[int, ...]:
    """Into how many parts each dim of an input lies split."""
    codes = next(t.codes for t in plan.inputs if t.name == name)
    parts = [1] * ndim
    for size, code in zip(plan.sizes, codes, strict=True):
        if code.startswith("S"):
            parts[int(code[1:])] *= size
    return tuple(parts)


def rows(size: int) -> dict[str, Tensor]:
    """A batch for the mlp."""
    torch.manual_seed(size)
    return {"x": torch.randn(size, 16).double(), "target": torch.randn(size, 8).double()}


# -- which mesh


@pytest.mark.parametrize("name", ["mlp", "mlp_classes"])
def test_the_plan_is_the_cheapest_of_all_meshes_where_each_axis_has_to_save_its_share(name: str) -> None:
    case = CASES[name]
    first = next(iter(case.ranks))
    given = {"in_strategy": {first: case.batch_split(8)[first]}}
    costs = [
        pw.compile(case.build(), (), case.batch(), mesh=mesh, **given).plan.certificate.cost for mesh in MESHES_OF_8
    ]
    pw.set_auto_parallel_context(device_num=8)
    plan = pw.compile(case.build(), (), case.batch(), **given).plan
    scores = [cost * 1.02 ** len(mesh) for mesh, cost in zip(MESHES_OF_8, costs, strict=True)]
    first_of_best = next(i for i, score in enumerate(scores) if score <= min(scores) * (1 + 1e-9))
    assert plan.mesh == pw.Mesh(MESHES_OF_8[first_of_best])
    assert plan.certificate.cost == pytest.approx(costs[first_of_best], rel=1e-9)
    others = [cost for i, cost in enumerate(costs) if i != first_of_best]
    assert plan.certificate.other_meshes == len(others)
    assert plan.certificate.bound_elsewhere is not None
    assert plan.certificate.bound_elsewhere <= min(others) * (1 + 1e-9)


def test_placements_choose_among_the_meshes_with_as_many_axes() -> None:
    pw.set_auto_parallel_context(device_num=8)
    model = pw.shard(CASES["mlp"].build(), in_strategy={"x": [pw.Shard(0), pw.Shard(1)]})
    assert_same_step(model, rows(8))
    assert sorted(model.plan.sizes) == [2, 4]


def test_what_no_mesh_can_meet_is_refused_for_the_coarsest() -> None:
    pw.set_auto_parallel_context(device_num=8)
    model = pw.shard(CASES["mlp"].build(), in_strategy={"x": ("dp", None)})
    with pytest.raises(pw.StrategyError, match=r"on the mesh d0=8:\n.*'dp', which the mesh \(d0=8\) lacks"):
        model(**rows(8))


@pytest.mark.parametrize("mode", ["auto_parallel", "semi_auto_parallel"])
def test_counts_of_a_module_inside_say_which_meshes_there_are(mode: str) -> None:
    pw.set_auto_parallel_context(device_num=8, parallel_mode=mode, dataset_strategy="full_batch")
    model: Any = CASES["mlp"].build()
    pw.shard(model.fc2, parameter_plan={"weight": (2, 4)})
    pw.shard(model)
    assert_same_step(model, rows(8))
    found = model.plan.parameters["fc2.weight"]
    assert found.splits(2) == (2, 4)


def test_a_mesh_that_was_given_inside_is_the_mesh() -> None:
    pw.set_auto_parallel_context(device_num=8)
    inner = pw.shard(lambda x: x * 3, in_strategy=(("dp", "tp"),), mesh={"dp": 2, "tp": 4})
    outer = pw.shard(lambda x, w: inner(x @ w))
    x, w = torch.randn(8, 16), torch.randn(16, 24)
    torch.testing.assert_close(outer(x, w), (x @ w) * 3)
    assert outer.plan.mesh == pw.Mesh({"dp": 2, "tp": 4})


def test_one_warning_names_an_operator_without_a_rule_however_many_meshes_there_are() -> None:
    pw.set_auto_parallel_context(device_num=8)
    f = pw.shard(lambda x: bend(x * 2) + bend(x))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        f(torch.ones(8, 16))
    (found,) = [str(w.message) for w in seen if issubclass(w.category, pw.UnknownOperatorWarning)]
    assert found.count("partway_tests.bend.default (node bend, ") == 1
    assert "has no rule; its operands are gathered and it runs replicated. Give it one, such as pw.rule(" in found


# -- and then it stays


def test_later_calls_stay_on_the_mesh_of_the_first() -> None:
    pw.set_auto_parallel_context(device_num=8)
    model: Any = pw.shard(CASES["mlp"].build(), in_strategy={"x": (8, 1)})
    assert_same_step(model, rows(8))
    first = model.plan
    for size in (64, 4096):
        assert_same_step(model, rows(size))
        assert model.plan is not first
        assert (model.plan.mesh, model.plan.parameters) == (first.mesh, first.parameters)
    with torch.no_grad():
        model.eval()(**rows(8))
    assert model.plan.mesh == first.mesh


def test_later_calls_in_another_mode_stay_on_the_mesh_of_the_first() -> None:
    pw.set_auto_parallel_context(device_num=8, dataset_strategy=((4, 1), (2, 1)))
    model: Any = pw.shard(CASES["mlp"].build())
    assert_same_step(model, rows(8))
    first = model.plan
    assert len(first.mesh.axes) > 1
    with pw.auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch"):
        assert_same_step(model, rows(8))
    assert model.plan.mesh == first.mesh
    assert model.plan is not first


@pytest.mark.parametrize("strategy", [((8, 1), (8, 1)), ((1, 8), (1, 1)), ((4, 1), (2, 1)), ((2, 1), (1, 2))])
def test_a_dataset_strategy_places_the_inputs_on_whatever_mesh(strategy: Any) -> None:
    pw.set_auto_parallel_context(device_num=8, dataset_strategy=strategy)
    model: Any = pw.shard(CASES["mlp"].build())
    assert_same_step(model, rows(8))
    assert (splits(model.plan, "x", 2), splits(model.plan, "target", 2)) == strategy


def test_a_dataset_strategy_of_whole_batches_leaves_the_other_inputs_to_the_search() -> None:
    plans = []
    for options in ({}, {"dataset_strategy": "full_batch"}):
        with pw.auto_parallel_context(device_num=8, **options):
            plans.append(pw.compile(CASES["mlp"].build(), (), rows(8), in_strategy={"x": (8, 1)}).plan)
    assert plans[0].mesh == plans[1].mesh
    assert plans[0].certificate.cost == plans[1].certificate.cost


def test_a_saved_plan_brings_its_mesh(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    with pw.auto_parallel_context(device_num=8, strategy_ckpt_config={"save_file": file}):
        first: Any = pw.shard(CASES["mlp"].build(), in_strategy={"x": (8, 1)})
        assert_same_step(first, rows(8))
    with pw.auto_parallel_context(device_num=8, strategy_ckpt_config={"load_file": file}):
        second: Any = pw.shard(CASES["mlp"].build())
        assert_same_step(second, rows(4096))
    assert (second.plan.mesh, second.plan.parameters) == (first.plan.mesh, first.plan.parameters)


# -- in processes


def processes_agree() -> tuple[Any, ...]:
    """What a rank planned for itself; its parameters lie on the mesh that it chose, and stay there."""
    model: Any = pw.shard(CASES["mlp"].build(), in_strategy={"x": (4, 1)})
    planned = []
    for size in (8, 64):
        expected_loss, expected = gradients(CASES["mlp"].build(), rows(size))
        loss, found = gradients(model, rows(size))
        assert_same_loss(loss, expected_loss, EXACT)
        assert_same_gradients(whole(found), expected, EXACT)
        plan = model.plan
        for name, held in model.named_parameters():
            assert isinstance(held, DTensor)
            assert held.device_mesh.mesh_dim_names == plan.mesh.axes
            assert tuple(held.device_mesh.shape) == plan.mesh.sizes
            assert held.placements == to_dtensor(plan.parameters[name])
        planned.append((str(plan.mesh), plan.model_dump_json(), str(model.program)))
    assert planned[0][0] == planned[1][0]
    assert all(g is not None for g in gradients_of(model).values())
    return tuple(planned)


@pytest.mark.gloo
@pytest.mark.slow
def test_every_process_chooses_the_same_mesh_and_plan(on_ranks: Callable[..., list[Any]]) -> None:
    first, *others = on_ranks(4, processes_agree)
    assert all(other == first for other in others)
