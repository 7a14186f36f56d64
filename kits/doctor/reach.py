"""Check that the ranks reach each other, for `partway doctor` under a launcher.

    come      each rank goes to the launcher's meeting place, and leaves its card there
    connect   each rank connects to every other at the address where that one's gloo listens, by a socket of its own:
              gloo itself does not say which pair failed, and may exceed its timeout
    talk      if all connect: messages of known values, through the process group that `init` would make

Each step has a time limit. Ranks that do not come are named, and so is each pair that does not connect.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from partway.runtime.launching import SCHEDULER, Launch, gpus, interfaces, meet, meet_by_scheduler, seconds_of
from partway.runtime.launching import versions as own_versions
from partway.runtime.ranks import first_line, named
from partway.strategy import RuntimeStateError

_INTERFACE = "GLOO_SOCKET_IFNAME"
_CONNECT = 5.0  # seconds in which a rank answers another
_LOOK = 0.05  # seconds between two looks
_ROUNDS = 8  # questions for the time; the quickest counts
_APART = 5.0  # seconds by which clocks may differ
_LISTED = 12  # problems of a kind that are listed


@dataclass(frozen=True)
class RankCard:
    """What a rank says of itself.

    place              tells apart hosts of the same name
    address, port      where it listens, at the address of its gloo; interface: of that address
    towards, by        its address on the way to the meeting place, and the interface of that
    token              the word that it answers to, so that no other program is mistaken for it
    asked              GLOO_SOCKET_IFNAME of its environment; ""
    wrong              why it does not listen; ""
    """

    rank: int
    host: str
    place: str
    process: int
    address: str
    interface: str
    port: int
    towards: str
    by: str
    token: str
    versions: str
    asked: str = ""
    wrong: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}{f', {self.address}' if self.address else ''})"


@dataclass(frozen=True)
class ReachReport:
    """The findings of a rank: why it did not reach others, by rank; how far rank 0's clock is ahead of its own, and the
    accuracy of that, in seconds; the fault of messages."""

    unreached: Mapping[int, str]
    ahead: float = 0.0
    exact: float = 0.0
    messages: str = ""


@dataclass(frozen=True)
class ReachProblem:
    """A problem, and the rank that reports it."""

    rank: int
    text: str


@dataclass(frozen=True)
class Met:
    """The meeting place of the ranks: a store, and the launcher's facts, with the rank and the local rank."""

    store: Any
    launch: Launch


