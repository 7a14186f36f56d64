"""How two plans, calls or runs differ, as `partway diff` says it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from graph_model import CALL, Net, batch, train
from torch import Tensor
from typer.testing import CliRunner, Result

import partway as pw
from partway.commands.cli import app


def diff(a: Path, b: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["diff", str(a), str(b), *options])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the small model with other annotations, a third like the first, and that at the other level."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name, more in {"tp": {}, "dp": {"parameter_plan": {}}, "again": {}, "every": {}}.items():
            patch.setenv("PARTWAY_SAVE_GRAPHS", "2" if name == "every" else "1")
            patch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(root / name))
            train(**more)
    return root


def test_two_annotations_of_a_model_differ_by_operators_and_end_in_a_verdict(runs: Path) -> None:
    found = diff(runs / "tp", runs / "dp", "--rows", "0")
    assert found.exit_code == 1
    lines = found.output.splitlines()
    assert lines[:3] == [f"A  {runs / 'tp' / 'rank_0' / CALL}", f"B  {runs / 'dp' / 'rank_0' / CALL}", ""]
    assert [line for line in lines[3:-1] if line and not line.startswith(" ")] == ["lower", "make_plan", "fuse"]
    assert "  -parameter up.weight: float32[16, 8] [dp:R tp:S0]    # annotated ('tp', None)" in lines
    assert "  +parameter up.weight: float32[16, 8] [dp:S0 tp:S0]" in lines
    assert lines[-1] == (
        "they differ first in what lower left; another strategy: linear, relu, draw_default, mul_tensor, mul_scalar, "
        "linear_1 and 1 more"
    )


def test_what_is_below_an_operator_is_told_with_it(runs: Path) -> None:
    lines = diff(runs / "tp", runs / "dp", "--rows", "0").output.splitlines()
    at = lines.index("  -linear: float32[4, 16] = aten.linear.default(x, up.weight, up.bias)")
    assert lines[at + 1].startswith("      # splits dp:_1 tp:n: ")
    assert lines[at + 2].startswith("      # backward all_reduce over dp of up.weight: 2 ranks send 256 B each, ")


def test_equal_runs_do_not_differ(runs: Path) -> None:
    found = diff(runs / "tp", runs / "again")
    assert found.exit_code == 0
    assert found.output.splitlines()[2:] == ["", "the plans are the same"]


def test_runs_of_two_levels_are_compared_by_what_both_have(runs: Path) -> None:
    assert diff(runs / "tp", runs / "every").exit_code == 0
    assert diff(runs / "every", runs / "dp").output.count("\nlower\n") == 1


def test_where_source_lines_stand_does_not_matter(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "tp", tmp_path / "moved")
    for path in (tmp_path / "moved").rglob("*.txt"):
        path.write_text(re.sub(r"graph_model.py:(\d+)", r"graph_model.py:1\1", path.read_text()))
    assert diff(runs / "tp", tmp_path / "moved").exit_code == 0


def test_a_pass_that_only_one_left_is_a_difference(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "tp", tmp_path / "less")
    next((tmp_path / "less").rglob("*_fuse.txt")).unlink()
    found = diff(runs / "tp", tmp_path / "less")
    assert found.exit_code == 1
    assert found.output.endswith("\nthey differ first in what fuse left\n")


@pytest.mark.parametrize("a", ["", "rank_0", f"rank_0/{CALL}", f"rank_0/{CALL}/plan.json"])
@pytest.mark.parametrize("b", ["", f"rank_0/{CALL}/plan.json"])
def test_runs_ranks_calls_and_plans_can_be_compared_with_each_other(runs: Path, a: str, b: str) -> None:
    found = diff(runs / "tp" / a, runs / "dp" / b)
    assert found.exit_code == 1
    assert "\nmake_plan\n" in found.output
    assert ("\nlower\n" in found.output) is not (a + b).endswith("plan.json")
    assert diff(runs / "tp" / a, runs / "tp" / b).exit_code == 0


def test_of_a_run_that_was_repeated_the_last_is_compared(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "tp" / "rank_0", tmp_path / "rank_0")
    shutil.copytree(runs / "tp" / "rank_0", tmp_path / "rank_0.2")
    shutil.copytree(runs / "dp" / "rank_0", tmp_path / "rank_0.10")
    shutil.copytree(runs / "tp" / "rank_0", tmp_path / "rank_1")
    assert diff(tmp_path, runs / "dp").exit_code == 0


def test_what_is_long_is_cut_and_says_so(runs: Path) -> None:
    found = diff(runs / "tp", runs / "dp", "--rows", "1")
    assert re.search(r"\nlower\n  -.*\n  \.\.\. and \d+ more lines; --rows 0 shows all\n\nmake_plan\n", found.output)
    assert "more lines; --rows" not in diff(runs / "tp", runs / "dp", "--rows", "0").output


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
    *_, alone, verdict = found.output.splitlines()
    assert re.fullmatch(r"only A has 002_.*f", alone)
    assert verdict == "2 of 3 calls are the same"


def test_another_mesh_is_told(runs: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    pw.compile(Net(), batch(), mesh={"dp": 4}, in_strategy=(("dp", None), None)).plan.save(plan)
    found = diff(runs / "dp", plan)
    assert "\n  -mesh dp=2, tp=2\n" in found.output
    assert "\n  +mesh dp=4\n" in found.output


def test_a_call_that_could_not_be_planned_is_told(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path))
    with pytest.raises(pw.StrategyError):
        train(parameter_plan={"up.weight": ("tp", None), "u?.weight": (None, "tp")})
    found = diff(runs / "tp", tmp_path)
    assert found.exit_code == 1
    assert "\nerror\n  +StrategyError: annotations contradict each other:" in found.output
    assert diff(tmp_path, tmp_path).exit_code == 0
    (folder,) = (tmp_path / "rank_0").iterdir()
    assert error_of(diff(runs / "tp" / "rank_0" / CALL / "plan.json", tmp_path)) == (
        f"partway diff: the call in {str(folder)!r} has no plan, since planning it failed: StrategyError: annotations "
        "contradict each other:"
    )


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
    (tmp_path / "index.txt").write_text("partway graphs 3, level 1: 000_f\n")
    assert error_of(diff(runs / "tp", tmp_path)) == (
        f"partway diff: {str(tmp_path / 'index.txt')!r} is of another version of Partway; save the graphs again"
    )


def test_a_folder_whose_plan_is_lost_is_an_error(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "index.txt").write_bytes((runs / "tp" / "rank_0" / CALL / "index.txt").read_bytes())
    assert "could not read a plan from" in error_of(diff(runs / "tp" / "rank_0" / CALL / "plan.json", tmp_path))
