"""A server: what it was asked once and what it was asked twice, before and after it was started again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from partway.ps.service.job import Job
from partway.ps.service.pieces import Parameter, RowRange
from partway.ps.service.server import Changes, Moved, PushedGradients, Server, StepDecision
from partway.ps.service.update import OptimizerMaker
from partway.ps.service.wire import array_of, tensor_of
from partway.strategy.errors import RuntimeStateError

ROWS = 10


class Trained:
    """A matrix, a vector on the workers and a table by rows; one optimizer on one device, and servers.

    `again`: whether each server is started again after each step, and each call comes twice.
    """

    def __init__(
        self, folder: Path, mode: str = "sync", servers: int = 1, kind: Callable[..., Any] = optim.AdamW,
        durability: str = "process", again: bool = False,
    ) -> None:  # fmt: skip
        seed = torch.Generator().manual_seed(7)
        shapes = {"matrix": (6, 4), "vector": (5,), "table": (ROWS, 3), "number": ()}
        self.plain = [
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=seed)) for shape in shapes.values()
        ]
        self.optimizer = kind(self.plain, lr=0.1)
        parameters = tuple(
            Parameter(i, name, shape, "float64", 8, 0, name == "table", name == "vector")
            for i, (name, shape) in enumerate(shapes.items())
        )
        self.options = [{key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}]
        self.job = Job(parameters, kind.__name__, tuple(self.options), True, mode, durability=durability)
        self.maker, self.folder, self.again, self.seed = OptimizerMaker.of(self.optimizer), folder, again, seed
        cuts = [(0, 0, 3), (0, 3, 6), (1, 0, 5), (2, 0, 4), (2, 4, 10), (3, 0, 1)]
        self.pieces = {piece.key: piece for piece in (RowRange(*cut) for cut in cuts)}
        self.where = {key: i % servers for i, key in enumerate(self.pieces)}
        self.servers = [self.started(i) for i in range(servers)]
        for key, piece in self.pieces.items():
            value = self.plain[piece.parameter].detach()
            state = self.optimizer.state.get(self.plain[piece.parameter], {})
            own = {k: v[piece.start : piece.stop] if k == "sum" and value.dim() else v for k, v in state.items()}
            part = value[piece.start : piece.stop] if value.dim() else value
            self.servers[self.where[key]].give([Moved(piece, array_of(part.clone()), own)])

    def started(self, number: int) -> Server:
        return Server(f"server{number}", self.job, self.maker, self.folder / str(number))

    def restart(self, number: int) -> None:
        self.servers[number].close()
        self.servers[number] = self.started(number)

    def gradients(self, unused: bool = False) -> list[Any]:
        """Of one worker: of the table rows, of all of which some are in one piece only."""
        ids = torch.randperm(ROWS, generator=self.seed)[:3].sort().values
        if unused:
            return [torch.randn(6, 4, dtype=torch.float64, generator=self.seed), None, None, None]
        return [
            torch.randn(6, 4, dtype=torch.float64, generator=self.seed),
            torch.randn(5, dtype=torch.float64, generator=self.seed),
            (ids, torch.randn(3, 3, dtype=torch.float64, generator=self.seed)),
            torch.randn((), dtype=torch.float64, generator=self.seed),
        ]

    def sent(self, gradients: list[Any], number: int, dtype: str | None = None) -> PushedGradients:
        """What a server gets of a worker's gradients."""
        kind = getattr(torch, dtype or "float64")
        sent = PushedGradients({}, {}, dtype)
        for key, piece in self.pieces.items():
            gradient = gradients[piece.parameter]
            if self.where[key] != number or gradient is None:
                continue
            if isinstance(gradient, tuple):
                ids, rows = gradient
                inside = (ids >= piece.start) & (ids < piece.stop)
                sent.rows[key] = array_of(ids[inside] - piece.start), array_of(rows[inside].to(kind))
            else:
                sent.dense[key] = array_of(
                    (gradient[piece.start : piece.stop] if gradient.dim() else gradient).to(kind)
                )
        return sent

    def step_plain(self, workers: list[list[Any]]) -> None:
        """The step of one device, with the mean."""
        for index, parameter in enumerate(self.plain):
            parts = [each[index] for each in workers if each[index] is not None]
            dense = [
                torch.zeros_like(parameter).index_add(0, *part) if isinstance(part, tuple) else part for part in parts
            ]
            parameter.grad = sum(dense[1:], dense[0].clone()) / len(workers) if parts else None
        self.optimizer.step()

    def step(self, workers: list[list[Any]], version: int, members: list[int] | None = None) -> list[Changes]:
        """A step of sync mode on all servers."""
        members = list(range(len(workers))) if members is None else members
        decision = StepDecision(version, members, self.options, members)
        changes = []
        for number in range(len(self.servers)):
            for worker in [*reversed(range(len(workers))), *range(len(workers) if self.again else 0)]:
                sent = self.sent(workers[worker], number)
                assert self.servers[number].prepare(worker, 1, version, sent) == version - 1
            if self.again:
                self.restart(number)
            changes += [self.servers[number].apply(decision, version - 1) for _ in range(2 if self.again else 1)]
            if self.again:
                self.restart(number)
                changes.append(self.servers[number].apply(decision, version - 1))
                sent = self.sent(workers[0], number)
                assert self.servers[number].prepare(0, 1, version, sent) == version  # it is over
        return changes

    def push(self, worker: int, step: int, gradients: list[Any], number: int, known: int = -1) -> Changes:
        """A step of async mode on one server."""
        server = self.servers[number]
        return server.push(worker, step, server.version(), self.sent(gradients, number), self.options, known)

    def cut(self, names: str = "cut") -> list[Moved]:
        """All pieces as they are now, in order."""
        for server in self.servers:
            server.snapshot(names)
        found = [self.servers[self.where[key]].read(names, key) for key in self.pieces]
        for server in self.servers:
            server.release(names)
        return found

    def values(self) -> list[Tensor]:
        moved = self.cut()
        parts: list[list[Tensor]] = [[], [], [], []]
        for each in moved:
            parts[each.piece.parameter].append(tensor_of(each.value, "float64"))
        return [torch.cat(each) if each[0].dim() else each[0] for each in parts]

    def far(self) -> float:
        """The largest difference from one device."""
        return max(float((a - b.detach()).abs().max()) for a, b in zip(self.values(), self.plain, strict=True))


