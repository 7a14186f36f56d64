"""The seconds and bytes of a published run's step, from its raw ingredients and a profile.

Operators are priced by `operator_seconds`, collectives by `collective_cost`, and `play` runs both on lanes, all of
the package. Everything else is how the steps of the sources differ from one forward and backward of a program:

* Gradient accumulation runs the forward and backward of a microbatch several times. Collectives of parameters run in
  each with ZeRO 3, and in the last one otherwise.
* Without overlap, gradients are reduced after the backward.
* The gradients of a block are copied into one buffer before they are reduced.
* A run of elementwise operators is one kernel where they are compiled, and in norms.
* The optimizer reads and writes the local parameters, gradients and states once in a step.

The layers of a model are equal: two programs with few layers give the figures of all layers by a straight line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from published_plans import MICROBATCH
from published_rows import Run

from partway.propagation.cost.cost import collective_cost, operator_seconds, outermost
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.program.schedule import COMMUNICATION, COMPUTE, Work, play
from partway.strategy import Mesh
from partway.strategy.placement import Kind

Floats = NDArray[np.float64]

# Operators beside pointwise ones that a compiler fuses with their neighbours (TorchInductor: pointwise and reductions).
FUSED_BY_COMPILERS = (
    "aten._to_copy.default", "aten.cat.default", "aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default",
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten.clone.default",
    "part", "partway.class_terms.default", "partway.class_terms_backward.default",
)  # fmt: skip
PRODUCT, ATTENTION, OTHER = 0, 1, 2  # classes of kernels
NAMES = ("aten.mm.default", "aten.scaled_dot_product_attention.default", "")  # an operator of each class


# -- Prices ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """The prices of a GPU and its network: a profile of the package, of a preset or with other figures."""

    profile: DeviceProfile

    def seconds(self, kernels: Kernels) -> Floats:
        """The seconds of each kernel."""
        found = np.zeros(len(kernels.flops))
        for dtype, kind in {*zip(kernels.dtypes.tolist(), kernels.classes.tolist(), strict=True)}:
            here = (kernels.dtypes == dtype) & (kernels.classes == kind)
            name, figures = NAMES[kind], (kernels.flops[here], kernels.moved[here])
            found[here] = operator_seconds(*figures, getattr(torch, DTYPES[dtype]), self.profile, name=name)
        return found

    def collective(self, kind: str, payload: float, mesh: Mesh, axes: tuple[str, ...]) -> tuple[float, float]:
        """The seconds of a collective, and those of each byte of its payload."""
        return collective_cost(Kind(kind), payload, mesh, axes, self.profile)


# -- Kernels and messages in order -------------------------------------------------------------------------------------

DTYPES = ("bfloat16", "float16", "float32", "int64", "bool", "int32", "float64")


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a graph: operations, bytes read and written, dtype, class, and the stretch that each is in."""

    flops: Floats
    moved: Floats
    dtypes: NDArray[np.intp]
    classes: NDArray[np.intp]
    stretches: NDArray[np.intp]


class Item:
    """A stretch of computation or a collective, as `play` reads it."""

    __slots__ = ("all_input_nodes", "message", "stretch")

    def __init__(self, stretch: int, message: Message | None, reads: list[Item]) -> None:
        self.stretch, self.message, self.all_input_nodes = stretch, message, reads


@dataclass(frozen=True)
class Message:
    """A collective: its kind, the axes of its group, its payload, and whether it is one of weights ("w") or of their
    gradients ("g")."""

    kind: str
    axes: tuple[str, ...]
    payload: float
    weights: str


@dataclass(frozen=True, eq=False)
class Graph:
    """The kernels of a graph, and its stretches and collectives in the order in which they are issued."""

    kernels: Kernels
    items: tuple[Item, ...]

    def seconds(self, prices: Prices, mesh: Mesh) -> float:
        """The seconds from its start to its end."""
        return self.played(prices, mesh)[0]

    def played(self, prices: Prices, mesh: Mesh) -> tuple[float, float]:
        """The seconds from its start to its end, and those of its kernels alone."""
        each = prices.seconds(self.kernels)
        count = max((item.stretch for item in self.items), default=0) + 1
        stretches = np.bincount(self.kernels.stretches, weights=each, minlength=count)
        work: dict[Any, Work] = {}
        for item in self.items:
            if item.message is None:
                work[item] = Work(COMPUTE, float(stretches[item.stretch]))
            else:
                kind, payload, axes = item.message.kind, item.message.payload, item.message.axes
                waiting, per_byte = prices.collective(kind, payload, mesh, axes)
                level = outermost(mesh, axes, prices.profile)
                work[item] = Work(COMMUNICATION, waiting, per_byte, int(payload), level=level)
        order: Any = [(item,) for item in self.items]
        _, end = play(order, work, prices.profile.together)
        return end, float(each.sum())


