"""The benchmark of planning time: its cases, what it counts as a miss, and that a run in its own process works."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import plan_time
import pytest
import typer
from plan_time import AUTOPARALLEL, BARS, CASES, QUICK, Case, Figures, Run, chosen, figures, measured

SMALL = next(case for case in CASES if case.name == "Llama-3-8B, 1 layer, 8")
SECONDS = dict.fromkeys(plan_time.PASSES, 0.0) | {
    "capture": 30.0, "formulate": 0.5, "search": 0.5, "lower": 0.5, "make_plan": 0.5, "differentiate": 0.5,
}  # fmt: skip
RUN = Run(SECONDS, 1e9, operators=7, vertices=12, width=3, gap=0.0, wire=2e6)


def slower(run: Run, **seconds: float) -> Run:
    return replace(run, seconds={**run.seconds, **seconds})


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert Case("Llama-3-8B", 8, (32, 8)).name == "Llama-3-8B, 8 layers, 32x8"
    assert Case("Llama-3-405B", 126, (64, 32, 8)).batch == 64
    assert (SMALL.batch, SMALL.devices, SMALL.repeats(3)) == (8, 8, 3)
    assert Case("Llama-3-8B", 32, (8,)).repeats(3) == 1


def test_every_figure_of_autoparallel_is_beside_a_case() -> None:
    assert set(AUTOPARALLEL) <= {(case.model, case.layers, case.sizes) for case in CASES}


def test_only_and_quick_choose_cases() -> None:
    assert chosen("", quick=False) == CASES
    assert chosen("", quick=True) == QUICK
    assert [case.name for case in chosen("405B", quick=False)] == ["Llama-3-405B, 126 layers, 64x32x8"]
    with pytest.raises(
        typer.BadParameter, match="no case contains '9 layers'; the cases are: Llama-3-8B, 1 layer, 8; "
    ):
        chosen("9 layers", quick=True)


def test_the_search_is_formulating_and_solving() -> None:
    assert RUN.search == 1.0
    assert RUN.beside_capture == 2.5


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (RUN, ()),
        (slower(RUN, search=1.6), ("search",)),
        (slower(RUN, differentiate=8.0), ("beside capture",)),
        (replace(RUN, peak=1.5e9), ("peak",)),
        (slower(replace(RUN, peak=2e9), formulate=9.0), tuple(BARS)),
    ],
)
def test_a_case_misses_the_bars_that_it_reaches(run: Run, missed: tuple[str, ...]) -> None:
    assert Figures(SMALL, (run,)).misses() == missed


def test_a_case_may_have_a_bar_of_its_own_for_all_but_capture() -> None:
    case = replace(SMALL, within=2.0)
    assert Figures(case, (RUN,)).misses() == ("beside capture",)
    assert Figures(case, (slower(RUN, lower=-0.1, search=1.6),)).misses() == ("search", "beside capture")
    assert Figures(replace(case, within=3.0), (slower(RUN, search=0.9),)).misses() == ()


def test_the_median_counts_and_a_run_that_is_over_ends_its_case() -> None:
    runs = iter([RUN, slower(RUN, search=30.0), RUN])
    found = figures(SMALL, 3, lambda _: next(runs))
    assert (len(found.runs), found.misses()) == (3, ())
    given = iter([RUN, "over 120 CPU s", RUN])
    found = figures(SMALL, 3, lambda _: next(given))
    assert (len(found.runs), found.misses()) == (1, ("over 120 CPU s",))


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own() -> None:
    run = measured(SMALL)
    assert isinstance(run, Run)
    assert set(run.seconds) == set(plan_time.PASSES)
    assert min(run.seconds.values()) >= 0 < sum(run.seconds.values())
    assert run.peak > 1e8
    assert (run.gap, run.width) == (0.0, 3)


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process of the run reads its limit from its own list of cases, so the list of a copy is another one."""
    text = Path(plan_time.__file__).read_text(encoding="utf-8").replace("limit: int = 300", "limit: int = 1")
    copy = tmp_path / "plan_time.py"
    copy.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path(plan_time.__file__).parent))  # of what it imports
    monkeypatch.setattr(plan_time, "__file__", str(copy))
    assert measured(replace(SMALL, limit=1)) == "over 1 CPU s"


def test_figures_are_written_as_data() -> None:
    data = plan_time._as_data([Figures(SMALL, (RUN,)), Figures(SMALL, (), "over 6 GB")])
    again = json.loads(json.dumps(data))
    assert again["cases"][0]["runs"] == [json.loads(json.dumps(asdict(RUN)))]
    assert again["cases"][1]["misses"] == ["over 6 GB"]
    assert again["autoparallel"]["cases"][0]["mesh"] == [8]
    assert plan_time._table([Figures(SMALL, (RUN,)), Figures(SMALL, (), "over 6 GB")]).row_count == 2
