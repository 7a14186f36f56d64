"""The network interfaces of this host."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path


def addresses() -> dict[str, str]:
    """The IPv4 addresses of this host's interfaces; empty if the system cannot be asked (only Linux can)."""
    if sys.platform != "linux":
        return {}
    import fcntl

    ask_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, ask_address, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an IPv6 address; IPv4 for everything else, names included."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def place_of(host: str, port: int) -> str:
    """Format a host and its port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def from_here(host: str, port: int = 1) -> str:
    """The address from which this host reaches another, or itself; nothing is sent. Raises OSError if there is no
    route."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as way:
        way.connect((host, port or 1))
        return str(way.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return whether an address belongs to the host itself, and to no network."""
    return address.startswith("127.") or address == "::1"


def place() -> str:
    """A text that tells apart hosts of the same name: the boot of the system, and the container's network."""
    told = [socket.gethostname()]
    with suppress(OSError):
        told += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(told)


def is_up(name: str) -> bool:
    """Return whether an interface is up."""
    return bool(int(Path("/sys/class/net", name, "flags").read_text(), 16) & 1)


def kind(name: str) -> str:
    """The kernel's word for the kind of an interface, such as "wireguard"; "" if it has none."""
    lines = Path("/sys/class/net", name, "uevent").read_text().splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("DEVTYPE=")), "")
