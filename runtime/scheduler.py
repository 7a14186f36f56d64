"""The scheduler of a job, and its workers: how they find each other, and end together.

The process whose MS_ROLE is MS_SCHED trains nothing. It keeps the store (torch.distributed's) through which the
workers (MS_WORKER) find each other, gives them ranks, and looks after them:

    cards      a worker that comes hands in what it is: its host, its process, the versions that it runs
    answers    the scheduler answers each with its rank, or with what is wrong with it. Nobody gets a rank before
               MS_WORKER_NUM workers have come; where too few come in MS_TOPO_TIMEOUT seconds, all are told who did
    beats      a worker says twice a second that it lives. One that is silent for MS_NODE_TIMEOUT seconds, or whose
               process is gone, has failed
    the end    when all workers have ended well, the scheduler does; when one fails, all others and the scheduler end
               within seconds, with what it was

What is in the store is JSON. (torch's own rendezvous keeps pickles there, which run what they say.)
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..strategy.errors import RuntimeStateError
from .doing import first_line, is_alive
from .launchers import Launch, number

_BEAT = 0.5  # seconds between two signs of life
_LOOK = 0.1  # seconds between two looks of the scheduler
_GRACE = 3.0  # seconds in which a process may end by itself, and say why, before it is ended


@dataclass(frozen=True)
class Card:
    """What a worker says of itself. `space`: where its process has its number; `node`: the rank that it asks for by
    MS_NODE_ID."""

    host: str
    space: str
    process: int
    node: int | None
    workers: int
    versions: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + ("" if self.node is None else f" (MS_NODE_ID={self.node})")

    @classmethod
    def own(cls, workers: int) -> Card:
        """That of this process."""
        node = number("MS_NODE_ID", 0) if "MS_NODE_ID" in os.environ else None
        return cls(socket.gethostname(), _space(), os.getpid(), node, workers, versions())


def versions() -> str:
    """What has to be alike in all processes of a job."""
    from importlib.metadata import version

    return f"partway {version('partway')}, torch {torch.__version__}, Python {platform.python_version()}"


def seconds_of(name: str, default: float) -> float:
    """A variable as a time in seconds. Raises RuntimeStateError if it is none."""
    text = os.environ.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 10**6:
        raise RuntimeStateError(f"{name} is {text!r}; it is a number of seconds, such as 30")
    return value


def meet(found: Launch, timeout: timedelta | None) -> tuple[Any, int, int]:
    """The store, the rank and the local rank of this worker. In the scheduler it ends the process when all workers
    have ended. Raises RuntimeStateError where that goes wrong."""
    role = os.environ["MS_ROLE"]
    if role == "MS_SCHED":
        _Scheduler(found).run()
        raise SystemExit(0)
    if role != "MS_WORKER":
        raise RuntimeStateError(f"MS_ROLE is {role!r}; it must be MS_WORKER or MS_SCHED")
    return _join(found, timeout)


# -- A worker


def _join(found: Launch, timeout: timedelta | None) -> tuple[Any, int, int]:
    card, patience = Card.own(found.size), seconds_of("MS_TOPO_TIMEOUT", 1800)
    try:
        store = dist.TCPStore(found.host, found.port, timeout=timedelta(seconds=patience))  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise RuntimeStateError(
            f"MS_WORKER cannot reach the scheduler at {found.where}; start one process with "
            f"MS_ROLE=MS_SCHED there, and check MS_SCHED_HOST and MS_SCHED_PORT: {first_line(error)}"
        ) from error
    mine = store.add("partway/count", 1)
    store.set(f"partway/card/{mine}", json.dumps(asdict(card)))
    try:
        store.wait([f"partway/answer/{mine}"], timedelta(seconds=patience + 10))
    except dist.DistError as error:
        raise RuntimeStateError(f"the scheduler at {found.where} has ended: {first_line(error)}") from error
    answer = json.loads(store.get(f"partway/answer/{mine}"))
    if "error" in answer:
        raise RuntimeStateError(answer["error"])
    rank: int = answer["rank"]
    _Pulse(found, rank).start()
    if timeout is not None:
        store.set_timeout(timeout)
    return dist.PrefixStore("partway/group", store), rank, answer["local"]  # type: ignore[attr-defined]


class _Pulse(threading.Thread):
    """The thread of a worker that says that it lives, and ends it with the job."""

    def __init__(self, found: Launch, rank: int) -> None:
        super().__init__(name="partway pulse", daemon=True)
        self.rank, self._where, self._process = rank, found.where, os.getpid()
        self._store = dist.TCPStore(found.host, found.port, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
        self._ended, self._hook = threading.Event(), sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._end)

    def run(self) -> None:
        while not self._ended.wait(_BEAT):
            try:
                self._store.add(f"partway/beat/{self.rank}", 1)
                why = self._store.get("partway/over").decode() if self._store.check(["partway/over"]) else None
            except RuntimeError as error:
                why = f"the scheduler at {self._where} has ended: {first_line(error)}"
            if why is not None and not self._ended.is_set():
                self._ended.wait(_GRACE)
                self._say(why)
                os._exit(1)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leave word of an error that ends this process, before what it tears down is an error elsewhere; and say what
        was first, where this is what followed from it."""
        if os.getpid() != self._process:
            self._hook(kind, error, trace)
            return
        self._end(f"{kind.__name__}: {first_line(error)}")
        self._hook(kind, error, trace)
        with suppress(RuntimeError):  # nobody was first, or the scheduler has gone
            self._store.wait(["partway/over"], timedelta(seconds=2 * _GRACE))
            self._say(self._store.get("partway/over").decode())

    def _say(self, why: str) -> None:
        if not why.startswith(f"rank {self.rank} "):
            sys.stderr.write(f"partway: rank {self.rank} ends: {why}\n")
            sys.stderr.flush()

    def _end(self, error: str = "") -> None:
        """Leave word of how this process ends; a child of it that was forked has no word in that."""
        if os.getpid() == self._process and not self._ended.is_set():
            self._ended.set()
            with suppress(RuntimeError):
                order = self._store.add("partway/failures", 1) if error else 0
                self._store.set(f"partway/ended/{self.rank}", json.dumps([order, error]))


