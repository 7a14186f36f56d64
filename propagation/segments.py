"""A long program as pieces, few of them different: a deep model repeats one layer.

A piece is a stretch of the program in its order. Where to cut is free, so the cuts are put where pieces come out
alike. First every call gets a token, equal for calls of one operator with equal constants on operands of equal
shapes; a stretch of tokens that stands several times in a row is a layer. Then the wiring is compared too, and only
pieces of equal tokens and wiring have equal keys: what is traced of one holds for the other.

The tokens need the local shape of every value. A call with a known token has a known result, so an operator of a
layer runs on fake tensors once, however many layers there are.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from .collectives import convert

_PERIODS = 64  # how many distances between equal tokens are tried as the length of a layer, the commonest first
_WORTH = 32  # nodes: two pieces more cost about as much as tracing this many again


@dataclass(frozen=True, slots=True)
class Like:
    """A local tensor without its values. `lazy`: a conjugation or negation of it is still to be carried out."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    lazy: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, requires_grad: bool) -> Like:
        """What `tensor` is like; `requires_grad` is said apart, for gradients do not."""
        lazy = tensor.is_conj() or tensor.is_neg()
        return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, requires_grad, lazy)

    def empty(self) -> torch.Tensor:
        """A new tensor of this kind, a leaf of autograd. A fake one where a fake mode is on."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(self.requires_grad)


Result = Any  # a Like, a tuple of results, or a plain value


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a program.

    inputs    the values from outside, in the order of their first use
    outputs   the values that are read outside
    likes     what the inputs are like
    tags      those of its conversions, in order
    key       equal for pieces that compute the same but for the tags of their conversions
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    likes: tuple[Like, ...]
    tags: tuple[int, ...]
    key: Hashable


def pieces_of(graph: fx.Graph, inputs: Mapping[fx.Node, Like]) -> tuple[tuple[Piece, ...], dict[fx.Node, Result]]:
    """`graph` cut into pieces, and what its values are like; `inputs`: what its placeholders are.

    Call it in a fake mode, with gradients enabled.
    """
    units = _units(graph)
    calls = {node: _call(node) for unit in units for node in unit}
    token, results = _described(calls, inputs)
    numbers: dict[tuple[int, ...], int] = {}
    tokens = np.array([numbers.setdefault(tuple(token[n] for n in unit), len(numbers)) for unit in units], np.int64)
    lazy = any(isinstance(result, Like) and result.lazy for result in results.values())
    # a Like cannot make a tensor that is conjugated lazily, so none may come into a piece
    starts = [0] if lazy else _cuts(tokens, _crossing(units, calls), 0, len(units))
    stretches = [
        [node for unit in units[start:stop] for node in unit]
        for start, stop in zip(starts, [*starts[1:], len(units)], strict=True)
    ]
    return tuple(_piece(nodes, calls, token, results) for nodes in stretches), results


def _units(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """The calls in order, each with the getitems that take its results apart: only tensors pass from unit to unit."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return [(node, *(user for user in node.users if user.target is operator.getitem)) for node in calls]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call apart from what it is called with: its operands in order, a repeated one repeated, and all the rest."""

    operands: tuple[fx.Node, ...]
    text: Hashable


def _call(node: fx.Node) -> _Call:
    operands: list[fx.Node] = []
    args = node.args[:-1] if node.target is convert else node.args  # the tag is the conversion's own
    text = (node.target, _text(args, operands), _text(node.kwargs, operands))
    return _Call(tuple(operands), text)


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
    calls: Mapping[fx.Node, _Call], inputs: Mapping[fx.Node, Like]
) -> tuple[dict[fx.Node, int], dict[fx.Node, Result]]:
    """For each call its token, and for each node what its result is like."""
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
    """What `node` computes of operands that are like `results`."""
    if node.target is operator.getitem:
        return operator.getitem(*fx.node.map_arg(node.args, results.__getitem__))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: results[operand].empty())
    return _like(node.target(*args, **kwargs))  # type: ignore[operator]


def _like(value: Any) -> Result:
    if isinstance(value, torch.Tensor):
        return Like.of(value, value.requires_grad)
    return tuple(map(_like, value)) if isinstance(value, list | tuple) else value


def _crossing(units: Sequence[tuple[fx.Node, ...]], calls: Mapping[fx.Node, _Call]) -> np.ndarray[Any, Any]:
    """For each unit how many values are made before it and read by it or after it."""
    place = {node: i for i, unit in enumerate(units) for node in unit}
    last = {operand: i for i, unit in enumerate(units) for node in unit for operand in calls[node].operands}
    change = np.zeros(len(units) + 1, np.int64)
    for node, i in last.items():
        if node in place:
            change[place[node] + 1] += 1
            change[i + 1] -= 1
    return np.cumsum(change)


@dataclass(frozen=True, slots=True)
class _Repeat:
    """From `start`, the next `equal` tokens are each equal to the one `period` later."""

    start: int
    period: int
    equal: int

    @property
    def saves(self) -> int:
        """Tokens in copies of the first period."""
        return self.equal // self.period * self.period


def _cuts(tokens: np.ndarray[Any, Any], crossing: np.ndarray[Any, Any], start: int, stop: int) -> list[int]:
    """Where the pieces of the tokens from `start` to `stop` start: the longest repeat's copies, then those before
    and after it. Of the places where a copy may start, the one that the fewest values cross is taken."""
    best = max(_repeats(tokens[start:stop]), key=lambda repeat: repeat.saves, default=None)
    if best is None or best.saves < _WORTH:
        return [start] if start < stop else []
    copies, spare = best.equal // best.period + 1, best.equal % best.period
    first = start + best.start + int(np.argmin(crossing[start + best.start + best.period :][: spare + 1]))
    end = first + copies * best.period
    copied = list(range(first, end, best.period))
    return [*_cuts(tokens, crossing, start, first), *copied, *_cuts(tokens, crossing, end, stop)]


def _repeats(tokens: np.ndarray[Any, Any]) -> Iterable[_Repeat]:
    """Stretches of `tokens` that stand at least twice in a row."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, token in enumerate(tokens.tolist()):
        if token in last:
            distances[i - last[token]] += 1
        last[token] = i
    for period, _ in distances.most_common(_PERIODS):
        equal = np.concatenate([[False], tokens[:-period] == tokens[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - begin >= period:
                yield _Repeat(begin, period, end - begin)


def _piece(
    nodes: Sequence[fx.Node],
    calls: Mapping[fx.Node, _Call],
    token: Mapping[fx.Node, int],
    results: Mapping[fx.Node, Result],
) -> Piece:
    place = {node: i for i, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}
    wiring = tuple(
        tuple(place[o] if o in place else ~outside.setdefault(o, len(outside)) for o in calls[node].operands)
        for node in nodes
    )
    outputs = tuple(node for node in nodes if any(user not in place for user in node.users))
    return Piece(
        nodes=tuple(nodes),
        inputs=tuple(outside),
        outputs=outputs,
        likes=tuple(results[node] for node in outside),
        tags=tuple(node.args[-1] for node in nodes if node.target is convert),  # type: ignore[misc]
        key=(tuple(token[node] for node in nodes), wiring, tuple(place[node] for node in outputs)),
    )
