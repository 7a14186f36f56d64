"""`partway calibrate`: a device profile of the machine that it runs on, or under a launcher of the hosts of the job.

Every process stands for one device. All of them compute at once, as in training, so that shared resources (cores,
memory, links) are shared in the figures too. Each collective comes after some computation, as in training: processes
that only wait for each other are much faster, because none has to be woken and all arrive at once. Then one
least-squares fit of relative errors gives the launch, the latency of a step of each kind, and bandwidths by group size:

    seconds = launch + steps(kind, n) * latency[kind] + payload / bandwidth[kind, n]

With several processes on each of several hosts, the profile has two levels. The first is fitted to groups inside a
host. The second is fitted to groups with one rank on each host, all of which send at once, and to all ranks. So its
bandwidth is the share of a host's link that each device has.

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from itertools import chain, groupby
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
    InARow,
    Overlap,
    Sample,
    collectives,
    fit,
    group_sizes,
    groups_on,
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
from partway.propagation.cost import DeviceProfile, NetworkLevel, PeakRates, Sources, costs_over, profile_of
from partway.runtime import get_rank, init, launched
from partway.runtime.launching import gpus, host_name
from partway.runtime.ranks import gathered
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
    payloads=(1 << 10, 1 << 15, MB, 4 * MB, 16 * MB),
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
    """A profile, and its sources: the samples of collectives (none: they were not measured) and of operators."""

    profile: DeviceProfile
    samples: tuple[Sample, ...]
    operators: tuple[OperatorSample, ...] = ()

    @property
    def residuals(self) -> tuple[float, ...]:
        """For each sample, the time by the profile over the measured time, less 1."""
        return tuple(self._predicted(s) / s.seconds - 1 for s in self.samples)

    def _predicted(self, sample: Sample) -> float:
        waiting, per_byte = costs_over(self.profile.levels, sample.sizes)[sample.kind]
        return waiting + per_byte * sample.payload

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
        if not self.samples:
            console.print(f"collectives: {p.levels[0].source}")
            return text.getvalue()
        table = Table("collective", "ranks", "payload", "measured", "fitted", "off", box=SIMPLE_HEAD, show_edge=False)
        for s, off in zip(self.samples, self.residuals, strict=True):
            table.add_row(
                s.kind,
                _among(s.sizes),
                f"{s.payload / 1024:,.0f} KB",
                _ms(s.seconds),
                _ms(self._predicted(s)),
                f"{100 * off:+.0f} %",
            )
        console.print(table)
        both = self.profile.together
        console.print(
            f"while both run, operators do {100 * both.computing:.0f} % and collectives "
            f"{100 * both.communicating:.0f} % of what they do alone; a collective that has queued waits for "
            f"{100 * both.queued:.0f} % of what it does by itself"
        )
        size = [abs(off) for off in self.residuals]
        for level in p.levels:
            steps_of = ", ".join(f"{kind} {level.latency.of(kind) * 1e6:.0f}" for kind in KINDS)
            console.print(f"{level.name}: launch {level.launch * 1e6:.0f} us; a step, in us: {steps_of}")
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


def calibrate(
    processes: int | None = None,
    device: str = "cpu",
    quick: bool = False,
    name: str = "calibrated",
    preset: str | None = None,
) -> Calibration:
    """Measure this machine with `processes` processes, a device each (default 2), and fit a profile to it.

    Under a launcher its processes measure together, and each returns the result. If they are on several hosts, the
    profile has a level for those of one host, if these are several, and one that joins the hosts.

    With one process collectives cannot be measured: their figures are those of `preset` (default: that of the device),
    and their source says so. With more, a `preset` completes what is measured with its levels that join more devices.
    `quick`: fewer and smaller cases. Raises RuntimeStateError for a `device` other than cpu and cuda, fewer than one
    process, more processes than there are GPUs, another number of them than the launcher started, and hosts with
    unequal numbers of ranks.
    """
    effort = QUICK if quick else FULL
    beyond = None if preset is None else profile_of(preset)
    if launched():
        join(device)
        if processes not in (None, dist.get_world_size()):
            started = counted(dist.get_world_size(), "process", "processes")
            raise RuntimeStateError(f"processes is {processes}, and the launcher started {started}; leave it out")
        with _silent():
            ranks = _measured(device, effort)
    else:
        processes = 2 if processes is None else processes
        check_devices(processes, device)
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, (processes, device, effort, folder), nprocs=processes)
            ranks = json.loads(Path(folder, "ranks.json").read_text())
    speed = _mean([DeviceSpeed(**rank["speed"]) for rank in ranks])
    beside = [Overlap(**overlap) for rank in ranks for overlap in rank["overlaps"]]
    rows = [InARow(**row) for rank in ranks for row in rank["rows"]]
    samples = over_ranks([[_sample(**sample) for sample in rank["samples"]] for rank in ranks])
    operators = tuple(OperatorSample(**sample) for rank in ranks for sample in rank["operators"])
    hosts, each = ranks_on_hosts([rank["host"] for rank in ranks])
    how = _how(hosts, each, device, ranks[0]["threads"])
    levels = _levels(samples, hosts, each, device, how) if samples else ()
    if beyond is not None or not levels:
        levels = completed(levels, hosts * each, beyond or profile_of(device))
    profile = DeviceProfile(
        name=name,
        peak=PeakRates(**speed.peak),
        memory=min(rank["memory"] for rank in ranks),
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
    return Calibration(profile, samples, operators)


def join(device: str) -> bool:
    """Join the other processes of a launcher, if one started this process. Return whether this one is the first."""
    check_device(device)
    if launched():
        init(backend=_backend(device))
    return get_rank() == 0


def ranks_on_hosts(names: Sequence[str]) -> tuple[int, int]:
    """The number of hosts and of ranks on each, from the name of each rank's host. Raises RuntimeStateError unless each
    host has as many, with consecutive numbers: the levels of a profile assume that."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    counts = {count for _, count in runs}
    if len(counts) > 1 or len({name for name, _ in runs}) < len(runs):
        found = ", ".join(f"{counted(count, 'rank')} on {name}" for name, count in runs)
        raise RuntimeStateError(
            f"in the order of the ranks there are {found}; a profile describes hosts with as many ranks on each, "
            "numbered host after host: start as many on each, in this order"
        )
    return len(runs), runs[0][1]


