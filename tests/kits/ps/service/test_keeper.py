"""What Ray gets is one user's alone, and nothing is left of it when nobody wants it any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from partway.ps.service import cluster, keeper
from partway.ps.service.cluster import Node, Site
from partway.strategy import RuntimeStateError

# Three processes like Ray's: one leaves the session and the parent, and one has another environment.
RAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.execv('/bin/sleep', ['other', '1000'])
if os.fork() == 0:
    os.execve('/bin/sleep', ['other', '1000'], {'OTHER': '1'})
time.sleep(1000)
"""
COUNT = 4  # with the keeper


@pytest.fixture
def folder() -> Iterator[Path]:
    made = keeper.made()
    yield made
    keeper.end(made)


def wait_for(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.01)


def started(folder: Path, parent: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(keeper.command(folder, parent, [sys.executable, "-c", RAY]), start_new_session=True)
    wait_for(lambda: len(keeper._processes(folder)) == COUNT)
    return process


def test_a_folder_has_a_random_name_and_is_one_users_alone(folder: Path) -> None:
    other = keeper.made()
    assert folder != other
    assert folder.stat().st_mode & 0o777 == 0o700
    assert keeper.is_ours(folder)
    keeper.end(other)
    assert not other.exists()


def test_sockets_have_room_whatever_tmpdir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = keeper.made()
    assert made.parent == Path("/tmp")
    keeper.end(made)
    monkeypatch.setattr(keeper, "_LONGEST", 12)
    with pytest.raises(
        RuntimeStateError, match=r"^Ray has no folder for its sockets: TMPDIR is .*x, and Ray's sockets"
    ):
        Node(Site("127.0.0.1", 1, None), head=True, logs=tmp_path / "logs").start(1)


@pytest.mark.parametrize("wrong", ["open", "link", "name", "foreign", "file"])
def test_what_is_not_ours_is_left_alone(
    wrong: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a folder may be anybody's, where the shard folder is."""
    there = tmp_path / "partway-ray-12345678"
    if wrong == "link":
        there.symlink_to(folder)
    elif wrong == "file":
        there.touch(0o600)
    else:
        there = tmp_path / "mine" if wrong == "name" else there
        there.mkdir(0o700)
    if wrong == "open":
        there.chmod(0o770)
    if wrong == "foreign":
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
    Node(Site("127.0.0.1", 1, None), head=True, logs=tmp_path / "logs").adopt(there)
    Node(Site("127.0.0.1", 1, None), head=True, logs=tmp_path / "logs").stop()
    assert there.exists()
    assert folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_all_of_rays_processes_end_with_their_keeper(number: int, folder: Path) -> None:
    process = started(folder, os.getpid())
    process.send_signal(number)
    assert process.wait() == 0
    assert keeper._processes(folder) == []
    assert not folder.exists()


def test_what_is_left_of_ray_ends_when_ray_does(folder: Path) -> None:
    process = started(folder, os.getpid())
    command = [sys.executable.encode(), b"-c", RAY.encode(), b""]
    first = [
        pid for pid in keeper._processes(folder) if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") == command
    ]
    os.kill(min(first), signal.SIGKILL)
    assert process.wait() == 0
    assert keeper._processes(folder) == []


@pytest.mark.parametrize("ray", [[sys.executable, "-c", RAY], []])
def test_a_node_ends_with_the_process_that_started_it(folder: Path, ray: list[str]) -> None:
    """Which may start Ray itself."""
    code = """
import os, subprocess, sys
subprocess.Popen([*sys.argv[1:4], str(os.getpid()), *sys.argv[4:]], start_new_session=True)
print(flush=True)
input()
"""
    command = keeper.command(folder, 0, ray)
    command.pop(3)
    parent = subprocess.Popen([sys.executable, "-c", code, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    if ray:
        wait_for(lambda: len(keeper._processes(folder)) == COUNT)
    assert folder.exists()
    parent.kill()
    parent.communicate()
    wait_for(lambda: not folder.exists())
    assert keeper._processes(folder) == []


def test_a_head_ends_when_its_lease_is_not_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    is_wanted = keeper._Leased(folder)
    for _ in range(2000):
        clock[0] += keeper._LOOK
        keeper.renew(folder)
        os.utime(folder / "lease", (clock[0], clock[0]))
        assert is_wanted()
    clock[0] += 10 * keeper.LEASE  # this process was stopped
    assert is_wanted()
    for _ in range(int(keeper.LEASE / keeper._LOOK) - 3):
        clock[0] += keeper._LOOK
        assert is_wanted()
    for _ in range(3):
        clock[0] += keeper._LOOK
        is_wanted()
    assert not is_wanted()


def test_a_head_outlives_the_process_that_started_it_and_is_stopped_by_another(folder: Path, tmp_path: Path) -> None:
    code = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code, *keeper.command(folder, 0, [sys.executable, "-c", RAY])], check=True)
    wait_for(lambda: len(keeper._processes(folder)) == COUNT)
    node = Node(Site("127.0.0.1", 1, None), head=True, logs=tmp_path)
    node.adopt(folder)
    before = (folder / "lease").stat().st_mtime_ns
    node.is_alive()
    assert (folder / "lease").stat().st_mtime_ns > before
    Node(Site("127.0.0.1", 1, None), head=True, logs=tmp_path).stop()
    assert keeper._processes(folder) == []
    assert not folder.exists()


def test_the_coordinator_renews_the_lease(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = cluster.RayServers(None)
    servers.renew()  # of nothing, outside of Ray's processes
    monkeypatch.setenv(keeper.FOLDER, str(folder))
    before = (folder / "lease").stat().st_mtime_ns
    servers.renew()
    assert (folder / "lease").stat().st_mtime_ns > before
