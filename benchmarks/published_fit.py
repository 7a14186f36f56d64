"""The physical figures of each kind of GPU, fitted to half of the published runs and judged on the other half.

A kind of GPU has at most nine fitted figures: the shares of its peak that matrix products and attention reach, the
share of its memory's bandwidth, the seconds of a kernel that do not depend on its work, the share of its speed that is
left to kernels while a collective runs, bytes/s and seconds per message of NVLink and of the network between nodes.
There is no figure for a row, a model or a source. Peaks and bandwidths of the memory are those of data sheets. A figure
that the rows of a kind say nothing about keeps its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from published_seconds import Floats, Prices, Step
from scipy.optimize import least_squares

from partway.propagation.cost.profile import DeviceProfile, profile_of


@dataclass(frozen=True)
class Sheet:
    """The data sheet of a kind of GPU: the preset that its profile starts from, dense operations/s in half precision,
    bytes/s and bytes of its memory, GPUs of a node, bytes/s of NVLink one way and of the adapter of a GPU."""

    preset: str
    peak: float
    bandwidth: float
    memory: float
    node: int
    nvlink: float
    network: float


SHEETS = {
    "A100 40GB": Sheet("a100_40", 312e12, 1.555e12, 40e9, 8, 300e9, 25e9),
    "A100 80GB": Sheet("a100", 312e12, 2.039e12, 80e9, 8, 300e9, 25e9),
    "H100 80GB": Sheet("h100", 989e12, 3.35e12, 80e9, 8, 450e9, 50e9),
    "H100 96GB": Sheet("h100", 989e12, 2.4e12, 96e9, 8, 450e9, 50e9),
    "H200": Sheet("h200", 989e12, 4.8e12, 141e9, 8, 450e9, 50e9),
    "B200": Sheet("b200", 2250e12, 8e12, 180e9, 8, 900e9, 50e9),
    "V100 32GB": Sheet("a100", 125e12, 0.9e12, 32e9, 16, 150e9, 12.5e9),
}


@dataclass(frozen=True)
class Figures:
    """What is fitted of a kind of GPU: shares of its data sheet and seconds.

    products, attention, memory   the shares of the peak and of the memory's bandwidth
    overhead           seconds per kernel
    beside             the speed of kernels while a collective runs, as a share of their speed alone
    nvlink, network    the shares of the bandwidth one way; and the seconds per message
    """

    products: float = 0.68
    attention: float = 0.25
    memory: float = 0.9
    overhead: float = 2e-6
    beside: float = 0.7
    nvlink: float = 0.9
    network: float = 0.8
    nvlink_latency: float = 4e-6
    network_latency: float = 1e-5

    def prices(self, kind: str) -> Prices:
        """The prices of a kind of GPU with these figures."""
        profile = profile_of_sheet(SHEETS[kind])
        inside, across = profile.levels
        inside = inside.model_copy(update=_level(self.nvlink * SHEETS[kind].nvlink, self.nvlink_latency))
        across = across.model_copy(update=_level(self.network * SHEETS[kind].network, self.network_latency))
        together = profile.together.model_copy(update={"computing": self.beside})
        reached = profile.reached.model_copy(
            update={"products": self.products, "attention": self.attention, "memory": self.memory}
        )
        figures = {"levels": (inside, across), "together": together, "reached": reached, "overhead": self.overhead}
        return Prices(profile.model_copy(update=figures))


NAMES = tuple(Figures.__dataclass_fields__)
LOWEST = Figures(0.2, 0.1, 0.3, 1e-7, 0.3, 0.2, 0.2, 5e-7, 1e-6)
HIGHEST = Figures(0.95, 0.95, 1.0, 3e-5, 1.0, 1.0, 1.0, 3e-5, 1e-4)


def _level(bandwidth: float, latency: float) -> dict[str, object]:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    like = type(_BY_KIND)
    return {
        "bandwidth": like(**dict.fromkeys(kinds, bandwidth)), "latency": like(**dict.fromkeys(kinds, latency)),
    }  # fmt: skip


_BY_KIND = profile_of("h100").levels[0].latency


def profile_of_sheet(sheet: Sheet) -> DeviceProfile:
    """The preset of a kind of GPU with the peak, memory and node of its data sheet."""
    preset = profile_of(sheet.preset)
    peak = preset.peak.model_copy(update={"bfloat16": sheet.peak, "float16": sheet.peak})
    inside, across = preset.levels
    levels = (inside.model_copy(update={"devices": sheet.node}), across)
    figures = {"peak": peak, "memory": sheet.memory, "memory_bandwidth": sheet.bandwidth, "levels": levels}
    return preset.model_copy(update=figures)


def halves(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Every second row of each source, to fit, and the others, to judge; rows with an assumption are in neither."""
    fitted, judged = [], []
    seen: dict[str, int] = {}
    for step in steps:
        if step.run.assumed:
            continue
        place = seen[step.run.source] = seen.get(step.run.source, -1) + 1
        (judged if place % 2 else fitted).append(step)
    return fitted, judged


FAMILIES = {"A100 40GB": "A100", "A100 80GB": "A100"}  # kinds with equal chips and networks, fitted together


def family(kind: str) -> str:
    """The kinds of GPU that share their figures, by name."""
    return FAMILIES.get(kind, kind)


def fitted(steps: Sequence[Step], start: Figures, free: Iterable[str]) -> Figures:
    """The figures that bring predicted over measured seconds of `steps` closest to 1: least squares of the logarithms,
    in which rows far off count less (soft L1 beyond 10 %)."""
    names = list(free)
    low, high = (np.log([getattr(each, name) for name in names]) for each in (LOWEST, HIGHEST))

    def figures(x: Floats) -> Figures:
        return replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        prices = {kind: figures(x).prices(kind) for kind in {step.run.kind for step in steps}}
        own = [np.log(step.predicted(prices[step.run.kind]).seconds / step.run.measured) for step in steps]
        drift = 0.01 * (x - first)  # a figure that no row says anything about stays where it started
        return np.array([*own, *drift])

    first = np.clip(np.log([getattr(start, name) for name in names]), low + 1e-9, high - 1e-9)
    found = least_squares(
        residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-2, max_nfev=12
    )
    return figures(found.x)


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of pairs of predicted and measured figures."""
    more = less = tied_a = tied_b = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            sign = np.sign(a - c) * np.sign(b - d)
            more, less = more + (sign > 0), less + (sign < 0)
            tied_a, tied_b = tied_a + (a == c and b != d), tied_b + (b == d and a != c)
    count = ((more + less + tied_a) * (more + less + tied_b)) ** 0.5
    return float((more - less) / count) if count else float("nan")


def spread(ratios: Mapping[object, float]) -> str:
    """The median, and the range of nine of ten, of predicted over measured."""
    values = np.array([*ratios.values()])
    if not len(values):
        return ""
    return f"{np.median(values):.2f} ({np.quantile(values, 0.05):.2f}-{np.quantile(values, 0.95):.2f})"
