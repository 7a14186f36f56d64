"""`partway calibrate`: a device profile of the machine that it runs on.

Every process stands for one device. All of them compute at once, as in training, so that shared resources (cores,
memory, links) are shared in the figures too. Each collective comes after some computation, as in training: processes
that only wait for each other are much faster, because none has to be woken and all arrive at once. Then one
least-squares fit of relative errors gives the launch, the latency of a step of each kind, and bandwidths by group size:

    seconds = launch + steps(kind, n) * latency[kind] + payload / bandwidth[kind, n]

Large collectives run once more while all compute, which shows how far the two slow each other down; small ones several
at once, which shows the time of one that has queued.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from partway.measure.clock import seconds_of
from partway.measure.collectives import (
    KINDS,
    MB,
    Fit,
    InARow,
    Overlap,
    Sample,
    collectives,
    fit,
    group_sizes,
    groups_of,
    in_a_row,
    over_ranks,
    overlaps,
    together,
)
from partway.measure.operators import (
    FORWARD,
    OperatorSample,
    fit_operators,
    fitted_seconds,
    operator_samples,
)
from partway.measure.probes import probes
from partway.measure.workloads import Workload
from partway.propagation.cost import DeviceProfile, NetworkLevel, PeakRates, Sources, profile_of
from partway.runtime.launching import gpus
from partway.strategy import Kind, RuntimeStateError, counted

DTYPES = {name: getattr(torch, name) for name in PeakRates.model_fields}
SHOWN = 30  # operators in a report
TIMES = {"cpu": (1,), "cuda": (1, 16)}  # factors of the batch sizes: small batches leave a GPU waiting for the host


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of a measurement: payloads in bytes, repeats of each case (`SMALL_REPEATS` times as many of small
    ones, which vary most), bytes of a copy, seconds of a product, and the networks for timing operators, by the factor
    of their batches."""

    payloads: tuple[int, ...]
    repeats: int
    copied: int
    product: float
    probes: Callable[[int], Iterable[Workload]]


QUICK = Effort(
    payloads=(1 << 10, 1 << 15, MB, 16 * MB),
    repeats=7,
    copied=32 * MB,
    product=0.03,
    probes=partial(probes, quick=True),
)
FULL = Effort(
    payloads=tuple(1 << k for k in range(10, 27, 2)),
    repeats=15,
    copied=128 * MB,
    product=0.3,
    probes=partial(probes, quick=False),
)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of a device while all compute: operations/s by dtype, bytes/s, seconds of an operator without work."""

    peak: Mapping[str, float]
    memory_bandwidth: float
    overhead: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, and its sources: the samples of collectives and of operators, and the fit (None: collectives were not
    measured)."""

    profile: DeviceProfile
    samples: tuple[Sample, ...]
    fit: Fit | None
    operators: tuple[OperatorSample, ...] = ()

    @property
    def residuals(self) -> tuple[float, ...]:
        """For each sample, the fitted time over the measured time, less 1."""
        return tuple(self.fit.seconds(s.kind, s.size, s.payload) / s.seconds - 1 for s in self.samples if self.fit)

    def report(self, width: int = 100) -> str:
        """The figures and, for each sample, its fitted time with its error."""
        p = self.profile
        text = StringIO()
        console = Console(file=text, width=width)
        figures = Table("figure", "measured", box=SIMPLE_HEAD, show_edge=False)
        for name in DTYPES:
            figures.add_row(f"matrix product in {name}", f"{getattr(p.peak, name) / 1e9:,.1f} GFLOP/s")
        figures.add_row("memory bandwidth", f"{p.memory_bandwidth / 1e9:,.2f} GB/s")
        figures.add_row("an operator without its work", f"{p.overhead * 1e6:.1f} us")
        console.print(figures)
        console.print(self._of_operators())
        if self.fit is None:
            console.print(f"collectives: {p.levels[0].source}")
            return text.getvalue()
        table = Table("collective", "ranks", "payload", "measured", "fitted", "off", box=SIMPLE_HEAD, show_edge=False)
        for s, off in zip(self.samples, self.residuals, strict=True):
            fitted = self.fit.seconds(s.kind, s.size, s.payload)
            table.add_row(
                s.kind, str(s.size), f"{s.payload / 1024:,.0f} KB", _ms(s.seconds), _ms(fitted), f"{100 * off:+.0f} %"
            )
        console.print(table)
        both = self.profile.together
        console.print(
            f"while both run, operators do {100 * both.computing:.0f} % and collectives "
            f"{100 * both.communicating:.0f} % of what they do alone; a collective that has queued waits for "
            f"{100 * both.queued:.0f} % of what it does by itself"
        )
        size = [abs(off) for off in self.residuals]
        steps_of = ", ".join(f"{kind} {seconds * 1e6:.0f}" for kind, seconds in self.fit.latency.items())
        console.print(f"launch {self.fit.launch * 1e6:.0f} us; a step, in us: {steps_of}")
        console.print(
            f"the fit is off by {100 * statistics.median(size):.0f} % (median), {100 * max(size):.0f} % at most"
        )
        return text.getvalue()

    def _of_operators(self) -> Table:
        """The most expensive operators, with the errors of their fitted times."""
        table = Table("operator", "calls", "measured", "fitted", "off", box=SIMPLE_HEAD, show_edge=False)
        names = [rates.name for rates in self.profile.operators]
        by_name = {name: [s for s in self.operators if s.name == name and s.of == FORWARD] for name in names}
        for name in sorted(names, key=lambda name: -sum(s.seconds for s in by_name[name]))[:SHOWN]:
            if samples := by_name[name]:
                fitted = [fitted_seconds(self.profile.operators, s) for s in samples]
                off = statistics.median(abs(f / s.seconds - 1) for f, s in zip(fitted, samples, strict=True))
                taken = sum(s.seconds for s in samples)
                table.add_row(name, str(len(samples)), _ms(taken), _ms(sum(fitted)), f"{100 * off:.0f} % (median)")
        return table