# -- The scheduler


class _Scheduler:
    """The process that keeps the store."""

    def __init__(self, found: Launch) -> None:
        self._size, self._where = found.size, found.where
        self._patience = seconds_of("MS_TOPO_TIMEOUT", 1800)
        self._silence = seconds_of("MS_NODE_TIMEOUT", 30)
        self._store = _listening(found.host, found.port)
        self._counted, self._awaited = 0, set[int]()  # those that have come, and of them those without a card yet
        self._cards: dict[int, Card] = {}  # of those that were let in, by the number of their card

    def run(self) -> None:
        """Let the workers in, and look after them until they have ended. Raises RuntimeStateError if one failed."""
        ranks = self._admit()
        failed = self._watch(ranks)
        if failed is not None:
            self._store.set("partway/over", failed)
            time.sleep(_GRACE + 2 * _BEAT)  # they look for it
            raise RuntimeStateError(failed)

    def _admit(self) -> dict[int, Card]:
        """The workers, by their ranks, when all have come."""
        end = time.monotonic() + self._patience
        while len(self._cards) < self._size:
            self._look()
            self._cards = {one: card for one, card in self._cards.items() if not _is_gone(card)}
            if time.monotonic() > end:
                came = "; ".join(map(str, self._cards.values())) or "none"
                nodes = {card.node for card in self._cards.values()} - {None}
                missing = sorted(set(range(self._size)) - nodes) if nodes else []
                text = (
                    f"{len(self._cards)} of {self._size} workers came to the scheduler at {self._where} in "
                    f"{self._patience:g} s (MS_TOPO_TIMEOUT): {came}"
                ) + (f"; missing: {', '.join(f'MS_NODE_ID={node}' for node in missing)}" if missing else "")
                for one in self._cards:
                    self._answer(one, error=text)
                time.sleep(2 * _BEAT)
                raise RuntimeStateError(text)
            time.sleep(_LOOK)
        fixed = {card.node: one for one, card in self._cards.items() if card.node is not None}
        free = iter([one for one, card in self._cards.items() if card.node is None])
        order = [fixed[rank] if rank in fixed else next(free) for rank in range(self._size)]
        hosts: dict[str, int] = {}
        for rank, one in enumerate(order):
            host = self._cards[one].host
            self._answer(one, rank=rank, local=hosts.get(host, 0))
            hosts[host] = hosts.get(host, 0) + 1
        return {rank: self._cards[one] for rank, one in enumerate(order)}

    def _look(self) -> None:
        """Read the cards of those that have come, and answer those that cannot be let in."""
        count = self._store.add("partway/count", 0)
        self._awaited |= set(range(self._counted + 1, count + 1))
        self._counted = count
        for one in sorted(one for one in self._awaited if self._store.check([f"partway/card/{one}"])):
            self._awaited.discard(one)
            try:
                card = Card(**json.loads(self._store.get(f"partway/card/{one}")))
            except (TypeError, ValueError):  # of no worker of ours
                continue
            if wrong := self._refused(card):
                self._answer(one, error=f"{card} is not let in by the scheduler at {self._where}: {wrong}")
            else:
                self._cards[one] = card

    def _refused(self, card: Card) -> str | None:
        if card.workers != self._size:
            return f"it has MS_WORKER_NUM={card.workers}, and the scheduler {self._size}; set one number everywhere"
        if card.versions != versions():
            return f"it runs {card.versions}, and the scheduler {versions()}; install the same everywhere"
        if card.node is not None and card.node >= self._size:
            return f"with MS_WORKER_NUM={self._size}, MS_NODE_ID is 0 to {self._size - 1}"
        twin = next((c for c in self._cards.values() if card.node is not None and c.node == card.node), None)
        if twin is not None:
            return f"{twin} has that number already; give each worker its own MS_NODE_ID, or none any"
        if len(self._cards) >= self._size:
            return f"all {self._size} workers are there already (MS_WORKER_NUM); start no more"
        return None

    def _answer(self, one: int, **answer: Any) -> None:
        self._store.set(f"partway/answer/{one}", json.dumps(answer))

    def _watch(self, ranks: dict[int, Card]) -> str | None:
        """Look after the workers. What the first that failed said, or None when all have ended well."""
        beats = dict.fromkeys(ranks, (0, time.monotonic()))
        left, reports, until = dict(ranks), dict[int, str](), float("inf")
        while left:
            self._look()
            now = time.monotonic()
            for rank, card in list(left.items()):
                count = self._store.add(f"partway/beat/{rank}", 0)
                if count != beats[rank][0]:
                    beats[rank] = count, now
                key = f"partway/ended/{rank}"
                if self._store.check([key]):
                    del left[rank]
                    order, error = json.loads(self._store.get(key))
                    if error:
                        reports[order] = f"rank {rank} ({card}) failed: {error}"
                        until = min(until, now + _GRACE)  # it may have lost one that has said nothing yet
                elif _is_gone(card):
                    return f"rank {rank} ({card}) was killed or crashed"
                elif now - beats[rank][1] > (_GRACE if reports else self._silence):
                    return f"rank {rank} ({card}) has not answered for {now - beats[rank][1]:.0f} s"
            if now > until:
                break
            time.sleep(_LOOK)
        return reports[min(reports)] if reports else None


def _listening(host: str, port: int) -> Any:
    """A store that listens on the interface of `host` only. Raises RuntimeStateError if it cannot."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise RuntimeStateError(
            f"MS_SCHED cannot listen at {host}:{port}: {error.strerror or error}; MS_SCHED_HOST is an address of this "
            "host, and MS_SCHED_PORT a port that nothing else takes"
        ) from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _is_gone(card: Card) -> bool:
    """Whether a process of this host has ended without a word."""
    return card.space == _space() != "" and not is_alive(card.process)


def _space() -> str:
    """What tells whether two processes see each other's numbers: the system's start, and the container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
