"""A worker of a scheduler's job (scheduler.py): how it joins the others, gives signs of life, and ends or starts again
with them."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, astuple
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...strategy.errors import RuntimeStateError
from ..ranks.answering import AnsweringStore, NoAnswer
from ..ranks.doing import first_line
from .door import way_to
from .job import JOB
from .launchers import Launch
from .scheduler import BEAT, GRACE, Card, Ended, Over, key, seconds_of
from .security import guard


def join(found: Launch, timeout: timedelta | None) -> tuple[Any, int, int]:
    """The store, the rank and the local rank of this worker. Raises RuntimeStateError if the scheduler does not answer,
    or refuses it."""
    card, patience = Card.own(found.size), seconds_of("MS_TOPO_TIMEOUT", 1800)
    start = _Start() if card.recovers else None
    while True:
        store = _reach(found, patience)
        try:
            answer = _ask(store, card, patience)
            break
        except dist.DistError as error:
            if not card.recovers:
                raise RuntimeStateError(f"the scheduler at {found.where} has ended: {first_line(error)}") from error
            time.sleep(BEAT)  # it may start again
    if "error" in answer:
        raise RuntimeStateError(answer["error"])
    rank, attempt = answer["rank"], answer["attempt"]
    JOB.pulses.append(_Pulse(found, rank, attempt, start))
    JOB.pulses[-1].start()
    if timeout is not None:
        store.set_timeout(timeout)
    return dist.PrefixStore(key(attempt, "group"), store), rank, answer["local"]  # type: ignore[attr-defined]


def _reach(found: Launch, patience: float) -> Any:
    try:
        way = way_to(found.host, found.port, guard(), patience, "the scheduler")
        return dist.TCPStore(*way, timeout=timedelta(seconds=patience))  # type: ignore[attr-defined]
    except (OSError, dist.DistError) as error:
        raise RuntimeStateError(
            f"MS_WORKER cannot reach the scheduler at {found.where}; start one process with "
            f"MS_ROLE=MS_SCHED there, and check MS_SCHED_HOST and MS_SCHED_PORT: {first_line(error)}"
        ) from error


def _ask(store: Any, card: Card, patience: float) -> dict[str, Any]:
    """Hand in the card, and return the scheduler's answer."""
    mine = store.add("partway/count", 1)
    store.set(f"partway/card/{mine}", json.dumps(asdict(card)))
    store.wait([f"partway/answer/{mine}"], timedelta(seconds=patience + 10))
    answer: dict[str, Any] = json.loads(store.get(f"partway/answer/{mine}"))
    return answer


def leave(asked: str | None) -> None:
    """Report that this worker ends before the work is done; does nothing without a scheduler.

    asked   what asked this process to end, such as "SIGTERM"; None if another worker was asked. If the scheduler
            recovers, this process then starts again, with the replacement of the other, and does not return
    """
    for pulse in JOB.pulses:
        pulse.leave(asked)


