"""`check_manual`: check a program of one rank that a person wrote by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from partway.annotations import InStrategy, in_layouts, out_layouts
from partway.checking.matching import matched
from partway.checking.measured import Measured, equal, measure
from partway.checking.ranks import Run, run_ranks
from partway.checking.reasons import Measurements
from partway.checking.records import Exact, tensors_in
from partway.checking.report import Finding, ManualReport, ResultDifference
from partway.propagation.graph import Call, check_call, flatten_call, name_of
from partway.requests import Request, check_target
from partway.runtime.code import part_of
from partway.strategy import Layout, Mesh, Replicate, Shard, StrategyError

_NOISE = 0.1  # times the deviation of a tensor: else zeros or ones, as in new biases and norms, can hide a mistake


def check_manual(
    fn: Callable[..., Any],
    in_strategy: InStrategy = None,
    out_strategy: tuple[Any, ...] | None = None,
    args: Sequence[Any] = (),
    *,
    mesh: Any = None,
    whole: Callable[..., Any] | None = None,
) -> ManualReport:
    """Check whether `fn`, the program of one rank, computes the values of one device; if not, find where it goes wrong.

    report = pw.check_manual(step, (("dp", None), None), (None, None), (x, w), mesh={"dp": 4})
    print(report)

    fn                          as for `manual`; it may compute gradients, and reduce them as a training loop does. All
                                tensors that it computes with are arguments
    in_strategy, out_strategy   as for `manual`: how the arguments are split, and the layouts of the results
    args                        whole tensors, as on one device
    mesh                        a Mesh, a dict of axis sizes or a DeviceMesh
    whole                       a function of the same arguments that computes the same results on one device

    `fn` runs on all ranks of the mesh, in threads of this process, and on one rank that has everything whole, where
    collectives do nothing. All in float64, with a little noise on the arguments. Each value of the ranks is compared
    with that of the one rank, which gives its placement: the same on all, a slice, an addend. The results are compared
    with `whole` or, without it, with those of the one rank; so a program that hard-codes the number of ranks needs it.

    The sum of all ranks' objectives is differentiated, as `pw.ops` documents.

    Raises StrategyError for strategies and arguments that do not fit, CaptureError if ranks do not meet.
    """
    fn, request = _asked(fn, Request(in_strategy, out_strategy, mesh=mesh))
    check_target("check_manual", fn)
    if not isinstance(args, tuple | list):
        raise StrategyError(
            f"check_manual takes the arguments of {name_of(fn)} in a tuple, such as (x,), not a {type(args).__name__}"
        )
    on = request.own_mesh
    if on is None:
        raise StrategyError(f"check_manual has no mesh to run {name_of(fn)} on; pass mesh={{'dp': 2, 'tp': 4}}")
    check_call(fn, tuple(args), {})
    call = flatten_call(fn, tuple(args), {})
    layouts = in_layouts(fn, call, request.in_strategy, on)
    given, one, right = _reference(fn, call, on, whole)
    parts = [[part_of(*pair, rank) for pair in zip(given, layouts, strict=True)] for rank in range(on.device_num)]
    runs = run_ranks(fn, call, parts, on)
    return _report(fn, on, runs, one, right, request.out_strategy, whole)


def _asked(fn: Any, request: Request) -> tuple[Any, Request]:
    """The program of one rank, and its strategies; a manual function has its own."""
    own = getattr(fn, "request", None)
    if not isinstance(own, Request):
        return fn, request
    if request.in_strategy is None and request.out_strategy is None:
        request = replace(request, in_strategy=own.in_strategy, out_strategy=own.out_strategy)
    return fn.fn, request if request.mesh is not None else replace(request, mesh=own.mesh)


def _reference(
    fn: Callable[..., Any], call: Call, mesh: Mesh, whole: Callable[..., Any] | None
) -> tuple[list[Tensor], Run, list[Tensor]]:
    """The arguments of all runs, the run of one rank, and the results of one device."""
    alone = Mesh(dict.fromkeys(mesh.axes, 1))
    exact = [_exact(tensor) for tensor in call.tensors]
    generator = torch.Generator().manual_seed(0)
    tries = [[_noisy(tensor, generator) for tensor in exact], exact]
    for given in tries:
        one = _one(fn, call, given, alone, needed=whole is None)
        right = list(one.outputs)
        if whole is not None:
            args, kwargs = call.structure.build([t.clone().requires_grad_(t.is_floating_point()) for t in given])
            with Exact():  # type: ignore[no-untyped-call]
                right = [tensor.detach() for tensor in tensors_in(whole(*args, **kwargs))]
        if all(output.isfinite().all() for output in right):
            break
    return given, one, right


def _one(fn: Callable[..., Any], call: Call, given: Sequence[Tensor], alone: Mesh, *, needed: bool) -> Run:
    """Run the program on one rank that has everything. Errors are raised only if the run is `needed`."""
    try:
        (one,) = run_ranks(fn, call, [given], alone)
    except Exception as error:
        if needed:
            error.add_note(
                f"check_manual runs {name_of(fn)} on one rank with everything whole, to know what it should compute; "
                "let it ask pw.axis_size and pw.axis_index in place of numbers, or pass whole"
            )
            raise
        return Run((), (), ())
    if not one.outputs:
        raise StrategyError(f"{name_of(fn)} returns no tensors, so that there is nothing to check; return its results")
    return one


def _exact(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.detach().to("cpu", torch.complex128)
    return tensor.detach().to("cpu", torch.float64) if tensor.is_floating_point() else tensor.detach().cpu()


def _noisy(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """`tensor` with a little noise, unless it holds integers."""
    if not tensor.is_floating_point():
        return tensor
    finite = tensor[tensor.isfinite()]
    deviation = float(finite.std()) if finite.numel() > 1 else 0.0
    noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
    return tensor + _NOISE * (deviation or 1.0) * noise


def _report(
    fn: Callable[..., Any],
    mesh: Mesh,
    runs: Sequence[Run],
    one: Run,
    right: Sequence[Tensor],
    out_strategy: tuple[Any, ...] | None,
    whole: Callable[..., Any] | None,
) -> ManualReport:
    first = runs[0]
    counts = {len(run.outputs) for run in runs}
    if counts != {len(right)}:
        raise StrategyError(
            f"{name_of(fn)} returns {' or '.join(map(str, sorted(counts)))} tensors on a rank, and {len(right)} on one "
            "device; let it return the same everywhere"
        )
    wanted = out_layouts(fn, [tuple(output.shape) for output in first.outputs], out_strategy, mesh)
    alike = [equal(found, expected) for found, expected in zip_longest(one.outputs, right)]
    measurements = Measurements(mesh, first.records, _known(runs, one, mesh) if all(alike) else {})
    differences, findings, unknown = list[ResultDifference](), list[Finding](), list[str]()
    for i, (layout, expected) in enumerate(zip(wanted, right, strict=True)):
        word = f"output {i}"
        difference = _difference(word, [run.outputs[i] for run in runs], expected, layout)
        differences.append(difference)
        if difference.right:
            continue
        found = list(measurements.findings(first.numbers[i], layout))
        findings += [replace(finding, outputs=(word,)) for finding in found]
        if not found:
            unknown.append(_why_not(word, fn, all(alike), first.numbers[i], measurements))
    against = "whole" if whole is not None else "one rank with everything whole"
    drawn = dict.fromkeys(line for run in (one, *runs) for line in run.drawn)
    unknown += [f"random numbers are drawn at {line}: what they are differs from one device" for line in drawn]
    return ManualReport(name_of(fn), against, tuple(differences), _joined(findings), tuple(unknown))


def _joined(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of several results, each mistake once."""
    joined: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        alone = replace(finding, outputs=())
        joined[alone] = tuple(dict.fromkeys((*joined.get(alone, ()), *finding.outputs)))
    return tuple(replace(finding, outputs=outputs) for finding, outputs in joined.items())


