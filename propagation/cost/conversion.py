"""The cost of every conversion between two layouts of one tensor, and its cheapest chain of steps.

A step of the placement algebra takes one axis, or several with the same placement, from one placement to another: one
all_reduce over two axes sends less than one over each. Several axes that split a dim cut it in mesh order, so a step
may add or remove a split of a dim only on the last axes that split it. The cheapest chains from a layout to all others
are a shortest-path problem on the grid of layouts; `ConversionTable` relaxes it axis by axis until nothing improves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ...strategy.cut import Cut
from ...strategy.errors import VerifyError
from ...strategy.layout import Layout, layout
from ...strategy.mesh import Mesh
from ...strategy.placement import (
    BROADCAST,
    PARTIAL,
    PARTIAL_MAX,
    REPLICATE,
    Kind,
    Placement,
    Routed,
    Shard,
    kind,
    sharded,
    step_kind,
    steps_between,
)
from ..ops.collectives import COLLECTIVES, is_reduction, shares_of
from .cost import Weights, collective_costs, hierarchies
from .profile import DeviceProfile

Floats = NDArray[np.float64]
Codes = NDArray[np.intp]
Mask = NDArray[np.bool_]
AT_A_TIME = 2**16  # costs that are relaxed at a time: they stay in the cache
_SLACK = 1 / 8  # the share of padding allowed in layouts that ranks store permanently, unless annotated
_PARTIAL: dict[str | None, tuple[Placement, ...]] = {None: (), "sum": (PARTIAL,), "max": (PARTIAL_MAX,)}
# `fixed` and `linear` by the states of a step; (from, to, bytes by byte of the value, least, fixed, linear) of each
# all_reduce in a step, which are added from `least` bytes on
_Coefficients = tuple[Floats, Floats, Sequence[tuple[int, int, int, int, float, float]]]
_STEP = 1e-13  # seconds: among chains of equal cost the shorter wins, and no chain has a cycle


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """One step of a conversion: `axes` go from `source` to `target`, which gives the layout `after`, at the weighted
    `cost` of forward and backward."""

    axes: tuple[str, ...]
    source: Placement
    target: Placement
    after: Layout
    cost: float = 0.0


@dataclass(frozen=True, eq=False)
class _Move:
    """All steps over one set of axes. `codes[s, o]` is the layout with state s on these axes and state o of the other
    axes; `cost[s, t, o]` is the cost of the step from there to state t."""

    axes: tuple[int, ...]
    codes: Codes
    cost: Floats

    @cached_property
    def states(self) -> list[int]:
        """The states from which a step is possible."""
        steps: Mask = np.any(np.isfinite(self.cost), axis=2)
        np.fill_diagonal(steps, False)
        states: list[int] = np.flatnonzero(np.any(steps, axis=1)).tolist()
        return states


@dataclass(frozen=True, eq=False)
class ConversionTable:
    """Costs between all layouts of tensors of one shape. The code of a layout has one digit per axis, its state.

    partial      the reduction of Partial, "sum" or "max"; None: there is no Partial
    gradient     the backward of a conversion runs too
    barred       steps, each as (axes, from, to): a conversion whose cheapest chain has one is impossible
    tied         axes along which no step is allowed
    stay_split   splits stay: no step gathers or exchanges them, forward or backward
    again        the forward of a conversion runs once more in the backward
    wider        how many times as many bytes an element has while sums of the backward send it
    short        sizes of dims that may be cut into more parts than they have elements
    routed       the placements of rows of a mixture of experts, in place of splits of their dim; no step leads to them
    load         the rows of the rank whose experts have most, over the mean of all ranks
    """

    shape: tuple[int, ...]
    itemsize: int
    partial: str | None
    gradient: bool
    mesh: Mesh
    profile: DeviceProfile
    weights: Weights
    barred: frozenset[tuple[tuple[str, ...], Placement, Placement]] = frozenset()
    tied: tuple[str, ...] = ()
    stay_split: bool = False
    again: bool = False
    wider: int = 1
    short: frozenset[int] = frozenset()
    routed: tuple[Routed, ...] = ()
    load: float = 1.0

    @cached_property
    def states(self) -> tuple[Placement, ...]:
        """The placements that one axis may have, splits first; a layout has one of them on each axis."""
        dims = (sharded(dim) for dim in self._dims)
        return (*dims, *self.routed, REPLICATE, BROADCAST, *_PARTIAL[self.partial])

    @property
    def _dims(self) -> list[int]:
        """The dims that may be split: those of the first states."""
        routed = {placed.dim for placed in self.routed}
        return [dim for dim, size in enumerate(self.shape) if size > 1 and dim not in routed]

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts, by code; some have more parts than the shape has elements (`valid`)."""
        return _layouts(self.mesh, self.states)

    @cached_property
    def index(self) -> dict[Layout, int]:
        """The code of each layout."""
        return _index(self.mesh, self.states)

    @cached_property
    def digits(self) -> Codes:
        """The state of each axis, for every code."""
        return digits_of(len(self.states), len(self.mesh.axes))

    def parts(self, dim: int) -> Codes:
        """The number of parts that `dim` is split into, for every code."""
        return self._parts[dim]

    @cached_property
    def _parts(self) -> list[Codes]:
        parts = [np.ones(len(self.digits), dtype=np.intp) for _ in self.shape]
        for state, dim in enumerate([*self._dims, *(placed.dim for placed in self.routed)]):
            if dim is not None:
                parts[dim] = parts[dim] * np.where(self.digits == state, self.mesh.sizes, 1).prod(axis=1)
        return parts

    @cached_property
    def valid(self) -> Mask:
        """Whether each layout has an element of every split dim for each part; dims in `short` need none."""
        valid = np.ones(len(self.digits), dtype=bool)
        for dim, size in enumerate(self.shape):
            if size not in self.short:
                valid &= (self.parts(dim) == 1) | (size >= self.parts(dim))
        return valid

    @cached_property
    def nearly_even(self) -> Mask:
        """Whether each layout cuts the shape as DTensor does, with little padding."""
        nearly = np.ones(len(self.digits), dtype=bool)
        for dim, size in enumerate(self.shape):
            parts = self.parts(dim)
            nearly &= -(-size // parts) * parts <= size * (1 + _SLACK)
        for code in np.flatnonzero(nearly & ~self.even):
            nearly[code] = self.layouts[code].chunks(self.shape)
        return nearly

    @property
    def _rows(self) -> frozenset[int]:
        """The dim of rows, of which a rank may hold any number."""
        dims = {placed.dim for placed in self.routed}
        return frozenset(dim for dim in dims if dim is not None and len(dims) == 1)

    @cached_property
    def even(self) -> Mask:
        """Whether each layout divides the shape evenly."""
        even = np.ones(len(self.digits), dtype=bool)
        for dim, size in enumerate(self.shape):
            if dim not in self._rows:
                even &= size % self.parts(dim) == 0
        return even

    @cached_property
    def held(self) -> Floats:
        """The bytes of one rank's part, of the largest if slices are uneven, for every code."""
        held = np.full(len(self.digits), float(self.itemsize))
        for dim, size in enumerate(self.shape):
            held *= -(-size // self.parts(dim))
        return held if self.load == 1.0 else held * self._crowded()

    def _crowded(self) -> Floats:
        """How many times its share of the rows the rank holds that has most, for every code."""
        by_expert = [i for i, p in enumerate(self.states) if isinstance(p, Routed) and p.by == "expert" and self._rows]
        times: Floats = np.where(np.isin(self.digits, by_expert), self.mesh.sizes, 1).prod(axis=1)
        return np.minimum(self.load, times)

    def last_dim(self, codes: Codes) -> Floats:
        """The bytes of a row of the last dim of one rank's part, for each of `codes`."""
        last = len(self.shape) - 1
        size = self.shape[-1] if self.shape else 1
        parts = self.parts(last)[codes] if self.shape else np.ones(len(codes), dtype=np.intp)
        rows: Floats = -(-size // parts) * np.float64(self.itemsize)
        return rows

    def local_bytes(self, placed: Layout) -> float:
        """The bytes of one rank's part."""
        return float(self.held[self.index[placed]])

    @property
    def _splits(self) -> int:
        return len(self._dims)

    def kinds(self, source: Placement, target: Placement, phase: str) -> tuple[Kind, ...]:
        """The kinds of a step in the "forward" or the "backward"."""
        done = step_kind(source, target, phase, self.gradient)
        return (done, kind(source, target)) if self.again and phase == "backward" else (done,)

    @cached_property
    def cost(self) -> Floats:
        """`cost[i, j]`: the weighted cost of layout i becoming layout j, forward and backward; inf: impossible."""
        return self.rows(range(len(self.digits)))

    def rows(self, sources: Iterable[int]) -> Floats:
        """The rows of `cost` for the codes `sources`, each computed on first use."""
        sources = list(sources)
        known = self._known
        missing = [code for code in dict.fromkeys(sources) if code not in known]
        if missing:
            chunk = max(1, AT_A_TIME // len(self.digits))
            for start in range(0, len(missing), chunk):
                part = missing[start : start + chunk]
                distances = self._distances(part)
                known.update(zip(part, self._but_barred(distances) if self.barred else distances, strict=True))
        return np.stack([known[code] for code in sources]) if sources else np.zeros((0, len(self.digits)))

    @cached_property
    def _known(self) -> dict[int, Floats]:
        return {}

    def _distances(self, sources: list[int]) -> Floats:
        """Rows of `cost`: try every move in turn until a whole round improves nothing."""
        best = np.full((len(self.digits), len(sources)), np.inf)
        best[sources, np.arange(len(sources))] = 0.0
        best[~self.valid] = np.inf
        quiet, moves = 0, itertools.cycle(self._moves)
        while quiet < len(self._moves):
            move = next(moves)
            here = best[move.codes]  # [state, others, source]
            there = here.copy()
            for state in move.states:
                np.minimum(there, here[state] + move.cost[state][..., None], out=there)
            quiet = quiet + 1 if np.array_equal(there, here) else 0  # a step after one of the same axes can pay too
            best[move.codes] = there
        return np.ascontiguousarray(best.T)

    def _but_barred(self, distance: Floats) -> Floats:
        """Rows of distances, with inf where the chain that `path` finds has a step that is barred."""
        nearest = np.full(distance.shape, np.inf)
        before = np.tile(np.arange(distance.shape[1]), (len(distance), 1))  # the layout before the last step
        impossible = np.zeros(distance.shape, dtype=bool)
        for move in self._moves:
            axes = tuple(self.mesh.axes[a] for a in move.axes)
            for state, target in enumerate(self.states):
                ways = distance[:, move.codes] + move.cost[:, state]  # [row, state, others]
                ways[:, state] = np.inf
                start = ways.argmin(axis=1)
                cost = ways.min(axis=1)
                to = move.codes[state]
                barred = np.array([(axes, source, target) in self.barred for source in self.states])
                better = (cost < nearest[:, to]) & (distance[:, to] > 0)
                nearest[:, to] = np.where(better, cost, nearest[:, to])
                before[:, to] = np.where(better, move.codes[start, np.arange(len(to))], before[:, to])
                impossible[:, to] = np.where(better, barred[start], impossible[:, to])
        while not np.array_equal(impossible, more := impossible | np.take_along_axis(impossible, before, axis=1)):
            impossible = more
        return np.where(impossible, np.inf, distance)

    def spread(self, values: Floats, forward: bool) -> Floats:
        """For every layout the minimum of `values[other] + cost[other, layout]`, or of `cost[layout, other]` if not
        `forward`, without computing rows of `cost`."""
        if self.barred:  # whether a chain is the cheapest one shows only at its end
            least: Floats = (values[:, None] + (self.cost if forward else self.cost.T)).min(axis=0)
            return least
        best = np.where(self.valid, values, np.inf)
        quiet, moves = 0, itertools.cycle(self._moves)
        while quiet < len(self._moves):
            move = next(moves)
            here = best[move.codes]
            ways = here[:, None] + move.cost if forward else here + move.cost
            there = np.minimum(here, ways.min(axis=0 if forward else 1))
            quiet = quiet + 1 if np.array_equal(there, here) else 0
            best[move.codes] = there
        return best

    @cached_property
    def _moves(self) -> tuple[_Move, ...]:
        axes = [i for i, axis in enumerate(self.mesh.axes) if axis not in self.tied]
        sets = [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
        names = tuple(tuple(self.mesh.axes[a] for a in chosen) for chosen in sets)
        coefficients = _coefficients(
            self.states, self.gradient, self.stay_split, self.again, self.wider, self.mesh, names, self.profile,
            self.weights,
        )  # fmt: skip
        return tuple(map(self._move, sets, coefficients))

    def _move(self, axes: tuple[int, ...], coefficients: _Coefficients) -> _Move:
        codes, others = _groups_of_codes(len(self.states), len(self.mesh.axes), axes)
        digits = self.digits[codes[0]][:, others]
        whole = self.held[codes[self.states.index(REPLICATE)]]  # bytes if none of these axes splits it
        fixed, linear, in_steps = coefficients
        cost = fixed[..., None] + linear[..., None] * whole
        for i, j, times, least, waiting, per_byte in in_steps:
            cost[i, j] += np.where(times * whole >= least, waiting + per_byte * times * whole, 0.0)
        # a later axis that splits the same dim blocks adding or removing a split
        later = digits[:, [i for i, other in enumerate(others) if other > axes[0]]]
        blocked = (later[:, :, None] == np.arange(self._splits)).any(axis=1).T  # [state, others]
        cost[: self._splits].transpose(0, 2, 1)[blocked] = np.inf
        cost[:, : self._splits].transpose(1, 2, 0)[blocked] = np.inf
        cost[:, ~self.valid[codes]] = np.inf
        return _Move(axes, codes, cost)

    def path(self, source: Layout, target: Layout) -> tuple[ConversionStep, ...]:
        """The cheapest chain of steps from `source` to `target`."""
        key = (self.index[source], self.index[target])
        if key not in self._paths:
            self._paths[key] = self._path(*key)
        return self._paths[key]

    @cached_property
    def _paths(self) -> dict[tuple[int, int], tuple[ConversionStep, ...]]:
        return {}

    def _path(self, source: int, target: int) -> tuple[ConversionStep, ...]:
        distance = self.rows([source])[0]
        if not np.isfinite(distance[target]):
            raise VerifyError(
                f"no steps turn {self.layouts[source]} into {self.layouts[target]}, in {list(self.shape)}"
            )
        chain: list[ConversionStep] = []
        while target != source:
            ways: list[tuple[float, int, int, int]] = []  # cost of the chain, move, state before, other axes' states
            for i, move in enumerate(self._moves):
                states, others = np.nonzero(move.codes == target)
                if not len(others):
                    continue
                costs = distance[move.codes[:, others[0]]] + move.cost[:, states[0], others[0]]
                costs[states[0]] = np.inf
                ways.append((float(costs.min()), i, int(costs.argmin()), int(others[0])))
            _, i, state, other = min(ways)
            move = self._moves[i]
            axes = tuple(self.mesh.axes[a] for a in move.axes)
            to = self.states[self.digits[target, move.axes[0]]]
            cost = float(move.cost[state, self.digits[target, move.axes[0]], other])
            chain.append(ConversionStep(axes, self.states[state], to, self.layouts[target], cost))
            target = int(move.codes[state, other])
        return tuple(reversed(chain))


def with_cuts(step: ConversionStep, before: Layout, shape: tuple[int, ...]) -> ConversionStep:
    """`step` with its uneven cuts, for a tensor of `shape` in the layout `before`. A dim's other axes cut it first."""

    sizes = dict(zip(before.mesh.axes, before.mesh.sizes, strict=True))

    def cut(placement: Placement, placed: Layout) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        others = tuple(sizes[axis] for axis in placed.axes_of(placement.dim) if axis not in step.axes)
        outer = Cut(shape[placement.dim], others).width if others else shape[placement.dim]
        slices = Cut(outer, tuple(sizes[axis] for axis in step.axes))
        return placement if slices.even else Shard(placement.dim, slices)

    return replace(step, source=cut(step.source, before), target=cut(step.target, step.after))


@lru_cache(maxsize=1024)
def digits_of(states: int, axes: int) -> Codes:
    """The state of each of `axes` axes, for every code."""
    return np.indices((states,) * axes).reshape(axes, states**axes).T.copy()


@lru_cache(maxsize=1024)
def _layouts(mesh: Mesh, states: tuple[Placement, ...]) -> tuple[Layout, ...]:
    return tuple(map(partial(layout, mesh), itertools.product(states, repeat=len(mesh.axes))))


@lru_cache(maxsize=1024)
def _index(mesh: Mesh, states: tuple[Placement, ...]) -> dict[Layout, int]:
    return {placed: code for code, placed in enumerate(_layouts(mesh, states))}


@lru_cache(maxsize=1024)
def _groups_of_codes(states: int, axes: int, chosen: tuple[int, ...]) -> tuple[Codes, list[int]]:
    """For every state of the axes not in `chosen`, the codes with one state on all of `chosen`; and the other axes."""
    others = [a for a in range(axes) if a not in chosen]
    weights = [states ** (axes - 1 - a) for a in range(axes)]
    base = digits_of(states, len(others)) @ np.array([weights[a] for a in others], dtype=np.intp)
    along = np.arange(states) * sum(weights[a] for a in chosen)
    return along[:, None] + base[None, :], others


@lru_cache(maxsize=4096)
def _coefficients(
    states: tuple[Placement, ...],
    gradient: bool,
    stay_split: bool,
    again: bool,
    wider: int,
    mesh: Mesh,
    sets: tuple[tuple[str, ...], ...],
    profile: DeviceProfile,
    weights: Weights,
) -> tuple[_Coefficients, ...]:
    """For each set of axes `fixed` and `linear`: a step over them costs `fixed + linear * bytes of the value, whole
    along these axes`, and what a large collective gains in steps by level. Steps over several axes all communicate:
    local steps cost the same one axis at a time."""
    steps = []
    for i, j, ways in steps_between(states, gradient):
        if stay_split and any(way.communicates and not COLLECTIVES[way].settled for way in ways):
            continue
        if stay_split and ways[0] is Kind.PAD:  # padding and summing amounts to a gather
            continue
        sent = [(way, wider if wider > 1 and phase and is_reduction(way) else 1) for phase, way in enumerate(ways)]
        steps.append((i, j, [*sent, sent[0]] if again else sent))
    collectives = {way for _, _, sent in steps for way, _ in sent if way.communicates}
    copying = weights.compute / (profile.reached.memory * profile.memory_bandwidth)
    local = dict.fromkeys((Kind.PAD, Kind.KEEP), (0.0, copying))
    sizes = [mesh.size(*axes) for axes in sets]
    every = [collective_costs(mesh, axes, profile) for axes in sets]
    payloads = [shares_of(collectives, size) for size in sizes]
    coefficients = []
    for axes, costs, shares in zip(sets, every, payloads, strict=True):
        collective = {
            way: (weights.latency * costs[way][0], weights.wire * part * costs[way][1]) for way, part in shares.items()
        }
        prices, in_steps = local | collective, hierarchies(mesh, axes, profile)
        gains = []
        fixed, linear = np.full((len(states),) * 2, np.inf), np.zeros((len(states),) * 2)
        np.fill_diagonal(fixed, 0.0)
        for i, j, sent in steps:
            if len(axes) > 1 and not any(way in collective for way, _ in sent):
                continue
            fixed[i, j] = _STEP
            for way, times in sent:
                seconds, per_byte = prices.get(way, (0.0, 0.0))
                fixed[i, j] += seconds
                linear[i, j] += times * per_byte
                if (faster := in_steps.get(way)) is not None:
                    waiting = weights.latency * faster.waiting - seconds
                    gains.append((i, j, times, faster.least, waiting, weights.wire * faster.per_byte - per_byte))
        coefficients.append((fixed, linear, gains))
    return tuple(coefficients)


@lru_cache(maxsize=4096)
def conversion_table(
    shape: tuple[int, ...],
    itemsize: int,
    partial: str | None,
    gradient: bool,
    mesh: Mesh,
    profile: DeviceProfile,
    weights: Weights,
    stay_split: bool = False,
    again: bool = False,
    wider: int = 1,
    short: frozenset[int] = frozenset(),
    routed: tuple[Routed, ...] = (),
    load: float = 1.0,
) -> ConversionTable:
    """The shared table for these arguments."""
    return ConversionTable(
        shape=shape,
        itemsize=itemsize,
        partial=partial,
        gradient=gradient,
        mesh=mesh,
        profile=profile,
        weights=weights,
        barred=frozenset(),
        tied=(),
        stay_split=stay_split,
        again=again,
        wider=wider,
        short=short,
        routed=routed,
        load=load,
    )


@lru_cache(maxsize=4096)
def once_more(table: ConversionTable) -> ConversionTable:
    """The shared table like `table`, for conversions whose forward runs once more in the backward."""
    return replace(table, again=True)


@lru_cache(maxsize=4096)
def tie(table: ConversionTable, axes: tuple[str, ...]) -> ConversionTable:
    """The shared table like `table` in which layouts do not change along `axes`."""
    return replace(table, tied=axes)
