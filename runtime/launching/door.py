"""The door to the store in which the processes of a job meet: it lets in who knows the job's secret, or has a
certificate of the job's authority.

torch's store answers whoever reaches its port. Where PARTWAY_JOB_SECRET or certificates are set, the process that keeps
the store has it listen on a loopback port that nobody is told, and a door on the address that the launcher names:

    greeting    the door says that it is one, and what it asks for
    TLS         where there are certificates: each side shows its own, and the rest is encrypted
    challenge   the door sends 32 random bytes
    answer      where there is a secret, who comes sends 32 of its own, and their HMAC with the door's under the secret
    answer      the door sends its HMAC of both, or "refused"; each side knows that the other has the secret
    bytes       go to the store and back from then on

A worker's store goes by a port of its own loopback, which opens a way through the door for each connection. The secret
itself is never sent. What is sent without certificates is not encrypted: docs/security.md says what that means.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ...strategy.errors import RuntimeStateError
from ..torch_internals import STORE_PING
from .certificates import Contexts

T = TypeVar("T")

SECRET, FILE = "PARTWAY_JOB_SECRET", "PARTWAY_JOB_SECRET_FILE"
_LEAST = 16  # characters of a secret
_GREETING = b"partway door 1\n"
_ASKS = {
    b"s": f"the job's secret ({SECRET})",
    b"t": "a certificate (set_ps_context)",
    b"b": f"the job's secret ({SECRET}) and a certificate (set_ps_context)",
}
_REFUSED = b"refused".ljust(32)
_HANDSHAKE = 10.0  # seconds that either side waits for the other
_PENDING = 256  # handshakes at once; where there are more, the oldest gives way
_AGAIN = 0.1  # seconds between two attempts to reach what may not listen yet

_OPEN: list[_Door | _Passage] = []  # of this process, until `shut`


@dataclass(frozen=True)
class Guard:
    """What lets a process in: a secret, TLS with certificates, or both. Its parts are not for people to read."""

    secret: bytes = field(default=b"", repr=False)
    contexts: Contexts | None = field(default=None, repr=False)

    @property
    def kind(self) -> bytes:
        """What it asks for, a key of `_ASKS`."""
        return b"s" if self.contexts is None else b"b" if self.secret else b"t"

    async def admit(self, peer: Peer) -> bool:
        """Whether who has come to the door may pass; say so to it."""
        await peer.send(_GREETING + self.kind)
        if self.contexts is not None:
            await peer.encrypt(self.contexts.server)
        own = secrets.token_bytes(32)
        await peer.send(own)
        if not self.secret:
            return True
        other, proof = await peer.take(32), await peer.take(32)
        passes = hmac.compare_digest(proof, self._proof(b"worker", own + other))
        await peer.send(self._proof(b"door", own + other) if passes else _REFUSED)
        return passes

    async def present(self, peer: Peer) -> str | None:
        """Pass a door. Returns why it cannot be passed; None if it was. Raises OSError or EOFError where there is
        nobody."""
        try:
            greeting = await peer.take(len(_GREETING))
        except TimeoutError:
            greeting = b""
        if greeting != _GREETING:
            return f"does not ask for {_ASKS[self.kind]} that this process has: set that there, too, or nowhere"
        kind = await peer.take(1)
        if kind != self.kind:
            return f"asks for {_asked(kind)}, and this process has {_ASKS[self.kind]}; set the same everywhere"
        if self.contexts is None:
            return await self._answered(peer, await peer.take(32))
        try:
            await peer.encrypt(self.contexts.client)
            other = await peer.take(32)
        except ssl.SSLCertVerificationError as error:
            return f"shows a certificate that this process does not accept: {error.verify_message}"
        except (OSError, EOFError):  # asyncio's server hangs up without a word
            return (
                "hangs up on the certificate of this process: give all processes certificates of one authority "
                "(ca_cert_path), none of which another has in its crl_path"
            )
        return await self._answered(peer, other)

    async def _answered(self, peer: Peer, other: bytes) -> str | None:
        if not self.secret:
            return None
        own = secrets.token_bytes(32)
        await peer.send(own + self._proof(b"worker", other + own))
        answer = await peer.take(32)
        if answer == _REFUSED:
            return f"has another secret; give all processes of a job the same {SECRET}"
        if not hmac.compare_digest(answer, self._proof(b"door", other + own)):
            return "does not know the secret that it asks for, and is not to be trusted; find out who listens there"
        return None

    def _proof(self, role: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self.secret, b"partway " + role + nonces, "sha256")


def secret() -> bytes:
    """That of this process's environment; empty where it names none. Raises RuntimeStateError for a secret that is
    too short, and for a file that cannot be read, or that others may read."""
    text, path = os.environ.get(SECRET), os.environ.get(FILE)
    if text is not None and path is not None:
        raise RuntimeStateError(f"{SECRET} and {FILE} are both set; unset one")
    if path is not None:
        text, name = _read_alone(path), f"{FILE} ({path})"
    else:
        name = SECRET
    if text is None:
        return b""
    if len(text) < _LEAST:
        raise RuntimeStateError(
            f"{name} has {len(text)} characters; a job's secret has {_LEAST} or more, as `openssl rand -hex 32` prints"
        )
    return text.encode()


def _read_alone(path: str) -> str:
    """A file that is this user's alone, without the end of its last line."""
    try:
        mode, text = Path(path).stat().st_mode, Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise RuntimeStateError(f"{FILE} names {path}, which cannot be read: {reason}") from None
    if mode & 0o077:
        raise RuntimeStateError(f"{FILE} names {path}, which other users may read or write; run: chmod 600 {path}")
    return text