def _why_not(word: str, fn: Callable[..., Any], alike: bool, number: int | None, measurements: Measurements) -> str:
    """Why a wrong result is not explained."""
    if not alike:
        return (
            f"why {word} is wrong: on one rank {name_of(fn)} does not compute what whole does, so that no value on "
            "the way is known; let it ask pw.axis_size and pw.axis_index in place of numbers"
        )
    if number is None:
        return f"why {word} is wrong: it is not computed of the arguments"
    records = measurements.records
    if culprits := measurements.culprits(number):
        return (
            f"why {word} is wrong: from {records[culprits[0]].line} on, values are not those of one device in any "
            "layout, which need not be a mistake there"
        )
    lost = [record for i, record in enumerate(records) if i not in measurements.known and record.line.number]
    where = f", first at {lost[0].line}" if lost else ""
    return f"why {word} is wrong: {len(lost)} values on the way have no counterpart on one rank{where}"


def _known(runs: Sequence[Run], one: Run, mesh: Mesh) -> dict[int, tuple[Measured, ...]]:
    """The measured placements of the first rank's records that have a counterpart on one device. A collective does not
    change the value that a tensor has on one device."""
    records = runs[0].records
    counterparts = matched(records, one.records, collectives=False)
    others = [matched(records, run.records) for run in runs[1:]]
    sources: dict[int, int] = {}
    known: dict[int, tuple[Measured, ...]] = {}
    for i, record in enumerate(records):
        source = counterparts.get(i)
        if record.collective and record.operands:
            source = sources.get(record.operands[0])
        if source is None or any(i not in each for each in others):
            continue
        sources[i] = source
        values = [record.value, *(run.records[each[i]].value for run, each in zip(runs[1:], others, strict=True))]
        known[i] = measure(values, one.records[source].value, mesh)
    return known


def _difference(word: str, values: Sequence[Tensor], expected: Tensor, layout: Layout) -> ResultDifference:
    """The difference between the results of the ranks and the `expected` ones under `layout`."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    parts = [_part(values, rank, layout) for rank in range(len(values))]
    whole = expected if expected.shape == layout.global_shape(tuple(values[0].shape)) else None
    if whole is None or any(value.shape != values[0].shape for value in values):
        return ResultDifference(word, float("inf"), largest, False)
    found = [(part, whole[layout.slices(tuple(whole.shape), rank)]) for rank, part in enumerate(parts)]
    off = max(
        float((a.double() - b.double()).abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0 for a, b in found
    )
    return ResultDifference(word, off, largest, all(equal(a, b) for a, b in found))


def _part(values: Sequence[Tensor], rank: int, layout: Layout) -> Tensor:
    """The value that a rank's tensor stands for: where ranks have addends, their sum."""
    axes = [
        axis
        for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True)
        if not isinstance(placement, Shard | Replicate)
    ]
    return torch.stack([values[other] for other in layout.mesh.group(rank, *axes)]).sum(0) if axes else values[rank]