class _Pulse(threading.Thread):
    """The thread of a worker that gives signs of life, and ends the worker with the job, or starts it again.

    start   how to start this process again; None if the scheduler does not recover
    """

    def __init__(self, found: Launch, rank: int, attempt: int, start: _Start | None) -> None:
        super().__init__(name="partway pulse", daemon=True)
        self._rank, self._attempt, self._where, self._start_again = rank, attempt, found.where, start
        self._process, self._silence = os.getpid(), seconds_of("MS_NODE_TIMEOUT", 30)
        self._store = AnsweringStore(_reach(found, 30), self._silence)
        self._told: Over | None = None
        self._ended, self._how, self._hook = threading.Event(), "", sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._exit)

    def run(self) -> None:
        while not self._ended.wait(BEAT):
            over = self._over()
            if over is not None and not self._ended.is_set():
                if self._ended.wait(GRACE):
                    time.sleep(2 * GRACE)  # it ends by itself, and is forced to only if that hangs
                self._follow(over)
                _flush()
                os._exit(1)

    def _over(self) -> Over | None:
        """Give a sign of life. Returns the reason if the job is over, with whether it starts again."""

        try:
            self._store.add(self._key(f"beat/{self._rank}"), 1)
            if self._told is None and self._store.check([self._key("over")]):
                self._told = Over(**json.loads(self._store.get(self._key("over"))))
            return self._told
        except NoAnswer:
            silent = f"has not answered for {self._silence:g} s (MS_NODE_TIMEOUT)"
            return self._told or Over(f"the scheduler at {self._where} {silent}", again=True)
        except RuntimeError as error:
            return self._told or Over(f"the scheduler at {self._where} has ended: {first_line(error)}", again=True)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an error that ends this process, before the teardown causes errors elsewhere."""
        self._end("failed", f"{kind.__name__}: {first_line(error).rstrip(':')}")
        self._hook(kind, error, trace)

    def _exit(self) -> None:
        """Handle the end of the script. After an error that followed from another worker's, print the first one. (torch
        keeps back output of the error's hook.)"""
        self._end()
        if self._how == "failed":
            self._wait_and_follow()

    def leave(self, asked: str | None) -> None:
        """Like the function `leave`."""
        self._end("left" if asked is None else "asked", asked or "")
        if asked is None and self._start_again is not None:
            self._wait_and_follow()

    def _wait_and_follow(self) -> None:
        if os.getpid() != self._process:
            return
        with suppress(RuntimeError):  # nobody was first, or the scheduler has gone
            self._store.wait([self._key("over")], timedelta(seconds=2 * GRACE))
        over = self._over()
        if over is not None:
            self._follow(over)

    def _follow(self, over: Over) -> None:
        """Say why this worker ends; start again if the job does, unless this worker failed or has ended well."""
        if self._how == "done" or self._rank == over.failed:
            return
        again = over.again and self._start_again is not None
        sys.stderr.write(f"partway: rank {self._rank} {'starts again' if again else 'ends'}: {over.why}\n")
        if again and self._start_again is not None:
            self._start_again.now()

    def _end(self, kind: str = "done", text: str = "") -> None:
        """Report how this process ends; a forked child does not report."""
        if os.getpid() == self._process and not self._ended.is_set():
            self._how = kind
            self._ended.set()
            with suppress(RuntimeError):
                word = Ended(kind, self._store.add(self._key("words"), 1), text)
                self._store.set(self._key(f"ended/{self._rank}"), json.dumps(astuple(word)))
                self._store.check([self._key("over")])  # behind a door the word is on its way until this is answered

    def _key(self, name: str) -> str:
        return key(self._attempt, name)


class _Start:
    """How this process was started, to start the same script in its place: its results are lost, its process number and
    output files stay. Raises RuntimeStateError if the script has left its folder already."""

    def __init__(self) -> None:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "-c").name
        gone = [text for text in sys.orig_argv[1:] if Path(text).name == script != "-c" and not Path(text).exists()]
        if gone:
            raise RuntimeStateError(
                f"MS_ENABLE_RECOVERY=1 starts {gone[0]} again from the folder where it was started, which {Path.cwd()} "
                "is not; call init() before os.chdir()"
            )
        self._command, self._folder = [sys.executable, *sys.orig_argv[1:]], Path.cwd()
        self._kept = {one for one in _descriptors() if os.get_inheritable(one)}

    def now(self) -> None:
        """Start again, with all open files closed, so that peers see that it has gone."""
        for child in multiprocessing.active_children():  # they see no end of a parent that keeps its number
            child.kill()
        _flush()
        for one in _descriptors() - self._kept:
            with suppress(OSError):  # closed meanwhile
                os.set_inheritable(one, False)
        os.chdir(self._folder)
        os.execv(self._command[0], self._command)


def _descriptors() -> set[int]:
    """The open files of this process, except its input and output."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found - {0, 1, 2}


def _flush() -> None:
    """Write out what was printed; gives up soon if another thread holds the stream."""
    writer = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    writer.start()
    writer.join(1)