@dataclass(frozen=True)
class Health:
    """The findings of all ranks, by rank, and the problems."""

    cards: Mapping[int, RankCard]
    reports: Mapping[int, ReachReport]
    problems: tuple[ReachProblem, ...]

    @property
    def well(self) -> str:
        """The message if there is no problem."""
        hosts = len({card.place for card in self.cards.values()})
        return f"{len(self.cards)} ranks on {hosts} host{'s' * (hosts > 1)} reach each other"

    def table(self) -> str:
        """The ranks for people, one a line."""
        rows = [("rank", "host", "process", "listens at", "clock, to rank 0", "runs")]
        for rank, card in sorted(self.cards.items()):
            report = self.reports.get(rank, ReachReport({}))
            where = f"{card.address}:{card.port} ({card.interface})" if card.port else "nowhere"
            clock = f"{-1e3 * report.ahead:+.2f} ms ± {1e3 * report.exact:.2f}" if report.exact else ""
            rows.append((str(rank), card.host, str(card.process), where, clock, card.versions))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def join(found: Launch, limit: float) -> Met:
    """Go to the launcher's meeting place. Raises RuntimeStateError if there is no way to it within `limit` seconds; the
    scheduler's own process ends here."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store
    _wait_for(found, agent, limit)
    patience = timedelta(seconds=limit)
    if found.launcher == SCHEDULER:
        os.environ["MS_TOPO_TIMEOUT"] = str(min(limit, seconds_of("MS_TOPO_TIMEOUT", limit)))
        store, rank, local = meet_by_scheduler(found, patience)
        found = replace(found, rank=rank, local_rank=local)
    elif agent:
        store = dist.TCPStore(found.host, found.port, timeout=patience)  # type: ignore[attr-defined]
    else:
        store = meet(found, patience)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the values of the last attempt
    return Met(dist.PrefixStore(f"partway/doctor/{attempt}", store), found)  # type: ignore[attr-defined]


def _wait_for(found: Launch, agent: bool, limit: float) -> None:
    """Wait until a process listens at the meeting place, unless this one will; a store's own errors are long, and come
    late."""
    if (found.rank == 0 and not agent) or os.environ.get("MS_ROLE") == "MS_SCHED":
        return
    keeper = "the scheduler" if found.launcher == SCHEDULER else "torchrun" if agent else "rank 0"
    end = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((found.host, found.port), timeout=min(limit, _CONNECT)).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                who = f"a worker on {socket.gethostname()}" if found.rank is None else f"rank {found.rank}"
                raise RuntimeStateError(
                    f"{who} does not reach {keeper} at {found.where} in {limit:g} s: {_why(error)}; check that it runs "
                    "there, that this host reaches the address, and that no firewall is in between"
                ) from error
        time.sleep(_LOOK)


def check(met: Met, limit: float, versions: str | None = None) -> Health:
    """Check whether the ranks reach each other; every rank calls it. `versions`: those of this rank (default: the real
    ones).

    If a rank is missing after `limit` seconds, nothing else is checked. Raises RuntimeStateError if the keeper of the
    ranks' messages has ended.
    """
    assert met.launch.rank is not None
    door, card = _opened(met.launch.rank, met.launch, versions or own_versions())
    try:
        health = _found_out(met, card, limit)
        _part(met)
        return health
    except dist.DistError as error:
        raise RuntimeStateError(
            f"rank {met.launch.rank} has lost what is kept at {met.launch.where}; whoever keeps it (rank 0, torchrun "
            f"or the scheduler) has ended, and said why: {first_line(error)}"
        ) from error
    finally:
        if door is not None:
            door.shutdown()
            door.server_close()


def _found_out(met: Met, card: RankCard, limit: float) -> Health:
    found, store = met.launch, met.store
    told = _gathered(store, "card", found, asdict(card), limit)
    cards = {rank: RankCard(**fields) for rank, fields in told.items()}
    if missing := sorted(set(range(found.size)) - cards.keys()):
        return Health(cards, {}, (_absent(missing, cards, found, limit),))
    report = _connected(cards, card.rank)
    reports = _reports(store, "reached", found, report, limit)
    refused = any(each.wrong for each in cards.values()) or any(each.unreached for each in reports.values())
    if len(reports) == found.size and not refused:
        report = replace(report, messages=_talked(met, limit))
        reports = _reports(store, "talked", found, report, 2 * limit)
    return Health(cards, reports, tuple(problems(cards, reports)))


def _part(met: Met) -> None:
    """Leave the store; rank 0, which may keep it, leaves last."""
    store, found = met.store, met.launch
    store.set(f"done/{found.rank}", "")
    came = [rank for rank in range(found.size) if store.check([f"card/{rank}"])]
    end = time.monotonic() + _CONNECT
    while found.rank == 0 and not store.check([f"done/{rank}" for rank in came]) and time.monotonic() < end:
        time.sleep(_LOOK)


def _absent(missing: Sequence[int], cards: Mapping[int, RankCard], found: Launch, limit: float) -> ReachProblem:
    came = "; ".join(f"{card}, process {card.process}" for card in cards.values())
    have = "have" if len(missing) > 1 else "has"
    return ReachProblem(
        min(cards), f"{named(missing)} {have} not come to {found.where} in {limit:g} s; there are {came}"
    )


def problems(cards: Mapping[int, RankCard], reports: Mapping[int, ReachReport]) -> Iterator[ReachProblem]:
    """The problems, with their fixes."""
    several = len({card.place for card in cards.values()}) > 1
    hidden = {
        rank for rank, card in cards.items() if several and not card.wrong and interfaces.is_loopback(card.address)
    }
    for rank, card in cards.items():
        if card.wrong:
            yield ReachProblem(rank, f"{card}: {card.wrong}")
        if card.versions != cards[0].versions:
            differ = f"{card} runs {card.versions}, and rank 0 {cards[0].versions}"
            yield ReachProblem(rank, f"{differ}; install the same everywhere")
        if rank in hidden:
            yield ReachProblem(rank, _loopback(card))
        if rank not in reports:
            yield ReachProblem(0, f"{card} has ended, or is too slow to say what it found; look at what it printed")
    for rank, report in reports.items():
        if abs(report.ahead) > _APART + report.exact:
            how = f"{abs(report.ahead):.1f} s {'behind' if report.ahead > 0 else 'ahead of'}"
            text = f"the clock of {cards[rank]} is {how} that of rank 0; set both by a time server (NTP), so that what"
            yield ReachProblem(rank, f"{text} logs and files say of time compares")
        if report.messages:
            yield ReachProblem(rank, f"{cards[rank]}: {report.messages}")
    yield from _shortened(
        ReachProblem(
            rank,
            f"{cards[rank]} cannot reach {cards[peer]} at port {cards[peer].port}: {why}; check {_INTERFACE} on both "
            "hosts, and what stands between them (a firewall)",
        )
        for rank, report in reports.items()
        for peer, why in report.unreached.items()
        if not (cards[peer].wrong or (peer in hidden and cards[rank].place != cards[peer].place))
    )


def _loopback(card: RankCard) -> str:
    why, fixes = f"{_INTERFACE} is {card.asked!r}", list[str]()
    if not card.asked:
        why = f"on {card.host} the name {card.host!r} stands for {card.address} (/etc/hosts)"
        fixes.append(f"give it the address {card.towards or 'by which others reach it'} there")
    if card.by:
        fixes.append(f"export {_INTERFACE}={card.by}")
    text = f"{card} listens on the loopback, which other hosts do not reach: {why}; {', or '.join(fixes)}"
    return text.removesuffix("; ")


def _shortened(found: Iterable[ReachProblem]) -> list[ReachProblem]:
    all_found = list(found)
    more = len(all_found) - _LISTED
    return all_found if more <= 0 else [*all_found[:_LISTED], ReachProblem(0, f"and {more} more pairs of ranks")]


# -- The card of this rank


class _AnsweringDoor(socketserver.ThreadingTCPServer):
    """The socket at which a rank answers the others: with its number and the time, to whoever knows its token."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, family: int, address: str, rank: int) -> None:
        self.address_family, self.rank, self.token = family, rank, secrets.token_hex(16)
        super().__init__((address, 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.05,), name="partway door", daemon=True).start()


