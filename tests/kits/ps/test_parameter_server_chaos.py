"""Every process of a job with a parameter server is killed, stopped and asked to end, at random: what was acknowledged
is counted once, and nothing is left behind.

PARTWAY_CHAOS_SECONDS (40) says for how long, PARTWAY_CHAOS_SEED (0) in which order.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from served import Job, by_variables, difference, job, kept_steps
from served_script import one_device

pytest.importorskip("ray")
pytest.importorskip("lmdb")

SECONDS, SEED = float(os.environ.get("PARTWAY_CHAOS_SECONDS", "40")), int(os.environ.get("PARTWAY_CHAOS_SEED", "0"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 10 * SECONDS), pytest.mark.xdist_group("ranks 0")]
ROLES = {
    "worker": "served_script.py", "server": "_ServerActor", "coordinator": "_CoordinatorActor",
    "scheduler": "import scheduler", "head": "gcs/gcs_server", "raylet": "raylet/raylet", "keeper": "ps/keeper.py",
}  # fmt: skip
QUICK = ("worker", "server", "coordinator", "scheduler")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short name, since sockets are below it."""
    folder = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Other processes want the cores, too."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def act(own: Job, role: str, how: str, draw: random.Random) -> bool:
    """Kill a process of a role, ask it to end, or stop it for a while. Whether there was one."""
    pids = [pid for pid in own.pids(ROLES[role]) if pid != own.process.pid]  # whose command names the script, too
    if not pids:
        return False
    pid = draw.choice(pids)
    with suppress(OSError):
        if how == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.5, 5))
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGTERM)
    return True


def nothing_is_left(own: Job, temporary: Path) -> None:
    """All processes of a job have ended, or do within seconds, and no folder of Ray's is there."""
    end = time.monotonic() + 60
    while (left := own.pids("")) or list(temporary.glob("partway-*")):
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes()[:100] for pid in left if Path(f"/proc/{pid}").exists()}
        assert time.monotonic() < end, f"left: {names}, {list(temporary.glob('partway-*'))}"
        time.sleep(0.1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_was_acknowledged_is_counted_once(mode: str, temporary: Path, tmp_path: Path) -> None:
    draw, steps, done = random.Random(SEED), max(400, int(2 * SECONDS)), []  # of which faults let few be done
    options = {"bound": 6} if mode == "async" else {}
    with (
        load(1),
        job(
            tmp_path / "job", 2, 2, steps=steps, mode=mode, nap=0.05, flags=("--restarts", "1000"),
            TMPDIR=str(temporary), MS_NODE_TIMEOUT="600",  # others wait for one that is slow to start
            **options,
        ) as own,
    ):  # fmt: skip
        own.until(3)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and own.process.poll() is None and len(own.steps()) < steps - 10:
            role = draw.choice([*QUICK] * 4 + [*ROLES])
            how = draw.choice(["kill", "kill", "stop", "ask"])
            before = len(own.steps())
            if act(own, role, how, draw):
                done.append(f"{role} {how}")
                if role not in QUICK or (role, how) == ("scheduler", "ask"):
                    own.wait_for(lambda before=before: len(own.steps()) > before, f"a step after {done}", 240)
            time.sleep(draw.expovariate(1))
        own.end(600)
        sys.stdout.write(f"{mode}: {len(done)} faults, {len(own.steps())} lines of steps: {', '.join(done)}\n")
        if mode == "sync":
            assert kept_steps(own) == {"server0": steps, "server1": steps}, done
            assert difference(one_device(steps)[0], own.final()) < 1e-12, done
        else:
            assert kept_steps(own) == {"server0": 2 * steps, "server1": 2 * steps}, done
        said = (own.folder / "said").read_text().splitlines()
        assert [line for line in said if not line.startswith("partway ps: ")] == [], "lines that are not ours"
        nothing_is_left(own, temporary)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("when", ["early", "head", "trains"])
def test_nothing_is_left_of_a_job_whose_command_ends(how: int, when: str, temporary: Path, tmp_path: Path) -> None:
    with job(tmp_path / "job", 1, 1, steps=10**6, nap=0.05, TMPDIR=str(temporary)) as own:
        if when == "early":
            own.wait_for(lambda: own.pids(ROLES["scheduler"]), "a scheduler")
        elif when == "head":
            own.wait_for(lambda: own.pids(ROLES["head"]), "a head")
        else:
            own.until(3)
        own.process.send_signal(how)
        own.process.wait(200)
        if how == signal.SIGKILL:  # who is killed removes nothing
            for folder in temporary.glob("partway-ps-*"):
                shutil.rmtree(folder)
        nothing_is_left(own, temporary)


def test_a_job_outlives_a_head_that_is_away_for_longer_than_ray_waits(temporary: Path, tmp_path: Path) -> None:
    """After a minute without a head a process that has joined a cluster of Ray's ends, unless it is told to wait."""
    with job(tmp_path / "job", 1, 1, steps=10**6, nap=0.05, TMPDIR=str(temporary)) as own:
        own.until(3)
        (scheduler,) = own.pids(ROLES["scheduler"])
        os.kill(scheduler, signal.SIGSTOP)  # who would start another one
        for pid in own.pids(ROLES["head"]):
            os.kill(pid, signal.SIGKILL)
        time.sleep(75)
        before = len(own.steps())
        os.kill(scheduler, signal.SIGCONT)
        own.wait_for(lambda: len(own.steps()) > before + 3, "steps after the head has come again", 240)


def test_a_head_that_nobody_wants_ends(temporary: Path, tmp_path: Path) -> None:
    """The scheduler is killed and not started again; the worker goes on, and ends."""
    folder = tmp_path / "job"
    with by_variables(folder, 1, 1, steps=100, nap=0.1) as start:
        more = {"TMPDIR": str(temporary)}
        scheduler, _ = start("MS_SCHED", **more), start("MS_PSERVER", **more)
        worker = start("MS_WORKER", MS_NODE_ID="0", **more)
        own = Job(folder, worker)
        own.until(3)
        scheduler.kill()
        scheduler.wait()
        assert worker.wait(300) == 0
        assert difference(one_device(100)[0], own.final()) < 1e-12
        end = time.monotonic() + 400
        while (left := own.pids("")) and time.monotonic() < end:
            time.sleep(0.5)
        assert left == []
        assert list(temporary.glob("partway-ray-*")) == []


def test_memory_is_flat_over_two_thousand_pushes(temporary: Path, tmp_path: Path) -> None:
    def memory(own: Job) -> dict[str, int]:
        found = {}
        for role in ("server", "coordinator", "head", "raylet", "worker"):
            for number, pid in enumerate(sorted(own.pids(ROLES[role]))):
                status = Path(f"/proc/{pid}/status").read_text()
                found[f"{role} {number}"] = int(status.partition("RssAnon:")[2].split()[0])
        return found

    with job(tmp_path / "job", 2, 2, steps=1100, TMPDIR=str(temporary)) as own:
        own.until(100)
        first = memory(own)
        own.until(1090, seconds=1200)
        last = memory(own)
        own.end()
        assert own.counts()["acknowledged"] == 2 * 1100  # the steps of both workers
        grown = {name: last[name] - first[name] for name in first}
        sys.stdout.write(f"anonymous memory, KB more after 2,000 pushes: {grown}\n")
        assert max(grown.values()) < 8 * 1024, grown
