"""The coordinator, with servers in this process: who is in which step, what moves where, and what it knows again."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from partway.ps.service.coordinator import Again, ClusterSize, Coordinator, Removed, WorkerPlace
from partway.ps.service.job import Job
from partway.ps.service.pieces import Parameter
from partway.ps.service.server import Changes, Moved, PushedGradients, Server, StepDecision
from partway.ps.service.update import OptimizerMaker
from partway.ps.service.wire import array_of, copy_into
from partway.strategy.errors import RuntimeStateError

SHAPES = {"one": (6, 64), "two": (5, 64), "three": (64,), "number": ()}
START = [
    torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) for shape in SHAPES.values()
]
PARAMETERS = tuple(Parameter(i, name, shape, "float64", 8) for i, (name, shape) in enumerate(SHAPES.items()))


def optimizer_of(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.05)


def options_of(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


LIKE = optimizer_of([nn.Parameter(start.clone()) for start in START])
MAKER, OPTIONS = OptimizerMaker.of(LIKE), options_of(LIKE)
JOB = Job(PARAMETERS, "AdamW", tuple(OPTIONS), True, durability="memory")


def gradients_of(worker: int, step: int) -> list[Tensor]:
    seed = torch.Generator().manual_seed(1000 * worker + step)
    return [torch.randn(shape, dtype=torch.float64, generator=seed) for shape in SHAPES.values()]


class Servers:
    """Servers of this process. `stops`: calls of this method fail, as if the coordinator died there."""

    def __init__(self) -> None:
        self.there: dict[str, Server] = {}
        self.stopped: list[str] = []
        self.stops: str | None = None
        self.moved: list[tuple[str, str]] = []
        self.renewals = 0

    def start(self, name: str, node: str | None, job: Job, maker: OptimizerMaker) -> None:
        if name not in self.there:
            self.there[name] = Server(name, job, maker, None)

    def stop(self, name: str) -> None:
        self.there.pop(name, None)
        self.stopped.append(name)

    async def ask(self, name: str, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(random.random() / 500)
        if method == self.stops:
            raise asyncio.CancelledError
        answer = getattr(self.there[name], method)(*copy.deepcopy(arguments))
        return copy.deepcopy(answer)

    def renew(self) -> None:
        self.renewals += 1

    async def move(self, source: str, target: str, keys: list[str]) -> None:
        await self.ask(target, "give", await self.ask(source, "take", keys))
        self.moved.append((source, target))


class Worker:
    """A worker, as client.py does it."""

    def __init__(self, run: Run, number: int | None = None) -> None:
        self.run, self.number, self.incarnation = run, -1 if number is None else number, 0
        self.tensors = [torch.full(start.shape, torch.nan, dtype=torch.float64) for start in START]
        self.version, self.epoch, self.assignment, self.members = 0, -1, dict[str, str](), list[int]()
        self.known: dict[str, int] = {}
        self.options = copy.deepcopy(OPTIONS)
        self.aux: bytes | None = None
        self.leaves = False

    async def come(self, job: Job = JOB) -> WorkerPlace:
        number = None if self.number < 0 else self.number
        self.number, self.incarnation = await self.run.coordinator.join(f"card {number}", job, MAKER, number)
        place = await self.run.coordinator.admitted(self.number, self.incarnation)
        while place.upload:
            for piece in job.pieces:
                start = START[piece.parameter]
                part = start[piece.start : piece.stop] if start.dim() else start
                server = place.assignment[piece.key]
                await self.run.servers.ask(server, "give", [Moved(piece, array_of(part), {})])
            await self.run.coordinator.uploaded(self.number, self.incarnation)
            place = await self.run.coordinator.admitted(self.number, self.incarnation)
        self.lay(place.assignment, place.epoch)
        self.version, self.aux, self.known, self.members = place.version, place.aux, {}, place.members
        for server in self.names:
            self.put(server, await self.run.servers.ask(server, "changed", -1))
        return place

    async def come_again(self, job: Job = JOB, mark: int | None = None) -> None:
        """As client.py where the coordinator was started again: with a step that it has computed."""
        with pytest.raises(Again):
            await self.run.coordinator.is_leaving(self.number, self.incarnation)
        await self.join_again(job, mark)

    async def join_again(self, job: Job = JOB, mark: int | None = None) -> None:
        card = f"card {self.number}"
        self.number, self.incarnation = await self.run.coordinator.join(card, job, MAKER, self.number)
        await self.run.coordinator.admitted(self.number, self.incarnation, mark)

    @property
    def names(self) -> list[str]:
        return sorted(set(self.assignment.values()))

    def lay(self, assignment: dict[str, str], epoch: int) -> None:
        if epoch != self.epoch:
            self.assignment, self.epoch, self.known = dict(assignment), epoch, {}

    def put(self, server: str, changes: Changes) -> None:
        self.known[server] = changes.version
        pieces = {piece.key: piece for piece in JOB.pieces}
        for key, array in changes.values.items():
            if self.assignment.get(key) == server:
                whole = self.tensors[pieces[key].parameter]
                copy_into(whole[pieces[key].start : pieces[key].stop] if whole.dim() else whole, array)

    def sent(self, gradients: list[Tensor]) -> dict[str, PushedGradients]:
        sent = {server: PushedGradients({}, {}) for server in self.names}
        for piece in JOB.pieces:
            gradient = gradients[piece.parameter]
            part = gradient[piece.start : piece.stop] if gradient.dim() else gradient
            sent[self.assignment[piece.key]].dense[piece.key] = array_of(part)
        return sent

    async def prepare(self) -> None:
        number = self.version + 1
        for server, each in self.sent(gradients_of(self.number, number)).items():
            await self.run.servers.ask(server, "prepare", self.number, self.incarnation, number, each)

    async def arrive(self, aux: bytes | None = None) -> StepDecision:
        number = self.version + 1
        options = copy.deepcopy(self.options)
        answer = await self.run.coordinator.arrive(self.number, self.incarnation, number, options, aux)
        assert answer.decision is not None
        self.lay(answer.assignment, answer.epoch)
        self.run.decisions[number] = answer.decision
        return answer.decision

    async def apply(self, decision: StepDecision) -> None:
        for server in self.names:
            self.put(server, await self.run.servers.ask(server, "apply", decision, self.known.get(server, -1)))
        self.version, self.members = decision.version, decision.next
        self.leaves = self.number not in decision.next

    async def step(self, aux: bytes | None = None) -> StepDecision:
        """A step of sync mode."""
        await self.prepare()
        decision = await self.arrive(aux)
        await self.apply(decision)
        return decision

    async def steps(self, upto: int) -> None:
        while self.version < upto and not self.leaves:
            await self.step()

    async def leave(self) -> None:
        await self.run.coordinator.leave(self.number, self.incarnation)


class Run:
    """A job: its coordinator, servers, and what was decided."""

    def __init__(self, folder: Path, plan: ClusterSize) -> None:
        self.folder, self.plan, self.servers = folder, plan, Servers()
        self.decisions: dict[int, StepDecision] = {}
        self.coordinator = Coordinator(plan, self.servers, folder)

    async def restart(self) -> None:
        """The coordinator dies, and is started again."""
        await self.end()
        self.coordinator = Coordinator(self.plan, self.servers, self.folder)

    async def end(self) -> None:
        for task in (self.coordinator._looking, self.coordinator._moving):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.coordinator._shelf.close()

    async def begin(self, count: int) -> list[Worker]:
        """All workers, which have come."""
        await self.coordinator.place_servers(self.plan.servers)
        workers = [Worker(self, number) for number in range(count)]
        await asyncio.gather(*(worker.come() for worker in workers))
        return workers

    def plain(self) -> list[Tensor]:
        """The parameters of one device after the steps that were decided."""
        parameters = [nn.Parameter(start.clone()) for start in START]
        optimizer = optimizer_of(parameters)
        for version in sorted(self.decisions):
            members = self.decisions[version].members
            pushed = [gradients_of(worker, version) for worker in members]
            for parameter, *each in zip(parameters, *pushed, strict=True):
                parameter.grad = sum(each[1:], each[0].clone()) / len(members)
            for group, options in zip(optimizer.param_groups, self.decisions[version].options, strict=True):
                group.update(options)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def check(self, *workers: Worker) -> None:
        """These workers have the parameters of one device."""
        plain = self.plain()
        for worker in workers:
            assert worker.version == max(self.decisions, default=0)
            for one, two in zip(worker.tensors, plain, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def running(folder: Path, act: Callable[[Run], Coroutine[Any, Any, None]], **plan: Any) -> None:
    """A job in which `act` happens."""

    async def all_of_it() -> None:
        run = Run(folder, ClusterSize(**{"workers": 2, "servers": 2, "patience": 20, "silence": 20} | plan))
        try:
            await asyncio.wait_for(act(run), 40)
        finally:
            await run.end()

    asyncio.run(all_of_it())


async def soon(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not condition():
        await asyncio.sleep(0.01)


async def meanwhile(act: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Something that has begun, and waits."""
    task = asyncio.ensure_future(act)
    await asyncio.sleep(0.05)
    assert not task.done()
    return task


