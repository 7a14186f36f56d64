"""`make demo`, with one pass over the data."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import partway as pw

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("net", ["vit", pytest.param("resnet", marks=pytest.mark.slow)])
def test_the_demo_shows_the_plan_and_equal_losses_and_writes_its_files(
    python: Runner, tmp_path: Path, net: str
) -> None:
    done = python(DEMO, "--net", net, "--epochs", "1", "--devices", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    for word in ("operator", "strategy", "layout", "collectives", "sent", "predicted"):
        assert re.search(rf"^ operator .*\b{word}\b|^ {word} ", done.stdout, re.M), word
    folder = Path("out/demo") / net
    for name in ("plan.txt", "plan.json", "program.txt", "loss.csv", "loss.png"):
        assert str(folder / name) in done.stdout
        assert (tmp_path / folder / name).stat().st_size > 0
    with (tmp_path / folder / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 22
    one, split = ([float(row[column]) for row in rows] for column in ("1 device", "4 virtual devices"))
    assert max(abs(a - b) for a, b in zip(one, split, strict=True)) < 1e-4
    assert split[-1] < split[0]
    plan = pw.Plan.load(tmp_path / folder / "plan.json")
    assert plan.mesh == pw.Mesh({"dp": 2, "tp": 2})
    assert (tmp_path / folder / "plan.txt").read_text() == f"{plan.table(every=True)}\n"


def test_an_odd_number_of_devices_is_refused(python: Runner) -> None:
    done = python(DEMO, "--devices", "7")
    assert done.returncode == 2
    assert "must be even" in done.stderr


def test_a_missing_extra_is_named_with_the_command_that_installs_it(python: Runner, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('no', name='matplotlib')")
    done = python(DEMO, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "the demo needs matplotlib; `make demo` installs" in done.stderr
    assert "Traceback" not in done.stderr