@pytest.fixture(params=["process", "memory"])
def durability(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


# -- Sync mode


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad, optim.SGD])
def test_steps_are_those_of_one_device_with_the_mean_gradients(
    tmp_path: Path, workers: int, kind: type[optim.Optimizer], durability: str
) -> None:
    trained = Trained(tmp_path, servers=2, kind=kind, durability=durability)
    for version in range(1, 8):
        gradients = [trained.gradients(unused=version == 3) for _ in range(workers)]
        trained.options[0]["lr"] = trained.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**version
        trained.step(gradients, version)
        trained.step_plain(gradients)
    assert trained.far() <= 1e-12
    for moved in trained.cut():
        parameter = trained.plain[moved.piece.parameter]
        expected = trained.optimizer.state.get(parameter, {})
        assert moved.state.keys() == expected.keys()
        for key, kept in expected.items():
            part = kept[moved.piece.start : moved.piece.stop] if kept.dim() else kept
            torch.testing.assert_close(moved.state[key], part, rtol=0, atol=1e-12)


def test_calls_that_come_again_and_servers_that_start_again_change_no_bit(tmp_path: Path) -> None:
    found = []
    for again in (False, True):
        trained = Trained(tmp_path / str(again), servers=2, again=again)
        for version in range(1, 7):
            trained.step([trained.gradients(), trained.gradients()], version)
        found.append(trained.cut())
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one.value, two.value)
        assert one.state.keys() == two.state.keys()
        assert all(torch.equal(one.state[key], two.state[key]) for key in one.state)


def test_what_a_server_has_done_is_counted(tmp_path: Path) -> None:
    trained = Trained(tmp_path, again=True)
    trained.step([trained.gradients(), trained.gradients()], 1)
    status = trained.servers[0].status()
    assert {key: status[key] for key in ("name", "version", "pieces", "bytes")} == {
        "name": "server0", "version": 1, "pieces": 6, "bytes": (24 + 5 + 30 + 1) * 8,
    }  # fmt: skip
    assert (status["prepared"], status["applied"], status["repeated"]) == (0, 0, 1)  # since it was started again