def calibrate(processes: int = 2, device: str = "cpu", quick: bool = False, name: str = "calibrated") -> Calibration:
    """Measure this machine with `processes` processes, a device each, and fit a profile to it.

    With one process collectives cannot be measured: their figures are those of the preset, and their source says so.
    `quick`: fewer and smaller cases. Raises RuntimeStateError for a `device` other than cpu and cuda, fewer than one
    process, and more processes than there are GPUs.
    """
    check_devices(processes, device)
    effort = QUICK if quick else FULL
    ranks = _measure(processes, device, effort)
    speed = _mean([DeviceSpeed(**rank["speed"]) for rank in ranks])
    beside = [Overlap(**overlap) for rank in ranks for overlap in rank["overlaps"]]
    rows = [InARow(**row) for rank in ranks for row in rank["rows"]]
    samples = over_ranks([[Sample(**{**s, "kind": Kind(s["kind"])}) for s in rank["samples"]] for rank in ranks])
    fitted = fit(samples) if samples else None
    operators = tuple(OperatorSample(**sample) for rank in ranks for sample in rank["operators"])
    levels = (_level(fitted, processes, device),) if fitted else _unmeasured(device)
    how = _how(processes, device)
    profile = DeviceProfile(
        name=name,
        peak=PeakRates(**speed.peak),
        memory=_memory(processes, device),
        memory_bandwidth=speed.memory_bandwidth,
        overhead=speed.overhead,
        sources=Sources(
            peak=f"the best of square matrix products, {how}",
            memory=f"what the system reports; bandwidth of a copy and an addition of {effort.copied // MB} MB, {how}",
            overhead=f"an addition of two numbers, {how}; operators: in steps of small networks, in the same processes",
        ),
        levels=levels,
        together=together(beside, rows),
        operators=fit_operators(operators),
    )
    return Calibration(profile, samples, fitted, operators)


def check_devices(processes: int, device: str) -> None:
    """Raise RuntimeStateError for devices that `calibrate` cannot measure."""
    if device not in ("cpu", "cuda"):
        raise RuntimeStateError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    if processes < 1:
        raise RuntimeStateError(f"processes is {processes}; it must be 1 (which measures no collectives) or more")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeStateError("device is 'cuda', but PyTorch finds no GPU here; use device 'cpu'")
    if device == "cuda":
        gpus.check_enough(processes)


# -- Measuring -------------------------------------------------------------------------------------------------------


def _measure(processes: int, device: str, effort: Effort) -> list[dict[str, Any]]:
    """The measurements of each process."""
    meeting = torch.multiprocessing.get_context("spawn").Barrier(processes)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (processes, device, effort, folder, meeting), nprocs=processes)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]


