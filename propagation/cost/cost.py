"""The costs of collectives, by alpha-beta on each level of the network, and of operators, by a roofline.

A collective takes `launch + messages * latency + wire / bandwidth`, with `wire` the bytes that one of n ranks sends in
a ring (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005). The table of kinds
(`propagation/ops/collectives.py`) has the bytes and the messages of each.

In a group with n ranks in each of m nodes, all n ranks of a node send their share of the traffic between nodes at once,
each through its own adapter or a share of a common one. Between nodes

    around a ring    one ring visits all ranks of a node before the next node's: all_gather, reduce_scatter, and
                     all_reduce with gloo. Each rank sends 1/n of what a rank of m * n ranks sends
    by trees         NCCL's all_reduce: 1/n of what a rank of m ranks sends, in 2 log2(m) messages
    directly         all_to_all: each rank sends (m - 1) / m of what it holds

The waits of the levels add up. Their bytes do not: collectives are pipelined in chunks over different links, so that
the busiest level sets the pace. (On 2 nodes of 8 H100 all_reduce reaches 267 GB/s, as NVLink alone does, and all_gather
410; the sum of the phases predicts 137 and 231.)

Where trees are missing, a large all_reduce may be faster in three steps (`Hierarchy`): between nodes each rank then
sends 1/n of what a rank of m ranks sends, and not of what a rank of m * n ranks sends.

Groups that do not fill their nodes evenly (3 of 8 ranks, the next 3, 2 and 1 of the third ...) are one ring over
the slowest level that they touch.

An operator takes its measured time (rates.py). With a profile without measurements it takes `overhead + flops / (peak *
share) + bytes / (memory bandwidth * share)`, with the shares that the profile says are reached. So a product of m x k
and k x n reaches `share / (1 + (1/m + 1/n + 1/k) * c)` of the peak: the smaller its sizes the less, as kernels do that
fill and drain their pipelines for every tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import fx

from ...strategy.errors import StrategyError
from ...strategy.mesh import Mesh
from ...strategy.placement import Kind
from ..graph.nodes import argument, is_pointwise, is_view, source_of, tensor_of
from ..ops.collectives import COLLECTIVES, figures_of
from .profile import DeviceProfile, NetworkLevel
from .rates import OTHER, POINTWISE, VIEW, OperatorRates, Rates

# Forward plus backward of an operator, in units of the forward: each operand's gradient costs about as much.
BACKWARD_FACTOR = 2.0
CHUNK = 1 << 20  # bytes of payload of a collective in steps that run one step together
CACHED = 1 << 26  # bytes that may fit in a cache, and are not limited by the memory's bandwidth


class Level(Enum):
    """The main objective of the search: `shard(..., level=)`."""

    COMMUNICATION = 0  # the largest ratio of computation to communication
    MEMORY = 1  # the least memory on a device
    SPEED = 2  # the least predicted time


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the objective: of seconds of communication, latency and computation, and of gigabytes held."""

    wire: float
    latency: float
    compute: float
    memory: float


WEIGHTS = {
    Level.COMMUNICATION: Weights(wire=1.0, latency=0.1, compute=0.1, memory=1e-9),
    Level.MEMORY: Weights(wire=1e-3, latency=1e-3, compute=1e-3, memory=1.0),
    Level.SPEED: Weights(wire=1.0, latency=1.0, compute=1.0, memory=1e-9),
}


def wire_bytes(kind: Kind, payload: float, size: int) -> float:
    """Bytes that one of `size` ranks sends. `payload`: the whole value's bytes; all_to_all: the bytes held; exchange:
    the bytes sent."""
    return COLLECTIVES[kind].wire(payload, size) if kind.communicates else 0.0


def steps(kind: Kind, size: int) -> int:
    """The number of consecutive messages."""
    return COLLECTIVES[kind].steps(size) if kind.communicates else 0


