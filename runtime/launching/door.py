"""The door to the store in which the processes of a job meet: it admits a process that knows the job's secret, or has a
certificate of the job's authority.

torch's store answers whoever reaches its port. If PARTWAY_JOB_SECRET or certificates are set, the process that keeps
the store has it listen on an undisclosed loopback port, and puts a door on the address that the launcher names:

    greeting    the door says that it is one, and what it asks for
    TLS         if there are certificates: each side shows its own, and the rest is encrypted
    challenge   the door sends 32 random bytes
    answer      if there is a secret, the client sends 32 of its own, and their HMAC with the door's under the secret
    answer      the door sends its HMAC of both, or "refused"; each side knows that the other has the secret
    bytes       go to the store and back from then on

A process tries a slow door again for as long as its patience lasts; only an explicit answer is a refusal. The door
holds few connections that have not passed, each for ten seconds. When it is full, a random one of the address with the
most of them gives way: strangers who connect faster than a worker can answer only delay it.

A worker's store connects to a port of its own loopback, which opens a way through the door for each connection. The
secret itself is never sent. Without certificates nothing is encrypted: docs/security.md explains the consequences.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import random
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ...strategy.errors import RuntimeStateError
from ..torch_internals import STORE_PING
from .certificates import Contexts
from .interfaces import family_of, place_of
from .job import JOB

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
_HANDSHAKE = 10.0  # seconds in which a client has to pass; also the limit of the first attempt to pass
_SHORTEST = 1.0  # the least seconds of an attempt, however little patience is left
_CONNECTS = 2.0  # seconds in which a connection is made, or tried anew: the system waits longer each time
_PENDING = 256  # handshakes at once
_AT_ONCE, _KEPT = 256, 64  # connections accepted in one turn of the door; connections kept if more wait
_HANG_UPS = 3  # on a certificate, in a row, that count as a refusal
_AGAIN = 0.1  # seconds between two attempts to reach a port that may not listen yet


class Refused(Exception):
    """The peer has answered, and cannot be passed. The text is the rest of a sentence about it."""


class _HungUp(EOFError):
    """Like Refused if it happens again: a door that is stopped or crowded hangs up, too."""


@dataclass(frozen=True)
class DoorGuard:
    """What a process must have to be admitted: a secret, TLS with certificates, or both. Its repr shows neither."""

    secret: bytes = field(default=b"", repr=False)
    contexts: Contexts | None = field(default=None, repr=False)

    @property
    def kind(self) -> bytes:
        """The kind of proof that it asks for, a key of `_ASKS`."""
        return b"s" if self.contexts is None else b"b" if self.secret else b"t"

    async def admit(self, peer: Peer, crowded: bool) -> bool:
        """Decide whether a peer may pass the door, and tell it. `crowded`: the peer may be dropped in favor of others,
        which a capital letter in the greeting says."""
        await peer.send(_GREETING + (self.kind.upper() if crowded else self.kind))
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

    async def present(self, peer: Peer) -> None:
        """Pass a door. Raises Refused if it cannot be passed, and OSError or EOFError if nobody answers."""
        if await peer.take(len(_GREETING)) != _GREETING:
            raise Refused(self.missing)
        kind = await peer.take(1)
        if kind.lower() != self.kind:
            raise Refused(f"asks for {_asked(kind)}, and this process has {_ASKS[self.kind]}; set the same everywhere")
        if self.contexts is None:
            await self._answer(peer, await peer.take(32))
        else:
            await self._answer(peer, await self._encrypted(peer, self.contexts.client, crowded=kind.isupper()))

    @property
    def missing(self) -> str:
        """The fault of a store without a door."""
        return f"does not ask for {_ASKS[self.kind]} that this process has: set that there, too, or nowhere"

    async def _encrypted(self, peer: Peer, context: ssl.SSLContext, crowded: bool) -> bytes:
        """The challenge, by TLS: only its arrival shows that the door has accepted the certificate."""
        begin = time.monotonic()
        try:
            await peer.encrypt(context)
            return await peer.take(32)
        except ssl.SSLCertVerificationError as error:
            raise Refused(f"shows a certificate that this process does not accept: {error.verify_message}") from None
        except (OSError, EOFError) as error:  # asyncio's server hangs up without a message
            if crowded or time.monotonic() - begin > _HANDSHAKE / 2:  # others came, or this took too long
                raise
            raise _HungUp(
                "hangs up on the certificate of this process: give all processes certificates of one authority "
                "(ca_cert_path), none of which another has in its crl_path"
            ) from error

    async def _answer(self, peer: Peer, other: bytes) -> None:
        if not self.secret:
            return
        own = secrets.token_bytes(32)
        await peer.send(own + self._proof(b"worker", other + own))
        answer = await peer.take(32)
        if answer == _REFUSED:
            raise Refused(f"has another secret; give all processes of a job the same {SECRET}")
        if not hmac.compare_digest(answer, self._proof(b"door", other + own)):
            raise Refused(
                "does not know the secret that it asks for, and is not to be trusted; find out who listens there"
            )

    def _proof(self, role: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self.secret, b"partway " + role + nonces, "sha256")


def secret() -> bytes:
    """The secret in this process's environment; empty if there is none. Raises RuntimeStateError for a secret that is
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
    """The content of a file that only this user may read, without the last newline."""
    try:
        mode, text = Path(path).stat().st_mode, Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise RuntimeStateError(f"{FILE} names {path}, which cannot be read: {reason}") from None
    if mode & 0o077:
        raise RuntimeStateError(f"{FILE} names {path}, which other users may read or write; run: chmod 600 {path}")
    return text


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at one address of this host only ("": at all of IPv4). Raises OSError if it cannot."""
    listener = socket.socket(family_of(host))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def store_behind(listener: socket.socket, own: DoorGuard | None) -> Any:
    """A store that serves the connections to `listener`, which is bound and listens: all of them, or those that pass
    the door."""
    host, port = listener.getsockname()[:2]
    if own is None:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    inner = socket.create_server(("127.0.0.1", 0), backlog=4096)
    JOB.doors.append(_Door(listener, inner.getsockname(), own))
    return store_behind(inner, None)


def way_to(host: str, port: int, own: DoorGuard | None, patience: float, keeper: str) -> tuple[str, int]:
    """The address at which this process reaches the store of `keeper` at `host`: the same address, or one on its own
    loopback, from where a passage leads through the door.

    Raises RuntimeStateError if the door cannot be passed, and OSError if nobody answers in `patience` seconds.
    """
    knocked = False

    async def attempt() -> None:
        nonlocal knocked
        if not knocked:
            await _knock(host, port, own)
            knocked = True
        if own is not None:
            (await _passed(host, port, own)).close()

    try:
        _run(_patiently(attempt, patience))
    except Refused as refused:
        raise RuntimeStateError(f"{keeper} at {place_of(host, port)} {refused}") from None
    if own is None:
        return host, port
    leads = host, port, own, patience
    there = next((one for one in JOB.doors if isinstance(one, _Passage) and one.leads == leads), None)
    if there is None:
        there = _Passage(*leads)
        JOB.doors.append(there)
    return there.address


def shut() -> None:
    """Shut the doors of this process, and the connections through them."""
    for one in [one for one in JOB.doors if isinstance(one, _Door)]:
        JOB.doors.remove(one)
        one.close()


def _asked(kind: bytes) -> str:
    return _ASKS.get(kind.lower(), "what this Partway does not know")


async def _patiently(attempt: Callable[[], Coroutine[Any, Any, T]], patience: float) -> T:
    """Return the result of the first attempt that succeeds. Each may take at least as long as all before it together,
    so that a slow peer has time to answer and a lost request is repeated. Raises Refused, and OSError after `patience`
    seconds."""
    begin, hung_up = time.monotonic(), 0
    while True:
        past = time.monotonic() - begin
        try:
            async with asyncio.timeout(min(max(_HANDSHAKE, past), max(patience - past, _SHORTEST))):
                return await attempt()
        except (OSError, EOFError) as error:
            hung_up = hung_up + 1 if isinstance(error, _HungUp) else 0
            over = time.monotonic() - begin > patience
            if isinstance(error, _HungUp) and (over or hung_up == _HANG_UPS):
                raise Refused(str(error)) from None
            if over:
                raise OSError(_described(error, patience)) from error
        await asyncio.sleep(_AGAIN)


def _described(error: OSError | EOFError, patience: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it has not answered for {patience:g} s: the process is stopped or overloaded, or the network is"
    return str(error) if isinstance(error, OSError) else "it hangs up on those who come"


async def _knock(host: str, port: int, own: DoorGuard | None) -> None:
    """Ask who listens: a store answers with four bytes, and a door with its greeting. Raises Refused if one of them
    answers and the other is expected."""
    peer = await Peer.reach(host, port)
    try:
        await peer.send(STORE_PING)
        if await peer.take(4) != _GREETING[:4]:
            if own is not None:
                raise Refused(own.missing)
        elif own is None:
            kind = (await peer.take(len(_GREETING) - 3))[-1:]
            raise Refused(f"asks for {_asked(kind)}, and this process has none; set the same everywhere")
    finally:
        peer.close()


async def _passed(host: str, port: int, own: DoorGuard) -> Peer:
    """A connection that has passed the door."""
    peer = await Peer.reach(host, port)
    try:
        await own.present(peer)
    except BaseException:
        peer.abort()
        raise
    return peer


class Peer:
    """A connection to an unknown peer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def reach(cls, host: str, port: int) -> Peer:
        """Connect to `host`. Raises OSError if nobody listens."""
        async with asyncio.timeout(_CONNECTS):
            return cls(*await asyncio.open_connection(host, port))

    @property
    def address(self) -> str:
        """The peer's address; "" if it has gone already."""
        return str((self.writer.get_extra_info("peername") or [""])[0])

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def encrypt(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake. Raises OSError, of which ssl.SSLError is a subclass, and EOFError."""
        await self.writer.start_tls(context, ssl_handshake_timeout=10**6)  # the caller has its own limit

    async def take(self, count: int) -> bytes:
        """Receive `count` bytes. Raises EOFError if the peer hangs up."""
        return await self.reader.readexactly(count)

    def close(self) -> None:
        """Hang up once everything is sent."""
        self.writer.close()

    def abort(self) -> None:
        """Hang up at once: TLS would wait for the peer's goodbye."""
        self.writer.transport.abort()

    async def carry(self, other: Peer) -> None:
        """Forward bytes both ways until one end hangs up."""
        ways = [asyncio.ensure_future(one.pour(two)) for one, two in ((self, other), (other, self))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self.close()
            other.close()

    async def pour(self, other: Peer) -> None:
        """Send `other` the bytes that come from this peer, until it hangs up."""
        with suppress(OSError):
            while data := await self.reader.read(2**16):
                await other.send(data)


def _fairly_kept(came: list[tuple[socket.socket, Any]]) -> list[socket.socket]:
    """A random choice of the new connections, in which no address has more than another unless that has no more; the
    others are closed."""
    random.shuffle(came)
    turns = Counter[str]()

    def turn(one: tuple[socket.socket, Any]) -> int:
        turns[one[1][0]] += 1
        return turns[one[1][0]]

    came.sort(key=turn)
    for connection, _ in came[_KEPT:]:
        connection.close()
    return [connection for connection, _ in came[:_KEPT]]


class _Listens:
    """A listening socket, and a task for each connection. In a flood it accepts a number in each turn and hangs up on
    most of them: a peer with the secret comes again soon, while the system's queue would keep it waiting for long."""

    def __init__(self, listener: socket.socket) -> None:
        self._here: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepts = _started(self._accept(listener))

    def close(self) -> None:
        """Hang up on all connections."""

        async def close() -> None:
            for task in [self._accepts, *self._here]:
                task.cancel()
            await asyncio.wait([self._accepts])

        _run(close())

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    came = [await loop.sock_accept(listener)]
                except OSError:  # it has gone already, or no descriptor is left
                    await asyncio.sleep(_AGAIN)
                    continue
                with suppress(OSError):
                    while len(came) < _AT_ONCE:
                        came.append(listener.accept())
                for connection in _fairly_kept(came) if len(came) == _AT_ONCE else [one for one, _ in came]:
                    connection.setblocking(False)
                    with suppress(OSError):
                        await loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._came)

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, peer = asyncio.current_task(), Peer(reader, writer)
        assert task is not None
        self._here.add(task)
        try:
            await self.serve(peer)
            peer.close()
        except (OSError, EOFError, Refused, asyncio.CancelledError):
            peer.abort()
        finally:
            self._here.discard(task)

    async def serve(self, peer: Peer) -> None:
        raise NotImplementedError


class _Door(_Listens):
    """The door before the store at `inner`."""

    def __init__(self, listener: socket.socket, inner: tuple[str, int], own: DoorGuard) -> None:
        self._inner, self._guard = inner, own
        self._pending: dict[asyncio.Task[Any], str] = {}  # those that have not passed yet, with their addresses
        super().__init__(listener)

    async def serve(self, peer: Peer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._make_room()
        self._pending[task] = peer.address
        try:
            async with asyncio.timeout(_HANDSHAKE):
                passes = await self._guard.admit(peer, crowded=len(self._pending) > _PENDING // 2)
        finally:
            self._pending.pop(task, None)
        if passes:
            await peer.carry(await Peer.reach(*self._inner))

    def _make_room(self) -> None:
        if len(self._pending) >= _PENDING:
            [(most, _)] = Counter(self._pending.values()).most_common(1)
            one = random.choice([task for task, address in self._pending.items() if address == most])
            del self._pending[one]
            one.cancel()


class _Passage(_Listens):
    """A passage from a port of this host's loopback through the door at `host`; it has `patience` seconds to pass."""

    def __init__(self, host: str, port: int, own: DoorGuard, patience: float) -> None:
        self.leads = host, port, own, patience
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        super().__init__(listener)

    async def serve(self, peer: Peer) -> None:
        if not _is_ours(peer.writer.get_extra_info("peername")[1], self.address[1]):
            return
        host, port, own, patience = self.leads
        await peer.carry(await _patiently(lambda: _passed(host, port, own), patience))


def _is_ours(port: int, to: int) -> bool:
    """Return whether the connection from one port of the loopback to another is of this process's user; True if the
    system does not say."""
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        if not table.exists():
            return True
        for line in table.read_text().splitlines()[1:]:
            _, source, target, *rest = line.split()
            if source.endswith(f":{port:04X}") and target.endswith(f":{to:04X}"):
                return int(rest[4]) == os.getuid()
    return False


def _run(what: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in this process's thread for doors, and return its result."""
    if JOB.loop is None or JOB.loop_of != os.getpid():  # a fork has none of its parent's threads
        JOB.loop, JOB.loop_of = asyncio.new_event_loop(), os.getpid()
        threading.Thread(target=JOB.loop.run_forever, name="partway door", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(what, JOB.loop).result()


def _started(what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a coroutine in that thread."""

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(what)

    return _run(start())
