"""Ray's processes on this host, and the folder that identifies them.

Ray makes its folder accessible to everybody. So it is created within a folder of random name that is this user's alone,
and each of its processes has that name in its environment: a process with it belongs to this cluster, whatever its
number, group or parent. Some overwrite their environment; those stay in the keeper's session.

This file also runs as a process (without the rest of Partway), the parent of Ray's: when they end, or nobody needs them
any more, it ends the remaining ones and removes the folder. Ray's head is not needed when its lease has not been
renewed for LEASE seconds; the scheduler renews it, and the coordinator as long as there are workers. A node that has
joined ends with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FOLDER = "PARTWAY_PS_RAY"  # in the environment of Ray's processes: their folder
LEASE = 120.0  # seconds
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"  # after which a process without Ray's head exits silently
_PREFIX = "partway-ray-"
_LONGEST = 107 - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1")  # the path of a socket
_LOOK = 0.5  # seconds


def made() -> Path:
    """A new folder, of this user alone. Raises OSError if no folder for temporary files has a path short enough for
    sockets."""
    for place in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(place)) + len(f"/{_PREFIX}12345678") <= _LONGEST:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            renew(folder)
            return folder
    most = _LONGEST - len(f"/{_PREFIX}12345678")
    raise OSError(f"TMPDIR is {tempfile.gettempdir()}, and Ray's sockets need a folder of at most {most} bytes")


def inner(folder: Path) -> Path:
    """The folder for Ray."""
    return folder / "ray"


def is_ours(folder: Path) -> bool:
    """Whether it is such a folder, of this user, and nobody else may write there."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and facts.st_mode & 0o077 == 0
    return private and folder.name.startswith(_PREFIX)


def renew(folder: Path) -> None:
    """Renew the lease of Ray's head."""
    with suppress(OSError):  # it has ended
        (folder / "lease").touch()


def marked(folder: Path) -> dict[str, str]:
    """The environment of Ray's processes: they need not outlive its head."""
    return {**{name: value for name, value in os.environ.items() if name != PATIENCE}, FOLDER: str(folder)}


def command(folder: Path, parent: int, ray: list[str]) -> list[str]:
    """The command of the process that keeps Ray's.

    parent   the process with which it ends; 0: it ends by its lease
    ray      the command that starts Ray; empty if the parent does
    """
    return [sys.executable, __file__, str(folder), str(parent), *ray]


def end(folder: Path) -> None:
    """End all of Ray's processes, and remove their folder. (Without /proc not all of them are found.)"""
    if not is_ours(folder):
        return
    while mine := [pid for pid in _processes(folder) if pid != os.getpid()]:
        for pid in mine:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: Path) -> list[int]:
    """The running processes that have the folder in their environment, or are in the session of its keeper."""
    entry, session, found = f"{FOLDER}={folder}".encode(), "", []
    with suppress(OSError):
        session = (folder / "session").read_text()
    for one in Path("/proc").glob("[0-9]*") if Path("/proc").exists() else ():
        with suppress(OSError):  # it has ended, or is another user's
            pid, environment = int(one.name), (one / "environ").read_bytes()
            if environment and (entry in environment.split(b"\0") or str(os.getsid(pid)) == session):
                found.append(pid)
    return found


def _keep(folder: Path, parent: int, ray: list[str]) -> None:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(1))
    if os.getsid(0) == os.getpid():
        (folder / "session").write_text(f"{os.getpid()}")
    process = subprocess.Popen(ray, stdin=subprocess.DEVNULL, env=marked(folder)) if ray else None
    is_wanted = _is_parents(parent) if parent else _Leased(folder)
    while (process is None or process.poll() is None) and not asked and is_wanted():
        time.sleep(_LOOK)
    end(folder)


def _is_parents(parent: int) -> Callable[[], bool]:
    return lambda: os.getppid() == parent


class _Leased:
    """Tells whether the lease was renewed recently, in the time that this process ran."""

    def __init__(self, folder: Path) -> None:
        self._lease, self._left, self._renewed, self._last = folder / "lease", LEASE, 0.0, time.monotonic()

    def __call__(self) -> bool:
        try:
            renewed = self._lease.stat().st_mtime
        except OSError:  # somebody else has ended it
            return False
        now = time.monotonic()
        self._left = LEASE if renewed != self._renewed else self._left - min(now - self._last, 2 * _LOOK)
        self._renewed, self._last = renewed, now
        return self._left > 0


if __name__ == "__main__":
    _keep(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