def collective_seconds(kind: Kind, payload: float, mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile) -> float:
    """The predicted time of one collective of `payload` bytes (see `wire_bytes`); raises as `collective_cost`."""
    waiting, per_byte = collective_cost(kind, payload, mesh, axes, profile)
    return float(waiting + per_byte * payload)


def collective_cost(
    kind: Kind, payload: ArrayLike, mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile
) -> tuple[Any, Any]:
    """The seconds of a collective of `payload` bytes over the group that `axes` span, and the seconds per byte; a local
    kind takes none. Of several payloads either may be an array. Raises as `collective_costs`."""
    once = collective_costs(mesh, axes, profile).get(kind, (0.0, 0.0))
    steps = hierarchies(mesh, axes, profile).get(kind)
    return steps.or_once(payload, *once) if steps else once


@lru_cache(maxsize=4096)
def collective_costs(mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile) -> Mapping[Kind, tuple[float, float]]:
    """As `collective_cost`, of each kind of collective in one step.

    All groups along `axes` run at once, and the slowest counts. Raises StrategyError for an axis that the mesh lacks,
    and for a mesh with more devices than the network of the profile joins.
    """
    joined = profile.levels[-1].devices
    if joined is not None and mesh.device_num > joined:
        raise StrategyError(
            f"the mesh {mesh} has {mesh.device_num} devices, and the network of device profile {profile.name!r} joins "
            f"{joined} (levels[{len(profile.levels) - 1}], {profile.levels[-1].name}); use a mesh of at most {joined}, "
            "or a profile with one more level"
        )
    return costs_over(profile.levels, _sizes(mesh, axes, profile))


def _sizes(mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile) -> tuple[int, ...]:
    return ranks_by_level(mesh, axes, tuple(level.devices for level in profile.levels))


