"""The door before the store lets in who knows the job's secret, and nobody else, whatever they send."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from certificates import Authority
from door_process import KINDS, flood, keeper

from partway.runtime.launching import door
from partway.runtime.launching.certificates import Contexts
from partway.runtime.launching.door import DoorGuard, secret, store_behind, way_to
from partway.strategy import RuntimeStateError

ONE, OTHER = DoorGuard(b"a secret of this job"), DoorGuard(b"a secret of another job")
KEY = "0123456789abcdef"
Address = tuple[str, int]


def _taken(peer: socket.socket, count: int) -> bytes:
    """So many bytes, or all until it hangs up. (MSG_WAITALL gives fewer where a signal comes between.)"""
    data = b""
    while len(data) < count and (more := peer.recv(count - len(data))):
        data += more
    return data


@pytest.fixture(autouse=True)
def shut() -> Iterator[None]:
    yield
    door.shut()


@pytest.fixture
def kept() -> tuple[Any, Address]:
    """A store behind a door, and the address of the door."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    return store_behind(listener, ONE), address


def test_who_knows_the_secret_reaches_the_store(kept: tuple[Any, Address]) -> None:
    store, address = kept
    way = way_to(*address, ONE, 5, "the scheduler")
    assert way != address
    first, second = (dist.TCPStore(*way) for _ in range(2))
    first.set("large", "x" * 10**6)
    assert store.get("large") == second.get("large") == b"x" * 10**6
    assert way_to(*address, ONE, 5, "the scheduler") == way, "a passage serves all"
    assert second.clone().add("count", 2) == 2


@pytest.mark.parametrize(("own", "said"), [
    (OTHER, "the scheduler at 127.0.0.1:{} has another secret; give all processes of a job the same PARTWAY_"),
    (None, "the scheduler at 127.0.0.1:{} asks for the job's secret (PARTWAY_JOB_SECRET), and this process has none"),
])  # fmt: skip
def test_others_are_told_why_not(kept: tuple[Any, Address], own: DoorGuard | None, said: str) -> None:
    with pytest.raises(RuntimeStateError) as error:
        way_to(*kept[1], own, 5, "the scheduler")
    assert said.format(kept[1][1]) in str(error.value)


def test_a_store_without_a_door_is_not_taken_for_one_that_has_it() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert way_to("127.0.0.1", store.port, None, 5, "rank 0") == ("127.0.0.1", store.port)
    with pytest.raises(RuntimeStateError, match=r"rank 0 at .* does not ask for the job's secret .* that this proc"):
        way_to("127.0.0.1", store.port, ONE, 5, "rank 0")


def test_a_door_that_does_not_know_the_secret_is_not_trusted() -> None:
    class Pretends(DoorGuard):
        async def admit(self, peer: Any, crowded: bool) -> bool:
            await peer.send(b"partway door 1\ns" + bytes(32))
            await peer.take(64)
            await peer.send(bytes(32))
            return True

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    store_behind(listener, Pretends(b""))
    with pytest.raises(RuntimeStateError, match="does not know the secret that it asks for, and is not to be trusted"):
        way_to(*address, ONE, 5, "the scheduler")


def test_nobody_there_is_an_error_after_the_patience() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        way_to(*address, ONE, 0.5, "the scheduler")