# -- Steps of sync mode


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_step_together_as_one_device(tmp_path: Path, count: int) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(count)
        assert all(worker.members == list(range(count)) for worker in workers)
        await asyncio.gather(*(worker.steps(8) for worker in workers))
        run.check(*workers)
        assert {tuple(decision.members) for decision in run.decisions.values()} == {tuple(range(count))}

    running(tmp_path, act, workers=count)


def test_a_step_waits_for_all_of_its_workers(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        waits = await meanwhile(one.step())
        status = await run.coordinator.status()
        assert status["workers"][0]["waits"] == "with step 1"
        await two.step()
        await waits
        run.check(one, two)

    running(tmp_path, act)


def test_nobody_begins_before_all_are_there(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(1)
        one, two = Worker(run), Worker(run)
        first = await meanwhile(one.come())
        await run.coordinator.place_servers(2)
        await soon(lambda: bool(run.coordinator._ready))
        assert not first.done()
        assert not one.members
        await two.come()
        await first
        assert one.members == two.members == [0, 1]
        assert await run.coordinator.events() == [
            "worker 0 came: card None", "server1 came", "the servers have 4 pieces", "worker 1 came: card None",
            "step 1 is the first of workers [0, 1]",
        ]  # fmt: skip

    running(tmp_path, act)


def test_a_call_that_comes_again_has_the_same_answer(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        await asyncio.gather(one.prepare(), two.prepare())
        first, _ = await asyncio.gather(one.arrive(), two.arrive())
        assert await one.arrive() == first
        await asyncio.gather(one.apply(first), two.apply(first))
        await asyncio.gather(one.steps(3), two.steps(3))
        run.check(one, two)

    running(tmp_path, act)


def test_a_worker_with_another_step_than_the_next_is_an_error(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        await asyncio.gather(one.steps(2), two.steps(2))
        one.version = 5
        with pytest.raises(RuntimeStateError) as error:
            await one.arrive()
        assert str(error.value) == "worker 0 came with step 6, and step 2 was the last"

    running(tmp_path, act)


def test_options_of_the_optimizer_are_those_of_each_step(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        for step in range(1, 5):
            for worker in workers:
                worker.options[0]["lr"] = 0.1 / step
            await asyncio.gather(*(worker.step() for worker in workers))
        assert [run.decisions[step].options[0]["lr"] for step in (1, 4)] == [0.1, 0.025]
        run.check(*workers)

    running(tmp_path, act)


def test_options_that_differ_between_workers_are_an_error_that_names_both(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.step() for worker in workers))
        workers[1].options[0]["lr"] = 0.5
        results = await asyncio.gather(*(worker.step() for worker in workers), return_exceptions=True)
        text = (
            "step 2 has lr=0.05 on worker 0 and 0.5 on worker 1 (group 0 of the optimizer); give all workers the same "
            "options"
        )
        assert [str(result) for result in results] == [text, text]
        assert all(type(result) is RuntimeStateError for result in results)

    running(tmp_path, act)


def test_optimizers_with_other_groups_are_an_error(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        workers[0].options.append({"lr": 0.5})
        results = await asyncio.gather(*(worker.step() for worker in workers), return_exceptions=True)
        assert [str(r) for r in results] == ["step 1: the optimizers of workers 0 and 1 have other groups"] * 2

    running(tmp_path, act)


# -- Workers that come and go


def test_a_worker_that_comes_is_in_the_steps_from_a_stated_one_on(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.steps(3) for worker in workers))
        third = Worker(run)
        comes = await meanwhile(third.come())
        await asyncio.gather(*(worker.steps(4) for worker in workers))
        await comes
        assert third.version == 4
        assert run.decisions[4].next == third.members == [0, 1, 2]
        await asyncio.gather(*(worker.steps(7) for worker in (*workers, third)))
        run.check(*workers, third)
        assert [run.decisions[step].members for step in (4, 5)] == [[0, 1], [0, 1, 2]]
        assert "from step 5 on: workers [0, 1, 2]" in await run.coordinator.events()

    running(tmp_path, act)


def test_a_worker_that_comes_has_the_parameters_of_the_step_that_it_is_told(tmp_path: Path) -> None:
    """The others have come with the step, and no server has taken it yet."""

    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.steps(2) for worker in workers))
        third = Worker(run)
        comes = await meanwhile(third.come())
        await asyncio.gather(*(worker.prepare() for worker in workers))
        decisions = await asyncio.gather(*(worker.arrive() for worker in workers))
        await comes
        assert third.version == 3
        run.check(third)
        await asyncio.gather(*(worker.apply(decisions[0]) for worker in workers))

    running(tmp_path, act)


def test_a_worker_that_leaves_is_in_no_later_step(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        await asyncio.gather(one.steps(2), two.steps(2))
        waits = await meanwhile(one.step())
        await two.leave()
        await waits
        await one.steps(5)
        run.check(one)
        assert run.decisions[3].members == [0]
        assert "worker 1 has ended: from step 3 on without it" in await run.coordinator.events()
        await one.leave()
        assert (await run.coordinator.wanted())["there"] == []

    running(tmp_path, act)


def test_a_worker_that_says_nothing_is_lost(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        await asyncio.gather(one.step(), two.step())

        async def beats() -> None:
            while True:
                assert await run.coordinator.beat(0, one.incarnation, None)
                await asyncio.sleep(0.1)

        beating = asyncio.ensure_future(beats())
        await one.step()
        assert run.decisions[2].members == [0]
        assert any(
            event.startswith("worker 1 has not answered for 1 s (MS_NODE_TIMEOUT): from step 2 on")
            for event in await run.coordinator.events()
        )
        await two.prepare()
        with pytest.raises(Removed) as error:
            await two.arrive()
        assert str(error.value) == "worker 1 is not known"
        assert not await run.coordinator.beat(1, two.incarnation, None)
        comes = await meanwhile(two.come())
        await one.steps(3)
        await comes
        await asyncio.gather(one.steps(5), two.steps(5))
        beating.cancel()
        run.check(one, two)

    running(tmp_path, act, silence=0.8)


def test_a_worker_whose_process_has_ended_is_waited_for_no_more(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        waits = await meanwhile(one.step())
        await run.coordinator.gone(1, "was killed")
        await waits
        assert run.decisions[1].members == [0]
        assert "worker 1 was killed: from step 1 on without it" in await run.coordinator.events()
        await run.coordinator.gone(1, "was killed")  # it is known already
        await two.leave()
        run.check(one)

    running(tmp_path, act)


def test_the_cluster_is_wanted_as_long_as_there_are_workers(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        before = run.servers.renewals
        await soon(lambda: run.servers.renewals > before + 2)
        for worker in (one, two):
            await worker.leave()
        before = run.servers.renewals
        looks = run.coordinator._notify
        seen: list[int] = []

        async def counted() -> None:
            seen.append(run.servers.renewals)
            await looks()

        run.coordinator._notify = counted  # type: ignore[method-assign]
        await soon(lambda: len(seen) > 3)
        assert run.servers.renewals == before

    running(tmp_path, act)


def test_a_worker_that_was_started_again_is_removed_where_it_was(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, old = await run.begin(2)
        await asyncio.gather(one.steps(2), old.steps(2))
        new = Worker(run, 1)
        await new.come()
        assert (new.version, new.incarnation) == (2, 2)
        await old.prepare()
        with pytest.raises(Removed) as error:
            await old.arrive()
        assert str(error.value) == "worker 1 was started again elsewhere"
        await old.leave()  # which is nothing to the new one
        await asyncio.gather(one.steps(4), new.steps(4))
        run.check(one, new)

    running(tmp_path, act)


def test_a_worker_that_is_started_again_has_what_it_kept_with_its_last_step(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        await asyncio.gather(one.step(b"epoch 1"), two.step())
        for restarted in (False, True):
            if restarted:
                await run.restart()
            again = Worker(run, 0)
            await again.come()
            assert again.aux == b"epoch 1"
            assert again.version == 1
        other = Worker(run, 1)
        await other.come()
        assert other.aux is None

    running(tmp_path, act)


def test_a_worker_that_is_started_again_after_its_step_was_decided_goes_on_from_there(tmp_path: Path) -> None:
    """It has died before any server took the step, and there is no other worker."""

    async def act(run: Run) -> None:
        (one,) = await run.begin(1)
        await one.steps(2)
        await one.prepare()
        await one.arrive()
        again = Worker(run, 0)
        await again.come()
        assert again.version == 3
        await again.steps(5)
        run.check(again)

    running(tmp_path, act, workers=1)


def test_workers_that_are_too_many_are_asked_to_end(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(3)
        await run.coordinator.scale(2, None)
        await asyncio.gather(*(worker.steps(3) for worker in workers))
        assert [worker.leaves for worker in workers] == [False, False, True]
        assert workers[2].version == 1
        await workers[2].leave()
        run.check(*workers[:2])
        assert run.decisions[2].members == [0, 1]
        with pytest.raises(RuntimeStateError) as error:
            await run.coordinator.scale(0, None)
        assert str(error.value) == "0 workers; it must be 1 or more"

    running(tmp_path, act, workers=3)


# -- Errors


def test_too_few_workers_are_an_error(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(1)
        with pytest.raises(RuntimeStateError) as error:
            await Worker(run).come()
        assert str(error.value) == (
            "1 of 3 workers and 1 of 2 servers came in 0.3 s (MS_TOPO_TIMEOUT): worker [0]; start the missing ones, or "
            "ask for fewer (MS_WORKER_NUM, MS_SERVER_NUM)"
        )

    running(tmp_path, act, workers=3, patience=0.3)


def test_a_worker_that_trains_something_else_is_an_error(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.begin(1)
        with pytest.raises(RuntimeStateError) as error:
            await Worker(run).come(replace(JOB, optimizer="SGD"))
        assert str(error.value) == (
            "card None does not train the same as the earlier workers: the optimizer is SGD, not AdamW"
        )

    running(tmp_path, act, workers=1)


def test_the_folder_of_another_job_is_an_error(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.begin(1)
        await run.restart()
        with pytest.raises(RuntimeStateError) as error:
            await Worker(run).come(replace(JOB, optimizer="SGD"))
        assert str(error.value) == (
            "card None trains another model, with another optimizer or another version of Partway than the one whose "
            "parameters are kept in the shard folder; give this job its own folder"
        )

    running(tmp_path, act, workers=1)


def test_the_only_server_cannot_go(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.begin(1)
        with pytest.raises(RuntimeStateError) as error:
            await run.coordinator.retire_server("server0")
        assert str(error.value) == "server0 is the only server, which cannot go; add another before"

    running(tmp_path, act, workers=1, servers=1)


def test_a_job_that_goes_on_later_waits_for_all_workers_again(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.steps(3) for worker in workers))
        for worker in workers:
            await run.coordinator.leave(worker.number, worker.incarnation)
        await run.restart()
        one, two = Worker(run, 0), Worker(run, 1)
        waits = await meanwhile(one.come())
        await two.come()
        place = await waits
        assert (place.version, place.members) == (3, [0, 1])
        await asyncio.gather(one.steps(5), two.steps(5))
        run.check(one, two)

    running(tmp_path, act)


# -- Servers that come and go


def test_servers_come_and_go_while_workers_step(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        for step, servers in enumerate((1, 3, 2, 4, 1), 1):
            await run.coordinator.scale(None, servers)
            await asyncio.gather(*(worker.steps(3 * step) for worker in workers))
            run.check(*workers)
            status = await run.coordinator.status()
            assert len(status["servers"]) == servers
            assert sum(report["pieces"] for report in status["reports"]) == len(JOB.pieces)
            assert {report["version"] for report in status["reports"] if report["pieces"]} == {3 * step}
        assert list(run.servers.there) == ["server0"]

    running(tmp_path, act)


def test_a_server_moves_what_it_has_before_it_goes(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.steps(2) for worker in workers))
        await run.coordinator.retire_server("server0")
        assert "server0" in run.servers.there
        await asyncio.gather(*(worker.steps(3) for worker in workers))
        assert run.servers.moved == [("server0", "server1")]
        assert run.servers.stopped == ["server0"]
        await asyncio.gather(*(worker.steps(5) for worker in workers))
        run.check(*workers)

    running(tmp_path, act)


@pytest.mark.parametrize("method", ["apply", "version", "take", "give", "keep"])
def test_pieces_move_where_the_coordinator_died_while_they_did(tmp_path: Path, method: str) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.steps(2) for worker in workers))
        await run.coordinator.scale(None, 3)
        run.servers.stops = method
        waits = [asyncio.ensure_future(worker.step()) for worker in workers]
        await asyncio.wait(waits, timeout=0.3)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        run.servers.stops = None
        await run.restart()
        await asyncio.gather(*(worker.come() for worker in workers))
        assert [worker.version for worker in workers] == [3, 3]
        await asyncio.gather(*(worker.steps(6) for worker in workers))
        run.decisions[3] = replace(run.decisions[4], version=3)
        run.check(*workers)
        assert {server.version() for server in run.servers.there.values()} == {6}
        await run.coordinator.scale(None, 2)  # after which nobody has what is another's
        await asyncio.gather(*(worker.steps(8) for worker in workers))
        run.check(*workers)
        assert sum(server.status()["pieces"] for server in run.servers.there.values()) == len(JOB.pieces)

    running(tmp_path, act)


# -- The coordinator is started again


def test_a_coordinator_that_was_started_again_between_two_steps_goes_on(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        for step in (2, 4, 6):
            await asyncio.gather(*(worker.steps(step) for worker in workers))
            await run.restart()
            await workers[0].come_again()
            await workers[1].join_again()
        await asyncio.gather(*(worker.steps(8) for worker in workers))
        run.check(*workers)

    running(tmp_path, act)


@pytest.mark.parametrize("decided", [False, True])
def test_a_coordinator_that_was_started_again_in_a_step_decides_it_once(tmp_path: Path, decided: bool) -> None:
    async def act(run: Run) -> None:
        one, two = await run.begin(2)
        await asyncio.gather(one.steps(2), two.steps(2))
        await asyncio.gather(one.prepare(), two.prepare())
        waits = asyncio.ensure_future(one.arrive())
        await asyncio.sleep(0.05)
        if decided:
            await two.arrive()
        waits.cancel()
        await run.restart()
        await one.come_again()
        await two.join_again()
        await asyncio.gather(one.prepare(), two.prepare())
        first, second = await asyncio.gather(one.arrive(), two.arrive())
        assert first == second
        assert first.version == 3
        await asyncio.gather(one.apply(first), two.apply(first))
        await asyncio.gather(one.steps(4), two.steps(4))
        run.check(one, two)

    running(tmp_path, act)


def test_servers_may_come_after_the_coordinator_was_started_again(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        workers = await run.begin(2)
        await asyncio.gather(*(worker.steps(2) for worker in workers))
        await run.restart()
        await run.coordinator.scale(None, 3)
        await workers[0].come_again()
        await workers[1].join_again()
        await asyncio.gather(*(worker.steps(5) for worker in workers))
        run.check(*workers)
        assert len(run.servers.there) == 3

    running(tmp_path, act)


# -- Async mode

ASYNC = replace(JOB, mode="async", max_staleness=2)


class Alone:
    """A worker of async mode, as client.py does it."""

    def __init__(self, run: Run, number: int, job: Job) -> None:
        self.own, self.run, self.job, self.granted = Worker(run, number), run, job, True

    async def come(self) -> None:
        await self.own.come(self.job)

    async def step(self) -> None:
        own, coordinator = self.own, self.run.coordinator
        number = own.version + 1
        answer, self.granted = await coordinator.turn(own.number, own.incarnation, True)
        own.lay(answer.assignment, answer.epoch)
        for server, each in own.sent(gradients_of(own.number, number)).items():
            read = own.known.get(server, min(own.known.values(), default=0))
            known = own.known.get(server, -1)
            changes = await self.run.servers.ask(server, "push", own.number, number, read, each, own.options, known)
            if self.granted:
                own.put(server, changes)
        await coordinator.done(own.number, own.incarnation)
        if not self.granted and not await coordinator.is_leaving(own.number, own.incarnation):
            answer = await coordinator.begin(own.number, own.incarnation)
            own.lay(answer.assignment, answer.epoch)
            for server in own.names:
                own.put(server, await self.run.servers.ask(server, "changed", own.known.get(server, -1)))
        own.version = number

    async def steps(self, upto: int, pause: float = 0) -> None:
        while self.own.version < upto:
            await asyncio.sleep(pause)
            await self.step()

    async def all_steps(self, upto: int, pause: float = 0) -> None:
        """From its coming to its leaving, after which nobody waits for this worker."""
        if self.own.incarnation == 0:
            await self.come()
        await self.steps(upto, pause)
        await self.own.leave()


async def pushed(run: Run, workers: list[Alone]) -> int:
    """All pushes were applied once by all servers; the largest staleness."""
    stale = 0
    for server in run.servers.there.values():
        assert server.version() == sum(worker.own.version for worker in workers)
        for worker in workers:
            assert server.seen(worker.own.number) == worker.own.version
        stale = max([stale, *(each for _, _, each in server.staleness())])
    return stale


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_pushes_are_no_staler_than_the_bound(tmp_path: Path, bound: int | None) -> None:
    async def act(run: Run) -> None:
        job = replace(ASYNC, max_staleness=bound)
        await run.coordinator.place_servers(2)
        workers = [Alone(run, number, job) for number in range(3)]
        await asyncio.gather(*(worker.all_steps(12, 0.004 * i) for i, worker in enumerate(workers)))
        stale = await pushed(run, workers)
        assert stale > 0 if bound is None else stale <= bound

    running(tmp_path, act, workers=3)


def test_a_slow_worker_is_waited_for_at_the_bound(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(2)
        fast, slow = (Alone(run, number, ASYNC) for number in (0, 1))
        await asyncio.gather(fast.come(), slow.come())
        waits = await meanwhile(fast.steps(5))
        await soon(lambda: fast.own.version == 2)
        await asyncio.sleep(0.1)
        assert fast.own.version == 2
        assert (await run.coordinator.status())["workers"][0]["waits"] == "to push"
        await slow.own.leave()
        await waits
        assert fast.own.version == 5

    running(tmp_path, act)


@pytest.mark.parametrize("rejoin", [False, True])
def test_the_bound_holds_after_the_coordinator_was_started_again(tmp_path: Path, rejoin: bool) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(2)
        fast, slow = (Alone(run, number, ASYNC) for number in (0, 1))
        await asyncio.gather(fast.come(), slow.come())
        await fast.steps(1)
        await run.restart()
        await fast.own.come_again(ASYNC, min(fast.own.known.values()))
        if rejoin:
            await slow.come()
        else:  # it computes, and only its beats are heard
            mark = min(slow.own.known.values())
            await run.coordinator.beat(slow.own.number, slow.own.incarnation, mark)
        steps = asyncio.ensure_future(fast.steps(10))
        await asyncio.sleep(0.3)
        await slow.steps(1)
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        stale = [each for server in run.servers.there.values() for each in server.staleness()]
        assert max(each for _, _, each in stale) <= 2

    running(tmp_path, act)


def test_a_worker_that_is_started_again_goes_on_from_the_step_that_all_servers_have(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(2)
        loose = replace(ASYNC, max_staleness=9)
        workers = [Alone(run, number, loose) for number in (0, 1)]
        await asyncio.gather(*(worker.come() for worker in workers))
        await asyncio.gather(*(worker.steps(3) for worker in workers))
        own = workers[0].own
        await run.coordinator.turn(own.number, own.incarnation, True)
        server, first = next(iter(own.sent(gradients_of(0, 4)).items()))
        await run.servers.ask(server, "push", 0, 4, own.known[server], first, own.options, -1)  # and it dies
        again = Alone(run, 0, loose)
        await again.come()
        assert again.own.version == 3
        await asyncio.gather(again.all_steps(6), workers[1].all_steps(6))
        await pushed(run, [again, workers[1]])

    running(tmp_path, act)


def test_pieces_move_while_nobody_pushes(tmp_path: Path) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(1)
        workers = [Alone(run, number, ASYNC) for number in (0, 1)]
        await asyncio.gather(*(worker.come() for worker in workers))
        training = asyncio.gather(*(worker.all_steps(60, 0.005) for worker in workers))
        for servers in (3, 1, 2):
            await asyncio.sleep(0.1)
            before = run.coordinator._epoch
            await run.coordinator.scale(None, servers)
            await soon(lambda: run.coordinator._epoch > before and not run.coordinator._paused)  # noqa: B023
        await training
        assert len(run.servers.there) == 2
        await pushed(run, workers)

    running(tmp_path, act, servers=1)


# -- The cut


@pytest.mark.parametrize("job", [JOB, replace(ASYNC, max_staleness=None)], ids=["sync", "async"])
def test_a_cut_is_of_one_moment(tmp_path: Path, job: Job) -> None:
    async def act(run: Run) -> None:
        await run.coordinator.place_servers(2)
        sync = job is JOB
        workers: list[Any] = [Worker(run, i) if sync else Alone(run, i, job) for i in (0, 1)]
        await asyncio.gather(*(worker.come() for worker in workers))
        await asyncio.gather(*(worker.steps(3) for worker in workers))
        training = asyncio.gather(*(worker.steps(9) for worker in workers)) if not sync else None
        where, version = await run.coordinator.cut("first")
        await (training or asyncio.gather(*(worker.steps(6) for worker in workers)))
        steps = {float(run.servers.there[where[p.key]].read("first", p.key).state["step"]) for p in job.pieces}
        assert steps == {float(version)}
        assert version == 3 if sync else 6 <= version < 18

    running(tmp_path, act)
