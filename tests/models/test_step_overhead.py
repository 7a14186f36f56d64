"""The benchmark of steps: its cases, what misses a bar, and that its parts run at a small size (no times)."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import step_overhead
import torch
import typer
from step_contenders import layout
from step_graphs import inputs_of, local_step
from step_overhead import BARE, Figures, Overhead, Simulation, Size, Steps, cases, chosen, measured

import partway as pw
from partway.measure.contenders import turns
from partway.measure.workloads import tiny

SMALL = Size(quick=True)


def test_cases_have_names_of_their_own() -> None:
    found = cases((2, 4))
    assert len({case.name for case in found}) == len(found)
    assert [case.name for case in chosen("mixed", (2, 4))] == ["gpt2, mixed, 4 processes"]
    with pytest.raises(typer.BadParameter, match="no case contains 'vit'; the cases are: gpt2, data, 2 processes; "):
        chosen("vit", (2,))


def test_layouts_are_of_all_ranks() -> None:
    assert [layout(name, 4).mesh for name in ("data", "tensor", "mixed")] == [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}]
    with pytest.raises(ValueError, match=r"no layout 'mixed' of 2 ranks; take data, tensor or \(from 4 ranks\) mixed"):
        layout("mixed", 2)


def test_a_case_misses_the_bars_that_it_is_above() -> None:
    seconds = {"partway": (1.0, 1.1, 9.0), "DDP": (1.0, 1.0, 9.0), BARE: (0.9, 1.0, 8.0)}
    found = Figures("x", seconds, seconds, {"DDP": 1.0})
    assert (found.misses(), found.ratios("DDP")) == ((), (1.0, 1.1, 1.0))
    assert Figures("x", seconds, seconds, {"DDP": 0.9}).misses() == ("DDP",)
    assert Figures("x", seconds, seconds, {}, excess=0.1).misses() == (BARE,)
    assert Figures("x", seconds, seconds, {}, excess=0.2).misses() == ()


def test_contenders_take_turns() -> None:
    seen: list[str] = []

    def run(name: str) -> tuple[float, float]:
        seen.append(name)
        return 2.0, 1.0

    whole, part = turns({name: lambda name=name: run(name) for name in "ab"}, rounds=2, warm=1)  # type: ignore[misc]
    assert (seen, whole["a"], part["b"]) == (list("ababab"), (2.0, 2.0), (1.0, 1.0))


def test_a_single_rank_alone_computes_what_the_model_does() -> None:
    work = tiny("gpt2")
    batch = work.tensors(4, torch.float32)
    with pw.auto_parallel_context(device_num=1):
        model = pw.shard(work.model(torch.float32), mesh={"dp": 1})
        step = local_step(model, batch, 0)
        assert torch.equal(step.forward(*step.inputs)[0], model(*batch))
        assert min(step.timed()) > 0
        model(*batch).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        step.loss(inputs_of(model, batch)).backward()
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("case", [Simulation("gpt2"), Overhead("mlp", launched=False)], ids=lambda case: case.name)
def test_figures_are_shown_and_written(case: step_overhead.Case) -> None:
    found = measured(case, SMALL, 1)
    assert all(min(seconds) > 0 for seconds in found.seconds.values())
    assert step_overhead._table([found]).row_count == len(found.seconds)
    assert json.loads(json.dumps(step_overhead._as_data([found], SMALL)))["size"] == asdict(SMALL)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("how", ["data", "tensor"])
def test_contenders_agree_and_run(how: str) -> None:
    found = measured(Steps("gpt2", how, 2), SMALL, 1)
    assert set(step_overhead.BARS[how]) < set(found.seconds) == set(found.computed)
