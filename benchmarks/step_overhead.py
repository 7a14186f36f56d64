"""The time of our training step beside the same program by hand, DTensor, DDP and FSDP2, on gloo processes.

    python benchmarks/step_overhead.py [--only TEXT] [--quick] [--world 2 --world 4] [--rounds 15] [--json FILE]

A case is one of

    gpt2, data, 2 processes     a model, a layout and a number of processes with one thread each. All contenders live in
                                the same processes and take turns, a step each (forward, backward, SGD); the step takes
                                as long as on the slowest rank, and ratios are of steps of one round. First, at a small
                                size in float64, each one's loss and gradients are compared with one device
    simulation, gpt2            forward and backward of 8 simulated ranks, beside the work of these 8 alone: each rank's
                                own two graphs as plain Python functions, on its parts, where a collective is what it
                                was given, or (where sizes change) a tensor that was there before
    overhead, mlp, simulated    a call and its backward, less the same two graphs in a bare node of autograd with the
                                same tensors, which is the least that PyTorch asks for: on one simulated device, and in
                                one gloo process. Beside it the two graphs as plain Python functions, without autograd

The last two are CPU time of the one thread that does all of it; steps of processes are wall time.

All contenders compute the same network: with DDP, FSDP2 and by hand each rank has the batch statistics of its part, and
Partway is told to (`batch_norm_parts`). "partway, joint statistics" is its default for a ResNet, the statistics of the
whole batch as on one device, for which every batch norm sends. Plans are made for a profile of this machine, measured
first with as many processes. `--profile` writes which operators each contender spends its time in. A case with a bar
fails, and with it the command (exit status 1), where a ratio is above it. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from script import WRITE, save, start, write_figures

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from step_contenders import FASTEST, builds, layout
from step_graphs import inputs_of, local_step
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import partway as pw
from partway.measure.calibrate import calibrate
from partway.measure.contenders import disagreements, one_rank, quartiles, spread, timed_step, turns
from partway.measure.workloads import Workload, gpt2, mlp, resnet50, tiny
from partway.propagation.cost.profile import DeviceProfile

SIMULATED = 8
OURS = "partway"
# The most that ours may take of another's step, by layout; and of what is beside it in the two other kinds of case.
BARS: Mapping[str, Mapping[str, float]] = {
    "data": {"DDP": 1.0},
    "tensor": {"by hand": 1.05, "DTensor": 0.7},
    "mixed": {},
}
BARE = "graphs in autograd"
SIMULATION_BAR, OVERHEAD_BAR = 1.2, 100e-6  # times; seconds of a call and its backward


# -- Cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How large the models are; batches are of 4 samples a rank."""

    layers: int = 2
    sequence: int = 128
    pixels: int = 128
    quick: bool = False

    def workload(self, name: str) -> Workload:
        small = self.quick
        match name:
            case "gpt2":
                return tiny("gpt2") if small else gpt2(self.layers, self.sequence)
            case "resnet50":
                return tiny("resnet50") if small else resnet50(self.pixels)
        return mlp(64 if small else 256, 6)


@dataclass(frozen=True)
class Steps:
    """Contenders in a group of processes."""

    model: str
    how: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.how}, {self.ranks} processes"


@dataclass(frozen=True)
class Simulation:
    model: str

    @property
    def name(self) -> str:
        return f"simulation, {self.model}"


@dataclass(frozen=True)
class Overhead:
    model: str
    launched: bool

    @property
    def name(self) -> str:
        return f"overhead, {self.model}, {'one process' if self.launched else 'simulated'}"


Case = Steps | Simulation | Overhead


def cases(worlds: Sequence[int]) -> tuple[Case, ...]:
    """All cases, with groups of these numbers of processes."""
    steps: list[Case] = []
    for ranks in worlds:
        steps += [Steps(model, "data", ranks) for model in ("gpt2", "resnet50")] + [Steps("gpt2", "tensor", ranks)]
        steps += [Steps("gpt2", "mixed", ranks)] if ranks > 2 and ranks % 2 == 0 else []
    overheads = [Overhead(model, launched) for launched in (False, True) for model in ("mlp", "gpt2")]
    return (*steps, Simulation("gpt2"), Simulation("resnet50"), *overheads)


