"""`partway ps`: the scheduler, the servers and the workers of a job on this machine, started and watched.

A worker that dies is started again, with its number; so is the scheduler. Servers are Ray's actors, which Ray starts
again. `partway ps scale` changes the numbers of workers and servers; this process starts and ends them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from partway.ps.live import LiveTable
from partway.ps.service import cluster, roles
from partway.ps.service.cluster import COORDINATOR, Gone, Link, Site
from partway.strategy import RuntimeStateError
from partway.strategy.basics import json_of, save

_C = ctypes.CDLL(None)
_LOOK = 0.2  # seconds between two looks
_STARTS = 300.0  # seconds in which the scheduler has to answer; it ends earlier if Ray does not start
_LASTS = 60.0  # seconds after which the failure of a worker does not count as a repeated one
_JOBS = Path(os.environ.get("PARTWAY_CACHE_DIR", "~/.cache/partway")).expanduser() / "ps"


@dataclass(frozen=True)
class ServedJob:
    """The job to start.

    restarts   how often each worker is started again that fails within a minute of its start
    port       of the scheduler; 0: a free one
    shards     the folder of the servers' parameters; None: they are not kept after the job
    """

    script: Path
    arguments: tuple[str, ...]
    workers: int
    servers: int
    restarts: int
    port: int
    logs: Path
    shards: Path | None = None
    quiet: bool = False

    def check(self) -> None:
        """Raise RuntimeStateError for a job that cannot be started."""
        if not self.script.is_file():
            raise RuntimeStateError(f"there is no script {self.script}")
        for what, count in (("workers", self.workers), ("servers", self.servers)):
            if count < 1:
                raise RuntimeStateError(f"--{what} is {count}; it must be 1 or more")
        if self.restarts < 0:
            raise RuntimeStateError(f"--restarts is {self.restarts}; it must be 0 or more")
        cluster.ray_is_there()


def run(job: ServedJob) -> int:
    """Start the job, and watch it until all workers have ended. Returns its exit status: 0 if they ended well."""
    running = _Running(job)
    with _ray_writes_to(running.logs / "ray") as ours:
        return running.run(ours)


class _Running:
    """The processes of a job."""

    def __init__(self, job: ServedJob) -> None:
        self._job = job
        port = job.port or _free_port()
        self._own = Path(tempfile.mkdtemp(prefix="partway-ps-"))
        self._site = Site("127.0.0.1", port, self._own)
        self._environment = {
            **os.environ,
            "MS_WORKER_NUM": str(job.workers),
            "MS_SERVER_NUM": str(job.servers),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(port),
            "PYTHONUNBUFFERED": "1",
            roles.LOCAL_SERVERS: str(job.servers),
            roles.FOLDER: str(job.shards or self._own),
        }
        self._environment.setdefault("MS_NODE_TIMEOUT", "30")
        self.logs = job.logs / time.strftime("%Y%m%d-%H%M%S")
        self.logs.mkdir(parents=True)
        self._link = Link(self._site, 60)
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._starts: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._failures: dict[int, int] = {}  # consecutive failures, each soon after a start
        self._ended: dict[int, int] = {}
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._asked = False
        self._missed = 0  # unanswered requests since the coordinator last answered

    def run(self, ours: TextIO) -> int:
        """See `run`. `ours`: the stream of its messages."""
        for asks in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(asks, self._terminate)
        roles.protect(self._site)
        record, recorded = _JOBS / f"{self._site.port}.json", False
        try:
            self._start_scheduler()
            self._reach()
            facts = {"port": self._site.port, "process": os.getpid(), "began": time.time()}
            save("the job", record, json.dumps(facts))
            recorded = True
            for number in range(self._job.workers):
                self._start_worker(number)
            with LiveTable(self._job.quiet, ours) as view:
                while self._workers and not self._asked:
                    time.sleep(_LOOK)
                    self._look(view)
        except KeyboardInterrupt:
            self._asked = True
        finally:
            self._end()
            with suppress(OSError):
                if recorded:
                    record.unlink()
            shutil.rmtree(self._own, ignore_errors=True)
        if self._asked:
            return 130
        return self._told(ours)

    def _told(self, ours: TextIO) -> int:
        failed = {number: status for number, status in self._ended.items() if status != 0}
        for number, status in failed.items():
            path = self.logs / f"worker.{number}"
            lines = path.read_text(errors="replace").strip().splitlines()[-1:]
            ours.write(f"partway ps: worker {number} ended with status {status}: {' '.join(lines)} ({path})\n")
        return 1 if failed else 0

    def _terminate(self, number: int, frame: Any) -> None:
        self._asked = True

    def _start_scheduler(self) -> None:
        environment = {**self._environment, "MS_ROLE": "MS_SCHED"}
        code = "from partway.ps.service.roles import scheduler; scheduler()"
        self._scheduler = self._start("scheduler", [sys.executable, "-c", code], environment)

    def _start_worker(self, number: int) -> None:
        environment = {**self._environment, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(number)}
        command = [sys.executable, str(self._job.script), *self._job.arguments]
        self._starts[number] = self._starts.get(number, 0) + 1
        self._began[number] = time.monotonic()
        self._workers[number] = self._start(f"worker.{number}", command, environment)

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.logs / name, "ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (one call of the system, which takes no lock)
            )

    def _reach(self) -> None:
        end = time.monotonic() + _STARTS
        while time.monotonic() < end and not self._asked:
            assert self._scheduler is not None
            if self._scheduler.poll() is not None:
                words = (self.logs / "scheduler").read_text(errors="replace").strip().splitlines()
                raise RuntimeStateError(f"the scheduler ended: {words[-1] if words else 'it said nothing'}")
            with suppress(Gone, RuntimeStateError):
                self._link.again()
                self._link.ask(COORDINATOR, "wanted", patience=30)
                return
            time.sleep(_LOOK)
        if self._asked:
            raise KeyboardInterrupt
        raise RuntimeStateError(f"the scheduler did not start in {_STARTS:g} s")

    def _look(self, view: LiveTable) -> None:
        """Handle processes that have ended, and changes of the wanted numbers."""
        assert self._scheduler is not None
        if self._scheduler.poll() not in (None, 0) and self._workers:  # 0: all workers have left
            view.say("the scheduler is started again")
            self._start_scheduler()
        for number, process in list(self._workers.items()):
            status = process.poll()
            if status is None:
                continue
            del self._workers[number]
            if time.monotonic() - self._began[number] > _LASTS:
                self._failures[number] = 0
            self._failures[number] = self._failures.get(number, 0) + 1
            if status != 0 and self._failures[number] <= self._job.restarts:
                view.say(f"worker {number} ended with status {status}, and is started again")
                self._start_worker(number)
                continue
            self._ended[number] = status
            if status != 0:
                view.say(f"worker {number} ended with status {status}")
                self._ask("gone", number, f"ended with status {status}")
        wanted = self._ask("wanted")
        if wanted is not None:
            for number in range(wanted["workers"]):
                if number not in self._workers and number not in self._ended:
                    self._start_worker(number)
            kept = {n: status for n, status in self._ended.items() if n < wanted["workers"] or status != 0}
            self._ended = kept  # those that were asked to end may be wanted again
        view.show(lambda: self._ask("status"), self._starts)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The coordinator's answer; None if it does not answer now."""
        try:
            answer = self._link.ask(COORDINATOR, method, *arguments, patience=5)
            self._missed = 0
            return answer
        except (RuntimeStateError, TimeoutError) as error:
            self._missed += 1
            if (isinstance(error, Gone) or self._missed > 2) and cluster.answers(self._site):
                with suppress(Gone, RuntimeStateError):
                    self._link.again()
                    self._missed = 0
            return None

    def _end(self) -> None:
        """End all processes: workers by SIGTERM first, then the scheduler, which ends Ray. No signal interrupts it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for process in self._workers.values():
            process.terminate()
        _wait(list(self._workers.values()), 5)
        cluster.leave()
        if self._scheduler is not None:
            self._scheduler.terminate()
            _wait([self._scheduler], 15)
        cluster.Node(self._site, head=True, logs=(self._job.shards or self._own) / "ray").stop()


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _ray_writes_to(log: Path) -> Iterator[TextIO]:
    """Redirect Ray's output in this process, from Python or C++, to a file. Yields a stream to the original stderr."""
    kept = [os.dup(number) for number in (1, 2)]
    other = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    _redirect([other, other])
    try:
        with open(kept[1], "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False) as ours:
            yield ours
    finally:
        _redirect(kept)
        for descriptor in (other, *kept):
            os.close(descriptor)


def _redirect(targets: list[int]) -> None:
    for number, (stream, target) in enumerate(zip((sys.stdout, sys.stderr), targets, strict=True), 1):
        stream.flush()
        os.dup2(target, number)


def _end_with_parent() -> None:
    """Make the system ask a process to end when its parent has gone, even if that was killed."""
    if sys.platform == "linux":
        _C.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def scale(workers: int | None, servers: int | None, address: str) -> str:
    """Set the numbers of workers and servers of a job: the one at `address` ("host:port"), that of the environment
    (MS_SCHED_HOST and MS_SCHED_PORT), or the last one that was started here. Returns a message for the user."""
    cluster.ray_is_there()
    if workers is None and servers is None:
        raise RuntimeStateError("nothing to change; give --workers, --servers or both")
    with _ray_writes_to(Path(os.devnull)):
        link = _link_to(address)
        link.ask(COORDINATOR, "scale", workers, servers)
        state = link.ask(COORDINATOR, "wanted")
    return f"{state['workers']} workers and {state['wanted_servers']} servers are wanted"


def _link_to(address: str) -> Link:
    if not address and "MS_SCHED_PORT" in os.environ:
        address = f"{os.environ.get('MS_SCHED_HOST', '127.0.0.1')}:{os.environ['MS_SCHED_PORT']}"
    if not address:
        address = f"127.0.0.1:{_last_port()}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RuntimeStateError(
            f"{address!r} is not an address; write host:port, the values of MS_SCHED_HOST and MS_SCHED_PORT"
        )
    site = Site(host, int(port), None)
    roles.protect(site)
    cluster.join(site, 5)
    return Link(site, 5)


def _last_port() -> int:
    found = []
    for path in _JOBS.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):  # a file of another program
            facts = json_of(path.read_bytes())
            os.kill(facts["process"], 0)
            found.append((facts["began"], facts["port"]))
    if not found:
        raise RuntimeStateError("no job of `partway ps` runs here; give --address host:port of its scheduler")
    return int(max(found)[1])
