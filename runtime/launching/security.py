"""Keep every byte from leaving the host in plain: `set_ps_context(enable_ssl=True)` makes `init` do so or fail.

    the interface   all ranks meet at, and gloo and NCCL bind to, an interface that encrypts: WireGuard, as the kernel
                    says, or one that is declared to
    one host        all ranks are on one host: they meet, and gloo and NCCL bind, on the loopback
    gloo's TLS      with certificates, if PyTorch was built with it; its wheels are not

`prepare` chooses before anything is sent; `confirm` has the ranks compare their choices, in the store, before a process
group is made.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...strategy.errors import RuntimeStateError, shown
from ..ranks.doing import first_line, named
from ..torch_internals import GLOO_TLS
from . import interfaces
from .certificates import Certificates, Contexts, pem_of
from .door import DoorGuard, secret
from .job import JOB
from .launchers import Launch

_log = logging.getLogger("partway.security")

WAYS = (
    "Start all ranks on one host; or give every rank secure_interface=, an interface that encrypts, such as "
    "WireGuard's 'wg0', and have them meet at its address; or use a PyTorch whose gloo has TLS "
    "(USE_GLOO_WITH_OPENSSL). See docs/security.md"
)


@dataclass(frozen=True)
class Wanted:
    """What a script asks for: an interface, if any, the interfaces declared to encrypt, and the certificates for the
    meeting of the ranks, if any."""

    interface: str | None = None
    declared: tuple[str, ...] = ()
    contexts: Contexts | None = None
    certificates: Certificates | None = None


@dataclass(frozen=True)
class Way:
    """A way on which nothing leaves the host in plain: the `interface` that all bind to, and this host's `address` on
    it."""

    interface: str
    address: str
    text: str

    def leads_to(self, host: str) -> bool:
        """Return whether data from this host to another stays on the interface, if there is one."""
        if not self.interface:
            return True
        source = _from_here(host)
        return source == self.address or (self.is_local and interfaces.is_loopback(source))

    @property
    def is_local(self) -> bool:
        """Return whether the interface is the loopback."""
        return interfaces.is_loopback(self.address)


def want(wanted: Wanted | None) -> None:
    """Set the protection of the next `init`; None for none."""
    JOB.wanted = wanted


def wanted() -> Wanted | None:
    """The protection that `init` is asked for."""
    return JOB.wanted


def guard() -> DoorGuard | None:
    """The guard of the store in which the ranks meet; None: all are admitted. Raises RuntimeStateError for a wrong
    secret."""
    contexts = None if JOB.wanted is None else JOB.wanted.contexts
    known = secret()
    return DoorGuard(known, contexts) if known or contexts is not None else None


def prepare(found: Launch, backend: str) -> Way | None:
    """Choose a way, and bind gloo and NCCL of this process to it; None if no protection is wanted. Nothing is sent.

    Raises RuntimeStateError if there is no way, or the environment contradicts it.
    """
    asked = wanted()
    if asked is None:
        JOB.in_plain.add(backend)
        return None
    if asked.interface is not None:
        way = _by_interface(asked.interface, asked.declared, found)
    elif found.one_host:
        way = _on_one_host(found)
    else:
        way = _by_tls(asked.certificates, found, backend)
    if way.interface:
        _bind(way.interface)
        JOB.in_plain.add(backend)
    _log.info("enable_ssl: %s", way.text)
    return way


def release() -> None:
    """Unset the variables that `prepare` set."""
    for name in JOB.bound:
        os.environ.pop(name, None)
    JOB.bound.clear()


def confirm(store: Any, rank: int, size: int, way: Way | None) -> None:
    """Tell the other ranks the way of this one and check that all have the same. Raises RuntimeStateError if they
    differ."""
    card = {"way": None if way is None else asdict(way), "place": interfaces.place()}
    store.set(f"security/{rank}", json.dumps(card))
    if way is None:
        return
    cards = []
    for other in range(size):
        try:
            cards.append(json.loads(store.get(f"security/{other}")))
        except dist.DistError as error:
            raise RuntimeStateError(f"rank {other} has not said how it encrypts: {first_line(error)}") from error
    differ = [other for other, each in enumerate(cards) if (each["way"] or {}).get("interface") != way.interface]
    if differ:
        says = {other: (cards[other]["way"] or {}).get("interface", "without enable_ssl") for other in differ}
        raise RuntimeStateError(
            f"enable_ssl=True with {way.interface} on rank {rank}, and {named(differ)} differ: {says}; call "
            "set_ps_context alike on every rank. Nothing was sent"
        )
    if way.is_local:
        apart = [other for other, each in enumerate(cards) if each["place"] != cards[rank]["place"]]
        where = f"not on the host of rank {rank}, or in another container: {named(apart)}"
    else:
        apart = [other for other, each in enumerate(cards) if not way.leads_to(each["way"]["address"])]
        where = f"{way.interface} of rank {rank} does not lead to {named(apart)}"
    if apart:
        raise RuntimeStateError(f"enable_ssl=True, and {where}. {WAYS}")


def meeting(host: str, way: Way | None) -> str:
    """The meeting place of the ranks that were told `host`. Raises RuntimeStateError if the way does not lead there."""
    if way is None or way.leads_to(host):
        return host
    if way.is_local:
        return way.address
    raise RuntimeStateError(f"rank 0 is at {host}, as this rank was told, which {way.interface} does not lead to")


def _on_one_host(found: Launch) -> Way:
    if not interfaces.is_loopback(_from_here(found.host)) and _resolved(found.host) not in _own():
        raise RuntimeStateError(
            f"enable_ssl=True, and {found.launcher} has all ranks on one host, but they meet at {found.where}, which "
            "is another; leave out MASTER_ADDR, or make it 127.0.0.1"
        )
    loopback = next((name for name, address in interfaces.addresses().items() if interfaces.is_loopback(address)), "lo")
    return Way(loopback, "127.0.0.1", f"all ranks are on one host, and bind to {loopback}")


def _by_interface(name: str, declared: tuple[str, ...], found: Launch) -> Way:
    names = [each for _, each in socket.if_nameindex()]
    if name not in names:
        raise RuntimeStateError(f"secure_interface is {name!r}, which this host does not have: {', '.join(names)}")
    address = interfaces.addresses().get(name)
    if address is None or not interfaces.is_up(name):
        lacks = "is down" if address is not None else "has no IPv4 address"
        raise RuntimeStateError(f"secure_interface {name!r} {lacks}; bring it up first, as docs/security.md says")
    there = interfaces.kind(name) or "nothing"
    verified = there == "wireguard"
    if not verified and name not in declared:
        raise RuntimeStateError(
            f"secure_interface {name!r} is not WireGuard's: the kernel says {there} of its type"
            '; if it encrypts all the same, declare it in the file of config_file_path: {"secure_interfaces": '
            f'["{name}"]}}'
        )
    if _from_here(found.host) != address:
        raise RuntimeStateError(
            f"the ranks meet at {found.where}, which secure_interface {name!r} ({address}) does not lead to; give "
            f"{_MEET.get(found.launcher, 'MASTER_ADDR')} an address on it"
        )
    how = "WireGuard, verified" if verified else "declared to encrypt, not verified"
    return Way(name, address, f"all ranks bind to {name} ({how}), here {address}")


def gloo_has_tls() -> bool:
    """Return whether the gloo of this PyTorch was built with TLS."""
    for library in Path(torch.__file__).parent.joinpath("lib").glob("libtorch_cpu.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(GLOO_TLS) >= 0:
                return True
    return False


def _by_tls(certificates: Certificates | None, found: Launch, backend: str) -> Way:
    if backend != "gloo":
        lacks = f"{backend} has no TLS"
    elif not gloo_has_tls():
        lacks = "the gloo of this PyTorch has no TLS"
    elif certificates is None:
        lacks = "gloo's TLS needs certificates, which the file of config_file_path does not name"
    elif certificates.revoked is not None or certificates.ciphers:
        lacks = (
            "gloo's TLS cannot be told crl_path or cipher_list, which would hold for the store alone; leave them out"
        )
    elif backend in JOB.in_plain:
        lacks = "gloo was used in this process before, without TLS, to which it then does not change; start it anew"
    else:
        files = {"PKEY": _kept(pem_of(certificates.server)[0]), "CERT": _kept(pem_of(certificates.server)[1])}
        files["CA_FILE"] = str(certificates.authority)
        variables = {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}": file for name, file in files.items()}
        _set({"GLOO_DEVICE_TRANSPORT": "TCP_TLS", **variables})
        return Way("", found.host, "gloo's TLS, and the store's, with certificates")
    raise RuntimeStateError(
        "enable_ssl=True, and what the ranks send would not be encrypted: they are on several hosts, as far as "
        f"{found.launcher} says, and {lacks}. {WAYS}"
    )


def _kept(pem: bytes) -> str:
    """A file in memory, which lasts as long as this process: a private key is not written to a disk."""
    number = os.memfd_create("partway")
    os.write(number, pem)
    return f"/proc/self/fd/{number}"


_MEET: Mapping[str, str] = {"the scheduler": "MS_SCHED_HOST"}


def _bind(interface: str) -> None:
    """Make gloo and NCCL use one interface only."""
    variables = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # not interfaces whose names only begin with it
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }
    _set(variables)


def _set(variables: Mapping[str, str]) -> None:
    for name, text in variables.items():
        there = os.environ.get(name, text)
        if there.removeprefix("=") != text.removeprefix("="):
            raise RuntimeStateError(f"enable_ssl=True needs {name}={text}, and it is {shown(there)}; unset it")
    for name, text in variables.items():
        if name not in os.environ:
            os.environ[name] = JOB.bound[name] = text


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _from_here(host: str) -> str:
    try:
        return interfaces.from_here(host)
    except OSError:
        return ""


def _own() -> set[str]:
    return set(interfaces.addresses().values())
