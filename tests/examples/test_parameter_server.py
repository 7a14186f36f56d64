"""The example of the parameter server, and the code and commands of its page: one script, without servers and with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import free_port

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("lmdb", reason="LMDB is not installed")

pytestmark = pytest.mark.xdist_group("parameter server")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "parameter_server.py"
SERVED = ("-m", "partway.commands.cli", "ps", "--restarts", "0", "--workers", "2", "--servers", "2")
RECOMMENDER = ("--model", "recommender", "--double", "--steps", "12")
OWN = {"PARTWAY_EXAMPLE": "1"}  # a process of its own
Runner = Callable[..., subprocess.CompletedProcess[str]]


def written(folder: Path, run: str) -> list[dict[str, Any]]:
    """What the workers of a run wrote."""
    return [json.loads(path.read_text()) for path in sorted((folder / "out/parameter_server").glob(f"*_{run}_*.json"))]


def losses(folder: Path, run: str) -> list[float]:
    """The means of all workers' losses."""
    each = [[loss for _, _, loss in worker["losses"]] for worker in written(folder, run)]
    return [sum(parts) / len(parts) for parts in zip(*each, strict=True)]


def test_the_recommender_learns_without_servers(python: Runner, tmp_path: Path) -> None:
    done = python(SCRIPT, "--no-servers", "--model", "recommender", "--steps", "60")
    assert done.returncode == 0, done.stderr
    assert "60 steps, test error" in done.stdout
    curve = losses(tmp_path, "no_servers")
    assert sum(curve[-10:]) < 0.9 * sum(curve[:10])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_have_the_losses_of_one_process(python: Runner, tmp_path: Path) -> None:
    for command in ((SCRIPT, "--no-servers"), (SCRIPT,)):
        done = python(*command, *RECOMMENDER, env=OWN)
        assert done.returncode == 0, done.stderr
    expected = losses(tmp_path, "no_servers")
    assert losses(tmp_path, "sync") == pytest.approx(expected, rel=0, abs=1e-12)
    done = python(*SERVED, SCRIPT, *RECOMMENDER)
    assert done.returncode == 0, done.stderr
    assert [each["workers"] for each in written(tmp_path, "sync")] == [2, 2]
    assert losses(tmp_path, "sync") == pytest.approx(expected, rel=0, abs=1e-12)
    [alone], served = written(tmp_path, "no_servers"), written(tmp_path, "sync")
    assert [each["test error"] for each in served] == pytest.approx([alone["test error"]] * 2, rel=0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_async_is_as_accurate_as_sync_and_keeps_its_bound(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--compare", "--max-staleness", "3"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy = {run: written(tmp_path, run)[0]["test accuracy"] for run in ("data_parallel", "sync", "async")}
    assert accuracy["sync"] == pytest.approx(accuracy["data_parallel"], abs=0.01)
    assert accuracy["async"] > accuracy["sync"] - 0.02
    pushes = written(tmp_path, "async")[0]["staleness"]
    assert len(pushes) > 400
    assert 0 < max(stale for _, _, stale in pushes) <= 3
    assert (tmp_path / "out/parameter_server/loss.png").stat().st_size > 20_000


# -- The page


def blocks(kind: str) -> list[str]:
    page = (ROOT / "docs" / "parameter_server.md").read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", page, re.S)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_command_of_the_page_gives_the_loss_of_one_process(tmp_path: Path) -> None:
    script, _, load = blocks("python")  # the second is a function of a schedule
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plain = script.replace("enable_ps=True", "enable_ps=False").replace("pw.ps.save", "pw.save")
    texts = {"python train.py": plain, "python train.py # served": script + load} | dict.fromkeys(blocks("sh"), script)
    assert len(texts) == 4
    found = {}
    for number, (command, text) in enumerate(texts.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.py").write_text(text, encoding="utf-8")
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        shell = ["bash", "-ec", command.replace("6667", str(free_port()))]
        done = subprocess.run(
            shell, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=250
        )
        assert done.returncode == 0, done
        found[command] = re.findall(r"loss \S+", done.stdout)
        assert (folder / "checkpoints" / "checkpoint-000001").is_dir(), command
    [expected] = found.pop("python train.py")
    assert list(found.values()) == [[expected]] * 3
