"""The door to the store in which the processes of a job meet: it lets in who knows the job's secret.

torch's store answers whoever reaches its port. Where PARTWAY_JOB_SECRET is set, the process that keeps the store has it
listen on a loopback port that nobody is told, and a door on the address that the launcher names:

    greeting    the door says that it is one, with 32 random bytes
    answer      who comes sends 32 random bytes of its own, and their HMAC with the door's under the secret
    answer      the door sends its HMAC of both, or "refused"; each side knows that the other has the secret
    bytes       go to the store and back from then on

A worker's store goes by a port of its own loopback, which opens a way through the door for each connection. The secret
itself is never sent. What is sent afterwards is not encrypted: docs/security.md says what that means.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..strategy.errors import RuntimeStateError
from .torch_internals import STORE_PING

T = TypeVar("T")

SECRET, FILE = "PARTWAY_JOB_SECRET", "PARTWAY_JOB_SECRET_FILE"
_LEAST = 16  # characters of a secret
_GREETING = b"partway door 1\n"
_REFUSED = b"refused".ljust(32)
_HANDSHAKE = 10.0  # seconds that either side waits for the other
_PENDING = 256  # handshakes at once; where there are more, the oldest gives way
_AGAIN = 0.1  # seconds between two attempts to reach what may not listen yet

_OPEN: list[_Door | _Passage] = []  # of this process, until `shut`


@dataclass(frozen=True)
class Guard:
    """What lets a process in. Its parts are not for people to read."""

    secret: bytes = field(repr=False)

    async def admit(self, peer: _Peer) -> bool:
        """Whether who has come to the door may pass; say so to it."""
        own = secrets.token_bytes(32)
        await peer.send(_GREETING + own)
        other, proof = await peer.take(32), await peer.take(32)
        passes = hmac.compare_digest(proof, self._proof(b"worker", own + other))
        await peer.send(self._proof(b"door", own + other) if passes else _REFUSED)
        return passes

    async def present(self, peer: _Peer) -> str | None:
        """Pass a door. Returns why it cannot be passed; None if it was. Raises OSError or EOFError where there is
        nobody."""
        try:
            greeting = await peer.take(len(_GREETING))
        except TimeoutError:
            greeting = b""
        if greeting != _GREETING:
            return f"does not ask for the secret that this process has: set {SECRET} there, too, or nowhere"
        other, own = await peer.take(32), secrets.token_bytes(32)
        await peer.send(own + self._proof(b"worker", other + own))
        answer = await peer.take(32)
        if answer == _REFUSED:
            return f"has another secret; give all processes of a job the same {SECRET}"
        if not hmac.compare_digest(answer, self._proof(b"door", other + own)):
            return "does not know the secret that it asks for, and is not to be trusted; find out who listens there"
        return None

    def _proof(self, role: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self.secret, b"partway " + role + nonces, "sha256")


def guard() -> Guard | None:
    """That of this process's environment; None where it names no secret. Raises RuntimeStateError for a secret that is
    too short, and for a file that cannot be read, or that others may read."""
    text, path = os.environ.get(SECRET), os.environ.get(FILE)
    if text is not None and path is not None:
        raise RuntimeStateError(f"{SECRET} and {FILE} are both set; unset one")
    if path is not None:
        text, name = _read_alone(path), f"{FILE} ({path})"
    else:
        name = SECRET
    if text is None:
        return None
    if len(text) < _LEAST:
        raise RuntimeStateError(
            f"{name} has {len(text)} characters; a job's secret has {_LEAST} or more, as `openssl rand -hex 32` prints"
        )
    return Guard(text.encode())


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


async def _knock(host: str, port: int, own: Guard | None) -> str | None:
    """Whether a door can be passed, or a store without one be talked to: why not, or None."""
    peer = await _Peer.reach(host, port)
    try:
        if own is not None:
            return await peer.within(own.present(peer))
        await peer.send(STORE_PING)  # which a store answers, and a door greets all
        with suppress(TimeoutError):
            if await peer.take(4) == _GREETING[:4]:
                return f"asks for the job's secret, and this process has none; give it the same {SECRET}"
        return None
    finally:
        peer.close()


class _Peer:
    """A connection, whose other end may be anybody."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def reach(cls, host: str, port: int) -> _Peer:
        """Raises OSError where nobody listens."""
        return cls(*await asyncio.wait_for(asyncio.open_connection(host, port), _HANDSHAKE))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def take(self, count: int) -> bytes:
        """So many bytes. Raises EOFError if it hangs up, and TimeoutError."""
        return await asyncio.wait_for(self.reader.readexactly(count), _HANDSHAKE)

    async def within(self, asked: Awaitable[T]) -> T:
        return await asyncio.wait_for(asked, 2 * _HANDSHAKE)

    def close(self) -> None:
        self.writer.close()

    async def carry(self, other: _Peer) -> None:
        """Carry bytes both ways until one end hangs up."""
        ways = [asyncio.ensure_future(one.pour(two)) for one, two in ((self, other), (other, self))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self.close()
            other.close()

    async def pour(self, other: _Peer) -> None:
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
                await self.serve(_Peer(reader, writer))
        finally:
            del self._here[task]
            writer.close()

    async def serve(self, peer: _Peer) -> None:
        raise NotImplementedError


class _Door(_Listens):
    """Before the store at `inner`."""

    def __init__(self, listener: socket.socket, inner: tuple[str, int], own: Guard) -> None:
        self._inner, self._guard = inner, own
        self._pending: dict[_Peer, None] = {}
        super().__init__(listener)

    async def serve(self, peer: _Peer) -> None:
        if len(self._pending) >= _PENDING:
            next(iter(self._pending)).close()
        self._pending[peer] = None
        try:
            passes = await peer.within(self._guard.admit(peer))
        finally:
            del self._pending[peer]
        if passes:
            await peer.carry(await _Peer.reach(*self._inner))


class _Passage(_Listens):
    """From a port of this host's loopback through the door at `host`."""

    def __init__(self, host: str, port: int, own: Guard) -> None:
        self.leads = host, port, own
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        super().__init__(listener)

    async def serve(self, peer: _Peer) -> None:
        if not _is_ours(peer.writer.get_extra_info("peername")[1], self.address[1]):
            return
        host, port, own = self.leads
        there = await _Peer.reach(host, port)
        try:
            if await there.within(own.present(there)) is None:
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
