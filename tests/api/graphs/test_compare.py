"""How two plans, calls or runs differ, as `partway diff` says it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from graph_model import ANNOTATIONS, CALL, GOLDEN, MESH, Net, batch, compare, train
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import partway as pw
from partway.cli import app
from partway.graphs.compare import compared
from partway.graphs.saved import SavedCall


def diff(a: Path, b: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["diff", str(a), str(b), *options])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the small model with other annotations, and a third like the first."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTWAY_SAVE_GRAPHS", "1")
        for name, more in (*ANNOTATIONS.items(), ("again", {})):
            patch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(root / name))
            train(**more)
    return root


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch writes other operators")
def test_two_annotations_of_a_model_differ_in_layouts_strategies_and_collectives(runs: Path) -> None:
    assert diff(runs / "tp", runs / "dp").exit_code == 1
    golden = (GOLDEN / "diff.txt").read_text()
    assert compare(runs / "tp", runs / "dp") == golden, "if this is meant, python tests/helpers/graph_model.py --write"


def test_equal_runs_do_not_differ_whatever_their_passes_took(runs: Path) -> None:
    found = diff(runs / "tp", runs / "again")
    assert found.exit_code == 0
    assert found.output.splitlines()[2:] == ["", "the plans are the same"]


@pytest.mark.parametrize("a", ["", "rank_0", f"rank_0/{CALL}", f"rank_0/{CALL}/plan.json"])
@pytest.mark.parametrize("b", ["", f"rank_0/{CALL}/plan.json"])
def test_runs_ranks_calls_and_plans_can_be_compared_with_each_other(runs: Path, a: str, b: str) -> None:
    found = diff(runs / "tp" / a, runs / "dp" / b)
    assert found.exit_code == 1
    assert "layouts that differ" in found.output
    assert ("passes that left something else" in found.output) is not (a + b).endswith("plan.json")
    assert diff(runs / "tp" / a, runs / "tp" / b).exit_code == 0


def test_a_section_that_is_long_is_cut_and_says_so(runs: Path) -> None:
    found = diff(runs / "tp", runs / "dp", "--rows", "1")
    assert "  ... and 3 more; --rows 0 shows all\n" in found.output
    assert "more; --rows" not in diff(runs / "tp", runs / "dp", "--rows", "0").output


def test_layers_that_differ_alike_are_one_entry() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    calls = []
    for strategy in (("tp", None), (None, "tp")):
        plan = {"layers.*.weight": strategy}
        made = pw.compile(Deep(), (torch.ones(4, 8),), mesh=MESH, in_strategy=(("dp", None),), parameter_plan=plan)
        calls.append(SavedCall(Path("plan"), None, made.plan))
    text = compared(*calls).text()
    assert "  parameter layers.*.weight (3 times)\n" in text


def test_the_calls_of_runs_are_matched_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sum()

    def g(x: Tensor) -> Tensor:
        return x.mean()

    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    for run, order in (("a", (f, g, f)), ("b", (g, f))):
        monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path / run))
        for one in order:
            pw.compile(one, (torch.ones(4),), mesh={"d": 2}, in_strategy=(("d",),))
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 1
    assert found.output.count("the plans are the same") == 2
    last = found.output.splitlines()[-1]
    assert re.fullmatch(r"only in A: 002_.*f", last)


def test_another_mesh_is_told_with_the_totals(runs: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    pw.compile(Net(), batch(), mesh={"dp": 4}, in_strategy=(("dp", None), None)).plan.save(plan)
    found = diff(runs / "dp", plan)
    assert re.search(r"^mesh +dp=2, tp=2 +dp=4 +another mesh$", found.output, re.M)


def test_a_call_that_could_not_be_planned_is_told(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path))
    with pytest.raises(pw.StrategyError):
        train(parameter_plan={"up.weight": ("tp", None), "u?.weight": (None, "tp")})
    found = diff(runs / "tp", tmp_path)
    assert found.exit_code == 1
    assert "planning B failed: StrategyError: annotations contradict each other:" in found.output
    assert diff(tmp_path, tmp_path).exit_code == 0


# -- What cannot be compared

WANTED = (
    "give a folder that PARTWAY_SAVE_GRAPHS has written (that of PARTWAY_SAVE_GRAPHS_PATH, a rank's or a call's), or a "
    "file that plan.save has written"
)


def error_of(result: Result) -> str:
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_what_is_not_there_is_an_error(runs: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    expected = f"partway diff: there is nothing at {str(missing)!r}; {WANTED}"
    assert error_of(diff(runs / "tp", missing)) == error_of(diff(missing, runs / "tp")) == expected


def test_a_folder_without_graphs_is_an_error(runs: Path, tmp_path: Path) -> None:
    expected = f"partway diff: {str(tmp_path)!r} holds no graphs that Partway saved; {WANTED}"
    assert error_of(diff(tmp_path, runs / "tp")) == expected


def test_a_file_that_is_no_plan_is_an_error(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json' holds no plan of this version: axes: Field required" in error_of(
        diff(runs / "tp", tmp_path / "plan.json")
    )


def test_graphs_of_another_version_are_an_error(runs: Path, tmp_path: Path) -> None:
    data = json.loads((runs / "tp" / "rank_0" / CALL / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**data, "format": "partway graphs 2"}))
    assert error_of(diff(runs / "tp", tmp_path)) == (
        f"partway diff: {str(tmp_path / 'index.json')!r} is no index of this version of Partway (format: Input should "
        "be 'partway graphs 1'); save the graphs again"
    )
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "index.json").unlink()
    (tmp_path / "rank_0" / "calls.txt").write_text("partway graphs 2: calls\n000_f\n")
    assert "calls.txt' is of another version of Partway; save the graphs again" in error_of(diff(tmp_path, runs / "tp"))


def test_a_folder_whose_plan_is_lost_is_an_error(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes((runs / "tp" / "rank_0" / CALL / "index.json").read_bytes())
    assert "could not read a plan from" in error_of(diff(runs / "tp", tmp_path))
