"""A Slurm cluster of one node for the duration of a test: slurmctld and slurmd, without munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripts import free_port

CONF = """
ClusterName=partway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextmanager
def node(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which srun finds a node: of an existing cluster, or of one that runs in `folder`, which is
    new. The test is skipped if there is neither."""
    if shutil.which("sinfo") and not _states({**os.environ}).stderr:
        yield {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        return
    missing = [name for name in ("slurmctld", "slurmd", "srun", "sinfo") if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs as root")
    with _started(folder) as found:
        yield found


@contextmanager
def _started(folder: Path, seconds: float = 30) -> Iterator[dict[str, str]]:
    (folder / "spool").mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    text = CONF.format(host=host, control=free_port(), node=free_port(), folder=folder)
    conf.write_text(text, encoding="utf-8")
    found = {**os.environ, "SLURM_CONF": str(conf), "PATH": _PATH}
    commands = [["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf)]]
    started = [
        subprocess.Popen(each, env=found, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for each in commands
    ]
    try:
        _wait_for_the_node(found, time.monotonic() + seconds, folder)
        yield {"SLURM_CONF": str(conf)}
    finally:
        _wait_for_jobs(found, time.monotonic() + 10)
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_the_node(environment: dict[str, str], end: float, folder: Path) -> None:
    while "idle" not in (asked := _states(environment)).stdout:
        if time.monotonic() > end:
            logs = "".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.glob("*.log")))
            pytest.skip(f"the Slurm node does not start: {asked.stdout}{asked.stderr}{logs}")
        time.sleep(0.2)


def _wait_for_jobs(environment: dict[str, str], end: float) -> None:
    """Wait until Slurm has finished its jobs: a step that cannot report its end stays for minutes."""
    command = ["squeue", "--noheader"]
    while time.monotonic() < end:
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not asked.stdout.strip():
            return
        time.sleep(0.2)


def _states(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The states of the nodes by sinfo."""
    return subprocess.run(
        ["sinfo", "--noheader", "--format", "%T"], env=environment, capture_output=True, text=True, check=False
    )
