"""Two hosts on one machine: network namespaces connected by a cable.

Each has its own loopback, addresses, ports, firewall and name. A process in one namespace reaches the other one only
through the cable, which can be cut. Files and process ids are shared.
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

_FRESH = iter(range(1, 256))  # the network of the next pair, in this process


@dataclass
class Host:
    """One of the two hosts. `space`: its namespace; `address`: on the cable; `device`: its end of the cable."""

    name: str
    space: str
    address: str
    device: str
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
        _ip("-n", self.space, "link", "set", self.device, "down")

    def mend(self) -> None:
        """Reconnect the cable."""
        _ip("-n", self.space, "link", "set", self.device, "up")


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
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        with two_hosts() as (first, _):
            ended = first.run(["true"])
    except RuntimeError as error:
        return f"network namespaces are not allowed: {error}"
    return "" if ended.returncode == 0 else f"network namespaces are not allowed: {ended.stderr.strip()}"


@contextmanager
def two_hosts(debian: bool = False) -> Iterator[tuple[Host, Host]]:
    """Two hosts, "one" and "two", which reach only each other, by addresses 10.x.0.1 and 10.x.0.2 and by their names.
    At the end they and the processes started in them are removed.

    debian a host's own name stands for 127.0.1.1, as Debian's installer configures it: gloo binds to the loopback

    Raises RuntimeError where namespaces are not allowed.
    """
    number = (os.getpid() * 8 + next(_FRESH)) % 65536
    net = f"10.{number // 256}.{number % 256}"
    hosts = [
        Host(name, f"partway-{number}-{name}", f"{net}.{place}", f"pw{number}-{place}")
        for place, name in enumerate(("one", "two"), 1)
    ]
    with ExitStack() as stack:
        for host in hosts:
            stack.callback(_remove, host)
            _ip("netns", "add", host.space)
        first, second = hosts
        _ip("link", "add", first.device, "netns", first.space, "type", "veth",
            "peer", "name", second.device, "netns", second.space)  # fmt: skip
        for host in hosts:
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", host.device)
            host.mend()
            _ip("-n", host.space, "link", "set", "lo", "up")
            names = [f"{'127.0.1.1' if debian and each is host else each.address} {each.name}" for each in hosts]
            folder = Path("/etc/netns", host.space)  # `ip netns exec` mounts it over /etc
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]), encoding="utf-8")
        yield first, second


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
    subprocess.run(["ip", "netns", "delete", host.space], capture_output=True, check=False)
    shutil.rmtree(Path("/etc/netns", host.space), ignore_errors=True)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
