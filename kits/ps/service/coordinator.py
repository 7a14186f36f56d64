"""The coordinator of workers and servers: who is there, which server has what, and who waits for whom. Plain Python:
cluster.py runs it as an actor of Ray.

In sync mode a step is decided when all of its workers have come: whose gradients are averaged, with which options of
the optimizer, and which workers take the next step. So workers join and leave at a definite step. In async mode the
gate (gate.py) decides who may push. Pieces move, and checkpoints are cut, while no step is under way.

A decision is kept before anybody is told, so that the coordinator may die at any moment; all calls may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from partway.ps.service.gate import Gate
from partway.ps.service.job import Job
from partway.ps.service.pieces import assign
from partway.ps.service.server import StepDecision
from partway.ps.service.shelf import open_shelf, viewing
from partway.ps.service.update import OptimizerMaker
from partway.strategy import RuntimeStateError

logger = logging.getLogger("partway.ps")
_LOOK = 0.2  # seconds between two looks
_STOPPED = 3.0  # seconds without a look after which this process itself was stopped


class Removed(RuntimeStateError):
    """This worker was declared lost, or was started again elsewhere."""


class Again(RuntimeStateError):
    """The coordinator was started again, and does not know its workers yet: each joins again, and goes on."""


class Servers(Protocol):
    """How servers are started and called."""

    def start(self, name: str, node: str | None, job: Job, maker: OptimizerMaker) -> None:
        """Start a server, if it is not running; on a node, if one is named."""

    def stop(self, name: str) -> None:
        """End a server for good, and remove its records."""

    async def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """The answer of a server, however often it is started again meanwhile."""

    def renew(self) -> None:
        """Renew the lease of a cluster that would end otherwise."""

    async def move(self, source: str, target: str, keys: list[str]) -> None:
        """Move pieces from one server to another."""


@dataclass
class ClusterSize:
    """The wanted numbers of workers and servers, and how long to wait for them.

    workers, servers   have to be there before the first step
    patience           seconds to wait for them (MS_TOPO_TIMEOUT)
    silence            seconds after which a silent worker is lost (MS_NODE_TIMEOUT)
    """

    workers: int
    servers: int
    patience: float = 1800
    silence: float = 30


@dataclass
class WorkerPlace:
    """The answer to a worker that may begin.

    version      the last step that was decided; in async mode the last step of this worker that all servers have
    members      the workers of the next step
    assignment   which server has which piece; `epoch`: how often that changed
    aux          the worker's own data from its last step
    upload       nobody has given the servers their parameters yet, and this worker has to
    """

    version: int
    members: list[int]
    assignment: dict[str, str]
    epoch: int
    aux: bytes | None = None
    upload: bool = False


@dataclass
class Answer:
    """The answer to a worker with a step."""

    decision: StepDecision | None
    assignment: dict[str, str]
    epoch: int


@dataclass
class _Worker:
    incarnation: int
    beat: float
    card: str
    arrived: int = 0  # the step with which it waits
    options: list[dict[str, Any]] = field(default_factory=list)
    aux: bytes | None = None
    steps: int = 0
    leaves: bool = False  # it was asked to end
    waits: str = ""


class Coordinator:
    """The one place for decisions. `folder`: of its records; None: in memory."""

    def __init__(self, plan: ClusterSize, servers: Servers, folder: Path | None) -> None:
        self._plan, self._servers = plan, servers
        self._shelf = open_shelf(folder, "process" if folder is not None else "memory")
        self._changed = asyncio.Condition()
        self._job: Job | None = None
        self._maker: OptimizerMaker | None = None
        self._workers: dict[int, _Worker] = {}
        self._uploader: int | None = None
        self._wrong: str | None = None
        self._paused = False
        self._began = time.monotonic()
        self._events: list[str] = []
        self._gate = Gate(None)
        self._moves = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._load()

    def _load(self) -> None:
        with viewing(self._shelf) as view:
            text = view.get(b"state")
            kept: dict[str, Any] = json.loads(bytes(text)) if text is not None else {}
            aux = {int(key[4:]): bytes(value) for key, value in view.items(b"aux/")}
        decision = kept.get("decision")
        self._version: int = kept.get("version", 0)
        self._decision = StepDecision(**decision) if decision else None
        self._members: list[int] = kept.get("members", [])
        self._waiting: list[int] = []
        self._assignment: dict[str, str] = kept.get("assignment", {})
        self._epoch: int = kept.get("epoch", 0)
        self._laid_for: list[str] = kept.get("laid_for", [])
        self._nodes: dict[str, str | None] = kept.get("nodes", {})
        self._ready: bool = kept.get("ready", False)
        self._fingerprint: str | None = kept.get("job")
        self._wanted_workers: int = kept.get("wanted_workers", self._plan.workers)
        self._named: int = kept.get("named", 0)
        self._over: bool = kept.get("over", False)  # the last worker has gone
        self._gathers: bool = kept.get("gathers", True)  # before the first step, or a new start: it waits for all
        self._unheard = set(self._members)  # workers whose versions this process does not know
        self._marks: dict[int, int] = {}  # versions that they reported before there was a gate
        now = time.monotonic()
        for worker, (incarnation, card) in ((int(w), each) for w, each in kept.get("workers", {}).items()):
            self._workers[worker] = _Worker(incarnation, now, card, aux=aux.get(worker))

    def _keep(self, aux: Iterable[int] = ()) -> None:
        state = {
            "version": self._version, "decision": asdict(self._decision) if self._decision else None,
            "members": self._members, "assignment": self._assignment, "epoch": self._epoch, "nodes": self._nodes,
            "ready": self._ready, "job": self._fingerprint, "wanted_workers": self._wanted_workers,
            "named": self._named, "over": self._over, "gathers": self._gathers, "laid_for": self._laid_for,
            "workers": {w: [each.incarnation, each.card] for w, each in self._workers.items()},
        }  # fmt: skip
        records = [(b"aux/%d" % w, self._workers[w].aux or b"") for w in aux]
        self._shelf.commit([*sorted(records), (b"state", json.dumps(state).encode())], 2**20)
        if self._job is not None and self._job.durability == "disk":
            self._shelf.sync()

    # -- Joining

    async def join(self, card: str, job: Job, maker: OptimizerMaker, number: int | None) -> tuple[int, int]:
        """Register a worker. Returns its number, and how often a worker with that number has joined. Raises
        RuntimeStateError if it trains something else."""
        self._look_on()
        if self._job is not None and (wrong := self._job.differs(job)):
            raise RuntimeStateError(f"{card} does not train the same as the earlier workers: {wrong}")
        if self._fingerprint not in (None, job.fingerprint):
            raise RuntimeStateError(
                f"{card} trains another model, with another optimizer or another version of Partway than the one whose "
                "parameters are kept in the shard folder; give this job its own folder"
            )
        if self._job is None:
            self._job, self._maker, self._fingerprint = job, maker, job.fingerprint
            self._gate = Gate(job.max_staleness if job.mode == "async" else None)
            for worker, mark in self._marks.items():
                self._gate.begin(worker, mark)
            self._start_servers()
        if number is None:
            number = next(n for n in range(len(self._workers) + 1) if n not in self._workers)
        before = self._workers.get(number)
        self._workers[number] = mine = _Worker(before.incarnation + 1 if before else 1, time.monotonic(), card)
        if before is not None and number in self._members:
            mine.aux = before.aux
        self._gate.drop(number)
        self._unheard.discard(number)
        if self._uploader == number:
            self._uploader = None
        if number not in self._members and number not in self._waiting:
            self._waiting.append(number)
        if self._wanted_workers <= number:
            self._wanted_workers = number + 1
        self._over = False
        self._say(f"worker {number} came: {card}")
        self._keep()
        await self._notify()
        return number, mine.incarnation

    async def admitted(self, worker: int, incarnation: int, mark: int | None = None) -> WorkerPlace:
        """Wait until a worker may take part, and all servers have the data that it will read. Raises RuntimeStateError
        if too few workers or servers come.

        mark    for one that joins again with a computed step: the version from which it was computed
        """
        mine = self._of(worker, incarnation)
        mine.waits = "to begin"
        end = self._began + self._plan.patience
        async with self._changed:
            while not self._may_begin(worker):
                if not self._ready and self._enough_servers() and self._uploader is None:
                    self._uploader = worker
                    self._lay_out()
                    return WorkerPlace(0, [], self._assignment, self._epoch, upload=True)
                if not self._ready or not self._members:
                    self._check_patience(end)
                await self._wait()
                self._of(worker, incarnation)
            while self._paused:
                await self._wait()
                self._of(worker, incarnation)
        version = self._version
        assert self._job is not None
        if self._job.mode == "async":
            version = await self._last_step_of(worker)
            await self._servers_at()
            if mark is None:
                await self.begin(worker, incarnation)
            else:
                self._gate.begin(worker, mark)
        elif self._decision is not None:  # whoever knew the decision may have died before telling a server
            for name in sorted(set(self._assignment.values())):
                await self._servers.ask(name, "apply", self._decision, self._version)
        mine.waits = ""
        return WorkerPlace(version, list(self._members), self._assignment, self._epoch, mine.aux or None)

    async def uploaded(self, worker: int, incarnation: int) -> None:
        """Record that the servers have their parameters."""
        self._of(worker, incarnation)
        self._ready, self._uploader = True, None
        self._say(f"the servers have {len(self._assignment)} pieces")
        self._keep()
        await self._notify()

    def _may_begin(self, worker: int) -> bool:
        if not self._ready or not self._enough_servers():
            return False
        if worker in self._members:
            return True
        assert self._job is not None
        enough = len(self._waiting) >= self._plan.workers if self._gathers else True
        if enough and (not self._members or self._job.mode == "async"):
            self._members = sorted({*self._members, *self._waiting})
            self._waiting, self._gathers = [], False
            self._say(f"step {self._version + 1} is the first of workers {self._members}")
            self._keep()
            self._changed.notify_all()
        return worker in self._members

    def _check_patience(self, end: float) -> None:
        if time.monotonic() > end:
            there = sorted({*self._waiting, *self._members})
            raise RuntimeStateError(
                f"{len(there)} of {self._plan.workers} workers and {len(self._nodes)} of {self._plan.servers} servers "
                f"came in {self._plan.patience:g} s (MS_TOPO_TIMEOUT): worker {there}; start the missing ones, or ask "
                "for fewer (MS_WORKER_NUM, MS_SERVER_NUM)"
            )

    def _of(self, worker: int, incarnation: int) -> _Worker:
        if self._wrong is not None:
            raise RuntimeStateError(self._wrong)
        if self._job is None:
            raise Again("the coordinator was started again")
        mine = self._workers.get(worker)
        if mine is None or mine.incarnation != incarnation:
            what = "is not known" if mine is None else "was started again elsewhere"
            raise Removed(f"worker {worker} {what}")
        mine.beat = time.monotonic()
        return mine

    async def beat(self, worker: int, incarnation: int, mark: int | None) -> bool:
        """Record a worker's sign of life, and the version from which it computes. Returns whether it still belongs to
        the job."""
        mine = self._workers.get(worker)
        if mine is None or mine.incarnation != incarnation:
            return False
        mine.beat = time.monotonic()
        self._unheard.discard(worker)
        if mark is not None and self._job is not None:
            self._gate.begin(worker, mark)
        elif mark is not None:
            self._marks[worker] = mark
        return worker in self._members or worker in self._waiting

    # -- Sync mode

    async def arrive(
        self, worker: int, incarnation: int, version: int, options: list[dict[str, Any]], aux: bytes | None
    ) -> Answer:
        """Record that a worker's gradients for step `version` are with all servers, and wait until the step is
        decided."""
        mine = self._of(worker, incarnation)
        if worker not in self._members:
            raise Removed(f"worker {worker} was declared lost before step {version}")
        if version == self._version + 1:
            mine.arrived, mine.options, mine.aux, mine.waits = version, options, aux, f"with step {version}"
            await self._decide()
        elif version != self._version:
            raise RuntimeStateError(f"worker {worker} came with step {version}, and step {self._version} was the last")
        async with self._changed:
            while self._version < version or self._paused:
                await self._wait()
                self._of(worker, incarnation)
                if worker not in self._members and self._version < version:
                    raise Removed(f"worker {worker} was declared lost before step {version}")
        mine.waits = ""
        mine.steps += 1
        return Answer(self._decision, self._assignment, self._epoch)

    async def _decide(self) -> None:
        """Decide the next step, if all of its workers have come."""
        version = self._version + 1
        members = [w for w in self._members if w in self._workers]
        if self._paused or not members or any(self._workers[w].arrived != version for w in members):
            return
        options = self._workers[members[0]].options
        for w in members[1:]:
            if self._workers[w].options != options:
                await self._fail(_differing(version, members[0], options, w, self._workers[w].options))
                return
        leaving = {w for w in members if self._workers[w].leaves}
        following = sorted({*members, *self._waiting} - leaving)
        before = self._decision, self._version, self._members, self._waiting
        self._decision, self._version = StepDecision(version, members, options, following), version
        self._members, self._waiting = following, []
        try:
            self._keep(members)
        except BaseException:  # a full disk: nobody was told
            self._decision, self._version, self._members, self._waiting = before
            raise
        if following != members:
            self._say(f"from step {version + 1} on: workers {following}")
        if self._is_to_move():
            await self._between_steps(self._move)
        await self._notify()

    async def _fail(self, wrong: str) -> None:
        self._wrong = wrong
        await self._notify()

    # -- Async mode

    async def turn(self, worker: int, incarnation: int, wants: bool) -> tuple[Answer, bool]:
        """Wait until a worker may push its computed step. Returns the assignment of pieces, and whether it may begin
        its next step with the answers of the servers (if it `wants`), or has to call `begin` first."""
        mine = self._of(worker, incarnation)
        mine.waits = "to push"
        async with self._changed:
            while self._paused or self._unheard or not self._gate.push(worker):
                await self._wait()
                self._of(worker, incarnation)
            granted = wants and not mine.leaves and self._gate.read(worker)
        mine.waits = ""
        mine.steps += 1
        return Answer(None, self._assignment, self._epoch), granted

    async def begin(self, worker: int, incarnation: int) -> Answer:
        """Wait until a worker may read the parameters and begin a step."""
        mine = self._of(worker, incarnation)
        mine.waits = "to begin"
        async with self._changed:
            while self._paused or self._unheard or not self._gate.read(worker):
                await self._wait()
                self._of(worker, incarnation)
        mine.waits = ""
        return Answer(None, self._assignment, self._epoch)

    async def done(self, worker: int, incarnation: int) -> None:
        """Record that all servers have applied a worker's push."""
        self._of(worker, incarnation)
        self._gate.done(worker)
        await self._notify()

    async def _last_step_of(self, worker: int) -> int:
        seen = [await self._servers.ask(name, "seen", worker) for name in sorted(set(self._assignment.values()))]
        return min(seen, default=0)

    async def _servers_at(self) -> None:
        """Ask the servers for their versions, after a restart of this process."""
        versions = [await self._servers.ask(name, "version") for name in sorted(set(self._assignment.values()))]
        self._gate.admitted = max([self._gate.admitted, *versions])

    # -- Leaving

    async def leave(self, worker: int, incarnation: int) -> None:
        """Remove a worker that has ended well."""
        mine = self._workers.get(worker)
        if mine is not None and mine.incarnation == incarnation:
            await self._without(worker, "has ended")

    async def gone(self, worker: int, why: str) -> None:
        """Remove a worker whose process has ended, and is not started again."""
        if worker in self._workers:
            await self._without(worker, why)

    async def _without(self, worker: int, why: str) -> None:
        del self._workers[worker]
        self._gate.drop(worker)
        self._unheard.discard(worker)
        if self._uploader == worker:
            self._uploader = None
        self._waiting = [w for w in self._waiting if w != worker]
        if worker in self._members:
            self._members = [w for w in self._members if w != worker]
            self._say(f"worker {worker} {why}: from step {self._version + 1} on without it")
        self._over = not self._workers
        self._gathers = self._gathers or self._over
        self._keep()
        await self._decide()
        await self._notify()

    def _look_on(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_after())

    async def _look_after(self) -> None:
        """Remove workers that are silent for too long."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            if now - last > _STOPPED:  # this process was stopped, and has yet to read their messages
                for mine in self._workers.values():
                    mine.beat = now
            last = now
            for worker, mine in list(self._workers.items()):
                if now - mine.beat > self._plan.silence:
                    await self._without(worker, f"has not answered for {now - mine.beat:.0f} s (MS_NODE_TIMEOUT)")
            if self._workers:
                self._servers.renew()
            self._move_if_idle()
            await self._notify()  # those that wait look at the clock

    # -- Servers

    async def add_server(self, node: str | None, name: str | None = None) -> str:
        """Add a server on a node, or restart the server `name` on the node where it is now. Returns its name."""
        if name is None or name not in self._nodes:
            name = f"server{self._named}"
            self._named += 1
        self._nodes[name] = node
        self._keep()
        if self._job is not None:
            self._start_servers()
            self._say(f"{name} came")
        self._move_if_idle()
        await self._notify()
        return name

    async def place_servers(self, count: int) -> None:
        """Start servers until there are at least `count`, wherever there is room."""
        self._look_on()
        while len(self._nodes) < count:
            await self.add_server(None)

    async def retire_server(self, name: str) -> None:
        """Make a server give up its pieces, and end. Raises RuntimeStateError if it is the last."""
        if name not in self._nodes:
            return
        if len(self._nodes) == 1:
            raise RuntimeStateError(f"{name} is the only server, which cannot go; add another before")
        del self._nodes[name]
        if name not in self._assignment.values():
            self._servers.stop(name)
        self._say(f"{name} is to go")
        self._keep()
        self._move_if_idle()

    async def scale(self, workers: int | None, servers: int | None) -> None:
        """Set the numbers of workers and servers. Raises RuntimeStateError for fewer than one."""
        for what, count in (("workers", workers), ("servers", servers)):
            if count is not None and count < 1:
                raise RuntimeStateError(f"{count} {what}; it must be 1 or more")
        if workers is not None:
            self._wanted_workers = workers
            for worker, mine in self._workers.items():
                mine.leaves = worker >= workers
            self._keep()
        while servers is not None and len(self._nodes) < servers:
            await self.add_server(None)
        while servers is not None and len(self._nodes) > servers:
            await self.retire_server(max(self._nodes, key=lambda name: int(name.removeprefix("server"))))
        await self._notify()

    def _start_servers(self) -> None:
        assert self._job is not None
        assert self._maker is not None
        for name in {*self._nodes, *self._assignment.values()}:
            self._servers.start(name, self._nodes.get(name), self._job, self._maker)

    def _enough_servers(self) -> bool:
        return len(self._nodes) >= (1 if self._ready else self._plan.servers)

    def _lay_out(self) -> None:
        """Assign the pieces to servers for the first time."""
        assert self._job is not None
        sizes = {piece.key: self._job.size(piece) for piece in self._job.pieces}
        self._assignment, self._laid_for = assign(sizes, self._nodes, {}), sorted(self._nodes)
        self._epoch += 1
        self._keep()

    def _is_to_move(self) -> bool:
        return self._ready and self._laid_for != sorted(self._nodes)

    def _move_if_idle(self) -> None:
        """Move pieces in async mode, once no push is under way; in sync mode they move after a decision."""
        if self._job is not None and self._job.mode == "async" and self._is_to_move() and not self._paused:
            self._moving = asyncio.get_running_loop().create_task(self._between_steps(self._move))

    async def _between_steps(self, act: Callable[[], Any]) -> Any:
        """Run `act` while no step is under way: in sync mode all servers have applied the last one, and nobody has been
        told; in async mode nobody pushes."""
        async with self._moves:
            self._paused = True
            try:
                names = sorted(set(self._assignment.values()))
                assert self._job is not None
                if self._job.mode == "async":
                    async with self._changed:
                        while not self._gate.is_still:
                            await self._wait()
                elif self._decision is not None:
                    for name in names:
                        await self._servers.ask(name, "apply", self._decision, self._version)
                return await act()
            finally:
                self._paused = False
                await self._notify()

    async def _move(self) -> None:
        """Move pieces to their new servers. The old server keeps a piece until the new one has it on its shelf."""
        assert self._job is not None
        begin = time.monotonic()
        before = self._assignment
        sizes = {piece.key: self._job.size(piece) for piece in self._job.pieces}
        nodes = sorted(self._nodes)
        after = assign(sizes, nodes, before)
        names = sorted({*before.values(), *after.values()})
        versions = [await self._servers.ask(name, "version") for name in sorted(set(before.values()))]
        moved = 0
        for source in names:
            for target in names:
                keys = [key for key in before if before[key] == source and after[key] == target and source != target]
                if keys:
                    await self._servers.move(source, target, keys)
                    moved += sum(sizes[key] for key in keys)
        self._assignment, self._epoch = after, self._epoch + 1
        self._keep()
        for name in {*names, *nodes}:
            keys = [key for key, server in after.items() if server == name]
            if name in nodes:
                await self._servers.ask(name, "keep", keys, max(versions))
            else:
                self._servers.stop(name)
        self._laid_for = nodes  # last, so that after a failure everything is repeated
        self._keep()
        seconds = time.monotonic() - begin
        self._say(f"{moved / 1e6:.1f} MB moved in {seconds:.1f} s: {len(nodes)} servers have the parameters")

    async def layout(self) -> Answer:
        """The assignment of pieces to servers."""
        async with self._changed:
            while self._paused:
                await self._wait()
        return Answer(self._decision, self._assignment, self._epoch)

    # -- The cut

    async def cut(self, name: str) -> tuple[dict[str, str], int]:
        """Make all servers keep their state as of one moment between two steps. Returns the assignment of pieces, and
        the step."""
        assert self._job is not None

        async def snapshots() -> tuple[dict[str, str], int]:
            versions = [
                await self._servers.ask(server, "snapshot", name) for server in sorted(set(self._assignment.values()))
            ]
            return dict(self._assignment), max(versions)

        if self._job.mode == "async":
            found: tuple[dict[str, str], int] = await self._between_steps(snapshots)
            return found
        return await snapshots()  # the worker that asks has not come with its next step

    # -- Views

    async def status(self) -> dict[str, Any]:
        """The state of the whole job, for a view."""
        now = time.monotonic()
        names = sorted({*self._nodes, *self._assignment.values()})
        ready = self._ready and self._job is not None
        return {
            "mode": self._job.mode if self._job else "", "version": self._version or self._gate.admitted,
            "ready": self._ready, "epoch": self._epoch, "wanted_workers": self._wanted_workers,
            "max_staleness": self._job.max_staleness if self._job else None,
            "members": list(self._members), "waiting": list(self._waiting),
            "workers": {
                w: {"card": each.card, "silent": now - each.beat, "steps": each.steps, "waits": each.waits,
                    "leaves": each.leaves, "incarnation": each.incarnation}
                for w, each in self._workers.items()
            },
            "servers": names, "reports": await self._reports(names) if ready else [],
            "events": self._events[-20:], "happened": len(self._events),
        }  # fmt: skip

    async def _reports(self, names: list[str]) -> list[dict[str, Any]]:
        found = []
        for name in names:
            if name in {*self._nodes, *self._assignment.values()}:  # it may have gone meanwhile
                with suppress(RuntimeStateError):
                    found.append(await self._servers.ask(name, "status"))
        return found

    async def wanted(self) -> dict[str, Any]:
        """The launcher's view: the wanted number of workers, and whether all have ended."""
        return {
            "workers": self._wanted_workers,
            "there": sorted(self._workers),
            "over": self._over,
            "epoch": self._epoch,
            "servers": sorted({*self._nodes, *self._assignment.values()}),
            "wanted_servers": len(self._nodes),
        }

    async def is_leaving(self, worker: int, incarnation: int) -> bool:
        """Whether a worker was asked to end."""
        return self._of(worker, incarnation).leaves

    async def events(self) -> list[str]:
        """The events, in order."""
        return list(self._events)

    def _say(self, text: str) -> None:
        logger.info("%s", text)
        self._events.append(text)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self) -> None:
        """Wait until something has changed; the caller holds the condition."""
        await self._changed.wait()


def _differing(version: int, one: int, options: list[dict[str, Any]], two: int, others: list[dict[str, Any]]) -> str:
    for number, (mine, theirs) in enumerate(zip(options, others, strict=False)):
        for name in mine:
            if mine[name] != theirs.get(name):
                return (
                    f"step {version} has {name}={mine[name]!r} on worker {one} and {theirs.get(name)!r} on worker "
                    f"{two} (group {number} of the optimizer); give all workers the same options"
                )
    return f"step {version}: the optimizers of workers {one} and {two} have other groups"
