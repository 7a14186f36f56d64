"""Several hosts on one machine: network namespaces, each connected to a switch by a cable.

Each has its own loopback, addresses, ports, firewall and name. A process in one namespace reaches another one only
through their cables, which can be cut, and may have a rate. Files and process ids are shared.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_FRESH = iter(range(1, 256))  # the network of the next hosts, in this process
_NAMES = ("one", "two", "three", "four")


@dataclass
class Host:
    """A host. `space`: its namespace; `address`: on the cable; `device`: its end of the cable; `switch`: the other
    one's namespace."""

    name: str
    space: str
    address: str
    device: str
    switch: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this host, under its name."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.space, *named, *command]

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host until it ends. After `seconds` it is ended, with subprocess.TimeoutExpired."""
        return finished(self.start(command, environment), seconds)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a session of its own that ends with the namespace."""
        process = subprocess.Popen(
            self.command(command), env=dict(os.environ if environment is None else environment), cwd=folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Disconnect the cable, without notice to processes that wait for messages."""
        _do("ip", "-n", self.space, "link", "set", self.device, "down")

    def limit(self, rate: str) -> None:
        """Let the cable carry at most `rate` in each direction, in tc's words ("1gbit"), from now on."""
        shaped = "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"
        for space, device in ((self.space, self.device), (self.switch, self.device)):
            _do("tc", "-n", space, "qdisc", "replace", "dev", device, *shaped)

    def mend(self) -> None:
        """Reconnect the cable."""
        _do("ip", "-n", self.space, "link", "set", self.device, "up")


def finished(process: subprocess.Popen[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """The output of a started process after its end. After `seconds` the process is ended, with
    subprocess.TimeoutExpired."""
    try:
        said, wrong = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        _end(process)
        said, wrong = process.communicate()
        sys.stderr.write(f"{said}{wrong}")
        raise error
    return subprocess.CompletedProcess(process.args, process.returncode, said, wrong)


@cache
def unavailable() -> str:
    """Why namespaces are not available here; "" if they are."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        with several_hosts(2) as (first, _):
            ended = first.run(["true"])
    except RuntimeError as error:
        return f"network namespaces are not allowed: {error}"
    return "" if ended.returncode == 0 else f"network namespaces are not allowed: {ended.stderr.strip()}"


@contextmanager
def several_hosts(count: int, rate: str = "", debian: bool = False) -> Iterator[tuple[Host, ...]]:
    """Up to four hosts, "one", "two", ..., which reach only each other, by addresses 10.x.y.1, 10.x.y.2, ... and by
    their names. At the end they and the processes started in them are removed.

    rate   what each cable carries in each direction (`Host.limit`); "": as much as it can
    debian a host's own name stands for 127.0.1.1, as Debian's installer configures it: gloo binds to the loopback

    Raises RuntimeError where namespaces are not allowed.
    """
    number = (os.getpid() * 8 + next(_FRESH)) % 65536
    net, switch = f"10.{number // 256}.{number % 256}", f"partway-{number}-switch"
    hosts = tuple(
        Host(name, f"partway-{number}-{name}", f"{net}.{place}", f"pw{number}-{place}", switch)
        for place, name in zip(range(1, count + 1), _NAMES, strict=False)
    )
    with ExitStack() as stack:
        stack.callback(_delete, switch)
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            stack.callback(_remove, host)
            _do("ip", "netns", "add", host.space)
            _do("ip", "link", "add", host.device, "netns", host.space, "type", "veth",
                "peer", "name", host.device, "netns", switch)  # fmt: skip
            _do("ip", "-n", switch, "link", "set", host.device, "master", "switch", "up")
            _do("ip", "-n", host.space, "address", "add", f"{host.address}/24", "dev", host.device)
            host.mend()
            _do("ip", "-n", host.space, "link", "set", "lo", "up")
            if rate:
                host.limit(rate)
            names = [f"{'127.0.1.1' if debian and each is host else each.address} {each.name}" for each in hosts]
            folder = Path("/etc/netns", host.space)  # `ip netns exec` mounts it over /etc
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]), encoding="utf-8")
        yield hosts


def _remove(host: Host) -> None:
    for process in host.started:
        _end(process)
    found = subprocess.run(["ip", "netns", "pids", host.space], capture_output=True, text=True, check=False)
    for number in found.stdout.split():  # processes that left their session
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
    for process in host.started:
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    _delete(host.space)
    shutil.rmtree(Path("/etc/netns", host.space), ignore_errors=True)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _delete(space: str) -> None:
    subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
