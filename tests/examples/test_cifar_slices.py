"""ResNet-50 on slices of CIFAR-10's images: slices of any number of devices train as one device does."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import partway as pw

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "cifar_slices.py"
SMALL = ("--double", "--size", "64", "--width", "4", "--batch", "4", "--steps", "3")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module examples/cifar_slices.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cifar_slices

    return cifar_slices


@pytest.fixture
def data(cifar: ModuleType, tmp_path: Path) -> Path:
    """Files of CIFAR-10's format."""
    folder = tmp_path / "cifar-10-batches-bin"
    cifar.make_files(folder, 2)
    return folder


def losses(shown: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", shown, re.M)]


@pytest.mark.slow
def test_slices_train_as_one_device(python: Runner, data: Path) -> None:
    runs = [
        python(SCRIPT, *SMALL, "--data", data, "--devices", "1"),
        python(SCRIPT, *SMALL, "--devices", "4", "--search", "sharding_propagation", env={"DATA_PATH": str(data)}),
    ]
    for done in runs:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no --data" not in done.stdout
    one, split = (losses(done.stdout) for done in runs)
    assert len(one) == 3
    assert split == pytest.approx(one, abs=1e-8)
    assert "search: sharding_propagation" in runs[1].stdout


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_that_are_given_their_slices_train_as_one_device(python: Runner) -> None:
    one = python(SCRIPT, *SMALL, "--devices", "1")
    split = python(*LAUNCHER, "2", SCRIPT, *SMALL)
    assert split.returncode == 0, split.stdout + split.stderr
    assert split.stdout.count("no --data and no DATA_PATH: training on stripes, in CIFAR-10's format") == 1
    assert "a rank was given images of [3, 64, 32]" in split.stdout
    assert losses(split.stdout) == pytest.approx(losses(one.stdout), abs=1e-8)


def test_ranks_have_the_slices_of_one_image(cifar: ModuleType, data: Path) -> None:
    whole = cifar.Slices(data, 64, pw.data.Part.whole(4))
    parts = [cifar.Slices(data, 64, pw.data.part_of((1, 1, 1, 8), rank, devices=8)) for rank in range(8)]
    for index in range(len(whole)):
        image, label = whole[index]
        slices = [part[index] for part in parts]
        assert torch.equal(torch.cat([own for own, _ in slices], -1), image)
        assert {int(other) for _, other in slices} == {int(label)}


def test_a_size_that_the_devices_do_not_divide_is_refused(python: Runner) -> None:
    done = python(SCRIPT, "--size", "36")
    assert done.returncode == 2
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())
    assert "images of 36 columns cannot be cut into 8 equal slices; take a multiple of 8" in said
