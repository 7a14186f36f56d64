"""A program as pieces, of which a deep model has few different ones, since it repeats one layer.

A program may be cut anywhere: any stretch of it can be differentiated by itself. So the cuts are put where pieces come
out alike, at places that each layer has, whatever precedes it: where few values cross. Pieces with equal keys compute
the same but for the tags of their conversions, and share one trace.

Keys need the local shape of every value. A call that equals an earlier one, on operands alike, has a result like that
of the earlier, so an operator of a layer runs on fake tensors once, however many layers there are.

An unrolled loop over time repeats its steps, but each step takes another element: `x.select(1, t)`. Such calls
are pieces of their own (`_apart`), and the steps between them are alike.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..graph.nodes import REPLACING, is_view, region_of
from ..memory.stretches import crossings, cuts
from ..ops.collectives import TAG, convert
from ..ops.experts import LAYER, counted

_LENGTHS = (8, 64)  # calls in a piece: tracing a piece costs as much as some calls, and a layer has dozens
_SHORTER = (1, 4)  # for short steps of a loop: LSTMCell is one call, which is 20 calls once it is traced
_MUCH_LESS = 0.5  # the share of traced calls below which shorter pieces are worth it
_SERIES = 4  # calls that differ by a number, from which they count as the steps of a loop


@dataclass(frozen=True, slots=True)
class Like:
    """A local tensor without its values. `lazy`: it has a pending conjugation or negation."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    lazy: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, requires_grad: bool) -> Like:
        """The Like of `tensor`, with the given `requires_grad`, as a gradient may be taken for one that needs none."""
        lazy = tensor.is_conj() or tensor.is_neg()
        return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, requires_grad, lazy)

    @staticmethod
    def whole(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Like:
        """The Like of a contiguous tensor."""
        stride = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        return Like(tuple(shape), stride, dtype, device, requires_grad)

    def empty(self) -> torch.Tensor:
        """A new tensor of this kind, a leaf of autograd; a fake one under a fake mode."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(self.requires_grad)


Result = Any  # a Like, a tuple of results, or a plain value


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a program.

    inputs    the values from outside, in the order of their first use
    outputs   the values that are read outside
    likes     the Like of each input
    tags      the tags of its conversions, in order
    regions   the regions of torch.utils.checkpoint that its nodes belong to, in the order of their first node
    key       equal for pieces that compute the same but for the tags of their conversions, the layers of their mixtures
              and the names of regions
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    likes: tuple[Like, ...]
    tags: tuple[int, ...]
    regions: tuple[int, ...]
    key: Hashable


def pieces_of(graph: fx.Graph, inputs: Mapping[fx.Node, Like]) -> tuple[tuple[Piece, ...], dict[fx.Node, Result]]:
    """`graph` cut into pieces, and the likeness of each of its values; `inputs`: the Like of each placeholder.

    Call it in a fake mode, with gradients enabled.
    """
    units = _units(graph)
    calls = {node: _call(node) for unit in units for node in unit}
    tokens, results = _described(calls, inputs)

    def cut(stretches: Iterable[Sequence[_Unit]]) -> tuple[Piece, ...]:
        return tuple(_piece([n for unit in stretch for n in unit], calls, tokens, results) for stretch in stretches)

    # a Like cannot make a lazily conjugated tensor, so none may be an input of a piece
    if any(isinstance(result, Like) and result.lazy for result in results.values()):
        return cut([units]), results
    runs = list(_apart(units, calls, results))
    once = {node for run in runs if run.numbered for unit in run.units for node in unit}

    def traced(pieces: Iterable[Piece]) -> int:
        """The number of calls traced in the different pieces, except those that are traced in any case."""
        return sum(node not in once for piece in {p.key: p for p in pieces}.values() for node in piece.nodes)

    pieces = cut(_stretches(runs, calls, _LENGTHS))
    if once and 2 * traced(pieces) > len(calls) - len(once):  # there are steps of a loop, and little is repeated
        shorter = cut(_stretches(runs, calls, _SHORTER))
        pieces = shorter if traced(shorter) < _MUCH_LESS * traced(pieces) else pieces
    return pieces if len({piece.key for piece in pieces}) < len(pieces) else cut([units]), results


_Unit = tuple[fx.Node, ...]


def _units(graph: fx.Graph) -> list[_Unit]:
    """The calls in order, each with the getitems of its results: only tensors pass from unit to unit."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return [(node, *(user for user in node.users if user.target is operator.getitem)) for node in calls]


_OWN: Mapping[Any, int] = {convert: TAG, counted: LAYER}  # the place of an argument that each call has for itself


@dataclass(frozen=True, slots=True)
class _CallShape:
    """A call split into its operands in order, with repetitions, and the text of everything else."""

    operands: tuple[fx.Node, ...]
    text: Hashable


def _call(node: fx.Node) -> _CallShape:
    operands: list[fx.Node] = []
    own = _OWN.get(node.target)
    args = node.args if own is None else (*node.args[:own], *node.args[own + 1 :])
    text = (node.target, _text(args, operands), _text(node.kwargs, operands))
    return _CallShape(tuple(operands), text)


def _text(argument: Any, operands: list[fx.Node]) -> Hashable:
    """`argument` as a value that can be compared; its nodes are left out, and added to `operands`."""
    if isinstance(argument, fx.Node):
        operands.append(argument)
        return fx.Node
    if isinstance(argument, list | tuple):
        return list, *(_text(a, operands) for a in argument)
    if isinstance(argument, dict):
        return dict, *((name, _text(a, operands)) for name, a in argument.items())
    if isinstance(argument, float | complex):
        return type(argument), repr(argument)  # -0.0 is not 0.0 here
    return type(argument), argument  # 1 and True are different arguments


def _described(
    calls: Mapping[fx.Node, _CallShape], inputs: Mapping[fx.Node, Like]
) -> tuple[dict[fx.Node, int], dict[fx.Node, Result]]:
    """The token of each call, and the likeness of each node's result."""
    tokens: dict[fx.Node, int] = {}
    results: dict[fx.Node, Result] = dict(inputs)
    known: dict[Hashable, tuple[int, Result]] = {}
    for node, call in calls.items():
        key = call.text, tuple(results[operand] for operand in call.operands)
        if key not in known:
            known[key] = len(known), _result(node, results)
        tokens[node], results[node] = known[key]
    return tokens, results


def _result(node: fx.Node, results: Mapping[fx.Node, Result]) -> Result:
    """The likeness of the result of `node`, for operands that are like `results`."""
    if node.target is operator.getitem:
        taken: Any = map_arg(node.args, results.__getitem__)
        return operator.getitem(*taken)

    def given(operand: fx.Node) -> Any:
        like = results[operand]
        return like.empty() if isinstance(like, Like) else like

    args, kwargs = map_arg((node.args, node.kwargs), given)
    return _like(node.target(*args, **kwargs))  # type: ignore[operator]


def _like(value: Any) -> Result:
    if isinstance(value, torch.Tensor):
        return Like.of(value, value.requires_grad)
    return tuple(map(_like, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class _Run:
    """Consecutive units. `numbered`: each takes, or puts, another element of a tensor."""

    units: list[_Unit]
    numbered: bool


def _apart(
    units: Sequence[_Unit], calls: Mapping[fx.Node, _CallShape], results: Mapping[fx.Node, Result]
) -> Iterator[_Run]:
    """The units in runs of numbered ones and of others. The others keep their order; whenever one of them waits for a
    numbered one, all numbered ones that are ready come first. Numbered units are views, or replace elements."""
    numbered = _numbered(units, calls, results)
    place = {node: i for i, unit in enumerate(units) for node in unit}
    needs = [
        {place[o] for node in unit for o in calls[node].operands if o in place} - {i} for i, unit in enumerate(units)
    ]
    done = [False] * len(units)

    def ready(i: int) -> bool:
        return all(done[other] for other in needs[i])

    regular = deque(i for i in range(len(units)) if i not in numbered)
    waiting = sorted(numbered)
    while regular or waiting:
        run: list[int] = []
        while regular and ready(regular[0]):
            run.append(regular.popleft())
            done[run[-1]] = True
        if run:
            yield _Run([units[i] for i in run], numbered=False)
        run = []
        for i in waiting:
            if ready(i):
                run.append(i)
                done[i] = True
        waiting = [i for i in waiting if not done[i]]
        if run:
            yield _Run([units[i] for i in run], numbered=True)


def _numbered(
    units: Sequence[_Unit], calls: Mapping[fx.Node, _CallShape], results: Mapping[fx.Node, Result]
) -> set[int]:
    """The units, by place, that differ from many others by an integer alone."""
    series: dict[Hashable, dict[Hashable, list[int]]] = {}
    for i, (node, *rest) in enumerate(units):
        if not rest and (node.target in REPLACING or is_view(node)):
            call = calls[node]
            like = _without_numbers(call.text), tuple(results[operand] for operand in call.operands)
            series.setdefault(like, {}).setdefault(call.text, []).append(i)
    return {i for members in series.values() if len(members) >= _SERIES for places in members.values() for i in places}


def _without_numbers(text: Hashable) -> Hashable:
    """`text`, which `_text` made, without its integers."""
    if isinstance(text, tuple):
        return int if text[:1] == (int,) else tuple(map(_without_numbers, text))
    return text


def _stretches(
    runs: Iterable[_Run], calls: Mapping[fx.Node, _CallShape], lengths: tuple[int, int]
) -> Iterator[list[_Unit]]:
    """The units of each piece: runs of numbered units whole, the others cut; `lengths`: the shortest and longest."""
    for run in runs:
        starts = [0] if run.numbered else cuts(_crossing(run.units, calls, lengths[1]), *lengths)
        for start, stop in zip(starts, [*starts[1:], len(run.units)], strict=True):
            yield run.units[start:stop]


def _crossing(units: Sequence[_Unit], calls: Mapping[fx.Node, _CallShape], longest: int) -> list[int]:
    """For each unit, the number of values made before it and read by it or after it, within `longest` units."""
    place = {node: i for i, unit in enumerate(units) for node in unit}
    last = {operand: i for i, unit in enumerate(units) for node in unit for operand in calls[node].operands}
    return crossings([(place[node], i) for node, i in last.items() if node in place], len(units), longest)


def _piece(
    nodes: Sequence[fx.Node],
    calls: Mapping[fx.Node, _CallShape],
    token: Mapping[fx.Node, int],
    results: Mapping[fx.Node, Result],
) -> Piece:
    place = {node: i for i, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}
    wiring = tuple(
        tuple(place[o] if o in place else ~outside.setdefault(o, len(outside)) for o in calls[node].operands)
        for node in nodes
    )
    regions: dict[int, int] = {}
    marked = list(map(region_of, nodes))
    marks = tuple(None if r is None else regions.setdefault(r, len(regions)) for r in marked)
    outputs = tuple(node for node in nodes if any(user not in place for user in node.users))
    return Piece(
        nodes=tuple(nodes),
        inputs=tuple(outside),
        outputs=outputs,
        likes=tuple(results[node] for node in outside),
        tags=tuple(node.args[TAG] for node in nodes if node.target is convert),  # type: ignore[misc]
        regions=tuple(regions),
        key=(tuple(token[node] for node in nodes), wiring, tuple(place[node] for node in outputs), marks),
    )