class _Answer(socketserver.StreamRequestHandler):
    timeout = _CONNECT

    def handle(self) -> None:
        door = self.server
        assert isinstance(door, _AnsweringDoor)
        with suppress(OSError):
            while self.rfile.readline(200).decode("ascii", "replace").strip() == door.token:
                self.wfile.write(f"{json.dumps([door.rank, time.time()])}\n".encode())


def _opened(rank: int, found: Launch, versions: str) -> tuple[_AnsweringDoor | None, RankCard]:
    """The door of this rank, and its card."""
    there = interfaces.addresses()
    towards = _towards(found, there)
    family, address, wrong = _listens_at(there)
    door = None
    if not wrong:
        try:
            door = _AnsweringDoor(family, address, rank)
        except OSError as error:
            wrong = f"cannot listen at {address}: {error.strerror or error}"
    port, token = (door.server_address[1], door.token) if door is not None else (0, "")
    names = {value: name for name, value in there.items()}
    interface = "lo" if interfaces.is_loopback(address) else names.get(address, "an interface without a known name")
    return door, RankCard(
        rank=rank,
        host=socket.gethostname(),
        place=interfaces.place(),
        process=os.getpid(),
        address=address,
        interface=interface,
        port=int(port),
        towards=towards,
        by=names.get(towards, ""),
        token=token,
        versions=versions,
        asked=os.environ.get(_INTERFACE, ""),
        wrong=wrong,
    )


def _listens_at(there: Mapping[str, str]) -> tuple[int, str, str]:
    """The address where gloo listens in this process, with its family; or the problem with it."""
    asked = os.environ.get(_INTERFACE, "")
    names = [name for _, name in socket.if_nameindex()]
    for name in filter(None, asked.split(",")):
        if name in there:
            return socket.AF_INET, there[name], ""
        lacks = f"{name!r} has no IPv4 address" if name in names else f"this host has no interface {name!r}"
        fix = f"export the name of one by which the others reach it, of {', '.join(there) or ', '.join(names)}"
        return socket.AF_INET, "", f"{_INTERFACE} is {asked!r}, and {lacks}; {fix}"
    with suppress(OSError):  # like gloo, which takes the loopback if the name stands for no address of this host
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as probe:
                probe.bind(address)
                return family, str(address[0]), ""
    return socket.AF_INET, "127.0.0.1", ""


def _towards(found: Launch, there: Mapping[str, str]) -> str:
    """The address of this host on the way to the meeting place; nothing is sent."""
    with suppress(OSError):
        if not interfaces.is_loopback(address := interfaces.from_here(found.host, found.port)):
            return address
    return next((address for address in there.values() if not interfaces.is_loopback(address)), "")


# -- Messages between the ranks


