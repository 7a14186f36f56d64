"""What `make gpu` runs: stages that end in time, and a page that says what each came to. (Without a GPU.)"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import session
from session import ROOT, Outcome, Stage, page, run, run_all, stages

PYTHON = sys.executable


def stage(code: str, seconds: float = 60, **other: Any) -> Stage:
    return Stage("a stage", [PYTHON, "-c", code], seconds, **other)


def test_a_stage_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    code = "import subprocess as s, sys; print(s.Popen(['sleep', '600']).pid, flush=True); s.run(['sleep', '600'])"
    outcome = run(stage(code), 1, tmp_path, {}, 2.0)
    assert outcome.word == "ran out of time"
    child = Path("/proc", (tmp_path / "01-a-stage.log").read_text().split()[0])
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        time.sleep(0.01)  # its parent reaps it


def test_a_stage_passes_or_fails_by_its_status_and_shows_its_last_line_or_its_figures(tmp_path: Path) -> None:
    passed = run(stage("print('one'); print('two')", figures=1), 1, tmp_path, {}, 60)
    assert (passed.word, passed.says, passed.lines) == ("passed", "", ["two"])
    failed = run(stage("raise ValueError('why')"), 2, tmp_path, {}, 60)
    assert (failed.word, failed.says) == ("failed", "ValueError: why")


def test_tests_tell_how_they_went_also_where_their_run_is_ended(tmp_path: Path) -> None:
    lines = [
        json.dumps({"test": f"test {i}", "outcome": kind}) for i, kind in enumerate(["passed", "failed", "skipped"])
    ]
    code = f"import os, time; open(os.environ['{session.REPORT}'], 'w').write({chr(10).join(lines)!r} + '\\n{{\"te'); "
    ended = run(stage(code + "time.sleep(600)", tests=True), 1, tmp_path, {}, 2.0)
    assert (ended.word, ended.says) == ("failed, and ran out of time", "1 passed, 1 failed, 1 skipped")
    assert ended.lines == ["test 1"]
    none = run(stage("print('no module named x'); exit(2)", tests=True), 2, tmp_path, {}, 60)
    assert (none.word, none.says) == ("failed", "no test has ended; no module named x")


def test_the_plugin_writes_each_test_as_it_ends(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert False\n@pytest.mark.skip\ndef test_not(): pass\n"
    )
    report = tmp_path / "report.jsonl"
    subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "partway_gpu_report", "test_some.py"], cwd=tmp_path, check=False,
        capture_output=True, env={"PYTHONPATH": str(ROOT / "tests" / "gpu"), session.REPORT: str(report)},
    )  # fmt: skip
    assert [each["outcome"] for each in session.read_report(report)] == ["passed", "failed", "skipped"]


def test_what_does_not_get_its_turn_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LEAST", 0.5)
    slow = stage("import time; time.sleep(600)", 2)
    outcomes = run_all([slow, slow], tmp_path, {}, 2.2 / 60, ["a GPU"])
    assert [each.word for each in outcomes] == ["ran out of time", "not its turn"]
    text = (tmp_path / "summary.md").read_text()
    assert "* a GPU\n" in text
    assert "| a stage | not its turn |  |  |\n" in text


def test_the_page_is_a_page(tmp_path: Path) -> None:
    many = Outcome(stage("", figures=99), "passed", 1.0, "", [f"figure {i}" for i in range(99)])
    text = page(["a GPU"], [many, many]).splitlines()
    assert len(text) <= session.LINES + 2
    assert text[-1].endswith("more lines, in the logs")


@pytest.mark.parametrize("dry", [False, True])
def test_what_stages_run_is_there(tmp_path: Path, dry: bool) -> None:
    every = stages(tmp_path, dry, 4)
    assert sum(each.seconds for each in every[:5]) <= 9 * 60  # the most that matters gets its turn
    for each in every:
        for word in each.command[1:]:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), word
    on_gpu = [word for each in every for word in each.command if word == "cuda"]
    assert bool(on_gpu) != dry


def test_a_python_that_lacks_something_is_told_so_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "NEEDED", ("torch", "no_such_module"))
    with (
        pytest.raises(
            SystemExit, match=r"has no no_such_module; `make gpu-wheels` fetches what it can into .*/none, w"
        ),
        session.prepared(tmp_path / "none"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_all_of_it_runs_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests" / "gpu" / "session.py"), "--out", str(tmp_path), "--dry"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launched tests | passed" in (tmp_path / "summary.md").read_text()
