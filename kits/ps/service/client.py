"""A worker: how it joins, takes its steps, and leaves; and its reaction when the coordinator, a server or Ray's head
dies.

A step is identified by the worker and its number, so that an unanswered request can be repeated without doing anything
twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partway.ps.service.cluster import COORDINATOR, Gone, Link
from partway.ps.service.coordinator import Again, Answer, Removed, WorkerPlace
from partway.ps.service.job import Job
from partway.ps.service.pieces import RowRange
from partway.ps.service.server import Changes, Moved, PushedGradients
from partway.ps.service.shelf import Full
from partway.ps.service.update import OptimizerMaker
from partway.ps.service.wire import array_of, copy_into, tensor_of
from partway.strategy import RuntimeStateError

logger = logging.getLogger("partway.ps")
_BEAT = 1.0  # seconds between two signs of life
_AT_ONCE = 2**26  # bytes for a server in one call

Pushed = Tensor | tuple[Tensor, Tensor] | None  # a gradient, or for a table the rows and their gradients


@dataclass
class Taken:
    """The result of a step.

    applied   False: this worker was declared lost before, and its gradients were not used
    means     of parameters that stay on workers: the mean gradients
    anew      of these, those that came as values instead, since they changed by more than this step
    """

    applied: bool = True
    means: dict[int, Tensor] = field(default_factory=dict)
    anew: set[int] = field(default_factory=set)


class Client:
    """This worker of a job.

    tensors    the parameters of the job, by their index; entries of tables are not used
    dtype      the dtype in which gradients are sent; None: their own
    """

    def __init__(
        self, link: Link, job: Job, maker: OptimizerMaker, card: str, number: int | None, tensors: Sequence[Tensor],
        dtype: str | None, patience: float,
    ) -> None:  # fmt: skip
        self._link, self.job, self._maker, self._card, self._wanted = link, job, maker, card, number
        self._tensors, self._dtype, self._patience = tensors, dtype, patience
        self._pieces = {piece.key: piece for piece in job.pieces}
        self._by_parameter: dict[int, list[RowRange]] = {}
        for piece in self._pieces.values():
            self._by_parameter.setdefault(piece.parameter, []).append(piece)
        self._starts = {i: np.array([p.start for p in pieces]) for i, pieces in self._by_parameter.items()}
        self._assignment: dict[str, str] = {}
        self._epoch = -1
        self._known: dict[str, int] = {}  # the version of each server that was read
        self._read = 0  # the smallest of them
        self._lock = threading.RLock()  # of joining again
        self._ended = threading.Event()
        self.worker, self._incarnation = -1, 0
        self.version = 0
        self.members: list[int] = []
        self.aux: bytes | None = None
        self.leaves = False
        self.counts = {"sent": 0, "acknowledged": 0, "refused": 0, "joined": 0}

    # -- Joining

    def start(self, first: Callable[[RowRange], Moved]) -> set[int]:
        """Join the job, and wait until it begins; give the servers their parameters if nobody has. Returns the
        parameters that stay on workers and got other values than they had."""
        threading.Thread(target=self._say_that_it_lives, name="partway ps", daemon=True).start()
        anew: set[int] = self._until_done(lambda: self._come(first))
        return anew

    def _come(self, first: Callable[[RowRange], Moved] | None) -> set[int]:
        place = self._enter()
        while place.upload:
            if first is None:
                raise RuntimeStateError("the servers have lost their parameters; load a checkpoint and start again")
            self._upload(place, first)
            place = self._admitted()
        self.version, self.members, self.aux = place.version, place.members, place.aux
        return self._all_anew()

    def _enter(self, mark: int | None = None) -> WorkerPlace:
        """Join, or join again; `mark`: the version from which this worker's step was computed."""
        number = self.worker if self.worker >= 0 else self._wanted
        self.worker, self._incarnation = self._link.ask(
            COORDINATOR, "join", self._card, self.job, self._maker, number, patience=self._patience
        )
        self.counts["joined"] += 1
        return self._admitted(mark if self.job.mode == "async" else None)

    def _admitted(self, mark: int | None = None) -> WorkerPlace:
        place: WorkerPlace = self._link.ask(COORDINATOR, "admitted", self.worker, self._incarnation, mark)
        self._lay(place)
        return place

    def _upload(self, place: WorkerPlace, first: Callable[[RowRange], Moved]) -> None:
        for server in self._servers:
            batch: list[Moved] = []
            size = 0
            for key in self._keys_of(server):
                batch.append(first(self._pieces[key]))
                size += self.job.size(self._pieces[key])
                if size > _AT_ONCE:
                    self._link.ask(server, "give", batch)
                    batch, size = [], 0
            if batch:
                self._link.ask(server, "give", batch)
        self._link.ask(COORDINATOR, "uploaded", self.worker, self._incarnation)

    def _lay(self, answer: WorkerPlace | Answer) -> None:
        """Take over the assignment of pieces to servers."""
        if answer.epoch != self._epoch:
            self._assignment, self._epoch = answer.assignment, answer.epoch
            self._known = {}

    @property
    def _servers(self) -> list[str]:
        return sorted(set(self._assignment.values()))

    def _keys_of(self, server: str) -> list[str]:
        return [key for key, name in self._assignment.items() if name == server]

    # -- Steps

    def step(self, gradients: Sequence[Pushed], options: list[dict[str, Any]], aux: bytes | None) -> Taken:
        """Push the gradients of a step, and get the parameters of the next one."""
        self.counts["sent"] += 1
        number, began = self.version + 1, time.monotonic()

        def take() -> Taken:
            if self.job.mode == "sync":
                return self._sync(number, gradients, options, aux)
            return self._async(number, gradients, options)

        try:
            taken: Taken = self._until_done(take, began)
        except Removed as error:
            logger.warning("%s: its gradients are not used, and it comes again", error)
            taken = Taken(False, anew=self._until_done(lambda: self._come(None)))
        self.counts["acknowledged" if taken.applied else "refused"] += 1
        return taken

    def _until_done(self, act: Callable[[], Any], began: float | None = None) -> Any:
        """Repeat `act` while the cluster is gone or a disk is full, for as long as this worker is patient."""
        began = time.monotonic() if began is None else began
        told = False
        while True:
            try:
                return act()
            except (Again, Gone, Full) as error:
                if time.monotonic() - began > self._patience:
                    raise
                if not told:
                    logger.warning("%s; tried again for %g s (MS_RECEIVE_MSG_TIMEOUT)", error, self._patience)
                told = True
                if isinstance(error, Full):
                    time.sleep(1)
                else:
                    self._come_again(began, error)

    def _come_again(self, began: float, error: Exception) -> None:
        """Join again, with the step that this worker holds: a coordinator that was started again, or another
        cluster."""
        while True:
            try:
                if isinstance(error, Gone):
                    with self._lock:
                        self._link.again()
                if self.worker >= 0:
                    self._enter(self._read)
                return
            except (Again, Gone) as another:
                if time.monotonic() - began > self._patience:
                    raise
                error = another
                time.sleep(0.5)

    def _sync(
        self, number: int, gradients: Sequence[Pushed], options: list[dict[str, Any]], aux: bytes | None
    ) -> Taken:
        sent = self._sent(gradients)
        calls = [
            self._link.call(server, "prepare", self.worker, self._incarnation, number, each)
            for server, each in sent.items()
        ]
        self._link.wait(calls)
        answer: Answer = self._link.ask(COORDINATOR, "arrive", self.worker, self._incarnation, number, options, aux)
        decision = answer.decision
        assert decision is not None
        if self.worker not in decision.members:
            raise Removed(f"worker {self.worker} was declared lost before step {number}")
        self._lay(answer)
        calls = [self._link.call(server, "apply", decision, self._known.get(server, -1)) for server in self._servers]
        taken = self._put(dict(zip(self._servers, self._link.wait(calls), strict=True)))
        self.version, self.members = number, decision.next
        self.leaves = self.worker not in decision.next
        return taken

    def _async(self, number: int, gradients: Sequence[Pushed], options: list[dict[str, Any]]) -> Taken:
        answer, granted = self._link.ask(COORDINATOR, "turn", self.worker, self._incarnation, True)
        self._lay(answer)
        sent = self._sent(gradients)
        calls = [
            self._link.call(
                server,
                "push",
                self.worker,
                number,
                self._known.get(server, self._read),
                each,
                options,
                self._known.get(server, -1),
            )
            for server, each in sent.items()
        ]
        changes: dict[str, Changes] = dict(zip(sent, self._link.wait(calls), strict=True))
        self._link.call(COORDINATOR, "done", self.worker, self._incarnation)
        if not granted:
            self.leaves = self._link.ask(COORDINATOR, "is_leaving", self.worker, self._incarnation)
        if not granted and not self.leaves:
            self._lay(self._link.ask(COORDINATOR, "begin", self.worker, self._incarnation))
            changes = self._asked("changed", lambda server: (self._known.get(server, -1),))
        taken = self._put(changes)
        self.version = number
        return taken

    def _sent(self, gradients: Sequence[Pushed]) -> dict[str, PushedGradients]:
        """The gradients for each server."""
        sent = {server: PushedGradients({}, {}, self._dtype) for server in self._servers}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            for piece in self._by_parameter[index]:
                mine = sent[self._assignment[piece.key]]
                if isinstance(gradient, tuple):
                    ids, rows = gradient
                    inside = (ids >= piece.start) & (ids < piece.stop)
                    mine.rows[piece.key] = array_of(ids[inside] - piece.start), array_of(self._cast(rows[inside]))
                else:
                    part = gradient[piece.start : piece.stop] if gradient.dim() else gradient
                    mine.dense[piece.key] = array_of(self._cast(part))
        return sent

    def _cast(self, gradient: Tensor) -> Tensor:
        return gradient if self._dtype is None else gradient.to(getattr(torch, self._dtype))

    def _asked(self, method: str, arguments: Callable[[str], tuple[Any, ...]]) -> dict[str, Any]:
        servers = self._servers
        calls = [self._link.call(server, method, *arguments(server)) for server in servers]
        return dict(zip(servers, self._link.wait(calls), strict=True))

    # -- The results

    def _put(self, changes: Mapping[str, Changes]) -> Taken:
        """Write the changes into the parameters."""
        taken = Taken()
        for server, each in changes.items():
            self._known[server] = each.version
            for key, array in each.values.items():
                if self._assignment.get(key) == server:
                    piece = self._pieces[key]
                    if self.job.parameters[piece.parameter].on_workers:
                        taken.anew.add(piece.parameter)
                    copy_into(self._part(piece), array)
            for key, array in each.means.items():
                if self._assignment.get(key) == server:
                    piece = self._pieces[key]
                    whole = self._tensors[piece.parameter]
                    mean = taken.means.setdefault(piece.parameter, torch.empty_like(whole, requires_grad=False))
                    copy_into(mean[piece.start : piece.stop] if mean.dim() else mean, array)
        self._read = min(self._known.values(), default=0)
        return taken

    def _part(self, piece: RowRange) -> Tensor:
        whole = self._tensors[piece.parameter].detach()
        return whole[piece.start : piece.stop] if whole.dim() else whole

    def _all_anew(self) -> set[int]:
        self._known = {}
        return self._put(self._asked("changed", lambda server: (-1,))).anew

    def states(self, indices: set[int]) -> dict[int, dict[str, Any]]:
        """The states of parameters in the servers' optimizers, whole."""
        found: dict[int, dict[str, Any]] = {}
        for index in indices:
            pieces = self._by_parameter[index]
            moved = [self._link.ask(self._assignment[p.key], "take", [p.key])[0] for p in pieces]
            whole = self._tensors[index]
            state = dict(moved[0].state)
            for name, kept in state.items():
                if isinstance(kept, Tensor) and kept.dim() == max(whole.dim(), 0) and whole.dim():
                    state[name] = torch.cat([each.state[name] for each in moved])
            found[index] = state
        return found

    def rows(self, index: int, ids: Tensor) -> Tensor:
        """The rows `ids` of a table; these are ascending, without repetition."""

        def read() -> Tensor:
            parameter = self.job.parameters[index]
            which = np.searchsorted(self._starts[index], ids.numpy(), side="right") - 1
            wanted: dict[str, dict[str, Any]] = {}
            for i in np.unique(which):
                piece = self._by_parameter[index][i]
                mine = ids[torch.from_numpy(which == i)] - piece.start
                wanted.setdefault(self._assignment[piece.key], {})[piece.key] = array_of(mine)
            calls = [self._link.call(server, "rows", each) for server, each in wanted.items()]
            found: dict[str, Any] = {}
            for _, arrays in self._link.wait(calls):
                found |= arrays
            kind = parameter.dtype
            parts = [tensor_of(found[self._by_parameter[index][i].key], kind) for i in np.unique(which)]
            return torch.cat(parts) if parts else torch.empty(0, *parameter.shape[1:], dtype=getattr(torch, kind))

        def again() -> Tensor:
            try:
                return read()
            except (Gone, KeyError):  # pieces have moved since
                self._lay(self._link.ask(COORDINATOR, "layout"))
                return read()

        found: Tensor = self._until_done(again)
        return found

    # -- The cut, and the end

    def cut(self, name: str) -> tuple[dict[str, str], int]:
        """Make all servers keep their present state; see Coordinator.cut."""
        found: tuple[dict[str, str], int] = self._until_done(lambda: self._link.ask(COORDINATOR, "cut", name))
        return found

    def read_cut(self, name: str, server: str, key: str) -> Moved:
        """A piece as it was at a cut."""
        moved: Moved = self._link.ask(server, "read", name, key)
        return moved

    def release_cut(self, name: str, servers: Sequence[str]) -> None:
        """Free the servers' copies for a cut."""
        with suppress(RuntimeStateError):
            self._link.wait([self._link.call(server, "release", name) for server in servers])

    def status(self) -> dict[str, Any]:
        """The state of the whole job, for a view."""
        found: dict[str, Any] = self._link.ask(COORDINATOR, "status")
        return found

    def staleness(self) -> list[tuple[int, int, int]]:
        """(worker, step, staleness) of the pushes, the largest of all servers."""
        most: dict[tuple[int, int], int] = {}
        for each in self._asked("staleness", lambda server: ()).values():
            for worker, number, stale in each:
                most[worker, number] = max(stale, most.get((worker, number), 0))
        return [(*key, stale) for key, stale in most.items()]

    def stop(self) -> None:
        """Give no more signs of life."""
        self._ended.set()

    def leave(self) -> None:
        """Report that this worker has ended well."""
        self.stop()
        with suppress(Exception):  # nobody may be there any more
            self._link.ask(COORDINATOR, "leave", self.worker, self._incarnation, patience=10)

    def _say_that_it_lives(self) -> None:
        while not self._ended.wait(_BEAT):
            if self.worker < 0:  # it has not joined yet
                continue
            mark = self._read if self.job.mode == "async" else None
            with self._lock, suppress(Exception):  # the step itself finds the problem
                self._link.ask(COORDINATOR, "beat", self.worker, self._incarnation, mark, patience=2)