def listening(host: str, port: int) -> socket.socket:
    """What listens at one address of this host only ("": at all). Raises OSError if it cannot."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def store_behind(listener: socket.socket, own: Guard | None) -> Any:
    """A store that who comes to `listener` reaches, which is bound and listens: all, or who passes the door."""
    host, port = listener.getsockname()[:2]
    if own is None:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    inner = socket.create_server(("127.0.0.1", 0), backlog=4096)
    _OPEN.append(_Door(listener, inner.getsockname(), own))
    return store_behind(inner, None)


def way_to(host: str, port: int, own: Guard | None, patience: float, keeper: str) -> tuple[str, int]:
    """The address by which this process reaches the store of `keeper` that listens at `host`: that itself, or one of
    its own loopback from where a passage leads through the door.

    Raises RuntimeStateError if the door cannot be passed, and OSError where nobody listens in `patience` seconds.
    """
    end, where = time.monotonic() + patience, f"{host}:{port}"
    while True:
        try:
            refused = _RUNS.wait(_knock(host, port, own))
            break
        except (OSError, EOFError) as error:
            if time.monotonic() > end:
                raise OSError(str(error) or "it hangs up") from error
        time.sleep(_AGAIN)
    if refused:
        raise RuntimeStateError(f"{keeper} at {where} {refused}")
    if own is None:
        return host, port
    there = next((one for one in _OPEN if isinstance(one, _Passage) and one.leads == (host, port, own)), None)
    if there is None:
        there = _Passage(host, port, own)
        _OPEN.append(there)
    return there.address


def shut() -> None:
    """Shut the doors of this process, with what goes through them."""
    for one in [one for one in _OPEN if isinstance(one, _Door)]:
        _OPEN.remove(one)
        one.close()


def _asked(kind: bytes) -> str:
    return _ASKS.get(kind, "what this Partway does not know")


async def _knock(host: str, port: int, own: Guard | None) -> str | None:
    """Whether a door can be passed, or a store without one be talked to: why not, or None."""
    peer = await Peer.reach(host, port)
    try:
        if own is not None:
            async with asyncio.timeout(2 * _HANDSHAKE):
                return await own.present(peer)
        await peer.send(STORE_PING)  # which a store answers, and a door greets all
        with suppress(TimeoutError):
            if await peer.take(4) == _GREETING[:4]:
                kind = (await peer.take(len(_GREETING) - 3))[-1:]
                return f"asks for {_asked(kind)}, and this process has none; set the same everywhere"
        return None
    finally:
        peer.close()


class Peer:
    """A connection, whose other end may be anybody."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def reach(cls, host: str, port: int) -> Peer:
        """Raises OSError where nobody listens."""
        async with asyncio.timeout(_HANDSHAKE):
            return cls(*await asyncio.open_connection(host, port))

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def encrypt(self, context: ssl.SSLContext) -> None:
        """Shake hands by TLS. Raises OSError, of which ssl.SSLError is one, and EOFError."""
        await self.writer.start_tls(context, ssl_handshake_timeout=_HANDSHAKE)

    async def take(self, count: int) -> bytes:
        """So many bytes. Raises EOFError if it hangs up, and TimeoutError."""
        async with asyncio.timeout(_HANDSHAKE):
            return await self.reader.readexactly(count)

    def close(self) -> None:
        """Hang up."""
        self.writer.close()

    async def carry(self, other: Peer) -> None:
        """Carry bytes both ways until one end hangs up."""
        ways = [asyncio.ensure_future(one.pour(two)) for one, two in ((self, other), (other, self))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self.close()
            other.close()

    async def pour(self, other: Peer) -> None:
        """Send to another what comes from this one, until it hangs up."""
        with suppress(OSError):
            while data := await self.reader.read(2**16):
                await other.send(data)


class _Listens:
    """What listens, and takes care of each that comes."""

    def __init__(self, listener: socket.socket) -> None:
        self._here: dict[asyncio.Task[None], None] = {}
        self._server = _RUNS.wait(asyncio.start_server(self.came, sock=listener, backlog=4096))

    def close(self) -> None:
        """Hang up on all."""

        async def close() -> None:
            self._server.close()
            for task in list(self._here):
                task.cancel()

        _RUNS.wait(close())

    async def came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._here[task] = None
        try:
            with suppress(OSError, EOFError, asyncio.CancelledError):
                await self.serve(Peer(reader, writer))
        finally:
            del self._here[task]
            writer.close()

    async def serve(self, peer: Peer) -> None:
        raise NotImplementedError


class _Door(_Listens):
    """Before the store at `inner`."""

    def __init__(self, listener: socket.socket, inner: tuple[str, int], own: Guard) -> None:
        self._inner, self._guard = inner, own
        self._pending: dict[Peer, None] = {}
        super().__init__(listener)

    async def serve(self, peer: Peer) -> None:
        if len(self._pending) >= _PENDING:
            next(iter(self._pending)).close()
        self._pending[peer] = None
        try:
            async with asyncio.timeout(2 * _HANDSHAKE):
                passes = await self._guard.admit(peer)
        finally:
            del self._pending[peer]
        if passes:
            await peer.carry(await Peer.reach(*self._inner))


class _Passage(_Listens):
    """From a port of this host's loopback through the door at `host`."""

    def __init__(self, host: str, port: int, own: Guard) -> None:
        self.leads = host, port, own
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        super().__init__(listener)

    async def serve(self, peer: Peer) -> None:
        if not _is_ours(peer.writer.get_extra_info("peername")[1], self.address[1]):
            return
        host, port, own = self.leads
        there = await Peer.reach(host, port)
        try:
            async with asyncio.timeout(2 * _HANDSHAKE):
                refused = await own.present(there)
            if refused is None:
                await peer.carry(there)
        finally:
            there.close()


def _is_ours(port: int, to: int) -> bool:
    """Whether the connection from one port of the loopback to another is of this process's user. (Where the system does
    not say, it is taken for that.)"""
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        if not table.exists():
            return True
        for line in table.read_text().splitlines()[1:]:
            _, source, target, *rest = line.split()
            if source.endswith(f":{port:04X}") and target.endswith(f":{to:04X}"):
                return int(rest[4]) == os.getuid()
    return False


class _Runs:
    """The thread of this process that the doors run in, from when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def wait(self, what: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, which runs in that thread."""
        if self._loop is None or self._process != os.getpid():  # a fork has none of its parent's threads
            self._loop, self._process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=self._loop.run_forever, name="partway door", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()


_RUNS = _Runs()
