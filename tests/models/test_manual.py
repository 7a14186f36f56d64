"""Manual functions inside a planned GPT: what is planned around them, and all that is done with a plan, counts them
in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hand_written
import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, assert_sends_as_planned, gradients, whole

import partway as pw
from partway.strategy import Mesh

Ranks = Callable[..., list[Any]]
EXACT = 1e-12
MANUALS = {"ring_attention", "split_mlp", "exchanged_experts", "split_loss"}


def assert_same_step(plain: Any, model: Any) -> None:
    """The loss and all gradients are those of one device."""
    loss, expected = gradients(plain, hand_written.batch())
    found_loss, found = gradients(model, hand_written.batch())
    assert_same_loss(whole(found_loss), loss, EXACT)
    assert_same_gradients(whole(found), expected, EXACT)


def test_a_gpt_with_manuals_has_the_gradients_of_one_device() -> None:
    plain, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    assert_same_step(plain, model)
    assert_same_step(plain, model)  # planned above, now only run
    operators = {o.operator for o in model.plan.operators}
    assert {f"manual.{name}" for name in MANUALS} <= operators
    layouts = {o.name: o.results for o in model.plan.operators}
    assert layouts["ring_attention"] == (("S0", "S2"),)
    assert layouts["split_loss"] == (("P", "R"),)


def test_what_manuals_send_is_in_the_plan() -> None:
    _, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    gradients(model, hand_written.batch())
    assert_sends_as_planned(model, hand_written.batch())
    by_hand = [c for c in model.plan.collectives if c.tensor.startswith("ring_attention.")]
    assert [(c.phase, str(c.kind), c.axes) for c in by_hand] == [
        *[("forward", "exchange", ("tp",))] * 6, *[("backward", "exchange", ("tp",))] * 6
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fusion",
    [{"mode": "index", "config": [6]}, pytest.param({"mode": "size", "config": 1}, marks=pytest.mark.slow)],
)
def test_gradients_of_weights_of_manuals_are_grouped_with_the_others(fusion: Any) -> None:
    pw.set_auto_parallel_context(comm_fusion={"allreduce": fusion})
    plain, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    assert_same_step(plain, model)
    inside = {f"layers.2.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    groups = [set(c.members) for c in model.program.collectives]
    assert any(group & inside and group - inside for group in groups)


@pytest.mark.slow
def test_they_run_by_inductor() -> None:
    pw.set_auto_parallel_context(backend="inductor")
    plain, model = hand_written.pair(mesh={"dp": 1, "tp": 2})
    assert_same_step(plain, model)


@pytest.mark.slow
def test_a_saved_plan_has_them(tmp_path: Any) -> None:
    plain, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    gradients(model, hand_written.batch())
    model.plan.save(tmp_path / "plan.json")
    again = pw.Plan.load(tmp_path / "plan.json")
    assert again == model.plan
    plain, followed = hand_written.pair(plan=str(tmp_path / "plan.json"))
    assert_same_step(plain, followed)
    assert followed.plan.mesh == Mesh({"dp": 2, "tp": 4})
    assert [o.strategy for o in followed.plan.operators] == [o.strategy for o in model.plan.operators]


def test_a_cached_plan_has_them(folder: Any) -> None:
    plain, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    assert_same_step(plain, model)
    written = sorted(folder.rglob("*.plan"))
    assert written
    plain, again = hand_written.pair(mesh={"dp": 2, "tp": 4})
    assert_same_step(plain, again)
    assert sorted(folder.rglob("*.plan")) == written


@pytest.mark.slow
def test_gradients_wait_in_no_sync() -> None:
    plain, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    first, second = hand_written.batch(), {k: v.flip(0) for k, v in hand_written.batch().items()}
    for each in (plain, model):
        each.zero_grad()
    gradients(model, first)
    model.zero_grad()
    with model.no_sync():
        model(**first).backward()
    model(**second).backward()
    plain(**first).backward()
    plain(**second).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_gradients({name: whole(p.grad) for name, p in model.named_parameters()}, expected, EXACT)


def test_explain_says_what_is_written_by_hand() -> None:
    _, model = hand_written.pair(mesh={"dp": 2, "tp": 4})
    gradients(model, hand_written.batch())
    text = str(model.plan.explain("split_mlp"))
    assert "split_mlp = manual.split_mlp" in text
    assert "written by hand in the manual function split_mlp, which is taken as it is" in text
    assert "in split_mlp: return pw.ops.all_reduce(" in text  # the line of the person's code


# -- on processes


def steps(sizes: dict[str, int]) -> None:
    plain, model = hand_written.pair(mesh=sizes)
    assert_same_step(plain, model)
    assert_same_step(plain, model)
    assert_sends_as_planned(model, hand_written.batch())


@pytest.mark.gloo
@pytest.mark.parametrize("sizes", [pytest.param({"dp": 1, "tp": 2}, marks=pytest.mark.slow), {"dp": 2, "tp": 2}])
def test_processes_run_them_alike(on_ranks: Ranks, sizes: dict[str, int]) -> None:
    on_ranks(sizes["dp"] * sizes["tp"], steps, sizes)


def differ() -> None:
    manual = pw.manual(lambda x: x * 2, in_strategy=(("tp", None),), mesh={"tp": 2})
    with pytest.raises(pw.VerifyError, match=r"output 0 of .* over tp, is said to be whole, .* ranks differ in 8 of 8"):
        manual(torch.arange(16.0).view(4, 4)[:, :4])


@pytest.mark.gloo
def test_processes_say_where_what_is_said_to_be_whole_differs(on_ranks: Ranks, monkeypatch: Any) -> None:
    on_ranks(2, differ)
