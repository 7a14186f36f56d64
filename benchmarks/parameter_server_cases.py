"""What parameter_server.py measures: each case, as a process of its own, prints what it took as a line of JSON.

    python benchmarks/parameter_server_cases.py '{"way": "partway", "megabytes": 25, "steps": 10}'

A step is what `optimizer.step()` takes: from the gradients that there are to the next parameters in the model. The
gradients stay the same, so that there is no forward or backward in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # the peer's Ray listens on the loopback, as ours

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import partway as pw
from partway.ps.service import cluster
from partway.ps.service.client import Client
from partway.ps.service.update import ServerShard, Table

LAYERS, ROWS, WIDE, WARM = 6, 1_000_000, 64, 3
LEARNING = {"lr": 0.01, "momentum": 0.9}
Spec = dict[str, Any]
Found = dict[str, Any]


def model_of(megabytes: float) -> nn.Sequential:
    """Layers of about so many MB together, with a gradient for each parameter."""
    width = int((megabytes * 1e6 / 4 / LAYERS) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    return model


def seconds_of(step: Callable[[], Any], count: int) -> list[float]:
    """What each of `count` steps takes, after a few that do not count."""
    for _ in range(WARM):
        step()
    took = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return took


def bytes_of(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


# -- Where the time goes


class Clock:
    """Seconds by name, all together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the block as `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def wrap(self, owner: Any, method: str, name: str | None = None) -> None:
        """Count all calls of a method."""
        inner = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.of(name or method):
                return inner(*arguments, **named)

        setattr(owner, method, timed)

    def taken(self) -> dict[str, float]:
        """What there is, and begin again."""
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found


class TimedServer(cluster._ServerActor):
    """A server that says where its time goes."""

    def __init__(self, *arguments: Any) -> None:
        self._clock = Clock()
        super().__init__(*arguments)
        for method in ("changed", "_pushed", "_mean", "_mean_rows", "_records", "_row_records"):
            self._clock.wrap(self, method)
        for method in ("reserve", "commit"):
            self._clock.wrap(self._shelf, method, f"shelf.{method}")
        self._clock.wrap(self._shelf, "view", "shelf.view")
        self._clock.wrap(ServerShard, "step", "Shard.step")
        self._clock.wrap(Table, "step", "Table.step")
        self._clock.wrap(Table, "catch_up", "Table.catch_up")

    # Ray calls the methods of the class, not of the instance.

    def prepare(self, *arguments: Any) -> int:
        with self._clock.of("prepare"):
            return super().prepare(*arguments)

    def apply(self, *arguments: Any) -> Any:
        with self._clock.of("apply"):
            return super().apply(*arguments)

    def push(self, *arguments: Any) -> Any:
        with self._clock.of("push"):
            return super().push(*arguments)

    def rows(self, wanted: Any) -> Any:
        with self._clock.of("rows"):
            return super().rows(wanted)

    def taken(self) -> dict[str, float]:
        """Seconds by name, since it was asked last."""
        return self._clock.taken()


class TimedCoordinator(cluster._CoordinatorActor):
    """A coordinator whose servers are timed."""

    def __init__(self, *arguments: Any) -> None:
        cluster._ServerActor = TimedServer  # type: ignore[misc]
        self._clock = Clock()
        super().__init__(*arguments)
        self._clock.wrap(self, "_keep")

    async def arrive(self, *arguments: Any) -> Any:
        with self._clock.of("arrive"):
            return await super().arrive(*arguments)

    async def taken(self) -> dict[str, float]:
        """Seconds by name, since it was asked last."""
        return self._clock.taken()


class TimedLink:
    """The calls of a worker: what it takes to send each, and to wait for the answers."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._link, self._clock = client._link, clock
        self._asked: dict[int, str] = {}
        for method in ("_sent", "_put"):
            clock.wrap(client, method)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        with self._clock.of(f"{method}: send"):
            made = self._link.call(name, method, *arguments)
        self._asked[id(made)] = method
        return made

    def wait(self, calls: list[Any], patience: float | None = None) -> list[Any]:
        with self._clock.of(f"{self._asked.pop(id(calls[0]), '')}: wait"):
            return self._link.wait(calls, patience)

    def ask(self, name: str, method: str, *arguments: Any, patience: float | None = None) -> Any:
        with self._clock.of(f"{method}: ask"):
            return self._link.ask(name, method, *arguments, patience=patience)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


# -- Partway


def start(spec: Spec) -> None:
    """A cluster of this process, with one server."""
    if spec.get("where"):
        cluster._CoordinatorActor = TimedCoordinator  # type: ignore[misc]
    pw.set_ps_context(enable_ps=True, mode=spec.get("mode", "sync"), durability=spec.get("durability", "process"))
    pw.init()


def partway(spec: Spec) -> Found:
    """Dense parameters on a server; with "where": seconds by what they went to."""
    start(spec)
    model = model_of(spec["megabytes"])
    pw.set_param_ps(model)
    optimizer: Any = pw.ps.optimizer(torch.optim.SGD(model.parameters(), **LEARNING))
    if not spec.get("where"):
        return {"seconds": seconds_of(optimizer.step, spec["steps"]), "bytes": bytes_of(model)}
    return {**_where(optimizer, optimizer.step, spec["steps"]), "bytes": bytes_of(model)}


def _clocks(optimizer: Any) -> Callable[[], dict[str, dict[str, float]]]:
    """Time the calls of the worker and of its server. Gives what reads the clocks, which then begin again."""
    import ray

    clock = Clock()
    optimizer.client._link = TimedLink(optimizer.client, clock)
    others = {"server": "server0", "coordinator": cluster.COORDINATOR}
    actors = {side: ray.get_actor(name, cluster.SPACE) for side, name in others.items()}
    return lambda: {
        "worker": clock.taken(), **{side: ray.get(actor.taken.remote()) for side, actor in actors.items()}
    }  # fmt: skip


def _where(optimizer: Any, step: Callable[[], Any], count: int) -> Found:
    read = _clocks(optimizer)
    for _ in range(WARM):
        step()
    read()
    took = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return {"seconds": took, "clocks": _each(read(), count)}


def _each(clocks: dict[str, dict[str, float]], count: int) -> dict[str, dict[str, float]]:
    """Seconds of one step."""
    return {side: {name: each / count for name, each in kept.items()} for side, kept in clocks.items()}


def sparse(spec: Spec) -> Found:
    """A table on a server: seconds of the pull of some rows, which the forward does, and of the push."""
    start(spec)
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDE, sparse=True)
    pw.set_param_ps(table)
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[spec["optimizer"]]
    began = time.perf_counter()
    optimizer: Any = pw.ps.optimizer(kind(table.parameters(), lr=0.01))
    found: Found = {"upload": time.perf_counter() - began, "pull": {}, "push": {}, "clocks": {}}
    generator = torch.Generator().manual_seed(1)
    read = _clocks(optimizer) if spec.get("where") else None

    def step(rows: int) -> tuple[float, float]:
        ids = torch.randperm(ROWS, generator=generator)[:rows]
        optimizer.zero_grad()
        began = time.perf_counter()
        looked = table(ids)
        pulled = time.perf_counter() - began
        looked.sum().backward()
        began = time.perf_counter()
        optimizer.step()
        return pulled, time.perf_counter() - began

    for rows in spec["rows"]:
        for _ in range(WARM):
            step(rows)
        if read is not None:
            read()
        took = [step(rows) for _ in range(spec["steps"])]
        if read is not None:
            found["clocks"][rows] = _each(read(), spec["steps"])
        found["pull"][rows], found["push"][rows] = zip(*took, strict=True)
    return found


# -- Peers


class Holder:
    """The peers' server: the parameters, and their optimizer."""

    def __init__(self, arrays: list[Any]) -> None:
        torch.set_num_threads(1)
        self._own = [nn.Parameter(torch.from_numpy(np.array(each))) for each in arrays]
        self._optimizer = torch.optim.SGD(self._own, **LEARNING)

    def step(self, gradients: list[Any]) -> list[Any]:
        """Take a step, and give the parameters."""
        return [each.numpy() for each in self.step_tensors([torch.from_numpy(each) for each in gradients])]

    def step_tensors(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same, of tensors."""
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient
        self._optimizer.step()
        return [each.detach() for each in self._own]


@torch.no_grad()
def take(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Give the model the parameters that came."""
    for each, value in zip(model.parameters(), values, strict=True):
        each.copy_(value)


def plain_ray(spec: Spec) -> Found:
    """An actor of Ray that holds the parameters, in memory: the gradients by `ray.put`."""
    import warnings

    import ray

    warnings.filterwarnings("ignore", "The given NumPy array is not writ")
    if spec.get("at_once"):
        os.environ.update(RAY_free_objects_period_milliseconds="0")  # as ours has it
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=4 * 2**30, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    model = model_of(spec["megabytes"])
    holder = ray.remote(Holder).options(num_cpus=0).remote([each.detach().numpy() for each in model.parameters()])
    gradients = [each.grad.numpy() for each in model.parameters() if each.grad is not None]

    def step() -> None:
        arrays = ray.get(holder.step.remote(ray.put(gradients)))
        take(model, [torch.from_numpy(each) for each in arrays])

    found = {"seconds": seconds_of(step, spec["steps"]), "bytes": bytes_of(model)}
    ray.shutdown()
    return found


_held: list[Holder] = []


def _hold(parameters: list[torch.Tensor]) -> None:
    _held[:] = [Holder([each.numpy() for each in parameters])]


def _step(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return _held[0].step_tensors(gradients)


def _rpc_process(rank: int, spec: Spec, port: int, queue: Any) -> None:
    from torch.distributed import rpc

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TP_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        rpc.init_rpc(f"process{rank}", rank=rank, world_size=2)
        if rank == 0:
            model = model_of(spec["megabytes"])
            rpc.rpc_sync("process1", _hold, ([each.detach() for each in model.parameters()],))
            gradients = [each.grad for each in model.parameters()]
            took = seconds_of(lambda: take(model, rpc.rpc_sync("process1", _step, (gradients,))), spec["steps"])
            queue.put({"seconds": took, "bytes": bytes_of(model)})
        rpc.shutdown()
    except Exception as error:  # what does not work on this torch is told
        queue.put({"error": f"{type(error).__name__}: {error}"})
        raise


def torch_rpc(spec: Spec) -> Found:
    """torch.distributed.rpc: a process that holds the parameters, and one that asks it."""
    return _of_processes(_rpc_process, spec)


def _parallel_process(rank: int, spec: Spec, port: int, queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = model_of(spec["megabytes"])
    optimizer = torch.optim.SGD(model.parameters(), **LEARNING)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    buffer = torch.empty(sum(each.numel() for each in gradients))  # in one piece, as DDP's buckets are

    def step() -> None:
        torch.cat([each.view(-1) for each in gradients], out=buffer)
        dist.all_reduce(buffer)
        buffer.div_(2)
        for each, part in zip(gradients, buffer.split([each.numel() for each in gradients]), strict=True):
            each.copy_(part.view_as(each))
        optimizer.step()

    took = seconds_of(step, spec["steps"])
    if rank == 0:
        queue.put({"seconds": took, "bytes": bytes_of(model)})
    dist.barrier()
    dist.destroy_process_group()


def data_parallel(spec: Spec) -> Found:
    """Two processes that average their gradients over gloo, and step each by itself."""
    return _of_processes(_parallel_process, spec)


def _of_processes(run: Callable[..., None], spec: Spec) -> Found:
    import queue as queues
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = mp.get_context("spawn")
    queue: Any = context.Queue()
    both = [context.Process(target=run, args=(rank, spec, port, queue)) for rank in range(2)]
    for each in both:
        each.start()
    found: Found = {"error": "it said nothing"}
    end = time.monotonic() + 240
    while time.monotonic() < end:
        try:
            found = queue.get(timeout=1)
            break
        except queues.Empty:
            if not any(each.is_alive() for each in both):
                break
    for each in both:
        each.join(10)
        each.kill()
    return found


def local(spec: Spec) -> Found:
    """The optimizer's step in this process."""
    model = model_of(spec["megabytes"])
    optimizer = torch.optim.SGD(model.parameters(), **LEARNING)
    return {"seconds": seconds_of(optimizer.step, spec["steps"]), "bytes": bytes_of(model)}


WAYS: dict[str, Callable[[Spec], Found]] = {
    "partway": partway, "sparse": sparse, "ray": plain_ray, "rpc": torch_rpc, "parallel": data_parallel, "local": local,
}  # fmt: skip


def main() -> None:
    """Measure the case that the command line names."""
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    found = WAYS[spec["way"]](spec)
    print(json.dumps(found), flush=True)


if __name__ == "__main__" and len(sys.argv) > 1:
    # under its own name, so that Ray's and torch's processes find its classes
    import parameter_server_cases

    parameter_server_cases.main()
