"""Measure the times of operators in the steps of small networks (probes.py), and fit the few numbers that a profile has
of each.

Each process runs the probes on a mesh of one device, through the same straight-line code as in training, while the
others run them too: so the figures include the sharing of a host among ranks, and the time of the interpreter.
"""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from partway import auto_parallel_context, shard
from partway.measure.clock import seconds_of
from partway.measure.workloads import Workload
from partway.propagation.cost import (
    KNEES,
    OTHER,
    POINTWISE,
    VIEW,
    Floats,
    OperatorRates,
    Rates,
    features_of,
    kind_of_call,
    name_of_call,
)
from partway.propagation.graph import computed_again, operator_of
from partway.propagation.program import COMPUTE, Meter, Program
from partway.runtime import get_rank, record_timeline
from partway.strategy import Mesh

WARM, STEPS = 2, 5  # untimed and timed steps of a probe
SHORT = 1e-6  # seconds: for shorter times the difference counts, for others the ratio
FAR, ROUNDS = 2, 16  # times a knee; fits, each weighted by the results of those before
RIDGE = 1e-5  # keeps unknowns small that no sample separates
FORWARD, BACKWARD = "forward", "backward"

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """A timed call.

    name      the operator, as PyTorch prints it
    kind      the kind whose rates other operators of the kind use
    of        "forward": the call itself; "backward": all that its gradient computes, in flops of that
    features  the factors of the numbers of Rates
    """

    name: str
    kind: str
    of: str
    flops: float
    moved: float
    written: float
    seconds: float


def operator_samples(device: str, meet: Callable[[], Any], probes: Iterable[Workload]) -> Iterator[OperatorSample]:
    """The times of the calls of all `probes` on this rank. `meet` returns when all ranks have called it."""
    alone = Mesh({"one": 1}, ranks=(get_rank(),))
    for probe in probes:
        model: Any = shard(probe.model(torch.float32, device), mesh=alone)
        batch = probe.tensors(probe.each, torch.float32, device)
        runs: list[dict[tuple[str, str], float]] = []
        with auto_parallel_context(batch_norm_parts=probe.each if probe.own_statistics else 1):
            for step in range(WARM + STEPS):
                model.zero_grad(set_to_none=True)
                meet()
                with record_timeline() as spans:
                    _step(model, batch)
                if step >= WARM:
                    runs.append({(span.phase, span.name): span.seconds for span in spans if span.lane == COMPUTE})
            seconds = usual_seconds(runs)
            if device == "cuda":
                untold = seconds_of(partial(_step, model, batch), device, STEPS, meet)
                seconds = no_longer_than(seconds, untold)
        yield from _samples(model.program, seconds)


def _step(model: Any, batch: Sequence[torch.Tensor]) -> None:
    model(*batch).backward()


def usual_seconds(runs: Sequence[Mapping[K, float]]) -> dict[K, float]:
    """The usual time of each call in several steps: its median, scaled by the ratio of a whole step to the sum of these
    medians. If processes take turns on a core, a few calls wait for a turn in each step, different ones each time."""
    seconds = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    longer = statistics.median(sum(run.values()) for run in runs) / sum(seconds.values())
    return {key: each * longer for key, each in seconds.items()}


def no_longer_than(seconds: Mapping[K, float], step: float) -> dict[K, float]:
    """The time of each call, scaled so that their sum is at most `step`, the time of a step without timing: timing a
    call takes the host about as long as issuing it, and a device with little work waits for both."""
    shorter = min(1.0, step / sum(seconds.values()))
    return {key: each * shorter for key, each in seconds.items()}


def _samples(program: Program, seconds: Mapping[tuple[str, str], float]) -> Iterator[OperatorSample]:
    """The times of the calls of one program, by their phases and names."""
    step = program.with_values()
    of_operators: dict[str, OperatorSample] = {}
    gradients: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # the seconds and flops of each one's backward
    for phase, graph in ((FORWARD, step.forward.graph), (BACKWARD, step.backward.graph if step.backward else None)):
        meter = Meter(graph, step.mesh, program.profile) if graph is not None else None
        for node in graph.nodes if graph is not None else ():
            taken = seconds.get((phase, node.name))
            if taken is None or meter is None:
                continue
            sample = _sample(node, meter, taken)
            yield sample
            name = operator_of(node)
            if phase == FORWARD and name and sample.kind != VIEW:
                of_operators.setdefault(name, replace(sample, moved=meter.moved(node)))
            elif phase == BACKWARD and name in of_operators and not computed_again(node):
                gradients[name][0] += taken
                gradients[name][1] += sample.flops
    for name, (taken, flops) in gradients.items():
        forward = of_operators[name]
        yield OperatorSample(forward.name, forward.kind, BACKWARD, flops, forward.moved, forward.written, taken)