@dataclass(frozen=True)
class Way:
    """How the graph of a program is run.

    compiled     runs of elementwise operators are one kernel
    parameters   the collectives of weights and gradients run, too
    overlapped   those of gradients run beside the backward, not after it
    """

    compiled: bool
    parameters: bool = True
    overlapped: bool = True


def scaled(columns: Mapping[str, list[Any]], times: float) -> dict[str, list[Any]]:
    """A recorded graph with `times` the microbatch."""
    if times == 1:
        return dict(columns)
    found = dict(columns)
    found["flops"] = [times * flops for flops in columns["flops"]]
    for name, still in (("moved", "fixed"), ("held", "still")):
        found[name] = [f + times * (b - f) for b, f in zip(columns[name], columns[still], strict=True)]
    payloads = zip(columns["payload"], columns["weights"], strict=True)
    found["payload"] = [b * (times if not weights and b % MICROBATCH == 0 else 1) for b, weights in payloads]
    return found


def graph_of(columns: Mapping[str, list[Any]], way: Way) -> Graph:
    """A recorded graph, run in some way."""
    kernels = _kernels(columns, way.compiled)
    items: list[Item] = []
    rows: list[tuple[float, float, int, int, int]] = []
    waits: dict[int, frozenset[Item]] = {}  # the collectives that the readers of a node wait for
    last: list[Item] = []
    stretch, waited, count = -1, frozenset[Item](), len(columns["operator"])
    late = {"l"}
    for i in range(count):
        flags, axes = columns["flags"][i], columns["axes"][i]
        reads = frozenset[Item]().union(*(waits.get(read, frozenset()) for read in columns["reads"][i]))
        if axes:
            weights = columns["weights"][i]
            if weights and not way.parameters:
                continue
            message = Message(columns["operator"][i], tuple(axes.split()), columns["payload"][i], weights)
            item = Item(-1, message, list(reads))
            gradient = weights == "g"
            if gradient and len(columns["reads"][i]) > 1:  # gradients are copied into one buffer: read and written once
                if stretch < 0:
                    stretch = 1 + max((item.stretch for item in items), default=-1)
                    items.append(Item(stretch, None, []))
                rows.append((0.0, 2.0 * columns["payload"][i], DTYPES.index("float32"), OTHER, stretch))
            (items if way.overlapped or not gradient else last).append(item)
            # the result of a reduced gradient is read by the optimizer only
            waits[i] = frozenset() if gradient else frozenset({item})
            stretch = -1
            continue
        if late & set(flags) or (columns["operator"][i] in ("placeholder", "output", "get_attr")) or "v" in flags:
            waits[i] = reads
            continue
        new = reads - waited
        if new or stretch < 0:
            stretch = 1 + max((item.stretch for item in items), default=-1)
            items.append(Item(stretch, None, list(new)))
            waited |= new
        if i in kernels:
            flops, moved, dtype, kind = kernels[i]
            rows.append((flops, moved, dtype, kind, stretch))
    flops, moved, dtypes, classes, stretches = (np.array(each) for each in zip(*rows, strict=True)) if rows else (
        (np.zeros(0),) * 5
    )  # fmt: skip
    arrays = Kernels(flops * 1.0, moved * 1.0, dtypes.astype(int), classes.astype(int), stretches.astype(int))
    return Graph(arrays, (*items, *last))


def _kernels(columns: Mapping[str, list[Any]], compiled: bool) -> dict[int, tuple[float, float, int, int]]:
    """The kernels of a graph, each at the place of its last operator: operations, bytes, dtype and class."""
    found: dict[int, tuple[float, float, int, int]] = {}
    run: list[int] = []
    readers: dict[int, list[int]] = {}
    for i, reads in enumerate(columns["reads"]):
        for read in reads:
            readers.setdefault(read, []).append(i)

    def close() -> None:
        if run:
            found[run[-1]] = (0.0, _moved_by(run, columns, readers), DTYPES.index("float32"), OTHER)
            run.clear()

    for i, name in enumerate(columns["operator"]):
        flags = columns["flags"][i]
        if name in ("placeholder", "output", "get_attr") or "l" in flags or ("v" in flags and not columns["axes"][i]):
            continue
        if columns["axes"][i]:
            close()
            continue
        fusible = "p" in flags or name in FUSED_BY_COMPILERS
        if fusible and (compiled or "n" in flags):
            run.append(i)
            continue
        close()
        kind = ATTENTION if "scaled_dot_product" in name else PRODUCT if columns["flops"][i] else OTHER
        dtype = columns["dtype"][i]
        place = DTYPES.index(dtype) if dtype in DTYPES else DTYPES.index("float32")
        found[i] = (float(columns["flops"][i]), float(columns["moved"][i]), place, kind)
    close()
    return found


