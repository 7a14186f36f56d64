"""PyTorch's samples of its operators (the OpInfo database), each run split on simulated ranks and compared with one
device.

    python tests/conformance/operators.py                       all entries, resumed from out/conformance
    python tests/conformance/operators.py --only fft --samples 3
    python tests/conformance/operators.py --dtypes complex128 int64 --samples 4
    python tests/conformance/operators.py --ranks one       as many ranks as the dim has elements; "none": one more
    python tests/conformance/operators.py --samples 0 --strided 2 --results out/strided
    python tests/conformance/operators.py --write               docs/coverage/operators.md, of all results; of a run
                                                                of other samples its row there

In each sample every dim of every tensor is split in turn, over 4 ranks (a dim of 2 or 3 elements over 2), as by
`in_strategy`. If the rules allow a plan that gathers nothing, it is taken, so that the rules are tested and not the
conversions: for such small tensors the cheapest plan would often gather them first. Outputs, and gradients for random
cotangents, have to equal those of plain PyTorch.

Some samples of an entry run again with strided operands, and with strided operands and gradients (strided.py); with
`--samples 0` only these run. On every rank each value is compared with its trace, strides included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from strided import strided
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from partway.propagation.capture.capture import capture
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.graph.graph import Graph, constant_nodes, differentiated
from partway.propagation.graph.nodes import draws_random_numbers, operands, operator_name, shape, source_of, tensor_of
from partway.propagation.graph.port import Port, Role
from partway.propagation.graph.structure import flatten
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import SearchProblem, Settings, VertexKind
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.program.program import verify_program
from partway.propagation.search.exact import dynamic_programming
from partway.runtime.executors.simulate import Simulator
from partway.runtime.loaded import Loaded
from partway.strategy import Layout, Mesh, Shard
from partway.strategy.errors import CaptureError
from partway.strategy.placement import REPLICATE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage" / "operators.md"
RANKS = 4
STRIDED = 4  # samples of an entry that are run with strided operands too
os.environ["PARTWAY_VERIFY"] = "1"
TOGETHER = 48  # samples that are captured together
DTYPES = torch.float64, torch.float32  # of the page
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}  # relative to the largest element
ABORTS = frozenset({"sparse.mm.reduce", "sparse.sampled_addmm"})  # in torch.export, with the whole process


class Ranks(StrEnum):
    """The number of ranks that a dim is split over."""

    FEW = "few"  # over RANKS, or over 2 where they are more than its elements
    ONE = "one"  # as many as it has elements, so that each rank has one
    NONE = "none"  # one more, so that the last rank has none


MOST = 8  # the elements of a dim that is split so


class Status(StrEnum):
    """The status of an entry: the worst of its samples, which comes last here."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    RANDOM = "random"
    UNSUPPORTED = "unsupported"
    WRONG = "wrong"


MEANING = {
    Status.SHARDED: "right, every operator by a rule, and split",
    Status.REPLICATED: "right; an operator has no rule, or can split nothing, and runs on gathered operands",
    Status.RANDOM: "random numbers or uninitialized memory; shapes and dtypes are right",
    Status.UNSUPPORTED: "no sample has a static graph in torch.export",
    Status.WRONG: "results that differ from plain PyTorch, or an error",
}


