"""Steps on several hosts whose links have a rate: predicted and measured, the order of plans, and other systems.

    python benchmarks/hosts.py [--hosts 2 --hosts 4] [--each 1 --each 2] [--rate 500mbit --rate 1gbit --rate 10gbit]
                               [--rounds 9] [--profile FILE] [--json FILE]

The hosts are network namespaces of this machine (tests/helpers/namespaces.py; root on Linux), each with one process or
several on gloo with one thread, started by torchrun. In each case the processes

* calibrate together (`partway calibrate --quick`), unless there is a profile;
* run GPT-2 of 2 layers by the plan that the search chooses for its batch alone, and by 12 others that a person may ask
  for, as in plan_order.py: predicted over measured time, and the order of the plans. With several processes on a host
  two of the plans split the batch over the hosts and the weights inside them, or both axes by the batch;
* reduce, gather and scatter 16 MB with several processes on a host, around one ring and in steps (`Hierarchy` in
  propagation/cost/cost.py);
* run the same GPT-2 beside DDP, FSDP2, HSDP (FSDP2 inside a host, and replicas on the hosts), DTensor and the program
  by hand, as in step_overhead.py: ratios of steps of the same round, with quartiles;
* run a layer of experts as `partway bench experts` does.

All processes share the cores of this machine, so that only ratios count. Nothing else should run meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import namespaces
import torch
import torch.distributed as dist
import typer
from calibration_cases import COLUMNS, ROWS, WORKLOADS
from plan_order import CHOSEN, Way, compared, measured, ways
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from step_contenders import FASTEST, Layout, builds, layout
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import partway as pw
from partway.measure import bench_experts
from partway.measure.calibrate import calibrate
from partway.measure.contenders import Contender, disagreements, part, quartiles, timed_step, turns
from partway.measure.workloads import Workload, tiny
from partway.propagation.cost.profile import profile_of
from partway.runtime import launched
from partway.runtime.executors.execute import hierarchical_group, process_group
from partway.runtime.executors.issue import Scratch, Seat
from partway.strategy import Mesh
from partway.strategy.placement import Kind

MODEL = "gpt2"
MOVED = 2**24  # bytes
RING, STEPS = "ring", "steps"
PORT = "29500"


# -- A rank ------------------------------------------------------------------------------------------------------------


def run(hosts: int, each: int, rounds: int, folder: Path) -> None:
    """One rank of a case; what it measured goes to a file."""
    ranks, rank = pw.init(backend="gloo"), pw.get_rank()
    torch.set_num_threads(1)
    profile = folder / "profile.json"
    if not profile.exists():
        calibrated = calibrate(quick=True).profile
        if rank == 0:
            calibrated.save(profile)
    dist.barrier()
    pw.set_auto_parallel_context(device_profile=str(profile))
    work = WORKLOADS[MODEL]()
    found: dict[str, Any] = {"plans": measured(work, ranks, plans(work, hosts, each), rounds), "steps": {}}
    if each > 1:
        found["collectives"] = collectives(hosts, each, rounds)
    for how in ("data", "tensor"):
        found["steps"][how] = steps(work, layout(how, ranks), hosts, each, rounds)
    found["steps"]["experts"] = experts(ranks, rounds)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    pw.shutdown()


def plans(work: Workload, hosts: int, each: int) -> dict[str, Way]:
    """12 ways to annotate the model, on one axis or on two, and its batch alone with `level=2`."""
    ranks = hosts * each
    flat = ways(MODEL, work, ranks)
    flat[CHOSEN] = {}, {"mesh": {"x": ranks}, "in_strategy": work.by("x"), "level": 2}
    if each == 1:
        return flat
    mesh = {"host": hosts, "local": each}
    inside = dict.fromkeys(COLUMNS[MODEL], ("local", None)) | dict.fromkeys(ROWS[MODEL], (None, "local"))
    both = tuple((("host", "local"), *dims[1:]) for dims in work.by(None))
    for replaced in ("all by rows", "columns then rows, turned"):
        del flat[replaced]
    return flat | {
        "2d, batch over hosts, columns then rows": (
            {}, {"mesh": mesh, "in_strategy": work.by("host"), "parameter_plan": inside},
        ),
        "2d, batch over both": ({}, {"mesh": mesh, "in_strategy": both}),
    }  # fmt: skip


def hsdp(work: Workload, hosts: int, each: int, dtype: torch.dtype) -> Contender:
    """fully_shard on every block and on the rest, inside a host, with replicas on the hosts."""
    model, split = work.model(dtype), hosts * each
    mesh = init_device_mesh("cpu", (hosts, each), mesh_dim_names=("host", "local"))
    mine = part(work, split, dist.get_rank(), dtype)
    blocks: Any = model.blocks
    for module in (*blocks, model):
        assert isinstance(module, nn.Module)
        fully_shard(module, mesh=mesh)
    return Contender("HSDP", model, lambda: model(*mine))


def steps(work: Workload, how: Layout, hosts: int, each: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """The seconds of each contender's steps on this rank, after its numbers have been compared with one device."""

    def contenders(work: Workload, dtype: torch.dtype) -> list[Contender]:
        made = [build(work, how, dtype) for build in builds(work, how)]
        return [*made, hsdp(work, hosts, each, dtype)] if how.name == "data" and hosts > 1 < each else made

    small = tiny(MODEL)
    for contender in contenders(small, torch.float64):
        if wrong := list(disagreements(contender, small, how.data, torch.float64)):
            raise ValueError("\n".join(["the contenders do not compute the same", *wrong]))
    whole, _ = turns({each.name: timed_step(each) for each in contenders(work, torch.float32)}, rounds)
    return whole


