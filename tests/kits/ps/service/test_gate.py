"""The bound on how stale a push may be: random runs of workers and servers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples

from partway.ps.service.gate import Gate


class Run:
    """Workers and servers, one thing at a time. Each server counts the pushes that it has applied; a worker's read and
    its push reach the servers at any moment between the gate's word and the next thing that the worker does.

    read       by worker: at which count it read each server; those that it has not read yet are missing
    sent       by worker: the servers that have not applied its push yet
    coming     by worker that may begin its next step with what the servers answer: at which count each of them did
    stale      of each push at each server
    """

    def __init__(self, bound: int | None, workers: int, servers: int, drawn: random.Random) -> None:
        self.gate, self.random = Gate(bound), drawn
        self.workers, self.servers = range(workers), range(servers)
        self.counts = [0] * servers
        self.read: dict[int, dict[int, int]] = {}
        self.sent: dict[int, list[int]] = {}
        self.coming: dict[int, dict[int, int]] = {}
        self.stale: list[int] = []
        self.pushes = [0] * workers

    def possible(self) -> list[tuple[str, int]]:
        """What may happen next without the gate, or what a worker may ask it for."""
        found = []
        for worker in self.workers:
            if worker in self.sent:
                found.append(("apply" if self.sent[worker] else "done", worker))
            elif worker not in self.read:
                found.append(("read", worker))
            elif len(self.read[worker]) < len(self.servers):
                found.append(("fetch", worker))
            else:
                found.append(("push", worker))
        return found

    def do(self, what: str, worker: int) -> bool:
        """Whether it went."""
        if what == "read":
            if not self.gate.read(worker):
                return False
            self.read[worker] = {}
        elif what == "fetch":
            server = self.random.choice([s for s in self.servers if s not in self.read[worker]])
            self.read[worker][server] = self.counts[server]
        elif what == "push":
            if not self.gate.push(worker):
                return False
            self.sent[worker] = list(self.servers)
            self.pushes[worker] += 1
            if self.random.random() < 0.7 and self.gate.read(worker):
                self.coming[worker] = {}
        elif what == "apply":
            server = self.sent[worker].pop(self.random.randrange(len(self.sent[worker])))
            self.stale.append(self.counts[server] - self.read[worker][server])
            self.counts[server] += 1
            if worker in self.coming:
                self.coming[worker][server] = self.counts[server]
        else:
            self.gate.done(worker)
            del self.sent[worker], self.read[worker]
            if worker in self.coming:
                self.read[worker] = self.coming.pop(worker)
        return True

    def step(self) -> None:
        """One thing that goes; it is an error if there is none."""
        possible = self.possible()
        self.random.shuffle(possible)
        assert any(self.do(*each) for each in possible), "nobody can go on"


runs = given(st.integers(0, 6), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32).map(random.Random))


@examples(300)
@runs
def test_no_push_is_staler_than_the_bound_and_somebody_can_always_go_on(
    bound: int, workers: int, servers: int, drawn: random.Random
) -> None:
    run = Run(bound, workers, servers, drawn)
    for _ in range(150):
        run.step()
        assert max(run.stale, default=0) <= bound


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_for_long_where_some_workers_are_slow(seed: int) -> None:
    drawn = random.Random(seed)
    bound, workers = drawn.randint(0, 6), drawn.randint(2, 5)
    run = Run(bound, workers, 3, drawn)
    weights = [1 + 10 * (i % 2) for i in range(workers)]
    for _ in range(3000):
        worker = drawn.choices(range(workers), weights)[0]
        (mine,) = [each for each in run.possible() if each[1] == worker]
        if not run.do(*mine):
            run.step()
    assert max(run.stale) <= bound
    assert min(run.pushes) > 0


@examples(200)
@runs
def test_the_bound_holds_where_workers_are_lost_and_begin_anew(
    bound: int, workers: int, servers: int, drawn: random.Random
) -> None:
    """One whose push is on its way is lost after the servers have it, or none of them."""
    run = Run(bound, workers, servers, drawn)
    for _ in range(150):
        if drawn.random() < 0.1:
            worker = drawn.choice(run.workers)
            if len(run.sent.get(worker, [])) in (0, servers):
                run.gate.drop(worker)
                for each in (run.read, run.sent, run.coming):
                    each.pop(worker, None)
        run.step()
        assert max(run.stale, default=0) <= bound


@examples(50)
@runs
def test_what_was_granted_is_granted_again_and_counts_once(
    bound: int, workers: int, servers: int, drawn: random.Random
) -> None:
    run = Run(bound, workers, servers, drawn)
    for _ in range(100):
        run.step()
        before = run.gate.admitted
        for worker in run.workers:
            if worker in run.sent:
                assert run.gate.push(worker)
            elif worker in run.read:
                assert run.gate.read(worker)
        assert run.gate.admitted == before == sum(run.pushes)


def test_with_a_bound_of_zero_workers_take_turns() -> None:
    gate = Gate(0)
    assert gate.read(0)
    assert not gate.read(1)  # the other's push would make it stale
    assert gate.push(0)
    assert not gate.read(1)  # it is on its way
    gate.done(0)
    assert gate.read(1)
    assert not gate.read(0)


def test_a_worker_may_begin_its_next_step_while_its_push_is_on_its_way() -> None:
    gate = Gate(1)
    assert gate.read(0)
    assert gate.push(0)
    assert gate.read(0)
    gate.done(0)
    assert gate.push(0)


def test_without_a_bound_nobody_waits() -> None:
    gate = Gate(None)
    for _ in range(10):
        assert gate.read(0)
    assert gate.read(1)
    for _ in range(10):
        assert gate.push(1)
        gate.done(1)
        assert gate.read(1)
    assert gate.push(0)
    assert gate.admitted == 11


def test_a_worker_that_is_dropped_holds_nobody_up() -> None:
    gate = Gate(1)
    assert gate.read(0)
    assert gate.read(1)
    assert gate.push(1)
    gate.done(1)
    assert gate.read(1)
    assert not gate.push(1)  # worker 0 would be two behind
    gate.drop(0)
    assert gate.push(1)


def test_a_push_that_is_dropped_is_on_its_way_no_more() -> None:
    gate = Gate(1)
    assert gate.read(0)
    assert gate.push(0)
    assert not gate.is_still
    gate.drop(0)
    assert gate.is_still


def test_done_and_drop_of_a_worker_that_did_nothing_change_nothing() -> None:
    gate = Gate(2)
    gate.done(3)
    gate.drop(3)
    assert gate.is_still
    assert gate.admitted == 0


def test_after_the_gate_was_started_again_a_push_counts_as_stale_as_may_be() -> None:
    gate = Gate(2)
    gate.admitted = 10
    assert gate.push(0)
    assert not gate.push(1)  # it would make the first one too stale, whose mark is not known
    gate.done(0)
    assert gate.push(1)


def test_after_the_gate_was_started_again_workers_say_from_what_they_compute() -> None:
    gate = Gate(2)
    gate.begin(0, 10)
    gate.begin(0, 8)  # what it said first holds
    gate.begin(1, 10)
    assert gate.admitted == 10
    assert gate.push(1)
    gate.done(1)
    assert gate.read(1)
    assert gate.push(1)
    gate.done(1)
    assert gate.read(1)
    assert not gate.push(1)  # worker 0 has read 10, and 12 are admitted
    assert gate.push(0)


def test_a_worker_whose_push_is_on_its_way_does_not_say_from_what_it_computes() -> None:
    gate = Gate(0)
    assert gate.read(0)
    assert gate.push(0)
    gate.begin(0, 0)
    gate.done(0)
    assert gate.read(1)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_workers_that_say_late_from_what_they_compute_hold_nobody_up_for_ever(bound: int) -> None:
    gate = Gate(bound)
    for _ in range(5):
        assert gate.read(0)
        assert gate.push(0)
        gate.done(0)
    assert gate.read(0)
    for worker in (1, 2, 3):
        gate.begin(worker, 0)
    assert not gate.push(0)  # the others are older
    for worker in (1, 2, 3):
        assert gate.push(worker)
        assert not gate.push(0)
        gate.done(worker)
    assert gate.push(0)


def test_a_worker_that_waits_to_begin_does_not_begin_by_saying_from_what_it_computed() -> None:
    gate = Gate(0)
    assert gate.read(0)
    assert gate.push(0)
    gate.done(0)
    assert gate.read(1)
    gate.begin(0, 0)
    assert not gate.read(0)
    assert gate.push(1)
    gate.done(1)
    assert gate.read(0)


@examples(200)
@runs
def test_the_bound_holds_where_workers_say_at_any_time_from_what_they_compute(
    bound: int, workers: int, servers: int, drawn: random.Random
) -> None:
    run = Run(bound, workers, servers, drawn)
    marks = dict.fromkeys(run.workers, 0)
    for _ in range(150):
        run.step()
        for worker, read in run.read.items():
            if len(read) == servers:
                marks[worker] = min(read.values())
        worker = drawn.choice(run.workers)
        if run.pushes[worker] or worker in run.read:
            run.gate.begin(worker, marks[worker])
        assert max(run.stale, default=0) <= bound
