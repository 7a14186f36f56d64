"""What a listener sees on the cable between two hosts: a pattern that is sent as a gradient, and nothing of it where
the ranks use an interface that encrypts."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import Host, finished, several_hosts, unavailable

PATTERN = b"partway!"  # eight bytes: a float64
TRAIN = """
import json, logging, os, pathlib, struct, torch, torch.distributed as dist
import partway as pw

logging.basicConfig(level=logging.INFO)
if os.environ["SECURE"]:
    pathlib.Path("config.json").write_text(json.dumps({"secure_interfaces": ["wg0"]}))
    os.chmod("config.json", 0o600)
    pw.set_ps_context(enable_ssl=True, config_file_path="config.json", secure_interface="wg0")
pw.init(backend="gloo", timeout=60)
[known] = struct.unpack("d", b"partway!")
weight = torch.nn.Parameter(torch.zeros(4096, dtype=torch.float64))
rank = pw.get_rank()
(weight * (known if rank else 0.0)).sum().backward()
dist.all_reduce(weight.grad)
assert bool((weight.grad == known).all())
print("rank", rank, "has it")
pw.shutdown()
"""
ADDRESS = ("10.200.77.1", "10.200.77.2")  # within the tunnel

pytestmark = [pytest.mark.slow, pytest.mark.gloo]


def missing() -> str:
    """What is not here that the tests need."""
    programs = [name for name in ("wg", "wireguard-go", "tcpdump") if shutil.which(name) is None]
    if programs:
        return f"{', '.join(programs)} not installed"
    return "" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


def protocols(capture: bytes) -> set[int]:
    """The numbers of the protocols over IPv4 in a file of tcpdump's: 6 is TCP, 17 UDP."""
    found, start = set(), 24
    while start < len(capture):
        [length] = struct.unpack_from("<I", capture, start + 8)
        packet = capture[start + 16 : start + 16 + length]
        if packet[12:14] == b"\x08\x00":
            found.add(packet[23])
        start += 16 + length
    return found


@dataclass
class Wire:
    """Two hosts with WireGuard between them, and the folder of the script."""

    hosts: tuple[Host, Host]
    folder: Path

    def capture(self, secure: bool, launcher: str) -> tuple[list[subprocess.CompletedProcess[str]], bytes]:
        """Train, one rank a host; what the processes said, and what was on the cable."""
        first, _ = self.hosts
        file = self.folder / "wire.pcap"
        listens = first.start(["tcpdump", "-i", first.device, "-U", "-s", "0", "-Z", "root", "-w", str(file)])
        while not file.exists() or file.stat().st_size < 24:
            assert listens.poll() is None, listens.communicate()
            time.sleep(0.1)
        keeper = ADDRESS[0] if secure else first.address
        running = [host.start(command, self.environment(secure, keeper, own), self.folder)
                   for host, command, own in self.commands(launcher, keeper)]  # fmt: skip
        ended = [finished(process) for process in running]
        time.sleep(1)
        listens.terminate()
        listens.communicate()
        return ended, file.read_bytes()

    def environment(self, secure: bool, keeper: str, own: dict[str, str]) -> dict[str, str]:
        """Of a process; without security gloo has to be told which way, too."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("MS_", "GLOO_"))}
        common = {"SECURE": "1" if secure else "", "OMP_NUM_THREADS": "1", "MS_SCHED_HOST": keeper}
        return {**kept, **common, "MS_SCHED_PORT": "29411", "MS_WORKER_NUM": "2", **own}

    def commands(self, launcher: str, keeper: str) -> Iterator[tuple[Host, list[str], dict[str, str]]]:
        """Where, what, and with which variables of its own."""
        first, second = self.hosts
        if launcher == "scheduler":
            yield first, [sys.executable, "train.py"], {"MS_ROLE": "MS_SCHED"}
            for node, host in enumerate(self.hosts):
                yield host, [sys.executable, "train.py"], {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(node)}
            return
        for node, host in ((0, first), (1, second)):
            yield host, [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                "--nproc-per-node", "1", "--master-addr", keeper, "--master-port", "29412", "train.py",
            ], {}  # fmt: skip


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    reason = missing() or unavailable()
    if reason:
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    with several_hosts(2) as hosts:
        keys = [subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout for _ in hosts]
        public = [
            subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True, check=True).stdout.strip()
            for key in keys
        ]
        for number, host in enumerate(hosts):
            key, peer = tmp_path / f"key{number}", 1 - number
            key.write_text(keys[number], encoding="utf-8")
            sockets = tmp_path / f"run{number}"
            sockets.mkdir()
            # wireguard-go keeps its control socket in /var/run: both hosts' are called wg0
            lines = f"""
                mount --bind {sockets} /var/run && mkdir -p /var/run/wireguard && wireguard-go wg0 &&
                wg set wg0 private-key {key} listen-port 51820 \\
                    peer {public[peer]} allowed-ips {ADDRESS[peer]}/32 endpoint {hosts[peer].address}:51820 &&
                ip address add {ADDRESS[number]}/24 dev wg0 && ip link set wg0 up
            """
            done = host.run(["unshare", "--mount", "sh", "-c", lines])
            if done.returncode:
                pytest.skip(f"no WireGuard here: {done.stderr.strip()}")
        yield Wire(hosts, tmp_path)


@pytest.mark.parametrize("launcher", ["scheduler", "torchrun"])
def test_the_wire_has_the_gradient_only_without_security(wire: Wire, launcher: str) -> None:
    for secure in (False, True):
        ended, seen = wire.capture(secure, launcher)
        assert [one.returncode for one in ended] == [0] * len(ended), [one.stderr[-2000:] for one in ended]
        assert sum("has it" in one.stdout for one in ended) == 2
        assert len(seen) > 4096 * 8, "the cable had no gradient at all"
        assert (PATTERN in seen) is not secure
        if secure:
            assert "all ranks bind to wg0 (declared to encrypt, not verified)" in ended[-1].stderr
            assert protocols(seen) == {17}, "there is more on the cable than WireGuard's UDP"
