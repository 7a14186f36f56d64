"""The benchmark of two installs: that its workers answer, and what misses the bar (no times)."""

from __future__ import annotations

import sys
from pathlib import Path

import before_after
import pytest
from before_after import CASES, measured
from typer.testing import CliRunner


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.model == "mlp"], ids=lambda case: case.name)
def test_both_installs_answer_every_round(case: before_after.Case) -> None:
    found = measured(case, {"before": Path(sys.executable), "after": Path(sys.executable)}, 2)
    assert {name: len(seconds) for name, seconds in found.items()} == {"before": 2, "after": 2}
    assert all(second > 0 for seconds in found.values() for second in seconds)


@pytest.mark.parametrize(("after", "status", "word"), [(1.04, 0, "holds"), (1.06, 1, "missed")])
def test_a_case_above_the_bar_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, after: float, status: int, word: str
) -> None:
    monkeypatch.setattr(before_after, "measured", lambda *_: {"before": [1.0, 1.0], "after": [after, after]})
    shown = CliRunner().invoke(before_after.app, ["--only", "plan, mlp"])
    assert shown.exit_code == status
    assert word in shown.output