def _gathered(store: Any, name: str, found: Launch, mine: Any, limit: float) -> dict[int, Any]:
    """The messages of the ranks that send one before the first of them has waited for `limit` seconds."""
    keys = {rank: f"{name}/{rank}" for rank in range(found.size)}
    store.set(keys[found.rank or 0], json.dumps(mine))
    end = time.monotonic() + limit
    while not (store.check(list(keys.values())) or store.check([f"{name}/over"])):
        if time.monotonic() > end:
            there = [rank for rank, key in keys.items() if store.check([key])]
            store.compare_set(f"{name}/over", "", json.dumps(there))
        time.sleep(_LOOK)
    there = json.loads(store.get(f"{name}/over")) if store.check([f"{name}/over"]) else list(keys)
    return {rank: json.loads(store.get(keys[rank])) for rank in there}


def _reports(store: Any, name: str, found: Launch, report: ReachReport, limit: float) -> dict[int, ReachReport]:
    told = _gathered(store, name, found, asdict(report), limit + 2 * _CONNECT)
    unreached = {rank: {int(peer): why for peer, why in each["unreached"].items()} for rank, each in told.items()}
    return {rank: ReachReport(**{**each, "unreached": unreached[rank]}) for rank, each in told.items()}


def _connected(cards: Mapping[int, RankCard], rank: int) -> ReachReport:
    """Connect to every other rank that listens, and ask rank 0 for the time."""
    peers = [card for card in cards.values() if card.rank != rank and not card.wrong]
    with ThreadPoolExecutor(16) as pool:
        answers = dict(zip([card.rank for card in peers], pool.map(_asked, peers), strict=True))
    unreached = {peer: answer for peer, answer in answers.items() if isinstance(answer, str)}
    clock = answers.get(0)
    return ReachReport(unreached, *clock) if isinstance(clock, tuple) else ReachReport(unreached)


def _asked(card: RankCard) -> tuple[float, float] | str:
    """How far that rank's clock is ahead, with the accuracy; or why it cannot be reached."""
    best = (0.0, float("inf"))
    try:
        line = socket.create_connection((card.address, card.port), timeout=_CONNECT)
        with line, line.makefile("rwb") as said:
            for _ in range(_ROUNDS if card.rank == 0 else 1):
                here, start = time.time(), time.perf_counter()
                said.write(f"{card.token}\n".encode())
                said.flush()
                rank, there = json.loads(said.readline() or "[-1, 0]")
                half = (time.perf_counter() - start) / 2
                if rank != card.rank:
                    return "what answers there is another program"
                best = min(best, (there - here - half, half), key=lambda each: each[1])
    except OSError as error:
        return _why(error)
    except ValueError:
        return "what answers there is another program"
    return best


def _why(error: OSError) -> str:
    return f"no answer in {_CONNECT:g} s" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()


def _talked(met: Met, limit: float) -> str:
    """The fault of messages in the process group that `init` would make; "" if there is none."""
    said = [f"messages have not come in {limit:g} s"]

    def talk() -> None:
        try:
            said[0] = _messages(met, limit)
        except (RuntimeError, ValueError) as error:
            said[0] = first_line(error)

    thread = threading.Thread(target=talk, name="partway messages", daemon=True)  # gloo may exceed its timeout
    thread.start()
    thread.join(limit + _CONNECT)
    return said[0]


def _messages(met: Met, limit: float) -> str:
    rank, size = met.launch.rank or 0, met.launch.size
    gpu, claims = torch.cuda.is_available(), dist.PrefixStore("claims", met.store)  # type: ignore[attr-defined]
    device = (
        torch.device("cuda", gpus.take(claims, rank, met.launch.local_rank, met.launch.one_host))
        if gpu
        else torch.device("cpu")
    )
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.PrefixStore("group", met.store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
    )
    try:
        total = torch.tensor([rank + 1], device=device)
        dist.all_reduce(total)
        got, wrong = total.item(), []
        if got != size * (size + 1) // 2:
            wrong.append(f"the sum over all ranks is {got}, not {size * (size + 1) // 2}")
        for apart in range(1, size):
            to, source = (rank + apart) % size, (rank - apart) % size
            sent, came = torch.tensor([rank * size + to], device=device), torch.zeros_like(total)
            pair = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, came, source)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            if (got := came.item()) != source * size + rank:
                wrong.append(f"the message of rank {source} came as {got}, not {source * size + rank}")
        return "; ".join(wrong)
    finally:
        dist.destroy_process_group()