def outermost(mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile) -> int:
    """The number of the outermost level of the network that joins the group over `axes`; 0 for one rank."""
    return max((number for number, size in enumerate(_sizes(mesh, axes, profile)) if size > 1), default=0)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The steps of a large collective of a kind: inside units of `within` consecutive ranks of its group, and between
    these units. They overlap, chunk by chunk.

    all_reduce       a reduce_scatter inside, an all_reduce of each rank's share between the units, an all_gather inside
    reduce_scatter   a reduce_scatter inside, and one of each rank's share between the units
    all_gather       an all_gather of the parts of the ranks at one place of all units, and one inside

    least                the bytes of payload from which on it is faster than in one step
    waiting, per_byte    its seconds before and per byte of payload
    """

    kind: Kind
    within: int
    least: int
    waiting: float
    per_byte: float

    def or_once(self, payload: ArrayLike, waiting: float, per_byte: float) -> tuple[Any, Any]:
        """The seconds before and per byte of `payload` bytes in these steps, or in one, which takes the given ones."""
        large = np.asarray(payload) >= self.least
        return np.where(large, self.waiting, waiting)[()], np.where(large, self.per_byte, per_byte)[()]


_TIMES_INSIDE = {Kind.ALL_REDUCE: 2, Kind.ALL_GATHER: 1, Kind.REDUCE_SCATTER: 1}  # the steps inside a unit


@lru_cache(maxsize=4096)
def hierarchies(mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile) -> Mapping[Kind, Hierarchy]:
    """The fastest steps of large collectives over the group that `axes` span, of each kind that is faster in steps than
    in one; none between units that NCCL joins by trees, since it has such steps itself.

    Worked example: 2 hosts of 2 ranks, 1 GB/s out of each rank, 10 GB/s inside. Around a ring of 4 each rank sends half
    of 2 * 3/4 of the payload of an all_reduce between hosts, 0.75 ns a byte; in three steps half of 2 * 1/2, so 0.5 ns.
    An all_gather, and a reduce_scatter, takes half of either.
    """
    levels, sizes, found = profile.levels, _sizes(mesh, axes, profile), dict[Kind, Hierarchy]()
    for kind in _TIMES_INSIDE if sum(size > 1 for size in sizes) > 1 else ():
        once, per_byte = collective_costs(mesh, axes, profile)[kind]
        ways = [way for cut in range(1, len(sizes)) if (way := _in_steps(kind, levels, sizes, cut))]
        slope, waiting, within = min(ways, default=(per_byte, once, 1))
        if slope < per_byte:
            least = max(0, math.ceil((waiting - once) / (per_byte - slope)))
            found[kind] = Hierarchy(kind, within, least, waiting, slope)
    return found


def _in_steps(
    kind: Kind, levels: Sequence[NetworkLevel], sizes: Sequence[int], cut: int
) -> tuple[float, float, int] | None:
    """The seconds per byte of payload and before them of the steps of `kind` with units of the levels up to `cut`, and
    the ranks of a unit; None if there is no such unit, no other one, or a tree joins them."""
    units, within, times = sizes[cut:], math.prod(sizes[:cut]), _TIMES_INSIDE[kind]
    trees = any(level.trees and n > 1 for level, n in zip(levels[cut:], units, strict=True))
    if within == 1 or math.prod(units) == 1 or trees:
        return None
    messages, inside = costs_over(levels[:cut], sizes[:cut])[Kind.ALL_TO_ALL]  # in each direction
    waiting, between = costs_over(levels[cut:], units)[kind]
    before = times * messages + waiting + times * inside * CHUNK
    return max(times * inside, between / within), before, within


def costs_over(levels: Sequence[NetworkLevel], sizes: Sequence[int]) -> Mapping[Kind, tuple[float, float]]:
    """As `collective_costs`, for a group with so many ranks on each of `levels`, inside out. Latencies add up; the
    slowest level determines the cost of the bytes."""
    launch = next((level.launch for level, size in reversed([*zip(levels, sizes, strict=True)]) if size > 1), 0.0)
    trees, costs = tuple(level.trees for level in levels), {}
    for kind in COLLECTIVES:
        messages, sent = messages_by_level(kind, sizes, trees), sent_by_level(kind, sizes, trees)
        waiting = sum(count * level.latency.of(kind) for count, level in zip(messages, levels, strict=True))
        per_byte = (
            part / _bandwidth(level, kind, n) for part, level, n in zip(sent, levels, sizes, strict=True) if part
        )
        costs[kind] = launch + waiting, max(per_byte, default=0.0)  # the phases are a single call: one launch
    return costs


def messages_by_level(kind: Kind, sizes: Sequence[int], trees: Sequence[bool] = ()) -> tuple[int, ...]:
    """The number of consecutive messages on each level, in a group with so many ranks on each; `trees`: whether each
    level has them (none by default).

    Data that go around a ring of all ranks cross each level as often as the ring does: 8 nodes of 8 ranks are 63 links,
    7 of them between nodes. (NCCL counts rings and trees in the same way, src/graph/tuning.cc.)
    """
    row, counts, outside = COLLECTIVES[kind], [], 1
    for size, tree in reversed([*zip(sizes, trees or (False,) * len(sizes), strict=True)]):
        if tree and kind is Kind.ALL_REDUCE:
            counts.append(2 * math.ceil(math.log2(size)))
        elif row.narrows:
            counts.append(row.steps(size * outside) - row.steps(outside))
            outside *= size
        else:
            counts.append(row.steps(size) if size > 1 else 0)
    return tuple(reversed(counts))


def sent_by_level(kind: Kind, sizes: Sequence[int], trees: Sequence[bool] = ()) -> tuple[float, ...]:
    """The bytes that each device sends on each level for a byte of payload; arguments as of `messages_by_level`.

    A ring visits all ranks of a unit before it leaves for the next unit. So one link out of each unit carries what one
    of all n ranks sends, which is the 1 / k of each of the k ranks inside: of 2 units of 8 ranks, 15/16 of the payload
    of an all_gather, where trees, and direct messages, carry only what the other unit lacks.
    """
    row, share, ranks, sent = COLLECTIVES[kind], 1.0, 1, []
    for size, tree in zip(sizes, trees or (False,) * len(sizes), strict=True):
        ranks *= size
        around = ranks if row.narrows and not (tree and kind is Kind.ALL_REDUCE) else size
        sent.append(share * row.wire(1, around) if size > 1 else 0.0)
        share /= size if row.narrows else 1
    return tuple(sent)


@lru_cache(maxsize=4096)
def ranks_by_level(mesh: Mesh, axes: tuple[str, ...], devices: tuple[int | None, ...]) -> tuple[int, ...]:
    """The number of ranks of one group along `axes` that each level joins, inside out; their product is its size.

    `devices`: how many ranks one unit of each level holds, None for all. A level whose units hold unequal numbers of
    a group's ranks joins none of them: they meet at the next one.
    """
    positions = sorted(mesh.index(axis) for axis in axes)
    ranks = np.arange(mesh.device_num).reshape(mesh.sizes)
    size = math.prod(mesh.sizes[position] for position in positions)
    groups = np.moveaxis(ranks, positions, range(-len(positions), 0)).reshape(-1, size)  # each in ascending order
    by_level, joined = [], 1
    for unit_size in devices:
        together = size if unit_size is None else _evenly(groups // unit_size)
        by_level.append(together // joined if together else 1)
        joined = together or joined
    return tuple(by_level)


def _evenly(units: np.ndarray) -> int:
    """The number of members of each group (row) in each unit that the group touches; 0 if the numbers differ."""
    count = int((units[0] == units[0, 0]).sum())
    if units.shape[1] % count:
        return 0
    runs = units.reshape(len(units), -1, count)
    even = (runs == runs[..., :1]).all() and (runs[:, 1:, 0] != runs[:, :-1, 0]).all()
    return count if even else 0


def _bandwidth(level: NetworkLevel, kind: Kind, size: int) -> float:
    """The bytes/s that one of `size` ranks sends, interpolated by log(size) in a table and constant beyond its ends."""
    figure = level.bandwidth.of(kind)
    if not isinstance(figure, tuple):
        return figure
    kind = figures_of(kind)
    sizes = [math.log(measured) for measured, _ in figure]
    return float(np.interp(math.log(size), sizes, [rate * wire_bytes(kind, 1, n) for n, rate in figure]))


def operator_seconds(
    flops: ArrayLike,
    moved: ArrayLike,
    dtype: torch.dtype,
    profile: DeviceProfile,
    rates: Rates | None = None,
    written: ArrayLike = 0.0,
    name: str = "",
) -> NDArray[np.float64]:
    """The predicted time of one operator that computes `flops` in `dtype` and moves `moved` bytes, or of several.
    `rates`: its measured rates; `written`: the bytes of its results, part of `moved`; `name`: of the operator."""
    computing = np.asarray(flops) / profile.peak.of(dtype)
    moved = np.asarray(moved)
    if rates is None:
        reached = profile.reached
        share = reached.attention if ATTENTION in name else reached.products
        return np.asarray(profile.overhead + computing / share + moved / (reached.memory * profile.memory_bandwidth))
    slower = profile.peak.float32 / profile.peak.of(dtype)
    least = np.maximum(computing, np.maximum(moved - CACHED, 0.0) / profile.memory_bandwidth)
    seconds: NDArray[np.float64] = np.maximum(rates.seconds(np.asarray(flops) * slower, moved, written), least)
    return seconds


def update_seconds(held: ArrayLike, states: float, profile: DeviceProfile) -> NDArray[np.float64]:
    """The predicted time of an optimizer's step on a parameter of which a device holds `held` bytes, and `states` as
    many bytes of the optimizer's states: a fused step reads all and the gradient, and writes all but the gradient. (A
    launch serves many parameters, and is not counted.)"""
    held = np.asarray(held, dtype=np.float64)
    written = (1 + states) * held
    rates = profile.rates_of(POINTWISE)
    measured = rates.forward.model_copy(update={"call": 0.0}) if rates else None
    alone = profile.model_copy(update={"overhead": 0.0})
    return operator_seconds(0, 2 * written + held, torch.float32, alone, measured, written)


def looked_up(moved: ArrayLike, table: ArrayLike, results: ArrayLike, row: ArrayLike) -> NDArray[np.float64]:
    """The bytes that a lookup moves: of the table only the rows in its results, of at least a LINE each. `moved`: with
    the whole table of `table` bytes; `row`: the bytes of a row."""
    moved, table, results, row = (np.asarray(each, dtype=np.float64) for each in (moved, table, results, row))
    read = np.minimum(results * np.maximum(LINE / np.maximum(row, 1.0), 1.0), np.maximum(table, results))
    found: NDArray[np.float64] = moved - table + read
    return found


# -- The choice of a profile's rates for a call

_aten = torch.ops.aten
_WEIGHT: Mapping[Any, int] = {_aten.convolution.default: 1, _aten.convolution_backward.default: 2}  # its place
# Operators with the rates of another one: PyTorch's BatchNorm has those of our operator that calls it for each part.
_SAME: Mapping[str, str] = {
    "aten._native_batch_norm_legit_functional.default": "partway.part_norm.default",
    "aten.native_batch_norm_backward.default": "partway.part_norm_backward.default",
}
_SECOND: Mapping[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 2, _aten.bmm.default: 1}  # of a product
LOOKUPS = (_aten.embedding.default, _aten.index.Tensor, _aten.index_select.default, _aten.gather.default)
ATTENTION = "scaled_dot_product"  # in the names of operators of attention
LINE = 64  # bytes that memory reads at least: a line of a CPU's caches, a burst of a GPU's memory
FEW = 8  # input channels of a convolution: with fewer its kernel does not fill the vectors
PLANE = 16  # pixels of an image that a kernel for 1x1 convolutions processes at once
ALIGNED = 8  # columns of a product: unless a multiple of these, its rows are not aligned

Shape = Callable[[fx.Node], Sequence[int]]


def kind_of_call(node: fx.Node) -> str:
    """The kind whose rates a call takes if its operator has none."""
    if is_view(node):
        return VIEW
    return POINTWISE if is_pointwise(node.target) else OTHER


def name_of_call(node: fx.Node, shape: Shape = lambda node: tensor_of(source_of(node)).shape) -> str:
    """The name of the rates of a call: its operator, with the kind of a convolution, a product or attention, since each
    kind runs another kernel. (A 1x1 convolution of images of 9 pixels took 6 times the usual time of its operations,
    of 36 or 49 pixels 1.4 times.) `shape`: gives the shape of an operand."""
    name = str(node.target)
    if node.target in _SECOND:
        columns = shape(node.args[_SECOND[node.target]])[-1]  # type: ignore[arg-type]
        return f"{name} of odd columns" if columns % ALIGNED and columns > ALIGNED else name
    if ATTENTION in name:
        return f"{name} causal" if argument(node, "is_causal") else name
    if node.target not in _WEIGHT:
        return _SAME.get(name, name)
    place = _WEIGHT[node.target]
    _, channels, *kernel = shape(node.args[place])  # type: ignore[arg-type]
    transposed, _, groups = node.args[place + 5 : place + 8]
    if transposed:
        return f"{name} transposed"
    if groups != 1:
        return f"{name} in groups"
    if channels < FEW:
        return f"{name} of few channels"
    if any(size != 1 for size in kernel):
        return name
    _, _, *plane = shape(node.args[place - 1])  # type: ignore[arg-type]
    pixels = math.prod(plane)
    if 1 < pixels < PLANE:
        return f"{name} of pixels in small planes"
    return f"{name} of pixels in odd planes" if pixels % PLANE and pixels > 1 else f"{name} of pixels"


def rates_of(node: fx.Node, profile: DeviceProfile, shape: Shape | None = None) -> OperatorRates | None:
    """The rates of a call; None if the profile has no rates of operators. `shape`: see `name_of_call`."""
    if not profile.operators:
        return None
    name = name_of_call(node, shape) if shape else name_of_call(node)
    return profile.rates_of(name, kind_of_call(node))