def test_strangers_do_not_keep_others_out(kept: tuple[Any, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PENDING", 4)
    monkeypatch.setattr(door, "_HANDSHAKE", 2.0)
    store, address = kept
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(20)]
        for stranger in silent[::2]:
            with contextlib.suppress(OSError):  # hung up on
                stranger.sendall(os.urandom(200))
        with socket.create_connection(address) as gone:
            gone.close()
        reached = dist.TCPStore(*way_to(*address, ONE, 5, "the scheduler"))
        reached.set("here", "1")
        assert store.get("here") == b"1"
        for stranger in silent[:10]:  # nothing but the greeting, and the end
            said = b""
            with contextlib.suppress(ConnectionError):
                while part := stranger.recv(4096):
                    said += part
            assert said[:15] in (b"", b"partway door 1\n")
            assert said[48:] in (b"", b"refused".ljust(32))


def test_a_door_may_have_an_address_of_ipv6() -> None:
    listener = door.listening("::1", 0)
    port = listener.getsockname()[1]
    store = store_behind(listener, ONE)
    client = dist.TCPStore(*way_to("::1", port, ONE, 60, "the scheduler"))
    client.set("here", "1")
    assert store.get("here") == b"1"
    with pytest.raises(RuntimeStateError, match=rf"^the scheduler at \[::1\]:{port} has another secret; give all "):
        way_to("::1", port, OTHER, 60, "the scheduler")


def test_who_comes_from_elsewhere_is_not_hung_up_on_for_them(
    kept: tuple[Any, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_PENDING", 4)
    with contextlib.ExitStack() as stack:

        def strangers() -> None:
            for _ in range(20):
                one = socket.create_connection(kept[1], source_address=("127.0.0.2", 0))
                _taken(stack.enter_context(one), 48)

        strangers()
        worker = stack.enter_context(socket.create_connection(kept[1]))
        challenge = _taken(worker, 48)[16:]
        strangers()
        worker.sendall(bytes(32) + ONE._proof(b"worker", challenge + bytes(32)))
        assert _taken(worker, 32) == ONE._proof(b"door", challenge + bytes(32))


@pytest.mark.timeout(60)
def test_few_of_those_that_say_nothing_are_held(kept: tuple[Any, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PENDING", 4)
    monkeypatch.setattr(door, "_HANDSHAKE", 1000.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(kept[1])) for _ in range(20)]
        for stranger in silent:
            with contextlib.suppress(ConnectionError):
                _taken(stranger, 48)
        while len(gone := select.select(silent, [], [], 0.1)[0]) < 16:
            pass
        assert len(gone) == 16


def test_who_does_not_pass_in_time_is_hung_up_on(kept: tuple[Any, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_HANDSHAKE", 0.3)
    for says in (b"", b"x" * 63):
        with socket.create_connection(kept[1]) as stranger:
            stranger.sendall(says)
            assert len(_taken(stranger, 4096)) == 48


def test_a_few_of_each_address_are_kept_of_many() -> None:
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(socket.socket()) for _ in range(door._AT_ONCE)]
        came = [(one, ("ours" if number < 3 else "flood", 1)) for number, one in enumerate(ours)]
        kept = door._fairly_kept(came)
        assert set(ours[:3]) < set(kept)
        assert len(kept) == door._KEPT
        assert sorted(one.fileno() >= 0 for one in ours) == [False] * (door._AT_ONCE - door._KEPT) + [True] * door._KEPT


# -- Patience


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The attempts of this process to reach a door, which wait for 0.3 seconds at first."""
    made: list[Address] = []
    reach = door.Peer.reach

    async def counted(host: str, port: int) -> door.Peer:
        made.append((host, port))
        return await reach(host, port)

    monkeypatch.setattr(door.Peer, "reach", counted)
    monkeypatch.setattr(door, "_HANDSHAKE", 0.3)
    return made


def wait_for(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.01)


@contextlib.contextmanager
def stopped(process: Any, until: Callable[[], bool]) -> Iterator[None]:
    """The process is stopped, until something is so."""

    def go_on() -> None:
        wait_for(until)
        process.send_signal(signal.SIGCONT)

    process.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_keeper_that_is_stopped_is_waited_for(attempts: list[Address]) -> None:
    with keeper(ONE.secret) as (process, address):
        with stopped(process, until=lambda: len(attempts) > 3):
            way = way_to(*address, ONE, 100, "the scheduler")
        begun = len(attempts)
        with stopped(process, until=lambda: len(attempts) > begun + 3):  # again, when the store is reached by that way
            store = dist.TCPStore(*way)
            store.set("here", "1")
        assert store.get("here") == b"1"


def test_a_keeper_that_stays_stopped_is_said_to_be_that(attempts: list[Address]) -> None:
    with keeper(ONE.secret) as (process, address):
        process.send_signal(signal.SIGSTOP)
        for own in (ONE, None):
            with pytest.raises(
                OSError, match=r"^it has not answered for 1 s: the process is stopped or overloaded, or t"
            ):
                way_to(*address, own, 1, "the scheduler")


@pytest.mark.parametrize(("count", "hangs_up"), [
    *itertools.product([0, 10, 16, 40, 48, 79], [True, False]), (80, True),
])  # fmt: skip
def test_a_door_that_falls_silent_or_hangs_up_is_tried_again(
    kept: tuple[Any, Address], attempts: list[Address], count: int, hangs_up: bool
) -> None:
    """The first connections get `count` bytes of what the door says."""
    with socket.create_server(("127.0.0.1", 0)) as between, contextlib.ExitStack() as stack:

        def carry() -> None:
            for number in range(100):
                try:
                    client = stack.enter_context(between.accept()[0])
                except OSError:
                    return
                upstream = stack.enter_context(socket.create_connection(kept[1]))
                threading.Thread(target=pour, args=(client, upstream, 10**9), daemon=True).start()
                threading.Thread(
                    target=pour, args=(upstream, client, count if number < 4 else 10**9), daemon=True
                ).start()

        def pour(one: socket.socket, two: socket.socket, most: int) -> None:
            with contextlib.suppress(OSError):
                while most > 0 and (part := one.recv(min(65536, most))):
                    two.sendall(part)
                    most -= len(part)
                if hangs_up:
                    two.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=carry)
        thread.start()
        try:
            store = dist.TCPStore(*way_to(*between.getsockname(), ONE, 100, "the scheduler"))
            store.set("here", "1")
            assert store.get("here") == b"1"
        finally:
            between.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_door_that_takes_longer_than_the_first_attempts_is_passed(
    kept: tuple[Any, Address], attempts: list[Address]
) -> None:
    """The network holds each connection back for three times as long as the first attempt lasts."""
    with socket.create_server(("127.0.0.1", 0)) as between:

        def carry(client: socket.socket) -> None:
            time.sleep(0.9)
            with client, socket.create_connection(kept[1]) as upstream, contextlib.suppress(OSError):
                thread = threading.Thread(target=pour, args=(upstream, client), daemon=True)
                thread.start()
                pour(client, upstream)
                upstream.shutdown(socket.SHUT_RDWR)
                thread.join()

        def pour(one: socket.socket, two: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while part := one.recv(65536):
                    two.sendall(part)

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=carry, args=(between.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            way_to(*between.getsockname(), ONE, 15, "the scheduler")
            assert len(attempts) > 2
        finally:
            between.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_workers_come_in_through_a_flood(kind: str) -> None:
    with keeper(ONE.secret) as (process, address), flood(kind, address[1]) as strangers:
        for number in range(2):
            store = dist.TCPStore(*way_to(*address, ONE, 240, "the scheduler"))
            assert store.add("came", 1) == number + 1
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 3 * (door._PENDING + door._AT_ONCE)
        assert strangers.poll() is None


# -- Strangers who have seen what others sent


def test_a_recorded_answer_does_not_open(kept: tuple[Any, Address]) -> None:
    """Whoever has seen a worker come in cannot come in with what it sent."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        seen: list[bytes] = []

        def overhear() -> None:
            while not seen or len(seen[-1]) < 64:  # before it answers, it asks whether there is a door
                client, _ = between.accept()
                with client, socket.create_connection(kept[1]) as upstream:
                    client.sendall(_taken(upstream, 48))
                    seen.append(_taken(client, 64))
                    if len(seen[-1]) == 64:
                        upstream.sendall(seen[-1])
                        client.sendall(_taken(upstream, 32))

        thread = threading.Thread(target=overhear)
        thread.start()
        way_to(*between.getsockname(), ONE, 5, "the scheduler")
        thread.join()
    with socket.create_connection(kept[1]) as again:
        _taken(again, 48)
        again.sendall(seen[-1])
        assert _taken(again, 32) == b"refused".ljust(32)


def test_a_passage_is_for_its_own_user(kept: tuple[Any, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    way = way_to(*kept[1], ONE, 5, "the scheduler")
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    with socket.create_connection(way, timeout=10) as other:
        other.sendall(b"x")
        with contextlib.suppress(ConnectionError):
            assert other.recv(1) == b""


def test_what_goes_through_ends_when_it_is_shut(kept: tuple[Any, Address]) -> None:
    with socket.create_connection(way_to(*kept[1], ONE, 5, "the scheduler"), timeout=10) as client:
        time.sleep(0.2)
        door.shut()
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(kept[1], timeout=1)


# -- The secret


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`named(secret, file, mode)`: the environment of a process."""

    def run(secret: str | None = None, file: bytes | None = None, mode: int = 0o600) -> None:
        monkeypatch.delenv("PARTWAY_JOB_SECRET", raising=False)
        if secret is not None:
            monkeypatch.setenv("PARTWAY_JOB_SECRET", secret)
        if file is not None:
            (tmp_path / "secret").write_bytes(file)
            (tmp_path / "secret").chmod(mode)
            monkeypatch.setenv("PARTWAY_JOB_SECRET_FILE", str(tmp_path / "secret"))

    return run


def test_a_secret_is_read_and_never_shown(named: Callable[..., None]) -> None:
    named()
    assert secret() == b""
    named(KEY)
    assert secret() == KEY.encode()
    assert KEY not in repr(DoorGuard(secret()))
    named(file=KEY.encode() + b"\n")
    assert secret() == KEY.encode()


@pytest.mark.parametrize(("given", "said"), [
    ((KEY[:15],), r"PARTWAY_JOB_SECRET has 15 characters; a job's secret has 16 or more, as `openssl rand -hex 32` "),
    (("",), r"PARTWAY_JOB_SECRET has 0 characters"),
    ((None, b"short\n"), r"PARTWAY_JOB_SECRET_FILE \(.*secret\) has 5 characters"),
    ((None, b"\xff" * 20), r"PARTWAY_JOB_SECRET_FILE names .*secret, which cannot be read: it is no text"),
    ((None, KEY.encode(), 0o640), r"PARTWAY_JOB_SECRET_FILE names .*, which other users may read or write; run: ch"),
    ((KEY, KEY.encode()), r"PARTWAY_JOB_SECRET and PARTWAY_JOB_SECRET_FILE are both set; unset one"),
])  # fmt: skip
def test_a_wrong_secret_is_an_error_without_it(named: Callable[..., None], given: tuple[Any, ...], said: str) -> None:
    named(*given)
    with pytest.raises(RuntimeStateError, match=said) as error:
        secret()
    assert KEY[:15] not in str(error.value)


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_JOB_SECRET_FILE", "/nowhere/secret")
    with pytest.raises(RuntimeStateError, match="names /nowhere/secret, which cannot be read: No such file"):
        secret()


# -- Certificates


@pytest.fixture
def certified(tmp_path: Path) -> Callable[..., Contexts]:
    """`certified(authority, **dates)`: the contexts of a process whose certificates it has signed, unchecked."""

    def make(authority: Authority, number: int = 0, trusts: Authority | None = None, **dates: Any) -> Contexts:
        files = [authority.sign(f"{side}{number}", **dates) for side in ("server", "client")]
        made = []
        for protocol, file in zip((ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT), files, strict=True):
            context = ssl.SSLContext(protocol)
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.load_cert_chain(file)
            context.load_verify_locations((trusts or authority).file)
            made.append(context)
        return Contexts(*made)

    return make


def opened(own: DoorGuard) -> tuple[Any, Address]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    return store_behind(listener, own), address


@pytest.mark.parametrize("known", [b"", b"a secret of this job"])
def test_who_has_a_certificate_reaches_the_store(
    certified: Callable[..., Contexts], tmp_path: Path, known: bytes
) -> None:
    authority = Authority(tmp_path)
    store, address = opened(DoorGuard(known, certified(authority)))
    client = dist.TCPStore(*way_to(*address, DoorGuard(known, certified(authority, 1)), 5, "the scheduler"))
    client.set("large", "x" * 10**6)
    assert store.get("large") == b"x" * 10**6


def test_what_is_kept_goes_encrypted(certified: Callable[..., Contexts], tmp_path: Path) -> None:
    own, seen = DoorGuard(b"", certified(Authority(tmp_path))), bytearray()
    _, address = opened(own)
    with socket.create_server(("127.0.0.1", 0)) as between:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with source, contextlib.suppress(OSError):
                while part := source.recv(65536):
                    seen.extend(part)
                    target.sendall(part)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = between.accept()
                    upstream = socket.create_connection(address)
                    for pair in ((client, upstream), (upstream, client)):
                        threading.Thread(target=carry, args=pair, daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        client = dist.TCPStore(*way_to(*between.getsockname(), own, 5, "the scheduler"))
        client.set("known", "pattern" * 100)
        assert client.get("known") == b"pattern" * 100
        assert b"partway door 1" in seen
        assert b"pattern" not in seen


HANGS_UP = r"at .* hangs up on the certificate of this process: give all processes certificates of one authority \(ca_"


def test_a_door_that_hangs_up_since_many_come_is_not_said_to_refuse_a_certificate(
    certified: Callable[..., Contexts], tmp_path: Path, attempts: list[Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = certified(Authority(tmp_path))

    class Busy(DoorGuard):
        async def admit(self, peer: Any, crowded: bool) -> bool:
            if len(attempts) > 20:
                return await super().admit(peer, crowded)
            await peer.send(b"partway door 1\nT")
            if len(attempts) % 2:
                await peer.encrypt(contexts.server)
            raise EOFError

    own = DoorGuard(b"", contexts)
    _, address = opened(Busy(b"", contexts))
    client = dist.TCPStore(*way_to(*address, own, 100, "the scheduler"))
    assert client.add("came", 1) == 1


def test_a_door_that_is_slow_to_encrypt_is_not_said_to_refuse_a_certificate(
    certified: Callable[..., Contexts], tmp_path: Path, attempts: list[Address]
) -> None:
    class Slow(DoorGuard):
        async def admit(self, peer: Any, crowded: bool) -> bool:
            if len(attempts) > 20:
                return await super().admit(peer, crowded)
            await peer.send(b"partway door 1\nt")
            return bool(await peer.take(10**6))

    contexts = certified(Authority(tmp_path))
    _, address = opened(Slow(b"", contexts))
    client = dist.TCPStore(*way_to(*address, DoorGuard(b"", contexts), 100, "the scheduler"))
    assert client.add("came", 1) == 1


WRONG = {
    "a foreign one": HANGS_UP,
    "an expired one": HANGS_UP,
    "none": HANGS_UP,
    "a foreign door": r"shows a certificate that this process does not accept: .*certificate",
    "a secret": r"asks for a certificate \(set_ps_context\), and this process has the job's secret \(PARTW",
    "nothing": r"asks for a certificate \(set_ps_context\), and this process has none; set the same everywhere",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_who_has_no_certificate_that_serves_stays_out(
    certified: Callable[..., Contexts], tmp_path: Path, wrong: str
) -> None:
    own, other = Authority(tmp_path), Authority(tmp_path, "other")
    _, address = opened(DoorGuard(b"", certified(own)))
    shows: DoorGuard | None
    if wrong == "an expired one":
        shows = DoorGuard(b"", certified(own, 1, end=timedelta(hours=-1)))
    elif wrong == "none":
        contexts = certified(own, 1)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(own.file)
        shows = DoorGuard(b"", Contexts(contexts.server, bare))
    elif wrong.startswith("a foreign"):
        shows = DoorGuard(b"", certified(other, 1, trusts=own if wrong == "a foreign one" else other))
    else:
        shows = ONE if wrong == "a secret" else None
    with pytest.raises(RuntimeStateError, match=WRONG[wrong]):
        way_to(*address, shows, 5, "the scheduler")
