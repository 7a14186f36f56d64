"""The training script: on virtual devices, in processes and on one device its loss is the same."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("train")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6
Runner = Callable[..., subprocess.CompletedProcess[str]]

ONE_DEVICE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from digits import batches, load_digits
from models import VisionTransformer

torch.manual_seed(0)
model = VisionTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for images, labels in list(batches(load_digits(), 64, 1))[:{STEPS}]:
    loss, _ = model(images, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.fixture(scope="module")
def expected() -> list[float]:
    done = subprocess.run([sys.executable, "-c", ONE_DEVICE], capture_output=True, text=True, timeout=280, check=True)
    return [float(line) for line in done.stdout.split()]


def losses(folder: Path) -> list[float]:
    with (folder / "out" / "train" / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_virtual_devices_train_as_one_device(python: Runner, tmp_path: Path, expected: list[float]) -> None:
    done = python(EXAMPLES / "train.py", "--steps", str(STEPS))
    assert done.returncode == 0, done.stderr
    assert f"{STEPS} steps on 8 devices" in done.stdout
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-4)


@pytest.mark.gloo
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one_device_and_only_rank_0_prints(
    python: Runner, tmp_path: Path, expected: list[float], processes: int
) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    done = python(*map(str, launcher), EXAMPLES / "train.py", "--steps", str(STEPS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step   1  loss") == 1
    assert f"{STEPS} steps on {processes} devices" in done.stdout
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-4)
