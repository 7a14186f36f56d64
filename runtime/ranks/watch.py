"""What the ranks of a process group know of each other beside their collectives, so that none waits in vain.

A collective that not every rank enters hangs, without telling which ranks are missing or what they do. So each rank has
a *watch*: a thread that sleeps until another rank rings its bell, and then answers what this rank's own code is doing.
It answers also while that code waits in a collective, since such a wait releases Python's lock. All messages go through
the store by which the processes have met, on connections of their own, and in the steady state there are none.

    ring      a rank whose collective has failed asks all others, and raises an error with their answers
    meet      all ranks come together at a point of the program, where each hands in a text (`agreement.py` compares
              them). A rank that waits there for others rings their bells: if they wait in a collective for ranks that
              are here, neither can ever come, and everyone at the meeting is told at once
    ended     a rank that ends leaves word of it, with the error that ended it
    overdue   over NCCL a rank's GPU waits while its code has gone on (`flights.py`)
    tell      a difference between the ranks' ledgers (`ledger.py`) is raised by the next step of every rank
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...strategy.errors import RuntimeStateError
from ...strategy.torch_mesh import has_nccl
from ..code.straight_line import trail_of
from ..torch_internals import default_store, flight_record, timeout_of
from .answering import AnsweringStore
from .doing import ENDED, GONE, MEETS, Doing, first_line, is_alive, last_words, lines_of, named, place_of
from .flights import Overdue, end_process, flights, given
from .ledger import Ledger
from .stragglers import Looks, waits
from .world import last, of_world

_LOOK = 1.0  # seconds between two looks at who is missing
_ANSWER = 2.0  # seconds in which a watch answers: it has no other work
_SURE = 3  # looks at which the same ranks wait for the same: a rank that is only slow has gone on by then
_FOREVER = timedelta(days=20)
T = TypeVar("T")
_STOP, _TOLD = "stop", "told "
EVERY = "ledger"  # of all ranks


class Watch:
    """The watch of this rank; every rank of the process group makes one. `timeout`: seconds that a meeting waits."""

    def __init__(self) -> None:
        before = last(Watch)
        self._number: int = 1 if before is None else before._number + 1  # numbers its keys in a store
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = timeout_of(self.group).total_seconds()
        self._prefix = f"partway/{self._number}"
        self._store, self._own = self._answering(), self._connected()
        self._process, self._asked = os.getpid(), itertools.count()
        self._meetings: dict[tuple[int, ...], int] = {}  # the number of meetings, by their ranks
        self._planning: list[str] = []
        self._at: str | None = None  # the meeting at which this rank waits
        self._waits: tuple[str, tuple[int, ...]] | None = (
            None  # the collective outside of programs in which it waits, and for which ranks
        )
        self.failed: str | None = None
        self._nccl = has_nccl()
        self._store.set(f"process/{self.rank}", f"{socket.gethostname()} {self._process}")
        self._broken: str | None = None  # the difference that was found, until it is raised
        self._ledgers: dict[str, Ledger] = {}
        self.ledger(EVERY, range(self.size))
        self.look_every: int | None = 0  # the setting for `replicas.note`: None: nothing; 0: only a few elements
        self._thread = threading.Thread(target=self._listen, name="partway watch", daemon=True)
        self._thread.start()
        self._overdue = Overdue(self.rank, _record_under_way, self.ask, self._end) if self._nccl else None

    def _connected(self) -> Any:
        return dist.PrefixStore(self._prefix, _connection())  # type: ignore[attr-defined]

    def ledger(self, name: str, ranks: Sequence[int]) -> Ledger:
        """The ledger `name` that this rank, one of `ranks`, shares with them."""
        if name not in self._ledgers:
            store = self._answering()
            looks = Looks(store, self.rank, self.size).look if name == EVERY else None
            self._ledgers[name] = Ledger(store, self.rank, ranks, self._tell, name, looks)
        return self._ledgers[name]

    def forget(self, name: str) -> None:
        """End the ledger `name`, as all of its ranks do; its remaining lines are compared first."""
        if (ledger := self._ledgers.pop(name, None)) is not None:
            ledger.close()

    def _answering(self) -> AnsweringStore:
        return AnsweringStore(self._connected(), self.timeout)

    # -- the thread

    def _listen(self) -> None:
        for n in range(sys.maxsize):
            bell = f"bell/{self.rank}/{n}"
            try:
                self._own.wait([bell], _FOREVER)
                request = self._own.get(bell).decode()
                self._own.delete_key(bell)
                if request == _STOP:
                    return
                if request.startswith(_TOLD):
                    self._broken = request.removeprefix(_TOLD)
                else:
                    self._own.set(f"{request}/{self.rank}", json.dumps(asdict(self.doing())))
            except RuntimeError:  # the store has gone, and with it the ranks that could ask
                return

    def _end(self, text: str) -> None:
        """End this process, whose GPU waits in vain."""
        self.failed = text.partition("\n")[0]
        with suppress(RuntimeError):  # the store has gone
            self._leave_word()
        end_process(text)

    def _leave_word(self) -> None:
        """Leave the word that others read after this process has ended."""
        given_here = given(flight_record()) if self._nccl else {}
        word = Doing(last_words(self.failed), mark=ENDED, given=given_here)
        self._store.set(f"ended/{self.rank}", json.dumps(asdict(word)))

    def stop(self) -> str | None:
        """Leave word of the end, and end the thread. Returns the difference between the ranks' ledgers if it was not
        raised."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return None
        if self._overdue is not None:
            self._overdue.stop()
        failed = self.failed is not None or hasattr(sys, "last_value")
        for ledger in self._ledgers.values():
            ledger.end(failed)
        difference = None if failed else self._broken
        if difference is not None:
            self.failed = f"has found: {difference}"
        try:
            self._leave_word()
            self._ring(self.rank, _STOP)
            self._thread.join(_ANSWER)
        except RuntimeError:  # the store has gone
            pass
        return difference

    def check(self) -> None:
        """Raise RuntimeStateError if what the ranks ran has been found to differ."""
        if (found := self.found()) is not None:
            raise found

    def found(self) -> RuntimeStateError | None:
        """The difference between the ranks, once; this rank then ends with the error."""
        if self._broken is None:
            return None
        error, self._broken = RuntimeStateError(self._broken), None
        self.gave_up(error)
        return error

    def _tell(self, text: str) -> None:
        """Tell every rank the difference that was found."""
        self._broken = text
        for rank in self._others():
            self._ring(rank, f"{_TOLD}{text}")

    def doing(self) -> Doing:
        """The current activity of this rank: its code and, over NCCL, its GPU."""
        does = self._code_does()
        if not self._nccl:
            return does
        recorded = flight_record()
        under_way = flights(recorded, time.time())
        text = f"{does.text}; its GPU waits in {under_way[0].text}" if under_way else does.text
        return replace(does, text=text, given=given(recorded))

    def _code_does(self) -> Doing:
        if self._planning and self._at is None and self._waits is None:
            return Doing(self._planning[-1])  # looking at the frames of a capture can make it fail
        main = threading.main_thread().ident
        frames = sys._current_frames()
        where = place_of(frames.get(main)) if main is not None else ""
        if self._at is not None:
            return Doing(f"waits for the other ranks to {self._at}{where}", mark=MEETS)
        if self._waits is not None:
            purpose, peers = self._waits
            return Doing(f"waits for {named(peers)} to {purpose}{where}", peers, f"{purpose}{where}")
        for frame in frames.values():
            while frame is not None:
                if trail := trail_of(frame):
                    step, about = trail.at(frame.f_lineno)
                    peers = trail.peers(step)
                    text = f"{'waits in' if peers else 'computes'} {about}{where}"
                    return Doing(text, peers, f"{id(frame)} {frame.f_lineno}")
                frame = frame.f_back  # type: ignore[assignment]
        return Doing(self.failed or f"is outside of what is sharded{where}")

    @contextmanager
    def planning(self, text: str) -> Iterator[None]:
        """Set the answer of this rank in the block, in which it plans."""
        self._planning.append(f"{text}{place_of(sys._getframe())}")
        try:
            yield
        finally:
            self._planning.pop()

    # -- asking

    def _ring(self, rank: int, request: str) -> None:
        n = self._store.add(f"bells/{rank}", 1) - 1
        self._store.set(f"bell/{rank}/{n}", request)

    def ask(self, ranks: Sequence[int]) -> dict[int, Doing]:
        """The activities of `ranks`, as they answer or have left word."""
        request = f"asked/{self.rank}/{next(self._asked)}"
        try:
            alive = [rank for rank in ranks if not self._store.check([f"ended/{rank}"])]
            for rank in alive:
                self._ring(rank, request)
            end = time.monotonic() + _ANSWER
            return {rank: self._answer(rank, request, end) for rank in ranks}
        except RuntimeError:
            silent = "cannot be asked: the store by which the processes met has gone, with the process that kept it"
            return dict.fromkeys(ranks, Doing(silent, mark=GONE))

    def _answer(self, rank: int, request: str, end: float) -> Doing:
        keys = f"{request}/{rank}", f"ended/{rank}"
        while True:
            answered, ended = (self._store.check([key]) for key in keys)
            if answered or ended:
                answer = json.loads(self._store.get(keys[0] if answered else keys[1]))
                return Doing(**answer | {"waits_for": tuple(answer["waits_for"])})
            if self._is_gone(rank):
                return Doing("has ended without a word, as a process does that is killed", mark=ENDED)
            if time.monotonic() > end:
                return Doing("does not answer")
            time.sleep(0.02)

    def _has_ended(self, rank: int) -> bool:
        """Whether `rank` has left word of its end, or is gone."""
        return self._store.check([f"ended/{rank}"]) or self._is_gone(rank)

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of `rank` was on this host and has ended."""
        if not self._store.check([f"process/{rank}"]):
            return False
        host, process = self._store.get(f"process/{rank}").decode().split()
        return host == socket.gethostname() and not is_alive(int(process))

    def others(self) -> str:
        """The activities of all other ranks, in lines."""
        return lines_of(self.ask(self._others()))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    # -- meeting

    def meet(
        self,
        purpose: str,
        mine: str,
        judge: Callable[[dict[int, str]], str],
        detail: str = "",
        among: Sequence[int] | None = None,
    ) -> str:
        """Hand in the text `mine`, and return the verdict of the first rank: `judge` of the texts of all ranks, or of
        the ranks `among`, of which this is one. `purpose` says what the meeting is for: "plan a call of MLP"; `detail`
        is further text for other ranks.

        Raises RuntimeStateError, on every rank that has come, if a rank cannot come or has not come in time.
        """
        ranks = self._among(among)
        n = self._meetings.get(ranks, 0)
        self._meetings[ranks], self.failed = n + 1, None
        here = _Rendezvous(ranks, self._key(ranks, n), purpose, self._key(ranks, n - 1) if n else "")
        self._at = purpose + detail
        try:
            self._store.set(here.text_of(self.rank), mine)
            if self.rank == ranks[0]:
                verdict = self._judged(here, judge)
                self._store.set(here.verdict, verdict)
            else:
                self._wait([here.verdict], here)
                verdict = self._store.get(here.verdict).decode()
                self._store.delete_key(here.text_of(self.rank))
        except dist.DistError as error:  # the store
            raise RuntimeStateError(
                f"rank {self.rank} wanted to {purpose}, and the store by which the processes met has gone, with the "
                f"process that kept it: {error}"
            ) from error
        finally:
            self._at = None
        failed, _, text = verdict.partition(" ")
        if failed == "failed":
            raise RuntimeStateError(text)
        return text

    def together(self, purpose: str, act: Callable[[], T]) -> T:
        """Return the result of `act`, which waits within PyTorch for all ranks, as the creation of a process group
        does.

        Raises RuntimeStateError if a rank has ended meanwhile: PyTorch would wait for it until its timeout.
        """
        result = Future[T]()
        gpu = torch.cuda.current_device() if self._nccl else None  # a thread begins with the first

        def run() -> None:
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)
                result.set_result(act())
            except BaseException as error:
                result.set_exception(error)

        # A daemon thread: if a rank has ended it stays in PyTorch, and must not keep the process.
        threading.Thread(target=run, name="partway together", daemon=True).start()
        ended = list[int]()
        while not wait([result], _LOOK).done:
            before, ended = ended, [rank for rank in self._others() if self._has_ended(rank)]
            if sure := [rank for rank in ended if rank in before]:  # not one that has done it and ended since
                raise RuntimeStateError(
                    f"rank {self.rank} would {purpose}, and {named(sure)} cannot come; run the same program on every "
                    f"rank:\n{lines_of(self.ask(sure))}"
                )
        return result.result()

    def wait_for(self, work: Any, group: Any, purpose: str) -> None:
        """Wait for the collective `work` of `group`, which is issued outside of programs for `purpose`.

        Raises RuntimeStateError if another rank certainly will not come, or if the collective fails.
        """
        peers = tuple(rank for rank in dist.get_process_group_ranks(group) if rank != self.rank)
        patient = has_nccl(group)  # a wait of NCCL that times out ends its process group
        looks = list[dict[int, Doing]]()
        self._waits = purpose, peers
        try:
            while not _is_over(work, None if patient else timedelta(seconds=_LOOK)):
                looks = [*looks, self.ask(peers)][-_SURE:]
                missing = {
                    rank
                    for rank, doing in looks[-1].items()
                    if self.rank not in doing.waits_for or not doing.mark.startswith(purpose)
                }
                of_missing = [{rank: look[rank] for rank in missing} for look in looks]
                if missing and not work.is_completed() and (why := self._hopeless(of_missing, missing)):
                    raise RuntimeStateError(
                        f"rank {self.rank} would {purpose}, and {named(sorted(missing))} {why}; run the same program "
                        f"on every rank:\n{lines_of(of_missing[-1])}"
                    )
        except RuntimeError as error:
            raise (error if isinstance(error, RuntimeStateError) else failed_in(purpose, error)) from error
        finally:
            self._waits = None

    def gave_up(self, error: Exception) -> None:
        """Record that this rank raised `error`: its answer from then on."""
        self.failed = f"has given up: {first_line(error).rstrip(':')}"

    def _among(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        return tuple(range(self.size) if ranks is None else ranks)

    def _key(self, ranks: tuple[int, ...], n: int) -> str:
        """The key of the `n`-th meeting of `ranks`."""
        return f"{n}" if len(ranks) == self.size else f"{','.join(map(str, ranks))}/{n}"

    def next_meeting(self, among: Sequence[int] | None = None) -> str:
        """The key of the next meeting of all ranks, or of the ranks `among`."""
        ranks = self._among(among)
        return self._key(ranks, self._meetings.get(ranks, 0))

    def part(self, among: Sequence[int] | None = None) -> None:
        """After a meeting that failed, stay until all have heard of it, since the store may go with this process."""
        ranks = self._among(among)
        with suppress(RuntimeError):
            key = self.next_meeting(among)
            self._store.set(f"parted/{key}/{self.rank}", "")
            end = time.monotonic() + _ANSWER
            while self.rank == ranks[0] and time.monotonic() < end:
                if self._store.check([f"parted/{key}/{rank}" for rank in ranks]):
                    return
                time.sleep(0.01)

    def _judged(self, here: _Rendezvous, judge: Callable[[dict[int, str]], str]) -> str:
        keys = {rank: here.text_of(rank) for rank in here.ranks}
        try:
            self._wait(list(keys.values()), here)
        except RuntimeStateError as error:
            return f"failed {error}"
        if here.before:  # every rank has read it
            self._store.delete_key(f"verdict/{here.before}")
        return f"judged {judge({rank: self._store.get(key).decode() for rank, key in keys.items()})}"

    def _wait(self, keys: list[str], here: _Rendezvous) -> None:
        """Wait until the store has `keys`. Raises RuntimeStateError if it certainly will not, or not in time."""
        end, before = time.monotonic() + self.timeout, list[dict[int, Doing]]()
        while True:
            look = min(time.monotonic() + _LOOK, end)
            pause = 0.0005
            while not self._store.check(keys) and time.monotonic() < look:  # a wait that times out writes to stderr
                time.sleep(pause)
                pause = min(2 * pause, 0.02 * (1 + len(here.ranks) / 64))
            if self._store.check(keys):
                return
            left = end - time.monotonic()
            first = here.ranks[0]
            missing = [rank for rank in here.ranks if not self._store.check([here.text_of(rank)])]
            if self.rank != first and first not in missing:  # the first rank says why, unless it has ended
                if (left > 0 and not self._has_ended(first)) or self._store.check(keys):
                    continue
                missing = [first]
            answers = self.ask(missing)
            before = [*before, answers][-_SURE:]
            why = self._hopeless(before, set(missing))
            if left <= 0:
                why = f"did not come within {self.timeout:g} s"
            if why and missing:
                come = [rank for rank in here.ranks if rank not in missing]
                raise RuntimeStateError(
                    f"{named(come)} would {here.purpose}, and {named(missing)} {why}; run the same program on every "
                    f"rank:\n{lines_of(answers)}"
                )

    def _hopeless(self, looks: list[dict[int, Doing]], missing: set[int]) -> str:
        """Why the missing ranks will not come, if that is certain; else ""."""
        last = looks[-1]
        if any(doing.mark == ENDED for doing in last.values()):
            return "cannot come"
        waiting = all(doing.waits_for for doing in last.values())
        for_us = any(set(doing.waits_for) - missing for doing in last.values())
        if len(looks) == _SURE and waiting and for_us and all(look == last for look in looks):
            return f"wait{'s' * (len(missing) == 1)} in a collective that needs all of its ranks"
        return ""


@dataclass(frozen=True)
class _Rendezvous:
    """A meeting of `ranks`, kept in the store under `key`; `before`: the key of their last one, if any."""

    ranks: tuple[int, ...]
    key: str
    purpose: str
    before: str

    @property
    def verdict(self) -> str:
        """The key of the first rank's verdict."""
        return f"verdict/{self.key}"

    def text_of(self, rank: int) -> str:
        """The key of the text of `rank`."""
        return f"meeting/{self.key}/{rank}"


