"""With MS_ENABLE_RECOVERY=1 the workers of a scheduler start again where one ended, with the numbers of a run that
never stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import free_port

SCRIPT = """
import os, pathlib, sys, time, torch, torch.distributed as dist
import partway as pw

if "LEAVE" in os.environ:
    os.chdir("/")
pw.init(backend="gloo", timeout=60)
rank, step = pw.get_rank(), pathlib.Path(f"step{pw.get_rank()}")
x = torch.zeros(1, dtype=torch.float64)
fault = pathlib.Path("fault")
for number in range(int(step.read_text()) if step.exists() else 0, 20):
    dist.all_reduce(x)
    step.write_text(str(number))
    print("step", number, flush=True)
    if number == 10 and rank == 1 and fault.exists():
        code = fault.read_text()
        fault.unlink()
        exec(code)
    time.sleep(0.1)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`start(role, node, **variables)`: a process of a job of two workers that recovers."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MS_")}
    common = {
        "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "MS_ENABLE_RECOVERY": "1", "MS_TOPO_TIMEOUT": "60", "MS_NODE_TIMEOUT": "6",
    }  # fmt: skip

    def process(role: str, node: int = 0, **variables: str) -> subprocess.Popen[str]:
        own = {"MS_ROLE": role, **({} if role == "MS_SCHED" else {"MS_NODE_ID": str(node)})}
        return subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, env={**kept, **common, **own, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return process


def steps(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ")]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("fault", "status", "why"), [
    ("os.kill(os.getpid(), 9)", -9, "was killed or crashed"),
    ("raise ValueError('a bad batch')", 1, "failed: ValueError: a bad batch"),
    ("from partway.runtime.launching import worker; worker.leave('SIGTERM'); sys.exit(143)", 143,
     "was asked to end by SIGTERM"),
])  # fmt: skip
def test_the_others_start_again_and_wait_for_its_place_to_be_taken(
    start: Start, tmp_path: Path, fault: str, status: int, why: str
) -> None:
    (tmp_path / "fault").write_text(fault)
    scheduler, first, second = start("MS_SCHED"), start("MS_WORKER", 0), start("MS_WORKER", 1)
    _, said = second.communicate(timeout=100)
    assert second.returncode == status, said
    time.sleep(2)
    assert scheduler.poll() is None
    assert first.poll() is None
    third = start("MS_WORKER", 1)
    ended = [process.communicate(timeout=100) for process in (scheduler, first, third)]
    assert [process.returncode for process in (scheduler, first, third)] == [0, 0, 0], ended
    assert steps(ended[1][0])[-10:] == steps(ended[2][0])[-10:] == list(range(10, 20))
    assert "partway: the scheduler waits for 2 workers to start again (MS_TOPO_TIMEOUT=60 s): rank 1" in ended[0][1]
    assert "partway: rank 0 starts again: rank 1" in ended[1][1]
    assert why in ended[1][1]


@pytest.mark.slow
@pytest.mark.gloo
def test_one_that_was_only_silent_starts_again_too(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("os.kill(os.getpid(), 19)")
    scheduler, first, second = start("MS_SCHED"), start("MS_WORKER", 0), start("MS_WORKER", 1)
    assert scheduler.stderr is not None
    assert "has not answered for" in scheduler.stderr.readline()
    time.sleep(5)
    second.send_signal(18)
    ended = [process.communicate(timeout=100) for process in (scheduler, first, second)]
    assert [process.returncode for process in (scheduler, first, second)] == [0, 0, 0], ended
    assert "partway: rank 1 starts again: rank 1" in ended[2][1]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("signal", [9, 15])
def test_a_scheduler_that_ended_may_start_again(start: Start, tmp_path: Path, signal: int) -> None:
    (fault := tmp_path / "fault").write_text("time.sleep(9)")  # or it would be done before it starts again
    scheduler, *workers = start("MS_SCHED"), start("MS_WORKER", 0), start("MS_WORKER", 1)
    while fault.exists():
        time.sleep(0.2)
    scheduler.send_signal(signal)
    _, said = scheduler.communicate(timeout=60)
    assert scheduler.returncode == {9: -9, 15: 143}[signal], said
    again = start("MS_SCHED")
    ended = [process.communicate(timeout=100) for process in (again, *workers)]
    assert [process.returncode for process in (again, *workers)] == [0, 0, 0], ended
    assert "partway: rank 0 starts again: the scheduler" in ended[1][1]


@pytest.mark.slow
@pytest.mark.gloo
def test_where_nobody_takes_its_place_all_end_and_say_who_is_missing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("os.kill(os.getpid(), 9)")
    few = {"MS_TOPO_TIMEOUT": "8"}
    processes = start("MS_SCHED", **few), start("MS_WORKER", 0, **few), start("MS_WORKER", 1, **few)
    ended = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [1, 1, -9], ended
    for _, said in ended[:2]:
        assert "1 of 2 workers came to the scheduler at 127.0.0.1:" in said
        assert "missing: MS_NODE_ID=1" in said


@pytest.mark.slow
@pytest.mark.gloo
def test_a_job_of_which_a_part_has_ended_well_does_not_start_again(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("time.sleep(8); os.kill(os.getpid(), 9)")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("    dist.all_reduce(x)\n", ""), encoding="utf-8")
    processes = start("MS_SCHED"), start("MS_WORKER", 0), start("MS_WORKER", 1)
    ended = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [1, 0, -9], ended
    assert "was killed or crashed; rank 0 had ended before, without an error" in ended[0][1]
    assert "the job cannot start again: rank 0 had ended, without an error, and did not come back" in ended[0][1]


@pytest.mark.gloo
def test_a_script_that_has_left_its_folder_cannot_start_again(start: Start) -> None:
    worker = start("MS_WORKER", LEAVE="1")
    _, said = worker.communicate(timeout=100)
    assert worker.returncode == 1
    assert said.splitlines()[-1].endswith(
        "MS_ENABLE_RECOVERY=1 starts train.py again from the folder where it was started, which / is not; call init() "
        "before os.chdir()"
    )