def _rank(rank: int, processes: int, device: str, effort: Effort, folder: str, meeting: Any) -> None:
    """One process: computes beside the others, then takes part in the collectives; its figures go to a file."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gloo prints a line for each new group
    torch.set_num_threads(threads_of(processes))
    if device == "cuda":
        gpus.take_of(rank, processes)
    meeting.wait()
    speed = _device_speed(device, effort)
    networks = chain.from_iterable(effort.probes(times) for times in TIMES[device])
    operators = list(operator_samples(device, meeting.wait, networks))
    samples = list(_group_samples(rank, processes, device, effort, folder)) if processes > 1 else []
    figures = {
        "speed": speed,
        "operators": operators,
        "samples": [sample for sample in samples if isinstance(sample, Sample)],
        "overlaps": [sample for sample in samples if isinstance(sample, Overlap)],
        "rows": [sample for sample in samples if isinstance(sample, InARow)],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(figures, default=asdict))


def _group_samples(
    rank: int, processes: int, device: str, effort: Effort, folder: str
) -> Iterator[Sample | Overlap | InARow]:
    """The times of the collectives in which this process took part, and of those of all processes while all compute."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    try:
        for size in group_sizes(processes):
            made = [(ranks, dist.new_group(list(ranks))) for family in groups_of(size, processes) for ranks in family]
            mine = [group for ranks, group in made if rank in ranks]
            dist.barrier()
            if mine:  # all groups at once, like those along an axis of a mesh
                yield from collectives(size, mine, device, effort.payloads, effort.repeats)
        dist.barrier()
        yield from in_a_row(processes, dist.group.WORLD, device, effort.payloads[0], effort.repeats)
        yield from overlaps(device, effort.payloads, effort.repeats)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _device_speed(device: str, effort: Effort) -> DeviceSpeed:
    count = effort.copied // 4
    a, b, out = (torch.ones(count, device=device) for _ in range(3))
    copy = seconds_of(lambda: out.copy_(a), device, effort.repeats)
    add = seconds_of(lambda: torch.add(a, b, out=out), device, effort.repeats)
    one = torch.ones(1, device=device)
    overhead = seconds_of(lambda: [one + one for _ in range(100)], device, effort.repeats) / 100
    peak = {name: _peak(dtype, device, effort) for name, dtype in DTYPES.items()}
    return DeviceSpeed(peak, 5 * effort.copied / (copy + add), overhead)


def _peak(dtype: torch.dtype, device: str, effort: Effort) -> float:
    """The operations/s of the fastest square product; sizes double until one takes `effort.product` seconds."""
    best, n, seconds = 0.0, 128, 0.0
    while seconds < effort.product and n <= 16384:
        a = torch.ones(n, n, dtype=dtype, device=device)
        seconds = seconds_of(lambda a=a: a @ a, device, 3)  # type: ignore[misc]
        best, n = max(best, 2 * n**3 / seconds), 2 * n
    return best


def _mean(speeds: Sequence[DeviceSpeed]) -> DeviceSpeed:
    return DeviceSpeed(
        {name: statistics.fmean(c.peak[name] for c in speeds) for name in DTYPES},
        statistics.fmean(c.memory_bandwidth for c in speeds),
        statistics.fmean(c.overhead for c in speeds),
    )


# -- The profile -----------------------------------------------------------------------------------------------------


def _level(fitted: Fit, processes: int, device: str) -> NetworkLevel:
    """One level that joins all: the GPUs of this machine, or any number of processes."""
    bandwidth = {kind.value: {str(n): rate for (k, n), rate in fitted.bandwidth.items() if k is kind} for kind in KINDS}
    sizes = ", ".join(map(str, group_sizes(processes)))
    source = (
        f"groups of {sizes}, {_how(processes, device)}; larger groups are assumed to send at the rate of the largest"
    )
    return NetworkLevel(
        name="nccl" if device == "cuda" else "gloo",
        source=source,
        devices=max(torch.cuda.device_count(), processes) if device == "cuda" else None,
        bandwidth=bandwidth,  # type: ignore[arg-type]
        latency={kind.value: seconds for kind, seconds in fitted.latency.items()},  # type: ignore[arg-type]
        launch=fitted.launch,
    )


def _unmeasured(device: str) -> tuple[NetworkLevel, ...]:
    """The levels of the preset, with a source that says so."""
    source = "not measured, which takes two processes or more; from the preset {}: {}"
    preset = profile_of(device)
    return tuple(
        level.model_copy(update={"source": source.format(preset.name, level.source)}) for level in preset.levels
    )


def _how(processes: int, device: str) -> str:
    cpu = f"a CPU with {counted(threads_of(processes), 'thread')}"
    where = torch.cuda.get_device_name() if device == "cuda" else cpu
    who = counted(processes, "process", "processes")
    shared = device == "cuda" and processes > torch.cuda.device_count()
    each = f" that they share, so that no figure is that of {where} alone" if shared else " each"
    return f"measured by partway calibrate with {who} on {where}{each}, PyTorch {torch.__version__}"


def threads_of(processes: int) -> int:
    """The number of threads of each of `processes`: an equal share of the cores; a single process keeps its number."""
    if processes == 1:
        return torch.get_num_threads()
    return max(1, (os.cpu_count() or 1) // processes)


def _memory(processes: int, device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
