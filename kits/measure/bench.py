"""`partway bench fusion`: one model trained data parallel with every fusion policy and with DDP, on this machine.

All contenders live in the same processes and take turns, a step each (forward, backward, SGD). A step takes as long as
on the slowest rank, and ratios are of steps of one round. First their gradients are compared with those of one device,
in float64; in a model with batch norms every rank has the statistics of its part of the batch, as with DDP
(`batch_norm_parts`). The forward and the backward are predicted, with a profile that is measured just before on
as many processes (`partway calibrate --quick`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.spawn import ProcessException, spawn

from partway import auto_parallel_context, compile
from partway.fusion import FusionMode
from partway.measure.bench_page import page
from partway.measure.calibrate import calibrate, check_devices, threads_of
from partway.measure.clock import wait_for
from partway.measure.collectives import MB
from partway.measure.contenders import (
    Contender,
    ddp,
    disagreements,
    one_rank,
    ours,
    quartiles,
    spread,
    three_quartiles,
    timed_step,
    turns,
)
from partway.measure.workloads import Workload, gpt2, mlp, own, resnet50, tiny
from partway.propagation.cost import DeviceProfile, profile_of
from partway.propagation.program import Program, Span
from partway.runtime import record_collectives, record_timeline
from partway.runtime.launching import gpus
from partway.strategy import Kind, RuntimeStateError, counted
from partway.strategy.basics import install_extra, save

MODELS = ("gpt2", "resnet50", "mlp")
LAYERS = 4  # of GPT-2
SIZES = (1, 4, 16, 64)  # MB
DDP = "DDP"
_PLOTS = (".png", ".svg", ".pdf", ".eps", ".ps")  # matplotlib's formats that name the program
WARM = 3  # rounds

Policies = Mapping[str, Mapping[str, Any] | None]  # by contender, comm_fusion["allreduce"]; None: nothing is grouped


# -- The contenders ----------------------------------------------------------------------------------------------------


def workload(model: str, *, small: bool = False) -> Workload:
    """The model of this name, or of the user's own function; `small`: with the same gradients, but quick in float64.

    A model of the user's own is never small. Raises RuntimeStateError for an unknown name, and as `own` does.
    """
    if ":" in model:
        return own(model)
    if model not in MODELS:
        raise RuntimeStateError(
            f"there is no model {model!r}; write {', '.join(MODELS)}, or module:function for your own model"
        )
    if small:
        return tiny(model, LAYERS)
    match model:
        case "gpt2":
            return gpt2(LAYERS, sequence=128)
        case "resnet50":
            return resnet50(pixels=128)
    return mlp(width=1024, layers=6)


def policies(gradients: int) -> Policies:
    """The compared fusion policies for a number of gradients; mode index only if there are enough."""
    shares = {f"index {name}": _parts(gradients, n) for name, n in (("thirds", 3), ("eighths", 8))}
    indices = {**shares, "index [20, 35]": [20, 35] if gradients > 35 else []}
    return {
        "unfused": None,
        "auto": {"mode": FusionMode.AUTO},
        **{f"size {limit}": {"mode": FusionMode.SIZE, "config": limit} for limit in SIZES},
        **{name: {"mode": FusionMode.INDEX, "config": ends} for name, ends in indices.items() if ends},
        "overlap": {"mode": FusionMode.OVERLAP},
    }


def _parts(gradients: int, parts: int) -> list[int]:
    """The number of gradients at the end of each of `parts` equal groups, except the last; empty for fewer
    gradients."""
    return [gradients * i // parts for i in range(1, parts)] if gradients >= parts else []


def gradients_of(work: Workload, world: int) -> int:
    """The number of AllReduces of gradients in a step on `world` ranks, unfused."""
    batch = work.tensors(work.each * world, torch.float32)
    parts = world if work.own_statistics else 1
    with auto_parallel_context(
        parallel_mode="data_parallel", device_num=world, batch_norm_parts=parts, comm_fusion={"openstate": False}
    ):
        program = compile(work.model(torch.float32), batch).program
    conversions = program.conversions
    return sum(
        c.phase == "backward" and c.kind is Kind.ALL_REDUCE and conversions[c.tag].parameter
        for c in program.collectives
    )


@dataclass(frozen=True)
class Case:
    """The arguments of every process. `profile` is a file; `timed`: rank 0 records a timeline of the contender
    `traced`."""

    model: str
    world: int
    device: str
    rounds: int
    quick: bool
    policies: Policies
    profile: str
    traced: str
    timed: bool


# -- Figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContenderFigures:
    """The collectives of one contender in a step, and its seconds, one for each round.

    collectives, bytes  their number, and their payload on one rank
    seconds             of the step; `computed` without the optimizer
    predicted           seconds of the step without the optimizer (None: DDP's are not predicted)
    exposed             of these, seconds in which only communication runs
    """

    name: str
    collectives: int
    bytes: int
    seconds: tuple[float, ...]
    computed: tuple[float, ...]
    predicted: float | None
    exposed: float | None

    @property
    def predicted_over_measured(self) -> float | None:
        """The predicted seconds over the median of the measured ones."""
        return None if self.predicted is None else self.predicted / statistics.median(self.computed)


@dataclass(frozen=True)
class BenchResult:
    """All contenders on one machine. `profile` predicts the steps; `timelines` are of one contender, "measured" and
    "predicted", if they were asked for."""

    case: Case
    profile: DeviceProfile
    gradients: int
    figures: tuple[ContenderFigures, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    timelines: Mapping[str, Sequence[Span]] = field(default_factory=dict)

    def ratios(self, figures: ContenderFigures) -> tuple[float, ...]:
        """The step of a contender over DDP's, round by round."""
        other = next(f for f in self.figures if f.name == DDP)
        return tuple(a / b for a, b in zip(figures.seconds, other.seconds, strict=True))

    @property
    def title(self) -> str:
        """The model, its gradients, and the machine."""
        world = counted(self.case.world, "process", "processes")
        quick = ", quick: times mean nothing" if self.case.quick else ""
        return f"{self.case.model}, {counted(self.gradients, 'gradient')}, {world} on {self.case.device}{quick}"

    def report(self, width: int = 150) -> str:
        """The table of all contenders."""
        text = StringIO()
        heading = f"{self.title}: milliseconds of a step, median (min-max)"
        table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("contender", no_wrap=True)
        columns = ("collectives", "MB", "step", "÷ DDP (quartiles)", "without optimizer", "predicted", "÷ measured")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for f in self.figures:
            prediction = (
                ("", "") if f.predicted is None else (f"{1e3 * f.predicted:.1f}", f"{f.predicted_over_measured:.2f}")
            )
            times = (spread(f.seconds), quartiles(self.ratios(f)), spread(f.computed))
            table.add_row(f.name, str(f.collectives), f"{f.bytes / MB:.1f}", *times, *prediction)
        Console(file=text, width=width).print(table)
        return text.getvalue()

    def data(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        case = {key: value for key, value in asdict(self.case).items() if key not in ("profile", "timed", "traced")}
        contenders = [
            {**asdict(f), "ratio_to_ddp": self.ratios(f), "predicted_over_measured": f.predicted_over_measured}
            for f in self.figures
        ]
        profile = self.profile.model_dump(mode="json")
        return {**self.facts, **case, "gradients": self.gradients, "profile": profile, "contenders": contenders}

    def save_html(self, path: Path) -> None:
        """Write everything as a page. Raises StrategyError if it cannot be written."""
        save("the page", path, page(self))

    def draw(self, path: Path) -> None:
        """Draw bars for the step without the optimizer, measured and predicted. (With quartiles: the slowest step may
        take many times the median if other processes run.)"""
        from matplotlib.figure import Figure

        drawing = Figure(figsize=(9, 1.4 + 0.42 * len(self.figures)), layout="constrained")
        axes = drawing.subplots()
        rows = range(len(self.figures))[::-1]
        measured = [[1e3 * seconds for seconds in three_quartiles(f.computed)] for f in self.figures]
        middle = [m for _, m, _ in measured]
        around = [m - low for low, m, _ in measured], [high - m for _, m, high in measured]
        above = [row + 0.2 for row in rows]
        style = {"linewidth": 0.8}
        axes.barh(above, middle, 0.4, xerr=around, color="tab:blue", label="measured (quartiles)", error_kw=style)
        predicted = [(row - 0.2, f.predicted) for row, f in zip(rows, self.figures, strict=True) if f.predicted]
        seconds = [1e3 * p for _, p in predicted]
        axes.barh([row for row, _ in predicted], seconds, 0.4, color="tab:orange", label="predicted")
        axes.axvline(middle[-1], color="grey", linewidth=0.8, linestyle="--", label=f"{DDP}, measured")
        names = [f"{f.name} ({counted(f.collectives, 'collective')})" for f in self.figures]
        axes.set_yticks(list(rows), names)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms of forward and backward")
        axes.set_title(self.title, fontsize=10, loc="left")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
        image = BytesIO()
        kind = path.suffix.removeprefix(".")
        drawing.savefig(image, dpi=130, format=kind, metadata={"Software" if kind == "png" else "Creator": "Partway"})
        save("the plot", path, image.getvalue())


def check_plot(path: Path | None) -> None:
    """Raise RuntimeStateError if a plot is wanted, and matplotlib is missing or the format is another."""
    if path is not None and path.suffix not in _PLOTS:
        raise RuntimeStateError(f"cannot draw {str(path)!r}; give a file of {', '.join(_PLOTS)}")
    if path is not None and find_spec("matplotlib") is None:
        raise RuntimeStateError(f"a plot needs matplotlib; install it with: {install_extra('demo')}")


# -- Measuring ---------------------------------------------------------------------------------------------------------


def bench_fusion(
    model: str = "gpt2",
    world: int = 2,
    rounds: int = 15,
    *,
    device: str = "",
    quick: bool = False,
    profile: str | None = None,
    timed: bool = False,
    traced: str = "overlap",
) -> BenchResult:
    """Compare all contenders on `world` processes of this machine.

    model     gpt2, resnet50 or mlp; or module:function, see `workloads.own`
    device    cpu (gloo) or cuda (NCCL, a GPU for each process); "": cuda if there are several GPUs, and enough, or
              PARTWAY_SHARE_GPU=1 lets processes share one
    quick     small models and few rounds: everything runs, and the times mean nothing
    profile   a device profile to predict with (a preset or a path), instead of calibrating
    timed     record a timeline of the contender `traced`, too

    Raises RuntimeStateError for an unknown model, contender or device, for fewer than one process or round, and with
    the message of a process that fails; StrategyError for an unknown profile.
    """
    device = device or _device(world)
    if world < 1:
        raise RuntimeStateError(f"world is {world}; it must be 1 or more")
    if rounds < 1:
        raise RuntimeStateError(f"rounds is {rounds}; it must be 1 or more")
    check_devices(world, device)
    preset = profile_of(profile) if profile is not None else None
    gradients = gradients_of(workload(model, small=quick), world)
    compared = policies(gradients)
    if timed and traced not in compared:
        raise RuntimeStateError(f"no contender {traced!r} has a timeline; write one of {', '.join(compared)}")
    if preset is None:
        _say("measuring this machine, by which steps are predicted")
    predictor = preset or calibrate(world, device, quick=True, name="bench").profile
    with tempfile.TemporaryDirectory() as folder:
        predictor.save(Path(folder, "profile.json"))
        case = Case(model, world, device, rounds, quick, compared, str(Path(folder, "profile.json")), traced, timed)
        try:
            spawn(_rank, (case, folder), nprocs=world)
        except ProcessException as error:
            raise RuntimeStateError(f"a process failed: {error}") from error
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    facts = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": threads_of(world)}
    timelines = {name: [Span(**each) for each in spans] for name, spans in ranks[0]["timelines"].items()}
    return BenchResult(case, predictor, gradients, tuple(_joined(ranks)), facts, timelines)


def _say(what: str) -> None:
    """Report the current work if it takes seconds."""
    sys.stderr.write(f"partway bench fusion: {what}\n")
    sys.stderr.flush()


def _device(world: int) -> str:
    count = torch.cuda.device_count()
    enough = count > 1 and 1 <= world <= count
    return "cuda" if enough or (count and gpus.may_share()) else "cpu"


def _joined(ranks: Sequence[Mapping[str, Any]]) -> list[ContenderFigures]:
    """The figures of each contender; a step takes as long as on the slowest rank."""
    slowest = {
        key: {name: tuple(map(max, zip(*(rank[key][name] for rank in ranks), strict=True))) for name in ranks[0][key]}
        for key in ("seconds", "computed")
    }
    return [
        ContenderFigures(name=name, seconds=slowest["seconds"][name], computed=slowest["computed"][name], **facts)
        for name, facts in ranks[0]["facts"].items()
    ]


def _rank(rank: int, case: Case, folder: str) -> None:
    """One process: check every contender, count its collectives, and time them all."""
    with one_rank(rank, case.world, folder, threads_of(case.world), case.device):
        if rank == 0:
            _say(f"comparing the numbers of {counted(len(case.policies) + 1, 'contender')} with those of one device")
        _check(case)
        if rank == 0:
            _say(f"timing them, {counted(case.rounds, 'round')} after {WARM} that do not count")
        work = workload(case.model, small=case.quick)
        contenders = _contenders(case, work, torch.float32)
        facts = {c.name: _facts(c) if c.name != DDP else _facts_of_ddp(case, work) for c in contenders}
        runs = {c.name: timed_step(c, case.device) for c in contenders}
        seconds, computed = turns(runs, case.rounds, WARM)
        timelines = _timelines(next(c for c in contenders if c.name == case.traced), case) if case.timed else {}
        figures = {"facts": facts, "seconds": seconds, "computed": computed, "timelines": timelines}
        Path(folder, f"{rank}.json").write_text(json.dumps(figures))


def _check(case: Case) -> None:
    small = workload(case.model, small=True)
    for contender in _contenders(case, small, torch.float64):
        wrong = list(disagreements(contender, small, case.world, torch.float64, case.device))
        if wrong:
            raise RuntimeStateError(
                "\n".join([f"{case.model}: {contender.name} does not compute what one device does", *wrong])
            )


def _contenders(case: Case, work: Workload, dtype: torch.dtype) -> list[Contender]:
    options = {"parallel_mode": "data_parallel", "full_batch": True, "device_profile": case.profile}
    fusion = {name: {"openstate": bool(policy), "allreduce": policy} for name, policy in case.policies.items()}
    fused = [
        ours(name, work, case.world, dtype, {**options, "comm_fusion": each}, device=case.device)
        for name, each in fusion.items()
    ]
    return [*fused, ddp(work, case.world, dtype, case.device)]


def _facts(contender: Contender) -> dict[str, Any]:
    """Collectives and bytes of a step, and its predicted seconds."""
    with contender.context(), record_collectives() as events:
        _gradients(contender)
    schedule = _program(contender).schedule
    payload = sum(event.payload_bytes for event in events)
    return {"collectives": len(events), "bytes": payload, "predicted": schedule.seconds, "exposed": schedule.exposed}


def _facts_of_ddp(case: Case, work: Workload) -> dict[str, Any]:
    """Collectives and bytes of a step of DDP, counted in a model of its own, because a hook that counts takes time."""
    contender = ddp(work, case.world, torch.float32, case.device)
    buckets: list[int] = []

    def noted(bucket: Any) -> Any:
        buckets.append(bucket.buffer().nbytes)
        return bucket

    model: Any = contender.module
    # DDP refuses a hook whose annotations are strings, as all are in this file
    model.register_comm_hook(None, lambda group, bucket: allreduce_hook(group, noted(bucket)))
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        buckets.clear()
        _gradients(contender)
    return {"collectives": len(buckets), "bytes": sum(buckets), "predicted": None, "exposed": None}


def _gradients(contender: Contender) -> None:
    contender.backward(contender.forward())
    contender.module.zero_grad()


def _timelines(contender: Contender, case: Case) -> dict[str, list[dict[str, Any]]]:
    """The spans of a further step on this rank, predicted and measured, as values that JSON has."""
    with contender.context():
        for _ in range(2):  # the first recording takes longer
            dist.barrier()
            with record_timeline() as spans:
                _gradients(contender)
                wait_for(case.device)
    sources = {"measured": spans, "predicted": _program(contender).schedule.spans}
    return {name: [asdict(span) for span in given] for name, given in sources.items()}


def _program(contender: Contender) -> Program:
    module: Any = contender.module
    program: Program = module.program
    return program