def check_device(device: str) -> None:
    """Raise RuntimeStateError for a device that `calibrate` cannot measure."""
    if device not in ("cpu", "cuda"):
        raise RuntimeStateError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeStateError("device is 'cuda', but PyTorch finds no GPU here; use device 'cpu'")


def check_devices(processes: int, device: str) -> None:
    """Raise RuntimeStateError if `calibrate` cannot start so many processes on a device."""
    if processes < 1:
        raise RuntimeStateError(f"processes is {processes}; it must be 1 (which measures no collectives) or more")
    check_device(device)
    if device == "cuda":
        gpus.check_enough(processes)


# -- Measuring -------------------------------------------------------------------------------------------------------


def _rank(rank: int, processes: int, device: str, effort: Effort, folder: str) -> None:
    """One of the processes of this machine. The first one writes the figures of all into a file."""
    with _silent():
        torch.set_num_threads(threads_of(processes))
        if device == "cuda":
            gpus.take_of(rank, processes)
        store = f"file://{folder}/store"
        dist.init_process_group(_backend(device), init_method=store, rank=rank, world_size=processes)
        try:
            ranks = _measured(device, effort)
        finally:
            dist.destroy_process_group()
    if rank == 0:
        Path(folder, "ranks.json").write_text(json.dumps(ranks))


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing is printed: gloo prints a line for each new group."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _measured(device: str, effort: Effort) -> list[dict[str, Any]]:
    """The figures of each rank of the process group; each calls it. They compute side by side, and then communicate."""
    hosts, each = ranks_on_hosts(gathered("say on which hosts they are", host_name()))
    dist.barrier()
    speed = _device_speed(device, effort)
    networks = chain.from_iterable(effort.probes(times) for times in TIMES[device])
    operators = list(operator_samples(device, dist.barrier, networks))
    samples = list(_group_samples(hosts, each, device, effort)) if hosts * each > 1 else []
    figures = {
        "host": host_name(),
        "threads": torch.get_num_threads(),
        "memory": _memory(each, device),
        "speed": speed,
        "operators": operators,
        "samples": [sample for sample in samples if isinstance(sample, Sample)],
        "overlaps": [sample for sample in samples if isinstance(sample, Overlap)],
        "rows": [sample for sample in samples if isinstance(sample, InARow)],
    }
    return gathered("compare what they measured", json.loads(json.dumps(figures, default=asdict)))