def chosen(only: str, worlds: Sequence[int]) -> tuple[Case, ...]:
    """The cases whose name contains `only`."""
    found = tuple(case for case in cases(worlds) if only in case.name)
    if not found:
        names = "; ".join(case.name for case in cases(worlds))
        raise typer.BadParameter(f"no case contains {only!r}; the cases are: {names}")
    return found


# -- Figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a case measured.

    seconds   of each contender, one for each round; `computed` likewise, without the optimizer's step (empty where
              there is none)
    bars      for a contender the most that ours may take of its time
    excess    the most seconds that ours may take more than the contender BARE (None: there is no such bar)
    """

    name: str
    seconds: Mapping[str, tuple[float, ...]]
    computed: Mapping[str, tuple[float, ...]]
    bars: Mapping[str, float]
    excess: float | None = None
    note: str = ""

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, ours: str = OURS) -> tuple[float, ...]:
        """Ours over `name`, round by round."""
        return tuple(a / b for a, b in zip(self.seconds[ours], self.seconds[name], strict=True))

    def beyond(self, name: str) -> float:
        """The median of the seconds that ours takes more than `name`."""
        pairs = zip(self.seconds[OURS], self.seconds[name], strict=True)
        return statistics.median(a - b for a, b in pairs)

    def misses(self) -> tuple[str, ...]:
        """The bars that it is above."""
        found = [name for name, bar in self.bars.items() if statistics.median(self.ratios(name)) > bar]
        return (*found, BARE) if self.excess is not None and self.beyond(BARE) >= self.excess else tuple(found)


# -- Steps of a group of processes -------------------------------------------------------------------------------------


@cache
def calibrated(ranks: int) -> DeviceProfile:
    """This machine as so many processes see it."""
    return calibrate(ranks, quick=True, name="bench").profile


def measured_steps(case: Steps, size: Size, rounds: int, profile: Path | None) -> Figures:
    """Start the processes of `case`; what the slowest rank needs counts."""
    with tempfile.TemporaryDirectory() as folder:
        calibrated(case.ranks).save(Path(folder, "profile.json"))
        spawn(_rank_of_steps, (case, size, rounds, profile, folder), nprocs=case.ranks)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.ranks)]
    whole, computed = (
        {name: tuple(map(max, zip(*(rank[i][name] for rank in ranks), strict=True))) for name in ranks[0][i]}
        for i in (0, 1)
    )
    return Figures(case.name, whole, computed, BARS[case.how])


def _rank_of_steps(rank: int, case: Steps, size: Size, rounds: int, profile: Path | None, folder: str) -> None:
    """One rank: check every contender, then time them."""
    pw.set_auto_parallel_context(device_profile=str(Path(folder, "profile.json")))
    with one_rank(rank, case.ranks, folder):
        how = layout(case.how, case.ranks)
        small, work = tiny(case.model), size.workload(case.model)
        for build in builds(small, how):
            contender = build(small, how, torch.float64)
            wrong = list(disagreements(contender, small, how.data, torch.float64))
            if wrong:
                raise ValueError("\n".join([f"{case.name}: the contenders do not compute the same", *wrong]))
        contenders = [build(work, how, torch.float32) for build in builds(work, how)]
        runs = {contender.name: timed_step(contender) for contender in contenders}
        Path(folder, f"{rank}.json").write_text(json.dumps(turns(runs, rounds)))
        if profile is not None:
            for name, run in runs.items():
                report = _profiled(run, rank == 0)
                if rank == 0:
                    with profile.open("a") as file:
                        file.write(f"\n== {case.name}: {name}, milliseconds of a step on rank 0\n{report}\n")


def _profiled(run: Callable[[], object], record: bool, steps: int = 3) -> str:
    """The operators and functions of `run` that take most time by themselves, in milliseconds of one run."""
    if not record:
        for _ in range(steps):
            run()
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            run()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    lines = [
        f"{event.self_cpu_time_total / 1e3 / steps:9.2f}  {event.cpu_time_total / 1e3 / steps:9.2f}"
        f"  {event.count / steps:7.1f}  {event.key}"
        for event in events[:30]
    ]
    total = sum(event.self_cpu_time_total for event in events) / 1e3 / steps
    return "\n".join([f"{'itself':>9}  {'with inner':>9}  {'calls':>7}", *lines, f"{total:9.2f}  in all"])


# -- Simulation beside each rank's work --------------------------------------------------------------------------------


def measured_simulation(case: Simulation, size: Size, rounds: int, ranks: int = SIMULATED) -> Figures:
    """Forward and backward of `ranks` simulated ranks, data parallel, and of each of these alone."""
    work = replace(size.workload(case.model), each=1)
    batch = work.tensors(ranks, torch.float32)
    with pw.auto_parallel_context(device_num=ranks):
        model: Any = pw.shard(work.model(torch.float32), mesh={"dp": ranks}, in_strategy=work.by("dp"))
        alone = [local_step(model, batch, rank) for rank in range(ranks)]

        def simulated() -> tuple[float, float]:
            start = time.thread_time()
            loss = model(*batch)
            computed = time.thread_time()
            loss.backward()
            seconds = time.thread_time() - start
            model.zero_grad()
            return seconds, computed - start

        def local() -> tuple[float, float]:
            seconds = [step.timed() for step in alone]
            return sum(s for s, _ in seconds), sum(f for _, f in seconds)

        whole, forward = turns({OURS: simulated, f"{ranks} single ranks": local}, rounds, warm=1)
    return Figures(case.name, whole, forward, {f"{ranks} single ranks": SIMULATION_BAR}, note="first part: the forward")


# -- What a call costs beside its graphs -------------------------------------------------------------------------------


def measured_overhead(case: Overhead, size: Size, rounds: int) -> Figures:
    """A call of a tiny model and its backward, and the two graphs without our runtime."""
    if not case.launched:
        return _overhead(case, size, rounds)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_of_overhead, (case, size, rounds, folder), nprocs=1)
        return Figures(**json.loads(Path(folder, "figures.json").read_text()))


def _rank_of_overhead(rank: int, case: Overhead, size: Size, rounds: int, folder: str) -> None:
    with one_rank(rank, 1, folder):
        Path(folder, "figures.json").write_text(json.dumps(asdict(_overhead(case, size, rounds))))


def _overhead(case: Overhead, size: Size, rounds: int) -> Figures:
    work = tiny("gpt2") if case.model == "gpt2" else size.workload("mlp")
    batch = work.tensors(work.each, torch.float32)
    plain: Any = work.model(torch.float32)
    model: Any = pw.shard(work.model(torch.float32), mesh={"dp": 1})
    alone = local_step(model, batch, 0)

    tensors = inputs_of(model, batch)

    def called(loss_of: Callable[[], Tensor], module: Any) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            start = time.thread_time()
            loss = loss_of()
            computed = time.thread_time()
            loss.backward()
            seconds = time.thread_time() - start
            module.zero_grad()
            return seconds, computed - start

        return run

    runs = {
        OURS: called(lambda: model(*batch), model),
        BARE: called(lambda: alone.loss(tensors), model),
        "graphs": alone.timed,
        "eager": called(lambda: plain(*batch), plain),
    }
    whole, forward = turns(runs, 20 * rounds, warm=10)
    count = len(list(plain.parameters()))
    return Figures(case.name, whole, forward, {}, OVERHEAD_BAR, f"{count} parameters; first part: the forward")


# -- All cases, and what is shown --------------------------------------------------------------------------------------


def measured(case: Case, size: Size, rounds: int, profile: Path | None = None) -> Figures:
    match case:
        case Steps():
            return measured_steps(case, size, rounds, profile)
        case Simulation():
            return measured_simulation(case, size, rounds)
    return measured_overhead(case, size, rounds)


def main(
    only: Annotated[str, typer.Option(help="run the cases whose name contains this")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="small models, 2 processes, few rounds: no figures")] = False,
    world: Annotated[list[int] | None, typer.Option(min=2, help="how many processes; may be repeated [2, 4]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="steps of each contender")] = 15,
    layers: Annotated[int, typer.Option(min=1, help="blocks of GPT-2")] = 2,
    sequence: Annotated[int, typer.Option(min=1, help="tokens of a sequence of GPT-2")] = 128,
    pixels: Annotated[int, typer.Option(min=32, help="the side of an image of ResNet-50")] = 128,
    profile: Annotated[Path | None, typer.Option(help="where to write which operators take the time")] = None,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/step_overhead.json"),
    plot: Annotated[Path, typer.Option(help="where to draw them")] = Path("out/step_overhead.png"),
    write: Annotated[str, WRITE] = "",
) -> None:
    """Measure the cases, print the table, and exit with status 1 if one misses its bar."""
    torch.set_num_threads(1)
    size, found = Size(layers, sequence, pixels, quick), []
    if profile is not None:
        profile.parent.mkdir(parents=True, exist_ok=True)
        profile.write_text(f"torch {torch.__version__}\n")
    todo = chosen(only, world or ([2] if quick else [2, 4]))
    for i, case in enumerate(todo):
        found.append(measured(case, size, 3 if quick else rounds, profile))
        print(f"{i + 1} of {len(todo)}: {case.name}: {_verdict(found[-1])}", file=sys.stderr, flush=True)
    Console(width=150).print(_table(found))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_as_data(found, size), indent=1) + "\n")
    print(f"wrote {out}{f' and {plot}' if _drawn(found, plot) else ''}")
    write_figures(write, {name: value for f in found for name, value in _quotable(f).items()})
    failed = [f for f in found if f.misses()]
    print(f"{len(found) - len(failed)} of {len(found)} cases hold")
    raise typer.Exit(1 if failed and not quick else 0)


def _quotable(found: Figures) -> dict[str, str]:
    """The median ratios of a case, by their names in figures.json."""
    return {
        f"{found.name}: {ours} / {name}": f"{statistics.median(found.ratios(name, ours)):.3f}"
        for ours in (OURS, FASTEST)
        if ours in found.seconds
        for name in found.seconds
    }


def _verdict(found: Figures) -> str:
    if not found.bars and found.excess is None:
        return "no bar"
    return f"misses {', '.join(found.misses())}" if found.misses() else "holds"


def _as_data(found: Iterable[Figures], size: Size) -> dict[str, Any]:
    facts = {"cores": os.cpu_count(), "torch": torch.__version__, "size": asdict(size)}
    return {**facts, "cases": [{**asdict(f), "misses": f.misses()} for f in found]}


def _table(found: Iterable[Figures]) -> Table:
    title = f"milliseconds of a step, medians (min-max), one thread a process, torch {torch.__version__}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for name in ("step", "without optimizer", "ours / it (quartiles)", "searched for speed / it", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for f in found:
        for i, name in enumerate(f.seconds):
            table.add_row("" if i else f.name, *_cells(f, name), end_section=i == len(f.seconds) - 1)
    return table


def _cells(f: Figures, name: str) -> tuple[str, ...]:
    times = (name, spread(f.seconds[name]), spread(f.computed[name]))
    ratio = "" if name == OURS else quartiles(f.ratios(name))
    fastest = quartiles(f.ratios(name, FASTEST)) if FASTEST in f.seconds and name != FASTEST else ""
    times = (*times, ratio, fastest)
    if name == OURS:
        return (*times, "", f.note)
    if f.excess is not None:
        more = f"{1e6 * f.beyond(name):.0f} us more"
        if name != BARE:
            return (*times, "", more)
        return (*times, f"{1e6 * f.excess:.0f} us", f"{more}: {'missed' if name in f.misses() else 'holds'}")
    if name not in f.bars:
        return (*times, "", "")
    return (*times, f"{f.bars[name]:.2f}", "missed" if name in f.misses() else "holds")


def _drawn(found: Sequence[Figures], path: Path) -> bool:
    """Draw the steps of every contender; False without matplotlib, which only the demo needs otherwise."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    drawing = Figure(figsize=(10, 1.2 + 1.6 * len(found)), layout="constrained")
    for axes, f in zip(drawing.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        names = list(f.seconds)[::-1]
        middle = [1e3 * f.median(name) for name in names]
        low = [m - 1e3 * min(f.seconds[name]) for m, name in zip(middle, names, strict=True)]
        high = [1e3 * max(f.seconds[name]) - m for m, name in zip(middle, names, strict=True)]
        colours = ["tab:orange" if name.startswith(OURS) else "tab:blue" for name in names]
        axes.barh(names, middle, xerr=(low, high), color=colours, error_kw={"linewidth": 0.8})
        for name, bar in f.bars.items():
            axes.axvline(1e3 * bar * f.median(name), color="grey", linewidth=0.8, linestyle="--")
        axes.set_title(f"{f.name}, ms (dashed: the bars)", fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
    save(drawing, path)
    return True


if __name__ == "__main__":
    start(main)
