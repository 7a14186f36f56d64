"""The passes are two tables: whoever walks them sees each value, and the same inputs always make the same plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.compiler import passes
from partway.compiler.passes import PLANNING, PROGRAM, Draft, Pass, applied, plan_on_mesh, run, timed, verified
from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.propagation.graph.graph import differentiated
from partway.propagation.search import search
from partway.requests.plan_inputs import PlanInputs
from partway.strategy import Mesh, VerifyError

MESH = {"dp": 2, "tp": 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


@pytest.fixture(scope="module")
def compiled() -> pw.Compiled:
    return pw.compile(Net(), (torch.ones(4, 8),), mesh=MESH, in_strategy=(("dp", None),))


def draft_of(inputs: PlanInputs) -> Draft:
    mesh = Mesh(MESH)
    return Draft(inputs, mesh, passes.settings_of(inputs, mesh))


def test_every_pass_has_a_name_of_its_own_and_makes_a_field_of_its_draft() -> None:
    names = [each.name for each in (*PLANNING, *PROGRAM)]
    assert names == [
        "annotate", "formulate", "search", "lower", "make_plan", "differentiate", "recompute",
        "recompute_within_others", "reduce_in_float32", "scale_gradients", "separate", "fuse",
    ]  # fmt: skip
    assert {each.makes for each in (*PLANNING, *PROGRAM)} <= set(Draft.__dataclass_fields__)


def test_whoever_walks_the_passes_sees_the_value_that_each_makes(compiled: pw.Compiled) -> None:
    texts: dict[str, str] = {}

    def printed(each: Pass, draft: Any) -> Any:
        draft = applied(each, draft)
        texts[each.name] = str(getattr(draft, each.makes))
        return draft

    plan_on_mesh(compiled.inputs, compiled.mesh, printed)
    wanted = differentiated(compiled.graph)
    draft = passes.differentiated_program(compiled.inputs, compiled.local, wanted, printed)
    assert str(passes.fused(draft, printed)) == texts["fuse"] == str(compiled.program)
    assert list(texts) == [each.name for each in (*PLANNING, *PROGRAM)]
    assert texts["lower"] == str(compiled.local)
    assert texts["make_plan"] == str(compiled.plan)


def test_the_same_inputs_make_the_same_plan_whatever_the_options_in_force(compiled: pw.Compiled) -> None:
    with pw.auto_parallel_context(device_num=16, parallel_mode="data_parallel", search_mode="sharding_propagation"):
        planned = plan_on_mesh(compiled.inputs, compiled.mesh)
    assert planned.plan.model_dump_json() == compiled.plan.model_dump_json()
    assert str(planned.program) == str(compiled.local)


def test_the_time_of_each_pass_is_added_up_by_its_name(compiled: pw.Compiled) -> None:
    seconds: dict[str, float] = {}
    run(PLANNING, draft_of(compiled.inputs), timed(seconds))
    assert list(seconds) == [each.name for each in PLANNING]
    first = dict(seconds)
    run(PLANNING, draft_of(compiled.inputs), timed(seconds))
    assert all(seconds[name] > first[name] > 0 for name in first)


def test_what_a_pass_made_wrong_is_found_before_the_next_one(
    compiled: pw.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = passes.search
    monkeypatch.setattr(passes, "search", lambda *args: replace(search(*args), cost=-1.0))
    monkeypatch.setattr(passes, "lower", lambda *_: pytest.fail("the next pass ran"))
    with pytest.raises(VerifyError, match=r"the plan costs .*, not -1\.0"):
        run(PLANNING, draft_of(compiled.inputs), verified)


def test_of_several_meshes_the_cheapest_plan_is_taken_and_proven_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = [Mesh.of_sizes(sizes) for sizes in ((8,), (2, 4), (4, 2), (2, 2, 2))]
    proofs: list[int] = []
    exact = search.dynamic_programming
    monkeypatch.setattr(search, "dynamic_programming", lambda *a, **more: (proofs.append(1), exact(*a, **more))[1])
    for mode, most in (("sharding_propagation", 1), ("recursive_programming", 1), ("dynamic_programming", 4)):
        with pw.auto_parallel_context(search_mode=mode):
            inputs = pw.compile(Net(), (torch.ones(4, 8),), mesh={"dp": 8}).inputs
        each = [passes.search_on_mesh(inputs, mesh, math.inf) for mesh in meshes]
        proofs.clear()
        found = passes.search_on_cheapest_mesh(inputs, meshes)
        assert len(proofs) <= most
        scores = [draft.solution.cost * 1.02 ** len(draft.mesh.axes) for draft in each]
        first = next(draft for draft, score in zip(each, scores, strict=True) if score <= min(scores) * (1 + 1e-9))
        assert (found.mesh, found.solution) == (first.mesh, first.solution)
        assert found.elsewhere is not None
        assert found.elsewhere.meshes == len(meshes) - 1
        assert (found.below, found.found) == (math.inf, None)


def test_a_draft_is_left_as_it_is(compiled: pw.Compiled) -> None:
    draft = draft_of(compiled.inputs)
    assert run(PLANNING, draft).plan is not None
    assert draft.plan is None


def test_automatic_groups_are_a_hundredth_of_a_memory_limit_at_most() -> None:
    policies = FusionPolicies(Fusion(FusionMode.AUTO), None, Fusion(FusionMode.SIZE, 32))
    assert passes.small_groups(policies, None) is policies
    assert passes.small_groups(policies, float("inf")) is policies
    assert passes.small_groups(policies, 80e9) is policies
    few = passes.small_groups(policies, 500 * 2**20)
    assert few == FusionPolicies(Fusion(FusionMode.SIZE, 5), None, Fusion(FusionMode.SIZE, 32))
    assert passes.small_groups(policies, 1e6).allreduce == Fusion(FusionMode.SIZE, 1)
