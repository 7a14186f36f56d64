"""The reference's manual parallelism, from run.sh: one loss however the training is started."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scripts import free_port

import partway as pw

EXAMPLE = Path(__file__).parents[2] / "examples" / "manual_parallel"
Runner = Callable[..., subprocess.CompletedProcess[str]]
OPTIONS = ["--epochs", "1", "--per-print-times", "4", "--double"]


def losses(log: str) -> list[float]:
    found = re.findall(r"^epoch: 1 step: \d+, loss is ([\d.]+)$", log, re.M)
    assert found, log
    return [float(loss) for loss in found]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses of an epoch in plain PyTorch, on one device in float64: every fourth step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        from data import batches, load

        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(1)
            images, labels = load(None)
            sizes = zip((64, 512, 512), (512, 512, 10), strict=True)
            layer1, layer2, layer3 = (torch.nn.Linear(*each) for each in sizes)
            net = torch.nn.Sequential(torch.nn.Flatten(), layer1, torch.nn.ReLU(), layer2, torch.nn.ReLU(), layer3)
            optimizer, found = torch.optim.SGD(net.parameters(), lr=1e-2), []
            for pixels, label in batches(images, labels, 32, 0):
                loss = torch.nn.functional.cross_entropy(net(pixels), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        finally:
            torch.set_default_dtype(torch.float32)
        return found[3::4]


@pytest.mark.parametrize("options", [[], ["--manual", "8"]], ids=["one device", "8 virtual devices"])
def test_one_process_trains_as_plain_pytorch(python: Runner, plain: list[float], options: list[str]) -> None:
    done = python(EXAMPLE / "train.py", *OPTIONS, *options)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(plain, rel=1e-12)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "workers"), [("mpirun", 8), ("torchrun", 4), ("scheduler", 4)])
def test_launchers_train_as_plain_pytorch(tmp_path: Path, plain: list[float], launcher: str, workers: int) -> None:
    if launcher == "mpirun" and shutil.which("mpirun.openmpi") is None:
        pytest.skip("there is no Open MPI")
    done = subprocess.run(
        ["bash", EXAMPLE / "run.sh", launcher, *OPTIONS], cwd=tmp_path, env=environment(WORKERS=str(workers)),
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    logs = sorted(tmp_path.glob("log_output/1/rank.*/stdout"))
    assert [log.parent.name for log in logs] == [f"rank.{rank}" for rank in range(workers)]
    assert len({log.read_text() for log in logs}) == 1
    assert losses(logs[0].read_text()) == pytest.approx(plain, rel=1e-12)


MPIRUN = """#!/bin/bash
# As Open MPI 5: logs of --output-filename would be elsewhere than those of Open MPI 4.
[[ $* == *--output* ]] && exit 9
shift 3
export OMPI_COMM_WORLD_SIZE=$WORKERS OMPI_COMM_WORLD_LOCAL_SIZE=$WORKERS PMIX_NAMESPACE=$MASTER_PORT
for ((i = 0; i < WORKERS; i++)); do
    OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i "$@" &
done
wait
"""


@pytest.mark.gloo
def test_logs_are_where_they_are_with_any_version_of_open_mpi(tmp_path: Path, plain: list[float]) -> None:
    fake = tmp_path / "bin" / "mpirun"
    fake.parent.mkdir()
    fake.write_text(MPIRUN)
    fake.chmod(0o700)
    given = environment(WORKERS="2", PATH=f"{fake.parent}:{os.environ['PATH']}", MASTER_PORT=str(free_port()))
    done = subprocess.run(
        ["bash", EXAMPLE / "run.sh", *OPTIONS], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for rank in range(2):
        assert losses((tmp_path / f"log_output/1/rank.{rank}/stdout").read_text()) == pytest.approx(plain, rel=1e-12)


def environment(**more: str) -> dict[str, str]:
    """That of a user, who may be root in a container; a port alone would be half of a launcher's variables."""
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PARTWAY_VERIFY")}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    port = {"MS_SCHED_PORT": str(free_port())} if more else {}
    return {**kept, **root, **port, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.gloo
def test_a_rank_that_fails_is_shown(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", EXAMPLE / "run.sh", "scheduler", "--batch", "33"], cwd=tmp_path, env=environment(WORKERS="2"),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "2 ranks cannot share 33 images evenly" in (tmp_path / "log_output/1/rank.1/stdout").read_text()
    assert "2 ranks cannot share 33 images evenly" in done.stderr


# -- MNIST's files


def idx(array: np.ndarray) -> bytes:
    """The IDX format, as MNIST's description has it."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def data() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        import data

        return data


def test_mnist_s_files_are_read(python: Runner, data: ModuleType, tmp_path: Path) -> None:
    pixels = np.arange(64 * 28 * 28, dtype=np.uint8).reshape(64, 28, 28)
    labels = np.arange(64, dtype=np.uint8) % 10
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(pixels))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    images, targets = data.load(tmp_path)
    assert images.shape == (64, 1, 28, 28)
    assert torch.allclose(images[3, 0, 2, 5], torch.tensor((pixels[3, 2, 5] / 255 - 0.1307) / 0.3081).float())
    assert targets.tolist() == labels.tolist()
    done = python(EXAMPLE / "train.py", "--epochs", "1", "--per-print-times", "1", env={"DATA_PATH": str(tmp_path)})
    assert len(losses(done.stdout)) == 2, done.stderr


def test_files_that_are_not_mnist_s_are_named(data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        pw.DataError, match=r"has no train-images-idx3-ubyte, or train-images-idx3-ubyte\.gz; give the fo"
    ):
        data.load(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    images.write_bytes(idx(np.zeros((3, 28, 28), np.uint8))[:-1])
    with pytest.raises(
        pw.DataError, match="train-images-idx3-ubyte is no file of MNIST's, or incomplete; copy it again"
    ):
        data.load(tmp_path)
    images.write_bytes(idx(np.zeros((3, 28, 28), np.uint8)))
    labels.write_bytes(idx(np.zeros(4, np.uint8)))
    with pytest.raises(pw.DataError, match="has 3 images and 4 labels; copy both files again"):
        data.load(tmp_path)
