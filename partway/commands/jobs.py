"""`partway run`: a script in several processes, on this host or on several.

torch's elastic launcher starts, watches and restarts them. This module places their logs, and reports failures.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from partway.strategy.errors import RuntimeStateError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

_PORT = 29400  # torchrun's default port of the rendezvous
_LAST = 5  # shown lines of a failed rank's stderr


@dataclass(frozen=True)
class LocalJob:
    """A script with its arguments, and the processes that run it.

    workers    the number of processes on each host
    hosts      the number of hosts
    meet       "host:port" of one of the hosts; "" for one host
    restarts   how often all processes are started again after one failed
    logs       the folder with a folder for each run, with rank.N/stdout and rank.N/stderr
    tail       the ranks whose output is also shown here; None: all
    """

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 1
    hosts: int = 1
    meet: str = ""
    restarts: int = 0
    logs: Path = Path("log_output")
    tail: Collection[int] | None = None

    @property
    def command(self) -> list[str]:
        """The command line of each process."""
        return [sys.executable, "-u", str(self.script), *self.arguments]

    def check(self) -> None:
        """Raise RuntimeStateError if the job cannot run."""
        if not self.script.is_file():
            raise RuntimeStateError(f"there is no script {str(self.script)!r}; give the path of a Python file")
        for name, count, least in (
            ("workers", self.workers, 1),
            ("hosts", self.hosts, 1),
            ("restarts", self.restarts, 0),
        ):
            if count < least:
                raise RuntimeStateError(f"{name} is {count}; it must be {least} or more")
        host, _, port = self.meet.rpartition(":")
        if self.hosts > 1 and not (host and port.isdecimal()):
            raise RuntimeStateError(
                f"meet is {self.meet!r}; with {self.hosts} hosts it is where they find each other, such as "
                f"{socket.gethostname()}:{_PORT}"
            )
        wrong = [rank for rank in self.tail or () if not 0 <= rank < self.workers * self.hosts]
        if wrong:
            raise RuntimeStateError(
                f"there is no rank {wrong[0]} to show; ranks are 0 to {self.workers * self.hosts - 1}"
            )
        if self.logs.exists() and not self.logs.is_dir():
            raise RuntimeStateError(f"{self.logs} is a file; logs go into a folder")


def commands(job: LocalJob, hosts: Sequence[str]) -> str:
    """The command to start on each of `hosts`, the same for all."""
    text = f"partway run --workers {job.workers} --nodes {len(hosts)} --meet {hosts[0]}:{_PORT}"
    text += f" --restarts {job.restarts}" if job.restarts else ""
    return f"start this on each of {', '.join(hosts)}:\n\n    {' '.join([text, str(job.script), *job.arguments])}"


def simulate(job: LocalJob, devices: int) -> int:
    """Run the script in one process, on `devices` virtual devices. Returns its exit status."""
    import subprocess

    from partway.runtime.launching.launchers import SIMULATE

    if devices < 1:
        raise RuntimeStateError(f"simulate is {devices}; it must be 1 or more")
    return subprocess.run(job.command, env={**os.environ, SIMULATE: str(devices)}, check=False).returncode


def run(job: LocalJob) -> int:
    """Run the processes of this host until all have ended. Returns 0, or the exit status of the first that failed,
    which it names on stderr. An interrupt ends them all. A termination signal is passed on to all, which have 30
    seconds to end; the status is then that of a process that the signal ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = _new_folder(job.logs)
    # the launcher's store outlives an attempt: the ranks of the next one would read stale keys in it
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.workers)))
    config = LaunchConfig(
        min_nodes=job.hosts,
        max_nodes=job.hosts,
        nproc_per_node=job.workers,
        run_id=folder.name if job.hosts == 1 else "partway",
        rdzv_backend="c10d",
        rdzv_endpoint=job.meet or "127.0.0.1:0",
        max_restarts=job.restarts,
        local_addr=None if job.meet else "127.0.0.1",
        logs_specs=_logs(folder, job.tail),
        log_line_prefix_template="[rank ${rank}] ",
    )
    command, *arguments = job.command
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        sys.stderr.write(f"partway run: rank {rank} failed first, with {_said(folder, rank, failure.exitcode)}\n")
        return status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _said(folder: Path, rank: int, status: int) -> str:
    """How a rank ended, and the last lines of its stderr."""
    logs = sorted((folder / f"rank.{rank}").glob("stderr*"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_LAST:] if logs else []
    how = f"exit status {status}" if status > 0 else f"signal {-status}"
    return "\n    ".join([f"{how} ({logs[-1] if logs else folder})", *lines])


def _new_folder(logs: Path) -> Path:
    """A folder for this run in `logs`, named by the time."""
    start = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = logs / (start if number == 1 else f"{start}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise RuntimeStateError(f"cannot make a folder for this run in {logs}")


def _logs(folder: Path, tail: Collection[int] | None) -> LogsSpecs:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Logs(LogsSpecs):
        """Logs in rank.N/stdout and rank.N/stderr of a run's folder, by global ranks; after a restart stdout.1, ..."""

        @property
        def root_log_dir(self) -> str:
            return str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}, "error.json": {}}
            for local, env in envs.items():
                own = folder / f"rank.{env['RANK']}"
                own.mkdir(exist_ok=True)
                attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
                for name, kept in files.items():
                    kept[local] = str(own / (name if attempt == "0" else f"{name}.{attempt}"))
                env["TORCHELASTIC_ERROR_FILE"] = files["error.json"][local]
            shown = {local for local, env in envs.items() if tail is None or int(env["RANK"]) in tail}
            tees = {
                name: {local: path for local, path in kept.items() if local in shown} for name, kept in files.items()
            }
            return LogsDest(
                stdouts=files["stdout"],
                stderrs=files["stderr"],
                error_files=files["error.json"],
                tee_stdouts=tees["stdout"],
                tee_stderrs=tees["stderr"],
            )

    return Logs()
