"""Jobs with a parameter server, as processes: the script that they run, the files that they leave, and the processes
that tests kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scripts import free_port

SCRIPT = Path(__file__).with_name("served_script.py")
PARTWAY = [sys.executable, "-m", "partway.commands.cli"]


@dataclass
class Job:
    """A running job of `partway ps`. `folder`: for its files; shards/ has the servers' records."""

    folder: Path
    process: subprocess.Popen[str]
    options: dict[str, str] = field(default_factory=dict)

    def steps(self, worker: int = 0) -> list[list[Any]]:
        """(step, seconds, losses, share, number of shares) for each step that a worker has finished."""
        path = self.folder / f"steps.{worker}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]

    def until(self, step: int, worker: int = 0, seconds: float = 240) -> None:
        """Wait until a worker has finished a step."""
        self.wait_for(lambda: any(each[0] >= step for each in self.steps(worker)), f"step {step}", seconds)

    def wait_for(self, there: Callable[[], Any], what: str, seconds: float = 120) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not there():
            status = self.process.poll()
            assert status is None, f"the job ended with status {status} before {what}:\n{self.said()}"
            assert time.monotonic() < end, f"no {what} in {seconds} s:\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        """The output of all its processes."""
        logs = [path for path in sorted(self.folder.rglob("log_output/*/*")) if path.is_file()]
        texts = [f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        said = self.folder / "said"
        return "\n".join([said.read_text() if said.exists() else "", *texts])

    def pids(self, what: str) -> list[int]:
        """The processes of this job whose command lines contain a text."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    environment = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if what in command and str(self.folder).encode() in environment:
                    found.append(int(entry.name))
        return found

    def worker(self, number: int) -> int:
        """The process of a worker."""
        mine = [pid for pid in self.pids("served_script.py") if _variable(pid, "MS_NODE_ID") == str(number)]
        return max(mine)

    def server(self) -> int:
        """The process of one of the servers."""
        return self.pids("_ServerActor")[0]

    def end(self, seconds: float = 180) -> None:
        """Wait for its end, which has to be a success."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end in {seconds} s:\n{self.said()}") from None
        assert status == 0, self.said()

    def final(self) -> dict[str, Any]:
        """The final state of worker 0."""
        found: dict[str, Any] = torch.load(self.folder / "final.pt", weights_only=True)
        return found

    def counts(self) -> dict[str, int]:
        """Pushes sent, acknowledged and refused, by all workers that have ended."""
        total: dict[str, int] = {}
        for path in self.folder.glob("counts.*"):
            for name, count in json.loads(path.read_text()).items():
                total[name] = total.get(name, 0) + count
        return total


def _variable(pid: int, name: str) -> str | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((each.decode().partition("=")[2] for each in entries if each.startswith(name.encode() + b"=")), None)


@contextmanager
def job(
    folder: Path, workers: int, servers: int, script: Path = SCRIPT, arguments: tuple[str, ...] = (),
    flags: tuple[str, ...] = (), **options: Any,
) -> Iterator[Job]:  # fmt: skip
    """Start a job of `partway ps`; processes that remain at the end are killed. `flags`: of the command; `options`: of
    the script, by name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given = {f"SERVED_{name.upper()}": str(value) for name, value in options.items() if name.islower()}
    variables = {name: str(value) for name, value in options.items() if not name.islower()}
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "SERVED_FOLDER": str(folder), "PARTWAY_CACHE_DIR": str(folder / "cache"),
        **given, **variables,
    }  # fmt: skip
    command = [
        *PARTWAY, "ps", "--workers", str(workers), "--servers", str(servers), "--shards", str(folder / "shards"),
        *flags, str(script), *arguments,
    ]  # fmt: skip
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, text=True)
    own = Job(folder, process, environment)
    try:
        yield own
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        for pid in own.pids(""):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def by_variables(
    folder: Path, workers: int, servers: int, script: Path = SCRIPT, **options: Any
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The processes of a job that is configured by MS_ROLE: a function that starts one more. Processes that remain at
    the end are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[str]] = []
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "SERVED_FOLDER": str(folder), "PARTWAY_CACHE_DIR": str(folder / "cache"),
        "MS_WORKER_NUM": str(workers), "MS_SERVER_NUM": str(servers), "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(free_port()), **{f"SERVED_{name.upper()}": str(value) for name, value in options.items()},
    }  # fmt: skip

    def start(role: str, **more: str) -> subprocess.Popen[str]:
        with open(folder / f"{len(started)}.txt", "w") as said:
            process = subprocess.Popen(
                [sys.executable, str(script)], env={**environment, "MS_ROLE": role, **more}, stdout=said, stderr=said,
                text=True, cwd=folder,
            )  # fmt: skip
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for pid in Job(folder, started[0] if started else subprocess.Popen(["true"], text=True)).pids(""):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def scale(own: Job, *arguments: str) -> str:
    """Run `partway ps scale` for a job."""
    command = [*PARTWAY, "ps", "scale", *arguments]
    done = subprocess.run(command, env=own.options, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kept_steps(own: Job) -> dict[str, int]:
    """The version in each server's records."""
    import lmdb

    found = {}
    for folder in sorted((own.folder / "shards").glob("server*")):
        with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as transaction:
            found[folder.name] = json.loads(transaction.get(b"meta"))["version"]
    return found


def difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    """The largest difference of two final states."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)