def test_a_worker_that_is_not_in_the_decision_is_ignored(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    gradients = [trained.gradients() for _ in range(3)]
    trained.step(gradients, 1, members=[0, 2])
    trained.step_plain([gradients[0], gradients[2]])
    assert trained.far() <= 1e-12


def test_an_old_incarnation_of_a_worker_is_refused(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    old, new = trained.gradients(), trained.gradients()
    server = trained.servers[0]
    server.prepare(0, 1, 1, trained.sent(old, 0))
    server.prepare(0, 2, 1, trained.sent(new, 0))
    server.prepare(0, 1, 1, trained.sent(old, 0))
    trained.restart(0)
    server = trained.servers[0]
    server.prepare(0, 1, 1, trained.sent(old, 0))  # known from before it was started again
    server.apply(StepDecision(1, [0], trained.options, [0]), 0)
    trained.step_plain([new])
    assert trained.far() <= 1e-12


def test_gradients_that_did_not_come_are_an_error(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.servers[0].prepare(0, 1, 1, trained.sent(trained.gradients(), 0))
    before = trained.values()
    with pytest.raises(RuntimeStateError) as error:
        trained.servers[0].apply(StepDecision(1, [0, 1], trained.options, [0, 1]), 0)
    assert str(error.value) == "server server0 has no gradients of worker 1 for step 1"
    assert trained.servers[0].version() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.values(), strict=True))


def test_a_server_with_an_older_folder_says_so(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    with pytest.raises(RuntimeStateError) as error:
        trained.servers[0].apply(StepDecision(3, [0], trained.options, [0]), 0)
    assert str(error.value) == (
        f"server server0 is at step 0 and was asked for 3: its shard folder {tmp_path / '0'} is of an older state"
    )


def test_a_step_that_fails_leaves_the_parameters_and_can_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(tmp_path)
    gradients = trained.gradients()
    server = trained.servers[0]
    server.prepare(0, 1, 1, trained.sent(gradients, 0))
    before = trained.values()
    with monkeypatch.context() as patched:
        patched.setattr(server, "_commit", lambda *_: (_ for _ in ()).throw(RuntimeStateError("the disk is full")))
        with pytest.raises(RuntimeStateError, match="the disk is full"):
            server.apply(StepDecision(1, [0], trained.options, [0]), 0)
    assert server.version() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.values(), strict=True))
    server.apply(StepDecision(1, [0], trained.options, [0]), 0)
    trained.step_plain([gradients])
    assert trained.far() <= 1e-12


