"""A Slurm of one node, for as long as a test takes: Debian's slurmctld and slurmd, without munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import free_port

CONF = """
ClusterName=partway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
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


@contextmanager
def one_node(folder: Path, seconds: float = 30) -> Iterator[dict[str, str]]:
    """The variables with which srun finds the node. Raises RuntimeError if there is none here, or it does not come."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "sinfo") if shutil.which(name, path=_PATH) is None]
    if missing:
        raise RuntimeError(f"{missing[0]} is not installed")
    if os.geteuid() != 0:
        raise RuntimeError("slurmd runs as root")
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    text = CONF.format(host=host, control=free_port(), node=free_port(), user="root", folder=folder)
    conf.write_text(text, encoding="utf-8")
    (folder / "spool").mkdir()
    found = {**os.environ, "SLURM_CONF": str(conf), "PATH": _PATH}
    commands = [["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf)]]
    started = [
        subprocess.Popen(each, env=found, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for each in commands
    ]
    try:
        _wait_for_the_node(found, time.monotonic() + seconds, folder)
        yield {"SLURM_CONF": str(conf)}
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _wait_for_the_node(environment: dict[str, str], end: float, folder: Path) -> None:
    while True:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format", "%T"], env=environment, capture_output=True, text=True, check=False
        )
        if "idle" in asked.stdout:
            return
        if time.monotonic() > end:
            logs = "".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"the node of Slurm does not come: {asked.stdout}{asked.stderr}{logs}")
        time.sleep(0.2)
