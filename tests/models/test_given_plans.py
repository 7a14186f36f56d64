"""A plan that another run saved is followed operator by operator, without a search, or refused with what differs."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from bend import bend
from checks import assert_same_gradients, gradients
from torch import Tensor, nn
from zoo import CASES

import partway as pw
from partway.compiler import passes

pytestmark = pytest.mark.deep
MESH = {"dp": 2, "tp": 2}
EXACT = 1e-10


def forbid_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "search", lambda *_: pytest.fail("searched"))


class Net(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + x


def planned(model: nn.Module | None = None, rows: int = 8, **options: Any) -> pw.Compiled:
    return pw.compile(model or Net(), (torch.ones(rows, 16),), **options)


@pytest.mark.parametrize("name", ["mlp", "convnet", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_same_program_and_the_same_numbers_without_a_search(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, file = CASES[name], tmp_path / "plans" / "plan.json"
    plain = case.build()
    first: Any = pw.shard(copy.deepcopy(plain), mesh=MESH)
    loss, expected = gradients(plain, case.batch())
    gradients(first, case.batch())
    first.plan.save(file)
    forbid_search(monkeypatch)
    second: Any = pw.shard(copy.deepcopy(plain), plan=file)
    found_loss, found = gradients(second, case.batch())
    torch.testing.assert_close(found_loss, loss, rtol=EXACT, atol=EXACT)
    assert_same_gradients(found, expected, EXACT)
    assert str(second.program) == str(first.program)
    assert str(second.plan.certificate) == "none: the strategies are those of a plan that was given"
    assert second.plan.operators == first.plan.operators


SCRIPT = """
    import sys

    import torch
    from torch import nn

    import partway as pw


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, given):
            # this run is of another script, on other lines
            given = given.to(given.dtype)
            middle = torch.relu(self.up(given))
            return self.down(middle) + given


    compiled = pw.compile(Net(), (torch.ones(8, 16),), plan=sys.argv[1])
    print(compiled.plan.certificate, *(o.strategy for o in compiled.plan.operators), sep="\\n")
"""


def test_another_process_and_other_lines_follow_it(tmp_path: Path) -> None:
    plan = planned(mesh=MESH, in_strategy=(("tp", "dp"),)).plan
    renamed = plan.model_copy(update={"inputs": tuple(
        t.model_copy(update={"name": "given"}) if t.name == "x" else t for t in plan.inputs
    )})  # fmt: skip
    renamed.save(tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py", "plan.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "none: the strategies are those of a plan that was given", *(o.strategy for o in plan.operators)
    ]  # fmt: skip


def test_of_several_plans_each_call_follows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    split = {"mesh": MESH, "parameter_plan": {"up.weight": ("tp", None)}}
    plans = tuple(planned(rows=rows, **split).plan for rows in (8, 4))
    forbid_search(monkeypatch)
    model: Any = pw.shard(Net(), plan=plans)
    for rows, plan in zip((8, 4, 8), (*plans, plans[0]), strict=True):
        model(torch.ones(rows, 16))
        assert model.plan.operators == plan.operators
    with pytest.raises(pw.StrategyError) as found:
        model(torch.ones(2, 16))
    assert "is not one of this call; of 2 plans the nearest differs:" in str(found.value)
    assert "input 'x': is input float32[8, 16] in the plan, and input float32[2, 16] here" in str(found.value)


def test_other_annotations_have_to_agree_with_it() -> None:
    plan = planned(mesh=MESH, in_strategy=(("dp", None),)).plan
    assert planned(plan=plan, in_strategy=(("dp", None),)).plan.operators == plan.operators
    with pytest.raises(
        pw.StrategyError, match=r"input 'x': the plan has S0 R, which \(None, 'dp'\) does not allow; drop"
    ):
        planned(plan=plan, in_strategy=((None, "dp"),))


class Deeper(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(torch.sigmoid(x)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"rows": 4},
            ["input 'x': is input float32[8, 16] in the plan, and input float32[4, 16] here; save a plan of"],
        ),
        (
            {"model": Net(48)},
            [
                "input 'up.weight': is parameter float32[32, 16] in the plan, and parameter float32[48, 16] here",
                "the plan: aten.linear.default float32[8, 32] in up",
            ],
        ),
        (
            {"model": Deeper()},
            [
                "operators from 0 of the plan: none there, and aten.sigmoid.default float32[8, 16] here",
                "none there, and aten.tanh.default float32[8, 16] here",
            ],
        ),
        ({"mesh": {"tp": 4}}, ["mesh: it is tp=4, the plan's dp=2, tp=2; leave the mesh out"]),
        ({"plan": "nowhere.json"}, ["plan: could not read a plan from 'nowhere.json'"]),
        ({"plan": 3}, ["plan: 3 (int) is not a plan; give the path of a file that plan.save wrote, or a Plan"]),
    ],
)
def test_a_plan_of_another_call_is_refused_with_what_differs(other: dict[str, Any], words: list[str]) -> None:
    plan = planned(mesh=MESH).plan
    with pytest.raises(pw.StrategyError) as found:
        planned(**{"plan": plan, **other})
    for text in words:
        assert text in str(found.value)


class WithLoss(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (y := super().forward(x)), y.square().mean()


def test_a_plan_of_training_serves_evaluation_though_it_splits_what_is_beside_a_loss() -> None:
    x, batch = torch.randn(4096, 16), (("dp", None),)
    plan = pw.compile(WithLoss(), (x,), mesh=MESH, in_strategy=batch).plan
    assert plan.outputs[0].codes != ("R", "R")
    trained: Any = pw.shard(net := WithLoss(), plan=plan)
    with torch.no_grad():
        found, expected = trained(x), net(x)
    assert trained.plan.outputs[0].codes == plan.outputs[0].codes
    torch.testing.assert_close(found, expected)
    pw.set_auto_parallel_context(whole_results=True)
    refused: Any = pw.shard(WithLoss(), plan=plan)
    with torch.no_grad(), pytest.raises(pw.StrategyError, match=r"'result\[0\]': the plan has S0.*not an option here"):
        refused(x)


def test_what_is_no_option_any_more_is_named() -> None:
    with pw.rule("partway_tests::bend", "a b -> a b", whole="b"):
        x = torch.ones(8, 8)
        plan = pw.compile(bend, (x,), mesh=MESH, in_strategy=(("dp", None),)).plan
    assert plan.operators[0].factors[0] == "a"
    with pytest.raises(pw.StrategyError, match=r"operator bend: the plan has \(dp:a .*\), which is not an option here"):
        pw.compile(bend, (torch.ones(8, 8),), plan=plan)


def test_the_cache_knows_plans_by_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTWAY_CACHE", raising=False)
    monkeypatch.delenv("PARTWAY_VERIFY", raising=False)
    with pw.auto_parallel_context(compile_cache_path=str(tmp_path)):
        for weight in ((None, "tp"), ("dp", "tp"), ("tp", None)):
            plan = planned(mesh=MESH, parameter_plan={"up.weight": weight}).plan
            plan.save(tmp_path / "plan.json")
            assert planned(plan=plan).plan.parameters == plan.parameters
            with pw.auto_parallel_context(strategy_ckpt_config={"load_file": str(tmp_path / "plan.json")}):
                assert planned().plan.parameters == plan.parameters