def _sample(kind: str, sizes: Sequence[int], payload: int, seconds: float) -> Sample:
    return Sample(Kind(kind), tuple(sizes), payload, seconds)


def _group_samples(hosts: int, each: int, device: str, effort: Effort) -> Iterator[Sample | Overlap | InARow]:
    """The times of the collectives in which this rank took part, and of those of all ranks while all compute."""
    for sizes, families in groups_on(hosts, each):
        made = [(ranks, dist.new_group(list(ranks))) for family in families for ranks in family]
        mine = [group for ranks, group in made if dist.get_rank() in ranks]
        dist.barrier()
        if mine:  # all groups at once, like those along an axis of a mesh
            yield from collectives(sizes, mine, device, effort.payloads, effort.repeats)
    dist.barrier()
    yield from in_a_row(hosts * each, dist.group.WORLD, device, effort.payloads[0], effort.repeats)
    yield from overlaps(device, effort.payloads, effort.repeats)
    dist.barrier()


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


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


def _levels(samples: Sequence[Sample], hosts: int, each: int, device: str, how: str) -> tuple[NetworkLevel, ...]:
    """One level that joins all ranks, or one that joins those of a host and one that joins the hosts."""
    network, larger = _backend(device), "larger groups are assumed to send at the rate of the largest"
    if hosts == 1 or each == 1:
        sizes = ", ".join(map(str, group_sizes(hosts * each)))
        gpus_here = max(torch.cuda.device_count(), each) if device == "cuda" and hosts == 1 else None
        where = network if hosts == 1 else f"{network} between hosts"
        found = fit(samples, trees=device == "cuda" and hosts > 1)
        return (found.level(where, f"groups of {sizes}, {how}; {larger}", gpus_here),)
    inner = [replace(sample, sizes=sample.sizes[:1]) for sample in samples if sample.sizes[-1] == 1]
    sizes = ", ".join(map(str, group_sizes(each)))
    inside = fit(inner).level(f"{network} inside a host", f"groups of {sizes} of a host, {how}", each)
    sizes = ", ".join(map(str, group_sizes(hosts)))
    source = f"groups on {sizes} hosts, with one rank on each, and all ranks, {how}; {larger}"
    outer = [sample for sample in samples if sample.sizes[-1] > 1]
    between = fit(outer, inside, trees=device == "cuda")
    return inside, between.level(f"{network} between hosts", source, None)


def _among(sizes: Sequence[int]) -> str:
    """The ranks of a group: "2" on one level; on two levels "2 on a host", "2 hosts" or "2 on each of 4 hosts"."""
    if len(sizes) == 1:
        return str(sizes[0])
    inside, hosts = sizes
    if hosts == 1:
        return f"{inside} on a host"
    return f"{hosts} hosts" if inside == 1 else f"{inside} on each of {hosts} hosts"


def completed(measured: Sequence[NetworkLevel], ranks: int, preset: DeviceProfile) -> tuple[NetworkLevel, ...]:
    """The levels that were measured with so many ranks, and those of a preset that join more. Their source says so."""
    here = (measured[-1].devices or ranks) if measured else 1
    beyond = [
        level
        for level in preset.levels
        if level.devices is None or (level.devices > here and level.devices % here == 0)
    ]
    more = f"more than {here} devices" if measured else "two processes or more"
    source = f"not measured, which takes {more}; from the preset {preset.name}: "
    added = [level.model_copy(update={"source": source + level.source}) for level in beyond]
    if measured and added:
        measured = [*measured[:-1], measured[-1].model_copy(update={"devices": here})]
    return (*measured, *added)


def _how(hosts: int, each: int, device: str, threads: int) -> str:
    cpu = f"a CPU with {counted(threads, 'thread')}"
    where = torch.cuda.get_device_name() if device == "cuda" else cpu
    who = counted(hosts * each, "process", "processes") + (f" on {hosts} hosts" if hosts > 1 else "")
    shared = device == "cuda" and each > torch.cuda.device_count()
    beside = f" that they share, so that no figure is that of {where} alone" if shared else " each"
    return f"measured by partway calibrate with {who} on {where}{beside}, PyTorch {torch.__version__}"


def threads_of(processes: int) -> int:
    """The number of threads of each of `processes`: an equal share of the cores; a single process keeps its number."""
    if processes == 1:
        return torch.get_num_threads()
    return max(1, (os.cpu_count() or 1) // processes)


def _memory(each: int, device: str) -> float:
    """The bytes of a device of a host with `each`."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / each


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
