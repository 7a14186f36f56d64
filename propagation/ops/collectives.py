"""The operators by which a program communicates, `convert` and, after fusion, `convert_group`, and the kinds of
collectives.

`partway::convert(x, source, target, axes, size, tag)` turns a rank's part of a tensor under the placement `source` on
each of `axes` into its part under `target` on each (`strategy/placement.py` has the collective or local step). Several
axes, in the order of the mesh, act as one axis of `size` ranks, the product of their sizes. `tag` is the position of
the conversion in the program's list, which holds its reason. The result of a conversion that moves data is contiguous,
whatever the strides of its operand. Both operators are symbols: they have shapes and a derivative, and the executors of
`runtime/` run them; calling one outside an executor is an error.

For routed rows of a mixture of experts it also takes `counts`, of shape [2, size]: the numbers of rows that the rank
sends to each rank, and gets from each.

`partway::constrain(x, strategy, name)` is x with a user's constraint at this place of the model. `strategy` is the JSON
text of `constraint_text`; planning reads it, and lowering removes the call.

The kinds of collectives, each with a row in COLLECTIVES, for planning:

    kind             payload                 one of n ranks sends   messages   its transpose
    all_reduce       the whole value         2 (n - 1) / n of it    2 (n - 1)  nothing, or all_reduce
    all_gather       the whole value         (n - 1) / n of it      n - 1      slice, or reduce_scatter
    reduce_scatter   the whole value         (n - 1) / n of it      n - 1      all_gather
    all_to_all       a rank's part           (n - 1) / n of it      n - 1      all_to_all
    all_to_allv      a rank's rows           (n - 1) / n of it      n - 1      all_to_allv
    exchange         the busiest rank's data all of it              1          exchange

The kinds themselves, and the conversions that use them, are in `strategy/placement.py`: the transpose of a conversion
follows from the duals of its placements. issue.py and meetings.py of `runtime/executors/` run each kind. A kind is
printed as its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...strategy.cut import SliceWindow
from ...strategy.placement import Kind, Placement, Routed, Shard, adjoint, kind, placement_from_code
from .registration import define


def converted_shape(shape: tuple[int, ...], source: str, target: str, size: int) -> tuple[int, ...]:
    """The local shape after converting a local `shape` among `size` ranks."""
    out = list(shape)
    before, after = placement_from_code(source), placement_from_code(target)
    match before, after:
        case Shard(), SliceWindow():
            out[after.dim] = after.width
        case SliceWindow(), _:
            out[before.dim] = before.cut.width
        case _, Routed(dim=int() as dim, rows=int() as rows):
            out[dim] = rows
        case _:
            if isinstance(before, Shard):
                out[before.dim] = before.cut.size if before.cut else out[before.dim] * size
            if isinstance(after, Shard):
                out[after.dim] = after.cut.width if after.cut else out[after.dim] // size
    return tuple(out)


@lru_cache(maxsize=4096)
def kind_of(source: str, target: str) -> Kind:
    """The kind of the conversion between two placement codes."""
    return kind(placement_from_code(source), placement_from_code(target))


def _fake_convert(
    x: Tensor, source: str, target: str, axes: list[str], size: int, tag: int, counts: Tensor | None = None
) -> Tensor:
    if kind_of(source, target) is Kind.NOTHING:  # the result is the operand
        return x.new_empty_strided(x.shape, x.stride())
    return x.new_empty(converted_shape(tuple(x.shape), source, target, size))


def _fake_group(
    xs: list[Tensor], source: str, target: str, axes: list[str], size: int, tags: list[int]
) -> list[Tensor]:
    return [x.new_empty(converted_shape(tuple(x.shape), source, target, size)) for x in xs]


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, source, target, ctx.axes, ctx.size, ctx.tag, counts = inputs
    before, after = placement_from_code(source), placement_from_code(target)
    if isinstance(before, Routed) and before.dim is not None:
        before = replace(before, rows=x.shape[before.dim])
        ctx.save_for_backward(counts)
    ctx.back = adjoint(after), adjoint(before)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    source, target = ctx.back
    if source != target:
        counts = [each.flip(0) for each in ctx.saved_tensors]  # of routed rows: what was sent comes back
        grad = convert(grad, str(source), str(target), ctx.axes, ctx.size, ctx.tag, *counts)
    return grad, None, None, None, None, None, None


def _fake_constrain(x: Tensor, strategy: str, name: str) -> Tensor:
    return torch.empty_like(x)


# -- The operators

convert = define(
    "convert(Tensor x, str source, str target, str[] axes, int size, int tag, Tensor? counts=None) -> Tensor",
    fake=_fake_convert,
    backward=_backward,
    keep=_keep_context,
)
convert_group = define(
    "convert_group(Tensor[] xs, str source, str target, str[] axes, int size, int[] tags) -> Tensor[]", fake=_fake_group
)
constrain = define(
    "constrain(Tensor x, str strategy, str name) -> Tensor",
    fake=_fake_constrain,
    backward=lambda ctx, grad: (grad, None, None),
)


# -- The kinds of collectives

Bytes = TypeVar("Bytes", int, NDArray[np.float64])  # of a tensor in one layout, or in each of several
TAG = 5  # the place of the tag among the arguments of `convert`
WORTH_A_CALL = 2**20  # bytes: copying that much into a buffer and out again takes as long as one call of gloo


class Payload(Enum):
    """The bytes that count as the payload of a collective, on one rank."""

    WHOLE = "whole"  # those of the value, as if no axis of the collective split it
    HELD = "held"  # those that the rank holds before
    SENT = "sent"  # those that the busiest rank sends


@dataclass(frozen=True, slots=True)
class KindRow:
    """One kind of collective.

    payload    the bytes of the value that count
    wire       the bytes that one of n ranks sends, from the payload and n
    steps      the number of consecutive messages among n ranks
    narrows    between nodes each rank sends only its share of the data of its node
    adds       it adds the values of ranks up (or takes their maximum)
    gathers    every rank gets the whole tensor, of which ranks hold parts
    settled    every rank holds the same part before and after
    figures    the kind whose figures in a device profile predict it; None: its own
    fusion     the key of the option comm_fusion that groups those of parameters; None: they are never grouped
    """

    payload: Payload
    wire: Callable[[float, int], float]
    steps: Callable[[int], int]
    narrows: bool = False
    adds: bool = False
    gathers: bool = False
    settled: bool = False
    figures: Kind | None = None
    fusion: str | None = None


def _once(payload: float, n: int) -> float:
    """A ring: each rank sends all but one of n parts."""
    return (n - 1) / n * payload


def _twice(payload: float, n: int) -> float:
    return 2 * _once(payload, n)


COLLECTIVES: Mapping[Kind, KindRow] = {
    Kind.ALL_REDUCE: KindRow(
        Payload.WHOLE, _twice, lambda n: 2 * (n - 1), narrows=True, adds=True, settled=True, fusion="allreduce"
    ),
    Kind.REDUCE_SCATTER: KindRow(
        Payload.WHOLE, _once, lambda n: n - 1, narrows=True, adds=True, fusion="reducescatter"
    ),
    Kind.ALL_GATHER: KindRow(Payload.WHOLE, _once, lambda n: n - 1, narrows=True, gathers=True, fusion="allgather"),
    Kind.ALL_TO_ALL: KindRow(Payload.HELD, _once, lambda n: n - 1),
    Kind.ALL_TO_ALLV: KindRow(Payload.HELD, _once, lambda n: n - 1, figures=Kind.ALL_TO_ALL),
    # Like all_to_all, but each rank sends to some ranks only.
    Kind.EXCHANGE: KindRow(Payload.SENT, lambda payload, n: payload, lambda n: 1, figures=Kind.ALL_TO_ALL),
}


def is_gather(kind: Kind) -> bool:
    """Whether every rank gets the whole tensor, of which ranks hold parts."""
    return kind.communicates and COLLECTIVES[kind].gathers


def is_reduction(kind: Kind) -> bool:
    """Whether it adds the values of ranks up (or takes their maximum)."""
    return kind.communicates and COLLECTIVES[kind].adds


def figures_of(kind: Kind) -> Kind:
    """The kind whose figures in a device profile predict a collective."""
    return COLLECTIVES[kind].figures or kind


def shares_of(kinds: Iterable[Kind], size: int) -> dict[Kind, float]:
    """The payload of each of some kinds of collectives among `size` ranks, as a fraction of the whole value. Raises
    ValueError for a kind whose payload has no fixed fraction."""
    return {kind: _share(kind, size) for kind in kinds}


def _share(kind: Kind, size: int) -> float:
    match COLLECTIVES[kind].payload:
        case Payload.WHOLE:
            return 1.0
        case Payload.HELD:
            return 1 / size
        case Payload.SENT:
            raise ValueError(f"the payload of {kind} is not a share of the whole value")


def payload_bytes(source: Placement, target: Placement, shape: Sequence[int], itemsize: int, size: int) -> int:
    """The payload of converting a local tensor of `shape` among `size` ranks."""
    held = math.prod(shape) * itemsize
    match COLLECTIVES[kind(source, target)].payload:
        case Payload.HELD:
            return held
        case Payload.WHOLE if isinstance(source, Shard):
            return held // shape[source.dim] * source.cut.size if source.cut else held * size
        case Payload.WHOLE:
            return held
        case Payload.SENT:
            window = next(side for side in (source, target) if isinstance(side, SliceWindow))
            return held // shape[window.dim] * window.rows[window.adds]


def payload_of_whole(
    kind: Kind, source: Placement, target: Placement, whole_bytes: Bytes, size: int, forward: bool
) -> Bytes:
    """The payload of a collective, the conversion from `source` to `target` (`forward`) or its transpose, among `size`
    ranks. `whole_bytes`: the bytes that a rank would hold of the value if the collective's axes did not split it."""
    match COLLECTIVES[kind].payload:
        case Payload.WHOLE:
            return whole_bytes
        case Payload.HELD:
            held = source if forward else target
            if isinstance(held, Shard) and held.cut:
                return whole_bytes // held.cut.size * held.cut.width
            return whole_bytes // size
        case Payload.SENT:
            assert isinstance(target, SliceWindow)
            return whole_bytes // target.cut.size * target.rows[not forward]
