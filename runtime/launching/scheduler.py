"""The scheduler of a job, and its workers: how they find each other, and end together.

The process whose MS_ROLE is MS_SCHED trains nothing. It keeps the store (torch.distributed's) through which the workers
(MS_WORKER) find each other, gives them ranks, and looks after them:

    cards      a worker hands in its card: its host, its process, the versions that it runs
    answers    the scheduler answers each with its rank, or with the reason for a refusal. Nobody gets a rank before
               MS_WORKER_NUM workers have come; if too few come in MS_TOPO_TIMEOUT seconds, all are told who did
    beats      a worker gives a sign of life twice a second. One that is silent for MS_NODE_TIMEOUT seconds, or whose
               process is gone, has failed
    the end    when all workers have ended well, the scheduler does; when one fails, all others and the scheduler end
               within seconds, with its error
    attempts   with MS_ENABLE_RECOVERY=1 all others start again instead, and wait for a replacement. The keys of an
               attempt in the store have its number, so that no value of the last one is read

The workers' side is worker.py. The values in the store are JSON. (torch's own rendezvous keeps pickles there, which can
run code.)
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from ...strategy.errors import RuntimeStateError
from ..ranks.doing import is_alive, named
from .door import listening, store_behind
from .interfaces import place_of
from .launchers import Launch, number
from .security import guard

AGAIN = 128 + signal.SIGTERM  # the exit status of a process that was asked to end, and may be started again
BEAT = 0.5  # seconds between two signs of life
GRACE = 3.0  # seconds in which a process may end by itself, with its error, before it is forced to
_LOOK = 0.1  # seconds between two looks of the scheduler


@dataclass(frozen=True)
class Card:
    """What a worker says of itself. `space`: the namespace of its process number; `node`: the rank that it asks for by
    MS_NODE_ID; `recovers`: whether it starts again with the others."""

    host: str
    space: str
    process: int
    node: int | None
    workers: int
    versions: str
    recovers: bool

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + ("" if self.node is None else f" (MS_NODE_ID={self.node})")

    @classmethod
    def own(cls, workers: int) -> Card:
        """The card of this process."""
        node = number("MS_NODE_ID", 0) if "MS_NODE_ID" in os.environ else None
        return cls(socket.gethostname(), _space(), os.getpid(), node, workers, versions(), recovers())


def versions() -> str:
    """The versions that have to be the same in all processes of a job."""
    from importlib.metadata import version

    return f"partway {version('partway')}, torch {torch.__version__}, Python {platform.python_version()}"


def seconds_of(name: str, default: float) -> float:
    """A variable as a time in seconds. Raises RuntimeStateError if it is not one."""
    text = os.environ.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 10**6:
        raise RuntimeStateError(f"{name} is {text!r}; it is a number of seconds, such as 30")
    return value


def recovers() -> bool:
    """Return whether MS_ENABLE_RECOVERY asks workers to start again after a failure. Raises RuntimeStateError for a
    value other than 0 or 1."""
    text = os.environ.get("MS_ENABLE_RECOVERY", "0")
    if text not in ("0", "1"):
        raise RuntimeStateError(f"MS_ENABLE_RECOVERY is {text!r}; it is 1, or 0 for no recovery")
    return text == "1"


def key(attempt: int, name: str) -> str:
    """The key of `name` in the store, for one attempt."""
    return f"partway/{attempt}/{name}"


@dataclass(frozen=True)
class Ended:
    """A worker's report of its end: "done", "failed", "asked" to end by a signal, or it "left" with one that was.
    `order`: the position of the report in its attempt; `text`: the error, or the signal."""

    kind: str
    order: int = 0
    text: str = ""


@dataclass(frozen=True)
class Over:
    """The scheduler's word that an attempt is over: the reason, whether the workers start again, the worker that does
    not because it failed (one that was only silent may), and else the exit status of the scheduler."""

    why: str
    again: bool
    failed: int | None = None
    status: int = 1


def keep(found: Launch) -> None:
    """Be the scheduler of a job until all its workers have ended. Raises RuntimeStateError if one failed and the job
    does not recover, and SystemExit if the scheduler was asked to end."""
    scheduler = _Scheduler(found)
    with _until_asked_to_end():
        try:
            scheduler.run()
        except _EndSignal as asked:
            again = recovers() and asked.number != signal.SIGINT
            scheduler.tell(Over(f"the scheduler was asked to end by {asked}", again))
            if not scheduler.ends_well():
                raise SystemExit(128 + asked.number) from None


class _Scheduler:
    """The process that keeps the store."""

    def __init__(self, found: Launch) -> None:
        self._size, self._where, self._recovers = found.size, found.where, recovers()
        self._patience = seconds_of("MS_TOPO_TIMEOUT", 1800)
        self._silence = seconds_of("MS_NODE_TIMEOUT", 30)
        self._store = _listening(found.host, found.port)
        self._attempt = 1
        self._counted, self._awaited = 0, set[int]()  # workers that have come, and those of them without a card yet
        self._cards: dict[int, Card] = {}  # workers of this attempt, by the number of their card
        self._next: dict[int, tuple[Card, float]] = {}  # candidates for the next attempt, with their time of arrival
        self._runs = False  # whether this attempt has its workers

    def run(self) -> None:
        """Admit the workers, and look after them until they have ended; again after a failure if the job recovers.
        Raises RuntimeStateError or SystemExit if one failed for good."""
        while (ranks := self._admit()) and (over := self._watch(ranks)) is not None:
            self.tell(over)
            if over.again:
                waits = f"waits for {self._size} workers to start again (MS_TOPO_TIMEOUT={self._patience:g} s)"
                _say(f"{waits}: {over.why}")
                self._attempt, self._cards, self._runs = self._attempt + 1, {}, False
                continue
            time.sleep(GRACE + 2 * BEAT)  # they look for it
            if over.status == 1:
                raise RuntimeStateError(over.why)
            _say(f"ends: {over.why}")
            raise SystemExit(over.status)

    def tell(self, over: Over) -> None:
        """Tell all workers that the attempt is over."""
        self._store.set(key(self._attempt, "over"), json.dumps(asdict(over)))
        if not over.again:
            waiting = [*self._next, *(() if self._runs else self._cards)]
            for one in waiting:
                self._answer(one, error=over.why)

    def ends_well(self) -> bool:
        """Return whether all workers end well in the time in which they look for the scheduler's word."""
        end = time.monotonic() + GRACE + 2 * BEAT
        while time.monotonic() < end:
            if len(self._done(self._attempt)) == self._size:
                return True
            time.sleep(_LOOK)
        return False

    def _admit(self) -> dict[int, Card]:
        """The workers, by their ranks, when all have come; empty if the last attempt has ended well after all."""
        begin = time.monotonic()
        end = begin + self._patience
        while len(self._cards) < self._size:
            self._look()
            done = self._done(self._attempt - 1)  # after all. (Or by sys.exit(1), and they come back.)
            if len(done) == self._size:
                return {}
            if done and time.monotonic() > begin + self._silence + 4 * GRACE:
                self._fail(
                    f"the job cannot start again: {named(done)} had ended, without an error, and did not come back"
                )
            self._cards = {one: card for one, card in self._cards.items() if not _is_gone(card)}
            if time.monotonic() > end:
                self._too_few()
            time.sleep(_LOOK)
        fixed = {card.node: one for one, card in self._cards.items() if card.node is not None}
        free = iter([one for one, card in self._cards.items() if card.node is None])
        order = [fixed[rank] if rank in fixed else next(free) for rank in range(self._size)]
        hosts: dict[str, int] = {}
        for rank, one in enumerate(order):
            host = self._cards[one].host
            self._answer(one, rank=rank, local=hosts.get(host, 0), attempt=self._attempt)
            hosts[host] = hosts.get(host, 0) + 1
        self._runs = True
        return {rank: self._cards[one] for rank, one in enumerate(order)}

    def _too_few(self) -> NoReturn:
        came = "; ".join(map(str, self._cards.values())) or "none"
        nodes = {card.node for card in self._cards.values()} - {None}
        missing = sorted(set(range(self._size)) - nodes) if nodes else []
        text = (
            f"{len(self._cards)} of {self._size} workers came to the scheduler at {self._where} in "
            f"{self._patience:g} s (MS_TOPO_TIMEOUT): {came}"
        ) + (f"; missing: {', '.join(f'MS_NODE_ID={node}' for node in missing)}" if missing else "")
        self._fail(text)

    def _fail(self, why: str) -> NoReturn:
        self.tell(Over(why, again=False))
        time.sleep(2 * BEAT)
        raise RuntimeStateError(why)

    def _done(self, attempt: int) -> list[int]:
        """The ranks that have reported a good end in an attempt."""
        words = {rank: key(attempt, f"ended/{rank}") for rank in range(self._size)}
        there = [rank for rank, word in words.items() if self._store.check([word])]
        return [rank for rank in there if Ended(*json.loads(self._store.get(words[rank]))).kind == "done"]

    def _look(self) -> None:
        """Read the cards of new workers, admit those that fit, and answer those that cannot be admitted."""
        count = self._store.add("partway/count", 0)
        self._awaited |= set(range(self._counted + 1, count + 1))
        self._counted = count
        for one in sorted(one for one in self._awaited if self._store.check([f"partway/card/{one}"])):
            self._awaited.discard(one)
            try:
                card = Card(**json.loads(self._store.get(f"partway/card/{one}")))
            except (TypeError, ValueError):  # from no worker of ours
                continue
            self._next[one] = card, time.monotonic()
        for one, (card, since) in list(self._next.items()):
            waits = self._recovers and self._runs and time.monotonic() - since < self._silence
            wrong = self._refused(card) or (None if waits else self._without_room(card))
            if wrong:
                self._answer(one, error=f"{card} is not let in by the scheduler at {self._where}: {wrong}")
            elif waits:  # it may replace one whose failure is not known yet
                continue
            else:
                self._cards[one] = card
            del self._next[one]

    def _refused(self, card: Card) -> str | None:
        if card.workers != self._size:
            return f"it has MS_WORKER_NUM={card.workers}, and the scheduler {self._size}; set one number everywhere"
        if card.versions != versions():
            return f"it runs {card.versions}, and the scheduler {versions()}; install the same everywhere"
        if card.recovers != self._recovers:
            return (
                f"MS_ENABLE_RECOVERY=1 is set for {'it' if card.recovers else 'the scheduler'} alone; set it everywhere"
            )
        if card.node is not None and card.node >= self._size:
            return f"with MS_WORKER_NUM={self._size}, MS_NODE_ID is 0 to {self._size - 1}"
        return None

    def _without_room(self, card: Card) -> str | None:
        twin = next((c for c in self._cards.values() if card.node is not None and c.node == card.node), None)
        if twin is not None:
            return f"{twin} has that number already; give each worker its own MS_NODE_ID, or none any"
        if len(self._cards) >= self._size:
            return f"all {self._size} workers are there already (MS_WORKER_NUM); start no more"
        return None

    def _answer(self, one: int, **answer: Any) -> None:
        self._store.set(f"partway/answer/{one}", json.dumps(answer))

    def _watch(self, ranks: dict[int, Card]) -> Over | None:
        """Look after the workers. Returns the word that the attempt is over if one failed; None when all have ended
        well."""
        beats = dict.fromkeys(ranks, (0, time.monotonic()))
        left, ended, until, now = dict(ranks), dict[int, Ended](), float("inf"), time.monotonic()
        while left and time.monotonic() <= until:
            self._look()
            last, now = now, time.monotonic()
            if now - last > GRACE:  # this process was stopped, and has yet to read the words of its workers
                beats = {rank: (count, now) for rank, (count, _) in beats.items()}
            for rank, card in list(left.items()):
                count = self._store.add(key(self._attempt, f"beat/{rank}"), 0)
                if count != beats[rank][0]:
                    beats[rank] = count, now
                word = key(self._attempt, f"ended/{rank}")
                if self._store.check([word]):
                    del left[rank]
                    ended[rank] = Ended(*json.loads(self._store.get(word)))
                    if ended[rank].kind == "failed":
                        until = min(until, now + GRACE)  # it may have lost one that has said nothing yet
                elif _is_gone(card):
                    return self._over(f"rank {rank} ({card}) was killed or crashed", ended, rank)
                elif now - beats[rank][1] > (GRACE if until < float("inf") else self._silence):
                    silent = f"has not answered for {now - beats[rank][1]:.0f} s"
                    return self._over(f"rank {rank} ({card}) {silent}", ended, None)
            time.sleep(_LOOK)
        words = [(one.order, rank, one) for rank, one in ended.items() if one.kind in ("failed", "asked")]
        if not words:
            return None
        _, rank, first = min(words, key=lambda word: word[0])
        how = "failed:" if first.kind == "failed" else "was asked to end by"
        status = 1 if first.kind == "failed" else AGAIN
        return self._over(f"rank {rank} ({ranks[rank]}) {how} {first.text}", ended, rank, status)

    def _over(self, why: str, ended: dict[int, Ended], failed: int | None, status: int = 1) -> Over:
        done = [rank for rank, one in ended.items() if one.kind == "done"]
        why += f"; {named(done)} had ended before, without an error" if done else ""
        return Over(why, self._recovers, failed, status)


class _EndSignal(BaseException):
    """The signal that asks the scheduler to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def _until_asked_to_end() -> Iterator[None]:
    """Raise _EndSignal for a signal that asks this process to end, except signals that it ignores."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        raise _EndSignal(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, asked)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    sys.stderr.write(f"partway: the scheduler {text}\n")
    sys.stderr.flush()


def _listening(host: str, port: int) -> Any:
    """A store that listens on the interface of `host` only, behind a door if the job has a secret. Raises
    RuntimeStateError if it cannot."""
    try:
        return store_behind(listening(host, port), guard())
    except OSError as error:
        raise RuntimeStateError(
            f"MS_SCHED cannot listen at {place_of(host, port)}: {error.strerror or error}; MS_SCHED_HOST is an address "
            "of this host, and MS_SCHED_PORT a port that nothing else takes"
        ) from error


def _is_gone(card: Card) -> bool:
    """Return whether a process of this host has ended without a word."""
    return card.space == _space() != "" and not is_alive(card.process)


def _space() -> str:
    """The namespace in which processes see each other's numbers: the boot of the system, and the container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
