"""How stale a push may be, in asynchronous training: who may push now, and who may begin a step.

The staleness of a push is how many others a server applied between the worker's read of the parameters and its push.
Every push goes to every server, which counts those that it has applied; so a worker's read has a mark: the smallest of
these counts. With `bound`:

    a push that was admitted and is on its way    all admitted before it is done may be applied before it:
                                                  admitted - 1 - mark <= bound
    steps that are being computed                 they can still push one after another, those of the smallest mark
                                                  first: the i-th of them (from 0) has admitted + i - mark <= bound

Nothing is admitted that breaks one of the two. So whoever has the smallest mark may always push, and nobody waits for
ever. Where they are broken all the same (the gate was started again, and workers say late from what they compute)
it may push when no other push is on its way.
"""

from __future__ import annotations


class Gate:
    """Marks and pushes of the workers, by their numbers. `bound`: None for none."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.admitted = 0
        self._computing: dict[int, int] = {}  # the marks of steps that are being computed
        self._on_their_way: dict[int, int] = {}
        self._known: set[int] = set()  # workers whose marks this gate has, or knows that there is none

    def read(self, worker: int) -> bool:
        """Let a worker read the parameters and begin a step, if that keeps the bound."""
        if worker in self._computing:
            return True
        mark = self.admitted - len(self._on_their_way)
        if not self._keeps(self.admitted, self._computing | {worker: mark}, self._on_their_way):
            return False
        self._computing[worker] = mark
        self._known.add(worker)
        return True

    def push(self, worker: int) -> bool:
        """Let a worker push the step that it has computed, if that keeps the bound. One that did not begin it here (the
        gate was started again since) is taken for as stale as may be."""
        if worker in self._on_their_way:
            return True  # it asks again: the answer was lost
        mark = self._computing.get(worker, self.admitted - (self.bound or 0))
        others = {other: theirs for other, theirs in self._computing.items() if other != worker}
        is_oldest = not self._on_their_way and mark <= min(others.values(), default=mark)
        if not is_oldest and not self._keeps(self.admitted + 1, others, self._on_their_way | {worker: mark}):
            return False
        self.admitted += 1
        self._computing.pop(worker, None)
        self._on_their_way[worker] = mark
        self._known.add(worker)
        return True

    def done(self, worker: int) -> None:
        """All servers have applied a worker's push."""
        self._on_their_way.pop(worker, None)

    def drop(self, worker: int) -> None:
        """A worker is lost, or begins anew."""
        self._computing.pop(worker, None)
        self._on_their_way.pop(worker, None)
        self._known.discard(worker)

    def begin(self, worker: int, mark: int) -> None:
        """A worker says that it computes a step from parameters of `mark`: news where this gate was started again. One
        that waits to begin says so too, of the step before."""
        self.admitted = max(self.admitted, mark)
        if worker not in self._known:
            self._computing[worker] = mark
            self._known.add(worker)

    @property
    def is_still(self) -> bool:
        """Whether no push is on its way."""
        return not self._on_their_way

    def _keeps(self, admitted: int, computing: dict[int, int], on_their_way: dict[int, int]) -> bool:
        if self.bound is None:
            return True
        marks = sorted(computing.values())
        return all(admitted - 1 - mark <= self.bound for mark in on_their_way.values()) and all(
            admitted + i - mark <= self.bound for i, mark in enumerate(marks)
        )