def _is_over(work: Any, limit: timedelta | None) -> bool:
    """Wait for a collective, no longer than `limit`, and return whether it is over. Raises its error."""
    try:
        with waits():
            work.wait() if limit is None else work.wait(limit)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _record_under_way(entries: bool) -> dict[str, Any]:
    return flight_record(entries, under_way=True)


def _connection() -> Any:
    """A connection of its own to the store by which the processes have met: a wait on one blocks all its users."""
    store: Any = default_store()
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def watch() -> Watch:
    """The watch of this process, started at the first use of a process group; every rank calls it."""
    before = last(Watch)
    if before is None:
        atexit.register(_at_exit)
    elif before.group is not dist.group.WORLD:
        before.stop()
    return of_world(Watch)


def comparing() -> Watch | None:
    """The watch of this process, if it runs and compares the copies that ranks hold alike; else None."""
    own = last(Watch)
    if own is None or own.size == 1 or own.look_every is None or own.group is not dist.group.WORLD:
        return None
    return own


def end_watch() -> str | None:
    """End the watch, if there is one, since the process group or the process ends. Returns the difference between the
    ranks if it was not raised."""
    own = last(Watch)
    return own.stop() if own is not None else None


def _at_exit() -> None:
    if difference := end_watch():
        sys.stderr.write(f"partway: {difference}\n")  # too late for an error to tell anybody
        sys.stderr = _Failing(sys.stderr)


class _Failing:
    """stderr with a flush that fails, so that Python ends the process with status 120, as `sys.exit` documents.

    The results are wrong, so the launcher must not take the process for a success. No handler of atexit can change the
    status, and `os._exit` would skip the handlers of others that come later.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise OSError("the ranks differ")


def told(error: Exception) -> Exception:
    """The exception to raise for the `error` of a program: if it came from a collective, an error that names it, with
    the activity of every other rank; else `error`."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        trail = trail_of(traceback.tb_frame)
        step, about = trail.at(traceback.tb_lineno) if trail else (None, "")
        if trail and step and trail.peers(step) and not isinstance(error, RuntimeStateError):
            return failed_in(about, error)
        traceback = traceback.tb_next
    return error


def failed_in(about: str, error: Exception) -> RuntimeStateError:
    """The exception to raise for the `error` of the collective described by `about`: the difference between the ranks
    if one was found before, or else an error with the activities of all others."""
    own = watch()
    if (found := own.found()) is not None:
        return found
    own.failed = f"has failed in {about}: {first_line(error)}"
    return RuntimeStateError(
        f"rank {own.rank} has failed in {about}: {first_line(error)}\nthe other ranks:\n{own.others()}"
    )