def _sample(node: Any, meter: Meter, seconds: float) -> OperatorSample:
    kind = VIEW if node.target is operator.getitem else kind_of_call(node)
    flops, moved, written = (0, 0, 0) if kind == VIEW else meter.figures(node)
    name = name_of_call(node, lambda operand: meter.values[operand].shape)
    return OperatorSample(name, kind, FORWARD, flops, moved, written, seconds)


# -- Fitting -----------------------------------------------------------------------------------------------------------


def fit_operators(samples: Iterable[OperatorSample]) -> tuple[OperatorRates, ...]:
    """The rates of each operator, and of each kind of them, with the least squares of relative errors."""
    groups: dict[str, dict[str, list[OperatorSample]]] = defaultdict(lambda: {FORWARD: [], BACKWARD: []})
    for kind in (POINTWISE, VIEW, OTHER):
        groups[kind][FORWARD] = []
    for sample in samples:
        for name in (sample.name, sample.kind):
            groups[name][sample.of].append(sample)
    if not groups[OTHER][FORWARD]:
        return ()
    return tuple(
        OperatorRates(name=name, forward=_rates(of[FORWARD]), backward=_rates(of[BACKWARD]) if of[BACKWARD] else None)
        for name, of in groups.items()
        if of[FORWARD]
    )


def fitted_seconds(operators: Sequence[OperatorRates], sample: OperatorSample) -> float:
    """The time of a call by the rates of its operator."""
    rates = next(rates for rates in operators if rates.name == sample.name)
    of = rates.forward if sample.of == FORWARD else rates.backward
    assert of is not None
    return float(of.seconds(sample.flops, sample.moved, sample.written))


def _rates(samples: Sequence[OperatorSample]) -> Rates:
    """The rates of similar calls, with the least squares of errors relative to the fitted times, so that sums are
    unbiased (a gamma regression: McCullagh & Nelder, "Generalized Linear Models", 1989). Each order of magnitude has
    the same weight. The cost of a byte beyond a knee comes only from calls far beyond it."""
    flops, moved, written, seconds = np.array([(s.flops, s.moved, s.written, s.seconds) for s in samples]).T
    matrix = np.stack(features_of(flops, moved, written), axis=1)
    for i, knee in enumerate(KNEES):
        if moved.max() < FAR * knee:
            matrix[:, 2 + i] = 0.0
    magnitude = np.log(np.maximum(flops + moved, 1.0)).round()
    shares = 1 / np.sqrt([(magnitude == each).sum() for each in magnitude])
    numbers, middle = np.zeros(matrix.shape[1]), seconds + SHORT
    for _ in range(ROUNDS):
        weights = shares / middle
        numbers = nonnegative(matrix * weights[:, None], seconds * weights)
        middle = np.sqrt(middle * (matrix @ numbers + SHORT))
    return Rates.of(numbers)


def nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with unknowns that are 0 or more (Lawson & Hanson, "Solving Least Squares Problems", 1974); of
    equally good solutions the smallest."""
    scale = np.linalg.norm(matrix, axis=0)
    columns = np.vstack([matrix / np.where(scale > 0, scale, 1.0), RIDGE * np.eye(len(scale))])
    target = np.concatenate([target, np.zeros(len(scale))])
    free, solution = np.zeros(columns.shape[1], dtype=bool), np.zeros(columns.shape[1])
    for _ in range(10 * len(free)):
        slope = columns.T @ (target - columns @ solution)
        slope[free | (scale == 0)] = -np.inf
        if slope.max() <= 1e-10:
            break
        free[slope.argmax()] = True
        while True:
            found = np.zeros(len(free))
            found[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            if (found[free] > 0).all():
                break
            negative = free & (found <= 0)
            step = (solution[negative] / (solution[negative] - found[negative])).min()
            solution = solution + step * (found - solution)
            free &= solution > 1e-15
            if not free.any():
                break
        solution = found * free
    return solution / np.where(scale > 0, scale, 1.0)