def _moved_by(run: list[int], columns: Mapping[str, list[Any]], readers: Mapping[int, list[int]]) -> float:
    """The bytes that a kernel of several operators reads from outside and writes for others."""
    own = set(run)

    def source(i: int) -> int:
        while "v" in columns["flags"][i] and columns["reads"][i]:
            i = columns["reads"][i][0]
        return i

    outside = {read for i in run for read in columns["reads"][i] if source(read) not in own}
    once = {source(read): read for read in outside}

    def leaves(i: int) -> bool:
        return any((leaves(r) if "v" in columns["flags"][r] and columns["operator"][r] != "output" else r not in own)
                   for r in readers.get(i, [])) or not readers.get(i)  # fmt: skip

    written = sum(columns["held"][i] for i in run if leaves(i))
    return float(sum(columns["held"][read] for read in once.values()) + written)


# -- A row -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Played:
    """The step of one program of a row: the graphs of a microbatch, and of the last one if that differs."""

    phases: tuple[Graph, ...]
    others: tuple[Graph, ...]  # of the microbatches whose collectives of parameters do not run


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and its parts: kernels, exposed communication and the optimizer."""

    seconds: float
    computing: float
    exposed: float
    optimizer: float


@dataclass(eq=False)
class Step:
    """A row with the ingredients of its two programs. `exact`: both are those of all layers, ranks and sequences."""

    run: Run
    few: Mapping[str, Any]
    more: Mapping[str, Any]
    exact: bool = False
    _played: list[Played] = field(default_factory=list)

    @property
    def programs(self) -> list[Played]:
        """The two programs as they are run."""
        if not self._played:
            rules = self.run.rules
            assert rules is not None
            way = Way(self.run.compiled, overlapped=rules.overlapped)
            apart = self.run.microbatches > 1 and not self.run.spec.regather
            times = 1.0 if self.exact else self.run.spec.microbatch / self.run.planned.microbatch
            for each in (self.few, self.more):
                columns = [scaled(graph, times) for graph in each["phases"].values()]
                phases = tuple(graph_of(c, way) for c in columns)
                others = tuple(graph_of(c, replace(way, parameters=False)) for c in columns) if apart else ()
                self._played.append(Played(phases, others))
        return self._played

    def extrapolated(self, few: float, more: float) -> float:
        """A figure of all layers from those of the two programs."""
        first, second = self.run.layers
        return few + (more - few) / (second - first) * (self.run.spec.model.layers - first)

    @property
    def parameters(self) -> float:
        """The parameters of one rank, split as at rest."""
        planned = self.run.spec if self.exact else self.run.planned
        whole = self.extrapolated(self.few["parameters"], self.more["parameters"]) * planned.ways
        return whole / self.run.spec.ways

    @property
    def gradients(self) -> float:
        """The gradients that one rank adds up over microbatches."""
        spec = self.run.spec
        return self.parameters * (spec.dp if spec.split_dp else 1)

    def predicted(self, prices: Prices) -> Prediction:
        """The step by `prices`."""
        ends, kernels = [], []
        mesh, count = self.run.spec.mesh, self.run.microbatches
        for program in self.programs:
            last = [graph.played(prices, mesh) for graph in program.phases]
            rest = [graph.played(prices, mesh) for graph in program.others] or last
            for found, place in ((ends, 0), (kernels, 1)):
                one, other = (sum(each[place] for each in graphs) for graphs in (last, rest))
                found.append(one + (count - 1) * other)
        seconds, computing = (self.extrapolated(*found) for found in (ends, kernels))
        optimizer = optimizer_seconds(self.run, prices, self.parameters, self.gradients)
        return Prediction(seconds + optimizer, computing, seconds - computing, optimizer)

    @property
    def memory(self) -> float:
        """The bytes at the peak: those of the program beside what is there throughout, and at rest weights, float32
        copies, two states of Adam, and the sums of gradients where they are not those of the program."""
        rules, spec = self.run.rules, self.run.spec
        assert rules is not None
        most = max(self.extrapolated(self.few["held"][part], self.more["held"][part]) for part in self.few["held"])
        own = self.parameters * (rules.weights + rules.masters + 8)
        sums = 4 * self.gradients if rules.masters and rules.sum32 else 4 * self.parameters if spec.fsdp > 1 else 0
        logits = 4 * spec.microbatch * spec.sequence * spec.model.vocab / spec.tp * rules.loss32
        return most + own + sums + logits


def optimizer_seconds(run: Run, prices: Prices, parameters: float, gradients: float) -> float:
    """The seconds of Adam and of the sums of gradients in a step of a rank with so many `parameters`, and `gradients`
    that it adds up over microbatches: weights in float32, both states and the gradient are read, all but the gradient
    written, and weights written once more in bfloat16 if the float32 ones are copies. To add the gradient of a
    microbatch to a sum reads both and writes one."""
    rules = run.rules
    assert rules is not None
    gradient = 4 if rules.sum32 else 2
    of_adam = gradient + 3 * 4 + 3 * 4 + (rules.weights if rules.masters else 0)
    moved = parameters * of_adam + 3 * gradient * gradients * (run.microbatches - 1)
    return moved / (prices.profile.memory_bandwidth * prices.profile.reached.memory)


def relative(step: Step, prices: Prices) -> float:
    """Predicted over measured seconds."""
    return step.predicted(prices).seconds / step.run.measured