def experts(ranks: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """The seconds of steps of a layer of experts in each form, as `partway bench experts` compares them."""
    case = bench_experts.ExpertsCase(ranks, rounds, tokens=1024, width=256, hidden=896, experts=8, k=2)
    bench_experts.check(case.small, ranks)
    contenders = bench_experts.contenders_of(case.work, ranks, torch.float32)
    whole, _ = turns({each.name: timed_step(each) for each in contenders}, rounds)
    return whole


def collectives(hosts: int, each: int, rounds: int) -> dict[str, dict[str, tuple[float, ...]]]:
    """The seconds of each kind of collective of MOVED bytes, around a ring and in steps."""
    mesh, whole = Mesh({"x": hosts * each}), torch.ones(MOVED // 4)
    group, part = process_group(mesh, ("x",)), torch.ones(MOVED // 4 // (hosts * each))
    ring = Seat(group, mesh.own_rank(dist.get_rank()), Scratch())
    ways = {RING: ring, STEPS: replace(ring, in_steps=hierarchical_group(mesh, ("x",), each))}

    def timed(start: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            whole.fill_(1.0)
            dist.barrier()
            began = time.perf_counter()
            start().wait()
            return time.perf_counter() - began, 0.0

        return run

    kinds: dict[Kind, Callable[[Seat], Any]] = {
        Kind.ALL_REDUCE: lambda seat: seat.all_reduce(whole, dist.ReduceOp.SUM),
        Kind.ALL_GATHER: lambda seat: seat.all_gather(whole, part),
        Kind.REDUCE_SCATTER: lambda seat: seat.reduce_scatter(part, whole),
    }
    found = {}
    for kind, begin in kinds.items():
        found[str(kind)], _ = turns({way: timed(partial(begin, seat)) for way, seat in ways.items()}, rounds)
    if part.unique().tolist() != [hosts * each]:
        raise ValueError("the reduce_scatter in steps does not add up all ranks")
    return found


# -- All cases ---------------------------------------------------------------------------------------------------------


def measured_case(hosts: int, each: int, rate: str, rounds: int, profile: Path | None) -> list[dict[str, Any]]:
    """What the ranks of a case measured, on hosts that are made for it."""
    with tempfile.TemporaryDirectory() as folder, namespaces.several_hosts(hosts, rate) as made:
        if profile is not None:
            profile_of(profile).save(Path(folder, "profile.json"))
        started = [
            host.start([
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--node-rank", str(number),
                "--nproc-per-node", str(each), "--master-addr", made[0].address, "--master-port", PORT, __file__,
                "--hosts", str(hosts), "--each", str(each), "--rounds", str(rounds), "--folder", folder,
            ])
            for number, host in enumerate(made)
        ]  # fmt: skip
        ended = [namespaces.finished(process, 7200) for process in started]
        if any(process.returncode for process in ended):
            raise SystemExit("\n".join(process.stderr for process in ended))
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(hosts * each)]
        found[0]["levels"] = json.loads(Path(folder, "profile.json").read_text())["levels"]
        return found


def main(
    hosts: Annotated[list[int], typer.Option(help="numbers of hosts")] = [2, 4],  # noqa: B006 - typer takes a list
    each: Annotated[list[int], typer.Option(help="processes on each host")] = [1, 2],  # noqa: B006
    rate: Annotated[list[str], typer.Option(help="of a host's link")] = ["500mbit", "1gbit", "10gbit"],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="steps of each plan and contender; the median counts")] = 9,
    profile: Annotated[Path | None, typer.Option(help="a device profile in place of a calibration")] = None,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/hosts.json"),
    folder: Annotated[Path | None, typer.Option(hidden=True, help="where a rank writes its figures")] = None,
) -> None:
    """Run all cases, and print tables for each."""
    if folder is not None and launched():
        run(hosts[0], each[0], rounds, folder)
        return
    if why := namespaces.unavailable():
        print(f"skipped: {why}")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    console, figures = Console(width=150), dict[str, Any]()
    for number, local, speed in itertools.product(hosts, each, rate):
        name = f"{number} hosts x {local}, {speed}"
        ranks = measured_case(number, local, speed, rounds, profile)
        order = compared(name, [rank["plans"] for rank in ranks], console)
        chosen = order["plans"][CHOSEN]
        predicted = [chosen["predicted"] / seconds for seconds in chosen["measured"]]
        print(f"{name}: predicted over measured step of the chosen plan {quartiles(predicted)}")
        beside = {how: slowest([rank["steps"][how] for rank in ranks]) for how in ranks[0]["steps"]}
        for how, contenders in beside.items():
            console.print(table(f"{name}: {how}", contenders))
        if local > 1:
            beside["collectives"] = dict[str, Any]()
            for kind in ranks[0]["collectives"]:
                beside["collectives"][kind] = moved = slowest([rank["collectives"][kind] for rank in ranks])
                ratios = [ours / flat for ours, flat in zip(moved[STEPS], moved[RING], strict=True)]
                ms = 1e3 * statistics.median(moved[RING])
                print(f"{name}: {kind} in steps over one around a ring ({ms:.0f} ms) {quartiles(ratios)}")
        figures[name] = {
            **order, "predicted_over_measured": predicted, "steps": beside, "levels": ranks[0]["levels"],
        }  # fmt: skip
        out.write_text(json.dumps({"cores": os.cpu_count(), "torch": torch.__version__, "cases": figures}, indent=1))
    print(f"wrote {out}")


def slowest(ranks: list[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """The seconds of each contender's steps, each as long as on the slowest rank."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def table(title: str, contenders: Mapping[str, list[float]]) -> Table:
    """The steps of all contenders, and ours over theirs."""
    own = FASTEST if FASTEST in contenders else bench_experts.CHOSEN
    shown = Table("contender", "ms", f"{own} / it", title=title, box=SIMPLE_HEAD)
    for name, seconds in contenders.items():
        ratios = [ours / other for ours, other in zip(contenders[own], seconds, strict=True)]
        shown.add_row(name, f"{1e3 * statistics.median(seconds):.0f}", quartiles(ratios))
    return shown


if __name__ == "__main__":
    start(main)
