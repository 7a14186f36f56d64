"""Bound the staleness of pushes in asynchronous training: decide who may push now, and who may begin a step.

The staleness of a push is how many others a server applied between the worker's read of the parameters and its push.
Every push goes to every server, which counts the applied ones; so a worker's read has a mark: the smallest of these
counts. With `bound`:

    an admitted push that is under way            all admitted before it is done may be applied before it:
                                                  admitted - 1 - mark <= bound
    steps that are being computed                 they can still push one after another, those of the smallest mark
                                                  first: the i-th of them (from 0) has admitted + i - mark <= bound

Nothing is admitted that breaks one of the two. So the worker with the smallest mark may always push, and nobody waits
forever. If they are broken nevertheless (the gate was started again, and workers report their marks late), that worker
may push when no other push is under way.
"""

from __future__ import annotations


class Gate:
    """Marks and pushes of the workers, by their numbers. `bound`: None for none."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.admitted = 0
        self._computing: dict[int, int] = {}  # the marks of steps that are being computed
        self._on_their_way: dict[int, int] = {}
        self._known: set[int] = set()  # workers whose marks, or lack of one, this gate knows

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
        """Let a worker push the step that it has computed, if that keeps the bound. A worker that did not begin the
        step here (the gate was started again since) counts as maximally stale."""
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
        """Record that all servers have applied a worker's push."""
        self._on_their_way.pop(worker, None)

    def drop(self, worker: int) -> None:
        """Forget a worker that is lost, or starts over."""
        self._computing.pop(worker, None)
        self._on_their_way.pop(worker, None)
        self._known.discard(worker)

    def begin(self, worker: int, mark: int) -> None:
        """Record that a worker computes a step from parameters of `mark`, which is news after a restart of the gate. A
        worker that waits to begin reports the mark of the step before."""
        self.admitted = max(self.admitted, mark)
        if worker not in self._known:
            self._computing[worker] = mark
            self._known.add(worker)

    @property
    def is_still(self) -> bool:
        """Whether no push is under way."""
        return not self._on_their_way

    def _keeps(self, admitted: int, computing: dict[int, int], on_their_way: dict[int, int]) -> bool:
        if self.bound is None:
            return True
        marks = sorted(computing.values())
        return all(admitted - 1 - mark <= self.bound for mark in on_their_way.values()) and all(
            admitted + i - mark <= self.bound for i, mark in enumerate(marks)
        )
