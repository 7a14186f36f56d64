"""A training step at half the memory: what a plan computes again, beside what people and PyTorch have computed again.

    python benchmarks/recomputing.py [--models gpt2,llama] [--share 0.5] [--rounds 9] [--quick] [--json FILE]

A model is trained on 2 gloo processes, data parallel, float32, in these ways, which take turns, a step each:

    DDP                     everything is kept
    DDP, blocks             every block is checkpointed, as `gradient_checkpointing_enable` of transformers does it
    DDP, partitioner        the graphs of AOTAutograd's min-cut partitioner, run operator by operator as ours are,
                            with the largest memory budget under which the step keeps to the limit
    Partway, nothing again  the plan without a limit and with `recompute="none"`
    Partway                 the plan without a limit
    Partway, limited        the plan with `memory_limit`

The limit is `--share` of the most bytes that live on a rank in a step of DDP, parameters and gradients included. Times
are of the forward and backward. Bars: Partway's step within the limit takes at most 0.9 of the time of checkpointed
blocks and at most that of the partitioner, in the median of rounds, and holds at most 3 % more than the limit.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PARTWAY_CACHE", "0")  # plans are made by the sources as they are

import torch
import torch._functorch.config
import torch.distributed as dist
import typer
from peaks import SAMPLES, Workload, workloads
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from spatial import measured
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import partway as pw
from partway.measure.contenders import one_rank

RANKS = 2
MB = 1e6
BUDGETS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)  # of the activations, as the partitioner counts them
BARS = {"DDP, blocks": 0.9, "DDP, partitioner": 1.0}
LIMIT_BAR = 1.03
OURS = "Partway, limited"

Batch = tuple[Tensor, ...]
Way = tuple[Callable[[], Any], Batch]  # a module, and this rank's batch for it


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)


def _with_blocks_checkpointed(model: Any) -> nn.Module:
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _ddp(model)


class _Partitioned(nn.Module):
    """A model in the graphs that the partitioner makes under this memory budget, for batches like this one."""

    def __init__(self, model: nn.Module, batch: Batch, budget: float) -> None:
        super().__init__()
        self.exported = torch.export.export(model, batch, strict=False).module()  # asks for no values any more
        names = [name for name, _ in self._held()]

        def run(*flat: Tensor) -> Any:
            parameters = dict(zip(names, flat, strict=False))
            return torch.func.functional_call(self.exported, parameters, flat[len(names) :])

        self._run = aot_function(run, nop, nop, partition_fn=min_cut_rematerialization_partition)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            self(*batch)

    def forward(self, *batch: Tensor) -> Any:
        return self._run(*(tensor for _, tensor in self._held()), *batch)

    def _held(self) -> list[tuple[str, Tensor]]:
        return [*self.exported.named_parameters(), *self.exported.named_buffers()]


def _sharded(model: nn.Module, batch: Batch, limit: float, recompute: str = "auto") -> nn.Module:
    pw.set_algo_parameters(optimizer_states=0.0, memory_limit=limit, recompute=recompute)
    by = tuple(("dp", *(None,) * (tensor.dim() - 1)) for tensor in batch)
    sharded: nn.Module = pw.shard(model, mesh={"dp": RANKS}, in_strategy=by)
    return sharded


def _rank(rank: int, name: str, share: float, rounds: int, quick: bool, folder: str) -> None:
    with one_rank(rank, RANKS, folder), pw.auto_parallel_context(device_profile="cpu"):
        found = _compared(workloads(quick=quick)[name], share, rounds)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _compared(work: Workload, share: float, rounds: int) -> dict[str, Any]:
    """The bytes that a rank holds at most, and the seconds of each round, of every way."""

    def made() -> Any:
        torch.manual_seed(0)
        return work.build()

    torch.manual_seed(1)
    mine = tuple(tensor.chunk(RANKS)[dist.get_rank()].clone() for tensor in work.batch(SAMPLES))
    ours = tuple(pw.data.to_global(t, ("dp", *(None,) * (t.dim() - 1)), {"dp": RANKS}) for t in mine)
    held: dict[str, float] = {}
    losses: dict[str, float] = {}
    models: dict[str, tuple[nn.Module, Batch]] = {}

    def add(way: str, model: nn.Module, batch: Batch) -> float:
        models[way] = model, batch
        step = measured(model, batch)
        held[way], losses[way] = step.rest + step.peak, step.loss
        return _of_all(held[way], max)

    limit = share * add("DDP", _ddp(made()), mine)
    add("DDP, blocks", _with_blocks_checkpointed(made()), mine)
    budget = math.nan
    for budget in BUDGETS:
        if add("DDP, partitioner", _ddp(_Partitioned(made(), mine, budget)), mine) <= limit:
            break
    add("Partway, nothing again", _sharded(made(), ours, math.inf, "none"), ours)
    add("Partway", _sharded(made(), ours, math.inf), ours)
    add(OURS, _sharded(made(), ours, limit), ours)
    seconds: dict[str, list[float]] = {way: [] for way in models}
    for turn in range(rounds + 1):
        for way, (model, batch) in models.items():
            taken = _timed(model, batch)
            if turn:  # the first is warming up
                seconds[way].append(taken)
    mean = {way: _of_all(loss, sum) / RANKS for way, loss in losses.items()}
    return {"limit": limit, "budget": budget, "held": held, "seconds": seconds, "losses": mean}


def _timed(model: nn.Module, batch: Batch) -> float:
    dist.barrier()
    begun = time.perf_counter()
    loss = model(*batch)
    loss.backward()
    dist.barrier()
    taken = time.perf_counter() - begun
    model.zero_grad()
    return taken


def _of_all(mine: float, how: Callable[[Iterator[float]], float]) -> float:
    """`how` of what all ranks have."""
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, mine)
    return float(how(iter(every)))


def compared(name: str, share: float, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Run a model in processes of its own: what rank 0 measured, and of bytes the most of any rank."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (name, share, rounds, quick, folder), nprocs=RANKS)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    held = {way: max(each["held"][way] for each in found) for way in found[0]["held"]}
    result: dict[str, Any] = {**found[0], "held": held}
    return result


def table(name: str, found: Mapping[str, Any]) -> Table:
    """A row for each way."""
    title = f"{name}: limit {found['limit'] / MB:.1f} MB; the partitioner's budget is {found['budget']}"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("way", no_wrap=True)
    for column in ("MB", "of the limit", "s", "spread", "Partway, limited, over it", "loss"):
        result.add_column(column, justify="right")
    for way, seconds in found["seconds"].items():
        over = _ratios(found, way)
        result.add_row(
            way, f"{found['held'][way] / MB:.1f}", f"{found['held'][way] / found['limit']:.3f}",
            f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}",
            f"{statistics.median(over):.3f} ({min(over):.3f} to {max(over):.3f})", f"{found['losses'][way]:.6f}",
        )  # fmt: skip
    return result


def _ratios(found: Mapping[str, Any], way: str) -> list[float]:
    """Of each round the time of our limited step over that of `way`."""
    return [mine / theirs for mine, theirs in zip(found["seconds"][OURS], found["seconds"][way], strict=True)]


def misses(found: Mapping[str, Any]) -> Iterator[str]:
    """The bars that a model misses."""
    for way, bar in BARS.items():
        if (ratio := statistics.median(_ratios(found, way))) > bar:
            yield f"{ratio:.3f} of the time of {way}, bar {bar}"
    if (over := found["held"][OURS] / found["limit"]) > LIMIT_BAR:
        yield f"{over:.3f} of the limit, bar {LIMIT_BAR}"


def main(
    models: Annotated[str, typer.Option(help="their names, with commas")] = "gpt2,llama,vit",
    share: Annotated[float, typer.Option(help="of what DDP holds: the limit")] = 0.5,
    rounds: Annotated[int, typer.Option(help="how often all ways take their turn")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="a small model, few rounds: no figures")] = False,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/recomputing.json"),
) -> None:
    """Measure, print a table for each model, and exit with status 1 if one misses a bar."""
    console, found = Console(width=150), {}
    for name in ["gpt2"] if quick else models.split(","):
        found[name] = compared(name, share, 2 if quick else rounds, quick=quick)
        console.print(table(name, found[name]))
        for missed in misses(found[name]):
            console.print(f"{name} misses: {missed}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"torch": torch.__version__, "quick": quick, "share": share, "models": found}, indent=1) + "\n"
    )
    print(f"wrote {out}")
    raise typer.Exit(1 if not quick and any(list(misses(each)) for each in found.values()) else 0)


if __name__ == "__main__":
    start(main)