@dataclass
class Result:
    """The results of an entry's samples. `splits` were tried, and in `kept` of them an operator computed on parts;
    `captured` of the `samples` were captured, of which `strided` have strided operands; `fallbacks` are the operators
    without a rule, `problems` the failures."""

    name: str
    status: Status = Status.UNSUPPORTED
    samples: int = 0
    captured: int = 0
    strided: int = 0
    splits: int = 0
    kept: int = 0
    fallbacks: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    undefined: bool = False


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def entries(dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """The entries that take one of `dtypes` on the CPU, by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # imports SciPy, which takes seconds

    return {name_of(info): info for info in op_db if not info.dtypes.isdisjoint(dtypes)}


# -- Samples, run together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One call of an entry. `fn` returns its outputs, or those with a gradient."""

    entry: str
    where: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scalars: bool  # only gradients of scalars are planned where there are any, so samples with and without stay apart

    @property
    def tensors(self) -> list[Tensor]:
        return flatten((self.args, self.kwargs))[0]


@dataclass(frozen=True)
class Batch:
    """Several samples captured as one function, since each capture takes some time; their graphs are not connected.

    names       the names of the inputs of each sample
    written     the inputs that it writes to
    owners      the sample of each node of the graph
    expected    the outputs and gradients of each sample on one device, and the inputs after its writes
    undefined   whether the numbers of a sample are random, or uninitialized memory
    """

    samples: tuple[Sample, ...]
    graph: Graph
    names: tuple[tuple[str, ...], ...]
    written: frozenset[str]
    owners: dict[fx.Node, int]
    expected: tuple[list[Any], ...]
    undefined: tuple[bool, ...]


def every_call(calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    return [fn(*args, **kwargs) for fn, args, kwargs in calls]


def fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def sample_of(info: Any, given: Any, where: str) -> Sample:
    """The sample of an entry. Raises the entry's own errors."""
    args, kwargs = (given.input, *given.args), dict(given.kwargs)

    def processed(x: Any, *args: Any, **kwargs: Any) -> Any:
        return given.output_process_fn_grad(info.op(x, *args, **kwargs))

    def outputs_of(fn: Callable[..., Any]) -> list[Tensor]:
        tensors, structure = flatten((args, kwargs))
        tensors = [fresh(t) for t in tensors]
        plain_args, plain_kwargs = structure.build(list(tensors))
        outputs = flatten(fn(*plain_args, **plain_kwargs))[0]
        gradients_of([outputs], [t for t in tensors if t.requires_grad])
        return outputs

    try:
        fn, outputs = info.op, outputs_of(info.op)
    except RuntimeError:  # none of its outputs has a gradient
        fn, outputs = processed, outputs_of(processed)
    return Sample(name_of(info), where, fn, args, kwargs, any(not o.shape for o in differentiable(outputs)))


def differentiable(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs whose gradients are planned: scalars, if there are any."""
    able = [o for o in outputs if o.requires_grad]
    return [o for o in able if not o.shape] or able


def gradients_of(outputs: Sequence[Sequence[Tensor]], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the outputs of some samples, weighted with fixed random numbers."""
    generator = torch.Generator().manual_seed(1)
    weighed = []
    for own in outputs:
        able = set(map(id, differentiable(own)))
        for o in own:  # a weight for each, since Partway may have gradients of zero where PyTorch has none
            weight = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
            weighed += [(o, weight)] if id(o) in able else []
    if not weighed or not leaves:
        return [None for _ in leaves]
    able, weights = zip(*weighed, strict=True)
    return list(torch.autograd.grad(able, leaves, weights, allow_unused=True))


def values_of(outputs: list[list[Tensor]], leaves: list[list[Tensor]]) -> tuple[list[Any], ...]:
    """The outputs of each sample, and their gradients."""
    needs = [[t for t in own if t.requires_grad] for own in leaves]
    gradients = gradients_of(outputs, [t for own in needs for t in own])
    every = zip(outputs, grouped(gradients, needs), strict=True)
    return tuple([*(o.detach() for o in own), *found] for own, found in every)


def grouped(flat: Iterable[Any], like: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """`flat`, cut into lists with the lengths of those in `like`."""
    rest = iter(flat)
    return [[next(rest) for _ in group] for group in like]


def batch_of(samples: Sequence[Sample]) -> Batch:
    """The batch of samples. Raises CaptureError if they cannot be captured."""
    calls = [(sample.fn, sample.args, sample.kwargs) for sample in samples]
    graph = capture(every_call, (calls,), {})
    leaves = [[fresh(t) for t in sample.tensors] for sample in samples]
    torch.manual_seed(0)
    outputs = []
    for sample, tensors in zip(samples, leaves, strict=True):
        args, kwargs = flatten((sample.args, sample.kwargs))[1].build(list(tensors))
        outputs.append(flatten(sample.fn(*args, **kwargs))[0])
    inputs = [port for port in graph.inputs if port.role is Role.INPUT]
    names = tuple(tuple(port.name for port in group) for group in grouped(inputs, leaves))
    owners: dict[fx.Node, int] = {}
    for i, group in enumerate(grouped(results_of(graph), outputs)):
        _own(owners, i, [port.node for port in group])
    samples_of_inputs = {name: i for i, own in enumerate(names) for name in own}
    updates = [port for port in graph.outputs if port.role is Role.INPUT_UPDATE]
    for port in updates:
        _own(owners, samples_of_inputs[port.name], [port.node])
    written = frozenset(port.name for port in updates)
    expected = [
        [*own, *(t.detach() for name, t in zip(given, tensors, strict=True) if name in written)]
        for own, given, tensors in zip(values_of(outputs, leaves), names, leaves, strict=True)
    ]
    undefined = {owners.get(node) for node in graph.nodes if _is_undefined(node)}
    return Batch(
        tuple(samples), graph, names, written, owners, tuple(expected),
        tuple(i in undefined for i in range(len(samples))),
    )  # fmt: skip


def results_of(graph: Graph) -> list[Port]:
    """The outputs of the function."""
    return [port for port in graph.outputs if port.role is Role.RESULT]


def _own(owners: dict[fx.Node, int], i: int, nodes: list[fx.Node]) -> None:
    """Record that sample `i` reads `nodes` and the nodes that they depend on."""
    while nodes:
        node = nodes.pop()
        if node not in owners:
            owners[node] = i
            nodes += operands(node)


def _is_undefined(node: fx.Node) -> bool:
    return draws_random_numbers(node) or "empty" in operator_name(node)


# -- Splits ------------------------------------------------------------------------------------------------------------

Splits = dict[int, tuple[str, int]]  # for some samples, the split input and dim


def ranks_of(n: int, over: Ranks) -> int:
    """The number of ranks for a dim of `n` elements; 1: it stays whole."""
    if over is Ranks.FEW:
        return RANKS if n >= RANKS else min(n, 2)
    return n + (over is Ranks.NONE) if 1 < n <= MOST else 1


def rounds_of(batch: Batch, over: Ranks) -> Iterator[tuple[Mesh, Splits]]:
    """Each dim of each input of each sample once, over the number of ranks that `over` gives; a round has one split of
    each sample."""
    sizes = {port.name: shape(port.node) for port in batch.graph.inputs}
    every = {ranks_of(n, over) for own in batch.names for name in own for n in sizes[name]}
    for ranks in sorted((ranks for ranks in every if ranks > 1), reverse=True):
        dims = [
            [(name, d) for name in own for d, n in enumerate(sizes[name]) if ranks_of(n, over) == ranks]
            for own in batch.names
        ]
        for i in range(max(map(len, dims), default=0)):
            yield Mesh({"x": ranks}), {sample: own[i] for sample, own in enumerate(dims) if i < len(own)}


def layouts_of(mesh: Mesh, size: Sequence[int], least: int) -> tuple[Layout, ...]:
    """The layouts that are whole, or split along any dim with at least this many elements, also unevenly."""
    placements = [Shard(dim) for dim, n in enumerate(size) if n >= least]
    return tuple(Layout(mesh, (placement,)) for placement in [*placements, REPLICATE])


def planned(batch: Batch, mesh: Mesh, splits: Splits) -> tuple[SearchProblem, tuple[int, ...]]:
    """For each sample the cheapest plan with its split that gathers no split tensor, if there is one; otherwise the
    cheapest plan. Other inputs and outputs may have any layout."""
    graph, constants = batch.graph, constant_nodes(batch.graph)
    ports = [port for port in graph.inputs if port.role is Role.INPUT]
    ports += [port for port in graph.outputs if source_of(port.node).node not in constants]
    whole = {port.name: shape(port.node) for port in graph.inputs}
    least = min([mesh.device_num, *(whole[name][dim] for name, dim in splits.values())])
    allowed = {port.name: (layouts_of(mesh, tensor_of(source_of(port.node)).shape, least), "any") for port in ports}
    allowed |= {name: ((Layout(mesh, (Shard(dim),)),), f"dim {dim}") for name, dim in splits.values()}
    settings = Settings(mesh, profile_of("cpu"), WEIGHTS[Level.COMMUNICATION], fully_use_devices=False)
    free, staying = (formulate(graph, replace(settings, stay_split=stay), allowed) for stay in (False, True))
    stays = dynamic_programming(staying).choice
    moves = impossible(batch, staying, stays)
    if not moves:
        return free, stays
    found = dynamic_programming(free).choice
    owners = [batch.owners.get(vertex.node) for vertex in free.vertices]
    return free, tuple(f if owner in moves else s for owner, f, s in zip(owners, found, stays, strict=True))


def impossible(batch: Batch, problem: SearchProblem, choice: Sequence[int]) -> set[int | None]:
    """The samples with an impossible conversion in `choice`."""
    found = set()
    for edge in problem.edges:
        rows, columns = edge.codes(problem.vertices)
        cost = edge.table.rows([int(rows[choice[edge.producer]])])[0, columns[choice[edge.consumer]]]
        if math.isinf(cost):
            found.add(batch.owners.get(problem.vertices[edge.consumer].node))
    return found


def kept(batch: Batch, problem: SearchProblem, choice: Sequence[int]) -> set[int | None]:
    """The samples in which an operator computes on parts, or that compute nothing."""
    operators = [(v, c) for v, c in zip(problem.vertices, choice, strict=True) if v.kind is VertexKind.OPERATOR]
    split = {batch.owners.get(v.node) for v, c in operators if any(v.options[c].factors)}
    return split | (set(range(len(batch.samples))) - {batch.owners.get(v.node) for v, _ in operators})


def run(batch: Batch, problem: SearchProblem, choice: tuple[int, ...]) -> tuple[list[Any], ...]:
    """The outputs and gradients of each sample on simulated ranks."""
    program = verify_program(lower(problem, choice))
    step = Loaded(differentiate(program, differentiated(batch.graph)), Simulator(problem.settings.mesh), lambda w: None)
    leaves = [[fresh(t) for t in sample.tensors] for sample in batch.samples]
    given = iter([t for own in leaves for t in own])
    constants = batch.graph.constants
    torch.manual_seed(0)
    outputs = step([next(given) if p.role is Role.INPUT else constants[p.name] for p in batch.graph.inputs])
    found = dict(zip(batch.graph.outputs, outputs, strict=True))
    updates = {port.name: out for port, out in found.items() if port.role is Role.INPUT_UPDATE}
    counts = [
        len(values) - sum(t.requires_grad for t in own) - sum(name in batch.written for name in names)
        for values, own, names in zip(batch.expected, leaves, batch.names, strict=True)
    ]
    results = grouped([found[port] for port in results_of(batch.graph)], [range(n) for n in counts])
    every = zip(values_of(results, leaves), batch.names, strict=True)
    return tuple([*own, *(updates[name].detach() for name in names if name in batch.written)] for own, names in every)


def difference(found: Sequence[Any], expected: Sequence[Any], undefined: bool) -> str:
    """The differences of `found` from the expected values; "" if there are none."""
    if len(found) != len(expected):
        return f"{len(found)} values, not {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        problem = _difference(a, b, undefined)
        if problem:
            return f"value {i} {problem}"
    return ""


def _difference(a: Tensor | None, b: Tensor | None, undefined: bool) -> str:
    if a is None or b is None:
        other = a if b is None else b
        return "" if other is None or undefined or not other.any() else "is None on one side"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
    if undefined:
        return ""
    a, b = (t.to_dense() if t.layout is not torch.strided else t for t in (a, b))
    if b.dtype is torch.complex32:  # no comparison supports it
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if torch.equal(a, b):
        return ""
    if not (b.is_floating_point() or b.is_complex()):
        return "has other elements"
    finite = b.isfinite()
    magnitude = 1.0 + float(b[finite].abs().max()) if finite.any() else 1.0
    tolerance = TOLERANCES.get(b.abs().dtype, 1e-2) * magnitude
    if torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True):
        return ""
    return f"differs by {float((a - b).abs().nan_to_num(nan=torch.inf).max()):.3g}, of {magnitude:.3g}"


# -- One entry ---------------------------------------------------------------------------------------------------------


def spread(samples: Sequence[Any], most: int | None) -> list[Any]:
    """At most this many of `samples`, evenly spaced, with the first one."""
    if most is None or len(samples) <= most:
        return list(samples)
    return [samples[i * len(samples) // most] for i in range(most)]


def examine(
    infos: Sequence[Any], most: int | None = None, dtypes: Sequence[torch.dtype] = DTYPES, over: Ranks = Ranks.FEW,
    strided: int = STRIDED,
) -> list[Result]:  # fmt: skip
    """The results of some entries, with at most `most` samples of each in each dtype (None: all), and `strided` samples
    of the first dtype with strided operands."""
    results = {name_of(info): Result(name_of(info)) for info in infos}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = [
            sample for info in infos for sample in samples_of(info, most, dtypes, strided, results[name_of(info)])
        ]
        fixed: list[Sample] = []
        free: dict[str, Sample] = {}  # of each entry the first, to have the reason
        for sample in samples:
            if depends_on_values(sample):
                free.setdefault(sample.entry, sample)
            else:
                fixed.append(sample)
        for sample in free.values():
            _examine([sample], results, over)
        for scalars in (True, False):
            alike = [sample for sample in fixed if sample.scalars == scalars]
            for first in range(0, len(alike), TOGETHER):
                _examine(alike[first : first + TOGETHER], results, over)
    for result in results.values():
        result.status = _status(result)
    return list(results.values())


def samples_of(
    info: Any, most: int | None, dtypes: Sequence[torch.dtype], strided: int, result: Result
) -> Iterator[Sample]:
    """The samples of an entry to run, counted in `result`."""
    own = [dtype for dtype in dtypes if dtype in info.dtypes]
    for dtype in own:
        torch.manual_seed(0)
        differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        given = list(enumerate(info.sample_inputs("cpu", dtype, requires_grad=differentiable)))
        for i, one in spread(given, most):
            result.samples += 1
            try:
                yield sample_of(info, one, f"{str(dtype).removeprefix('torch.')} sample {i}")
            except Exception as error:  # PyTorch itself refuses this
                _note(result.reasons, f"PyTorch: {_first_line(error)}")
        for i, one in spread(given, strided) if dtype is own[0] else ():
            for sample in strided_samples(info, one, f"{str(dtype).removeprefix('torch.')} sample {i}", i):
                result.samples += 1
                result.strided += 1
                yield sample


def strided_samples(info: Any, given: Any, where: str, number: int) -> Iterator[Sample]:
    """A sample with strided operands and gradients, if PyTorch itself accepts them."""
    with contextlib.suppress(Exception):
        plain = sample_of(info, given, where)
        for name, fn, stored in strided(plain.fn, plain.args, plain.kwargs, number):
            with contextlib.suppress(Exception):
                tensors = [fresh(t) for t in stored]
                gradients_of([flatten(fn(*tensors))[0]], [t for t in tensors if t.requires_grad])
                yield replace(plain, where=f"{where} {name}", fn=fn, args=stored, kwargs={})


def depends_on_values(sample: Sample) -> bool:
    """Whether sizes or computations depend on the values of tensors: fake tensors show this much sooner than a failing
    capture."""
    mode = FakeTensorMode()
    tensors, structure = flatten((sample.args, sample.kwargs))
    try:
        args, kwargs = structure.build([mode.from_tensor(t) for t in tensors])
        with mode:
            sample.fn(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True
    except Exception:  # the capture reports other errors
        return False
    return False


def _examine(samples: Sequence[Sample], results: dict[str, Result], over: Ranks) -> None:
    """Add the results of samples to `results`: of all together, or of halves if something is wrong."""
    if not samples:
        return
    tried: list[tuple[SearchProblem, tuple[int, ...], Splits, dict[int, str]]] = []
    reason = problem = ""
    try:
        batch = batch_of(samples)
        tried = [_try(batch, mesh, splits) for mesh, splits in rounds_of(batch, over)]
    except CaptureError as error:
        reason = _first_line(error)
    except Exception as error:  # whatever it is, it is a finding
        problem = f"{samples[0].where}: {_last_frame(error)}"
    if len(samples) > 1 and (reason or problem or any(wrong for *_, wrong in tried)):
        for half in _halves(samples):
            _examine(half, results, over)
        return
    if reason or problem:
        result = results[samples[0].entry]
        _note(result.reasons if reason else result.problems, reason or problem)
        return
    for sample, undefined in zip(samples, batch.undefined, strict=True):
        results[sample.entry].captured += 1
        results[sample.entry].undefined |= undefined
    for searched, choice, splits, wrong in tried:
        _count(batch, searched, choice, splits, results)
        for i, text in wrong.items():
            name, dim = splits.get(i, ("", 0))
            _note(results[samples[i].entry].problems, f"{samples[i].where}, dim {dim} of {name}: {text}")


def _halves(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Split between two entries, if there are several."""
    middle = len(samples) // 2
    starts = [i for i in range(1, len(samples)) if samples[i].entry != samples[i - 1].entry]
    middle = min(starts, key=lambda i: abs(i - middle), default=middle)
    return samples[:middle], samples[middle:]


def _try(batch: Batch, mesh: Mesh, splits: Splits) -> tuple[SearchProblem, tuple[int, ...], Splits, dict[int, str]]:
    """A plan with these splits, and the failures of each sample."""
    problem, choice = planned(batch, mesh, splits)
    every = enumerate(zip(run(batch, problem, choice), batch.expected, batch.undefined, strict=True))
    texts = {i: difference(*values) for i, values in every}
    return problem, choice, splits, {i: text for i, text in texts.items() if text}


def _count(
    batch: Batch, problem: SearchProblem, choice: Sequence[int], splits: Splits, results: dict[str, Result]
) -> None:
    """Count the splits that stayed, and record operators without a rule."""
    staying = kept(batch, problem, choice)
    for i in splits:
        results[batch.samples[i].entry].splits += 1
        results[batch.samples[i].entry].kept += i in staying
    for node in batch.graph.nodes:
        if operator_name(node) in problem.unknown and node in batch.owners and node not in problem.constants:
            _note(results[batch.samples[batch.owners[node]].entry].fallbacks, operator_name(node))


def _status(result: Result) -> Status:
    if result.problems:
        return Status.WRONG
    if not result.captured:
        return Status.UNSUPPORTED
    if result.undefined:
        return Status.RANDOM
    return Status.REPLICATED if result.fallbacks or (result.splits and not result.kept) else Status.SHARDED


def _note(notes: list[str], text: str, most: int = 12) -> None:
    if text not in notes and len(notes) < most:
        notes.append(text)


def _first_line(error: Exception) -> str:
    """The message of an error in one line, without facts of this machine or run."""
    text = " ".join(str(error).splitlines()[:1])
    return re.sub(r"\S*/|\bat 0x[0-9a-f]+", "", text)[:200]


def _last_frame(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {_first_line(error)}"


# -- All entries, on processes that may end ----------------------------------------------------------------------------


def _work(connection: Connection, most: int | None, dtypes: Sequence[torch.dtype], over: Ranks, strided: int) -> None:
    """A process that examines the requested entries, and discards PyTorch's output to the terminal."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    known = entries(dtypes)
    while names := connection.recv():
        connection.send([asdict(result) for result in examine([known[n] for n in names], most, dtypes, over, strided)])


class Worker:
    """A process that can be replaced, and the entries that it examines."""

    def __init__(self, most: int | None, dtypes: Sequence[torch.dtype], over: Ranks, strided: int) -> None:
        self.names: list[str] = []
        self.since = 0.0
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, most, dtypes, over, strided), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, names: list[str]) -> None:
        self.names, self.since = names, time.monotonic()
        self.connection.send(names)

    def answer(self) -> list[Result] | None:
        """The results of the requested entries; None if one of them ended the process."""
        try:
            return [loaded(found) for found in self.connection.recv()]
        except (EOFError, ConnectionResetError):
            return None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def loaded(found: dict[str, Any]) -> Result:
    return Result(**{**found, "status": Status(found["status"])})


def examine_all(
    names: Sequence[str], most: int | None = None, workers: int = 2, seconds: float = 1800.0, together: int = 4,
    dtypes: Sequence[torch.dtype] = DTYPES, over: Ranks = Ranks.FEW, strided: int = STRIDED,
) -> Iterator[Result]:  # fmt: skip
    """The results of `names` as they arrive, from several processes. An entry that ends its process, or takes longer
    than `seconds`, is tried alone, and is then wrong."""
    left = [list(names[i : i + together]) for i in range(0, len(names), together)][::-1]
    busy: list[Worker] = []
    idle = [Worker(most, dtypes, over, strided) for _ in range(min(workers, len(left)))]
    while left or busy:
        while left and idle:
            busy.append(idle.pop())
            busy[-1].ask(left.pop())
        ready = wait([worker.connection for worker in busy], timeout=1.0)
        for worker in list(busy):
            late = time.monotonic() - worker.since > seconds * len(worker.names)
            if worker.connection not in ready and not late:
                continue
            busy.remove(worker)
            found = worker.answer() if worker.connection in ready else None
            if found is not None:
                idle.append(worker)
                yield from found
                continue
            worker.stop()
            idle.append(Worker(most, dtypes, over, strided))
            if len(worker.names) > 1:
                left += [[name] for name in worker.names]
            else:
                yield _without_answer(worker.names[0], late, seconds)
    for worker in idle:
        worker.stop()


def _without_answer(name: str, late: bool, seconds: float) -> Result:
    if name in ABORTS and not late:
        return Result(name, Status.UNSUPPORTED, reasons=["torch.export ends the process"])
    return Result(name, Status.WRONG, problems=[f"not done after {seconds} seconds" if late else "the process ends"])


# -- The page ----------------------------------------------------------------------------------------------------------

HEAD = """# Operators

PyTorch describes its operators in a database of samples (`op_db`), which its own tests run. The samples of each entry
that takes float32 on the CPU run here with every dim of every tensor split in turn over {ranks} simulated ranks (a
dim of 2 or 3 elements over 2), and all other layouts planned. Outputs and gradients are compared with plain PyTorch
{version}. The samples are {most}, in float64 and in float32; {strided} have strided operands,
and half of these strided gradients (transposed, channels last, expanded, slices with and without steps).
`python tests/conformance/operators.py --write` writes this page, `make conformance` checks it.

| status | entries | |
| --- | --: | --- |
{totals}
| all | {count} | {samples} samples, {splits} splits, {kept} of which some operator computes on parts |

An entry has the worst status of its samples. Samples without a static graph in torch.export are omitted: the second
number of *samples* counts them, and *why* has the reason. *kept* is the number of splits in which an operator computes
on parts. (If only a dim is split that an operator cannot split, it is gathered, and some sizes cannot be cut evenly.)

| entry | status | samples | splits | kept | without a rule, or why |
| --- | --- | --: | --: | --: | --- |
{lines}
"""
OTHERS = """
## Other runs

The results of other options of the same program. With strided operands every value of every rank is also compared with
its trace, strides included. `--ranks one` splits a dim over as many ranks as it has elements, `--ranks none` over one
more, so the last rank has none.

| options | entries | samples | splits | kept | wrong |
| --- | --: | --: | --: | --: | --: |
"""


def page(results: Sequence[Result], most: int | None) -> str:
    """docs/coverage/operators.md, except the rows of other runs."""
    counts = Counter(result.status for result in results)
    totals = [f"| {status.value} | {counts[status]} | {MEANING[status]} |" for status in Status]
    return HEAD.format(
        ranks=RANKS,
        most="all of an entry's" if most is None else f"at most {most} of an entry, evenly spread",
        version=".".join(torch.__version__.split(".")[:2]),
        totals="\n".join(totals),
        count=len(results),
        samples=sum(result.captured for result in results),
        strided=sum(result.strided for result in results),
        splits=sum(result.splits for result in results),
        kept=sum(result.kept for result in results),
        lines="\n".join(map(_line, sorted(results, key=lambda result: result.name))),
    )


def row(options: str, results: Sequence[Result]) -> str:
    """The results of another run, in one row."""
    wrong = sum(result.status is Status.WRONG for result in results)
    sums = [sum(getattr(r, what) for r in results) for what in ("captured", "splits", "kept")]
    return "".join(f"| {cell} " for cell in (f"`{options}`", len(results), *sums, wrong)) + "|\n"


def rows() -> dict[str, str]:
    """The rows of other runs on the page, by their options."""
    text = PAGE.read_text(encoding="utf-8").partition(OTHERS)[2]
    return {line.split("`")[1]: line for line in text.splitlines(keepends=True)}


def write(results: Sequence[Result], most: int | None, options: str) -> None:
    """Write the page from these results or, if they are of another run, the row of that run."""
    main, known = PAGE.read_text(encoding="utf-8").partition(OTHERS)[0], rows()
    if options:
        known[options] = row(options, results)
    else:
        main = page(results, most)
    PAGE.write_text(main + OTHERS + "".join(known[name] for name in sorted(known)), encoding="utf-8")


def _line(result: Result) -> str:
    lost = result.samples - result.captured
    samples = f"{result.captured} + {lost}" if lost else str(result.captured)
    why = "; ".join([*result.problems[:2], *(f"`{name}`" for name in result.fallbacks), *result.reasons[:1]])
    return f"| {result.name} | {result.status.value} | {samples} | {result.splits} | {result.kept} | {_escaped(why)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def statuses() -> dict[str, Status]:
    """The status of each entry on the page."""
    rows = re.findall(r"^\| (\S+) \| (\w+) \| \d", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: Status(status) for name, status in rows if status in set(Status)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="entries whose name this regular expression finds")
    parser.add_argument("--samples", type=int, help="at most this many of an entry in each dtype (default: all)")
    parser.add_argument("--strided", type=int, default=STRIDED, help="samples with strided operands (default: 4)")
    parser.add_argument("--dtypes", nargs="+", help="such as complex128 int64 (default: float64 float32)")
    parser.add_argument(
        "--ranks", type=Ranks, default=Ranks.FEW, choices=list(Ranks), help="the number of ranks for a dim"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1800.0, help="for one entry")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "conformance")
    parser.add_argument("--again", action="store_true", help="also entries with results")
    parser.add_argument("--write", action="store_true", help="write docs/coverage/operators.md")
    given = parser.parse_args()
    if given.write and given.only:
        parser.error("the page is of all entries; leave out --only or --write")
    dtypes = [getattr(torch, name) for name in given.dtypes or ()] or DTYPES
    variant = "-".join([*(given.dtypes or ()), *([given.ranks] if given.ranks is not Ranks.FEW else [])])
    given.results /= variant
    given.results.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in entries(dtypes) if re.search(given.only, name)]
    todo = [name for name in chosen if given.again or not (given.results / f"{name}.json").exists()]
    for result in examine_all(
        todo, given.samples, given.workers, given.seconds, dtypes=dtypes, over=given.ranks, strided=given.strided
    ):
        (given.results / f"{result.name}.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
        notes = "; ".join([*result.problems, *result.fallbacks, *result.reasons])
        print(f"{result.name}: {result.status.value}, {result.kept} of {result.splits} kept  {notes}", flush=True)
    results = [loaded(json.loads((given.results / f"{name}.json").read_text(encoding="utf-8"))) for name in chosen]
    print(dict(Counter(result.status.value for result in results)))
    if given.write:
        write(results, given.samples, _options(given))


def _options(given: argparse.Namespace) -> str:
    """The options that distinguish another run from that of the page."""
    options = [f"--dtypes {' '.join(given.dtypes)}"] if given.dtypes else []
    options += [f"--ranks {given.ranks}"] if given.ranks is not Ranks.FEW else []
    if options or given.samples == 0:
        options += [f"--samples {given.samples}"] if given.samples is not None else []
        options += [f"--strided {given.strided}"] if given.strided != STRIDED else []
    return " ".join(options)


if __name__ == "__main__":
    main()