def test_unused_parameters_are_not_stepped_and_not_sent(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.step([trained.gradients(), trained.gradients()], 1)
    (changes,) = trained.step([trained.gradients(unused=True), trained.gradients(unused=True)], 2)
    assert changes.values.keys() == {"0:0", "0:3"}
    assert changes.means == {}
    assert trained.servers[0].changed(2).values == {}
    assert trained.servers[0].changed(0).values.keys() == {"0:0", "0:3", "1:0", "3:0"}


def test_a_parameter_that_one_worker_did_not_use_has_its_share_of_the_mean(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    gradients = [trained.gradients(), trained.gradients(unused=True)]
    trained.step(gradients, 1)
    trained.step_plain(gradients)
    assert trained.far() <= 1e-12


def test_parameters_on_workers_come_as_mean_gradients(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    gradients = [trained.gradients(), trained.gradients()]
    (changes,) = trained.step(gradients, 1)
    assert changes.means.keys() == {"1:0"}
    assert "1:0" not in changes.values
    np.testing.assert_allclose(changes.means["1:0"], (gradients[0][1] + gradients[1][1]).numpy() / 2, rtol=1e-15)


@pytest.mark.parametrize("again", [False, True])
def test_who_missed_more_than_a_step_gets_the_values_of_parameters_on_workers(tmp_path: Path, again: bool) -> None:
    trained = Trained(tmp_path)
    trained.step([trained.gradients()], 1)
    if again:  # means are not kept
        trained.restart(0)
    changes = trained.servers[0].changed(0 if again else -1)
    assert changes.means == {}
    assert changes.values.keys() == {"0:0", "0:3", "1:0", "3:0"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_may_be_sent_in_fewer_bits(tmp_path: Path, dtype: str) -> None:
    trained = Trained(tmp_path)
    gradients = [trained.gradients(), trained.gradients()]
    trained.servers[0].prepare(0, 1, 1, trained.sent(gradients[0], 0, dtype))
    trained.servers[0].prepare(1, 1, 1, trained.sent(gradients[1], 0))  # the other as it is
    trained.servers[0].apply(StepDecision(1, [0, 1], trained.options, [0, 1]), 0)
    kind = getattr(torch, dtype)

    def rounded(gradient: Any) -> Any:
        return (gradient[0], rounded(gradient[1])) if isinstance(gradient, tuple) else gradient.to(kind).double()

    trained.step_plain([[rounded(each) for each in gradients[0]], gradients[1]])
    assert trained.far() <= 1e-12


def test_rows_of_which_no_worker_has_any_are_stepped_as_on_one_device(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.float64)
    for version in range(1, 5):
        gradients = [trained.gradients(), trained.gradients()]
        for each in gradients:
            each[2] = empty if version % 2 else each[2]
        trained.step(gradients, version)
        trained.step_plain(gradients)
        trained.restart(0)
    assert trained.far() <= 1e-12


# -- Rows


def test_rows_are_read_with_the_steps_that_they_missed(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    for version in range(1, 5):
        gradients = [trained.gradients()]
        trained.step(gradients, version)
        trained.step_plain(gradients)
    version, found = trained.servers[0].rows({"2:4": np.array([5]), "2:0": np.array([1, 3])})
    assert version == 4
    assert found.keys() == {"2:0", "2:4"}
    table = trained.plain[2].detach()
    np.testing.assert_allclose(found["2:0"], table[[1, 3]].numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["2:4"], table[[9]].numpy(), rtol=0, atol=1e-12)
    _, none = trained.servers[0].rows({"2:0": np.zeros(0, np.int64)})
    assert none["2:0"].shape == (0, 3)


def test_rows_that_were_read_between_steps_change_nothing_that_comes_later(tmp_path: Path) -> None:
    found = []
    for reads in (False, True):
        trained = Trained(tmp_path / str(reads))
        for version in range(1, 8):
            trained.step([trained.gradients()], version)
            if reads:
                trained.servers[0].rows({"2:0": np.arange(version % 4), "2:4": np.arange(6)})
            if version == 4:
                trained.restart(0)
        found.append(trained.values()[2])
    assert torch.equal(*found)


# -- Async mode


def test_pushes_are_steps_in_the_order_in_which_they_come(tmp_path: Path, durability: str) -> None:
    trained = Trained(tmp_path, "async", servers=2, durability=durability)
    numbers = [0, 0, 0]
    for worker in (0, 1, 0, 2, 2, 1, 0):
        gradients = trained.gradients()
        numbers[worker] += 1
        for number in (0, 1):
            trained.push(worker, numbers[worker], gradients, number)
        trained.step_plain([gradients])
    assert trained.far() <= 1e-12
    assert [server.version() for server in trained.servers] == [7, 7]
    assert [trained.servers[0].seen(worker) for worker in (0, 1, 2, 3)] == [3, 2, 2, 0]


def test_a_push_that_comes_again_is_taken_once(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "async")
    for step in range(1, 4):
        gradients = trained.gradients()
        first = trained.push(0, step, gradients, 0, known=step - 1)
        again = trained.push(0, step, gradients, 0, known=step - 1)
        trained.restart(0)
        third = trained.push(0, step, gradients, 0, known=step - 1)
        trained.push(0, step - 1, gradients, 0)
        trained.step_plain([gradients])
        assert first.version == again.version == third.version == step
        for key, value in first.values.items():
            assert np.array_equal(value, again.values[key])
            assert np.array_equal(value, third.values[key])
    assert trained.far() <= 1e-12
    assert trained.servers[0].seen(0) == 3


def test_the_staleness_of_each_push_is_kept_once(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "async")
    server = trained.servers[0]
    for worker, number, read in [(0, 1, 0), (1, 1, 0), (0, 2, 1), (0, 2, 1)]:
        server.push(worker, number, read, trained.sent(trained.gradients(), 0), trained.options, -1)
    assert server.staleness() == [(0, 1, 0), (1, 1, 1), (0, 2, 1)]
    assert server.status()["staleness"] == server.staleness()


def moved(trained: Trained, keys: list[str], source: int, target: int) -> None:
    """Have pieces go from one server to another, as the coordinator does."""
    trained.servers[target].give(copy.deepcopy(trained.servers[source].take(keys)))
    trained.where |= dict.fromkeys(keys, target)
    version = max(server.version() for server in trained.servers)
    for number, server in enumerate(trained.servers):
        server.keep([key for key, place in trained.where.items() if place == number], version)


@pytest.mark.parametrize("again", [False, True])
def test_pieces_that_move_between_steps_go_on_as_before(tmp_path: Path, again: bool) -> None:
    trained = Trained(tmp_path, "sync", servers=3, again=again)
    for version in range(1, 9):
        gradients = [trained.gradients(), trained.gradients()]
        trained.step(gradients, version)
        trained.step_plain(gradients)
        some = [key for i, key in enumerate(trained.where) if (i + version) % 3 == 0]
        for key in some:
            moved(trained, [key], trained.where[key], (trained.where[key] + 1) % 3)
        assert trained.far() <= 1e-12
    assert sum(server.status()["pieces"] for server in trained.servers) == 6


def test_pieces_that_are_given_again_are_those_of_the_second_time(tmp_path: Path) -> None:
    """The coordinator has died while pieces moved, and moves them again after another step."""
    trained = Trained(tmp_path, "sync", servers=2)
    keys = [key for key, place in trained.where.items() if place == 0]
    for version in range(1, 4):
        gradients = [trained.gradients()]
        trained.step(gradients, version)
        trained.step_plain(gradients)
        trained.servers[1].give(trained.servers[0].take(keys))
    moved(trained, keys, 0, 1)
    trained.restart(1)
    assert trained.far() <= 1e-12
    assert trained.servers[0].status()["pieces"] == 0
    assert trained.servers[1].status()["pieces"] == 6


@pytest.mark.parametrize("restart", [False, True])
def test_a_push_that_some_servers_have_is_taken_once_after_pieces_have_moved(tmp_path: Path, restart: bool) -> None:
    """A worker dies when one of two servers has its push; pieces move either way; it pushes again."""
    trained = Trained(tmp_path, "async", servers=2)
    for worker in (0, 1):
        gradients = trained.gradients()
        for number in (0, 1):
            trained.push(worker, 1, gradients, number)
        trained.step_plain([gradients])
    partial = trained.gradients()
    trained.push(0, 2, partial, 0)
    there = [key for key, place in trained.where.items() if place == 0]
    away = [key for key, place in trained.where.items() if place == 1]
    moved(trained, there[:1], 0, 1)
    moved(trained, away[:1], 1, 0)
    if restart:
        trained.restart(0)
        trained.restart(1)
    assert [server.seen(0) for server in trained.servers] == [1, 1]
    assert [server.seen(1) for server in trained.servers] == [1, 1]
    moved(trained, away[1:2], 1, 0)
    for _ in range(2):
        for number in (0, 1):
            trained.push(0, 2, partial, number)
        if restart:
            trained.restart(0)
            trained.restart(1)
    trained.step_plain([partial])
    assert trained.far() <= 1e-12
    assert [server.seen(0) for server in trained.servers] == [2, 2]
    for number in (1, 0):
        trained.push(1, 2, partial, number)
    trained.step_plain([partial])
    assert trained.far() <= 1e-12


def test_a_push_that_one_server_has_is_taken_once_when_all_pieces_are_with_the_other(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "async", servers=2)
    gradients = trained.gradients()
    trained.push(0, 1, gradients, 0)
    moved(trained, [key for key, place in trained.where.items() if place == 0], 0, 1)
    assert trained.servers[1].seen(0) == 0
    trained.push(0, 1, gradients, 1)
    trained.step_plain([gradients])
    assert trained.far() <= 1e-12
    assert trained.servers[1].seen(0) == 1


# -- The cut


def test_a_snapshot_is_of_its_moment_while_steps_go_on(tmp_path: Path, durability: str) -> None:
    trained = Trained(tmp_path, durability=durability)
    server = trained.servers[0]
    for version in range(1, 4):
        trained.step([trained.gradients()], version)
    before = {key: server.read("old", key) for key in trained.pieces} if server.snapshot("old") == 3 else {}
    trained.step([trained.gradients()], 4)
    server.snapshot("new")
    trained.step([trained.gradients()], 5)
    changed = 0
    for key in trained.pieces:
        again, later = server.read("old", key), server.read("new", key)
        assert np.array_equal(before[key].value, again.value)
        assert all(torch.equal(before[key].state[name], again.state[name]) for name in again.state)
        assert all(float(again.state["step"]) == 3 and float(later.state["step"]) == 4 for _ in [0])
        changed += not np.array_equal(later.value, again.value)
    assert changed == 6
    server.release("old")
    server.release("old")
    with pytest.raises(RuntimeStateError) as error:
        server.read("old", "0:0")
    assert str(error.value) == "server server0 was started again while a checkpoint was written; save again"


def test_pieces_that_were_given_up_are_in_the_snapshots_from_before(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.step([trained.gradients()], 1)
    server = trained.servers[0]
    server.snapshot("cut")
    before = [server.read("cut", key).value for key in trained.pieces]
    server.keep([], 1)
    assert server.status()["pieces"] == 0
    for value, key in zip(before, trained.pieces, strict=True):
        assert np.array_equal(value, server.read("cut", key).value)


def test_parameters_on_workers_are_given_with_all_that_the_optimizer_keeps(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    gradients = [trained.gradients()]
    trained.step(gradients, 1)
    trained.step_plain(gradients)
    (vector,) = trained.servers[0].take(["1:0"])
    expected = trained.optimizer.state[trained.plain[1]]
    assert vector.state.keys() == expected.keys()
    assert all(torch.equal(vector.state[key], expected[key]) for key in expected)


# -- Folders


def test_the_folder_of_another_job_is_an_error(tmp_path: Path) -> None:
    Trained(tmp_path).servers[0].close()
    other = Trained(tmp_path / "other", kind=optim.SGD)
    with pytest.raises(RuntimeStateError) as error:
        Server("server0", other.job, other.maker, tmp_path / "0")
    mine = Trained(tmp_path / "third").job.fingerprint
    assert str(error.value) == (
        f"the shard folder {tmp_path / '0'} holds the parameters of another job ({mine[:12]}, and this is "
        f"{other.job.fingerprint[:12]}): of another model, optimizer, mode or version of Partway; give this job its "
        "own folder"
    )


def test_a_job_in_memory_needs_no_folder() -> None:
    trained = Trained(Path("/proc/none"), durability="memory")
    gradients = [trained.gradients()]
    trained.step(gradients, 1)
    trained.step_plain(gradients)
    assert trained.far() <= 1e-12


def test_parameters_of_other_dtypes_and_shapes_are_kept(tmp_path: Path) -> None:
    tensors = [
        torch.randn(4, 3, dtype=torch.bfloat16),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.zeros(0, 3),
        torch.tensor(1.5, dtype=torch.float16),
    ]
    own = [nn.Parameter(tensor.clone()) for tensor in tensors]
    optimizer = optim.SGD(own, lr=0.5, momentum=0.5)
    options = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
    parameters = tuple(
        Parameter(i, f"p{i}", tuple(t.shape), str(t.dtype)[6:], t.element_size()) for i, t in enumerate(tensors)
    )
    job = Job(parameters, "SGD", tuple(options), True)
    server = Server("server0", job, OptimizerMaker.of(optimizer), tmp_path)
    server.give([Moved(piece, array_of(tensors[piece.parameter]), {}) for piece in job.pieces])
    for version in (1, 2):
        gradients = [torch.randn_like(tensor) for tensor in tensors]
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        dense = {piece.key: array_of(gradients[piece.parameter]) for piece in job.pieces}
        server.prepare(0, 1, version, PushedGradients(dense, {}))
        server.apply(StepDecision(version, [0], options, [0]), 0)
        server.close()
        server = Server("server0", job, OptimizerMaker.of(optimizer), tmp_path)
    changes = server.changed(0)
    for piece, parameter in zip(job.pieces, parameters, strict=True):
        assert torch.equal(tensor_of(changes.values[piece.key], parameter.dtype), own[piece.parameter].detach())
    server.close()
