"""Exchanges in which each rank has its own neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partway.ops.collectives import check_position, check_tensor
from partway.ops.where import here
from partway.propagation.ops import by_hand
from partway.strategy import OperatorError
from partway.strategy.errors import shown
from partway.strategy.place import Group

_SIDES = ("top", "bottom", "left", "right")  # in the order of `send_lens` and `recv_lens`
_AROUND = {
    "top": ("top", ""), "top right": ("top", "right"), "right": ("", "right"), "bottom right": ("bottom", "right"),
    "bottom": ("bottom", ""), "bottom left": ("bottom", "left"), "left": ("", "left"), "top left": ("top", "left"),
}  # fmt: skip  # the neighbours in the order of rank ids, and the sides of their borders
_OPPOSITE = dict(zip(_AROUND, [*_AROUND][4:] + [*_AROUND][:4], strict=True))


def neighbor_exchange(
    xs: Sequence[Tensor],
    send_rank_ids: Sequence[int],
    recv_rank_ids: Sequence[int],
    recv_shapes: Sequence[Sequence[int]] | None = None,
    group: Group = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Send xs[i] to the rank at position send_rank_ids[i] of the group, and receive a tensor from each `recv_rank_ids`.

    recv_shapes    the shapes of the received tensors, in the order of `recv_rank_ids`; None: those of `xs`, in order
    dtype, device  of the received tensors; None: those of `xs`

    Every rank of the group calls it, with empty lists if it has no neighbours. If a rank sends several tensors to
    another one, they arrive in the order of sending. Gradients go the opposite way. Raises as `all_reduce` does.
    """
    return exchange("neighbor_exchange", xs, send_rank_ids, recv_rank_ids, recv_shapes, group, dtype, device)


def exchange(
    call: str, xs: Any, targets: Any, sources: Any, shapes: Any, group: Group, dtype: torch.dtype | None, device: Any
) -> list[Tensor]:
    """`neighbor_exchange`, called `call` in errors. Raises as it does."""
    place = here(call)
    axes, size = place.axes(group), place.size(group)
    place.index(group)  # each rank has its own neighbours
    tensors = _list(call, "xs", xs, "tensors")
    for x in tensors:
        check_tensor(call, x)
    targets = check_ranks(call, "send_rank_ids", targets, size)
    sources = check_ranks(call, "recv_rank_ids", sources, size)
    if len(targets) != len(tensors):
        raise OperatorError(
            f"{call}: send_rank_ids has {len(targets)} ranks for {len(tensors)} tensors; write one for each"
        )
    coming = _coming(call, tensors, len(sources), shapes)
    kind, on = _kind_of(call, tensors, dtype, device)
    if size == 1:
        return _kept(call, tensors, coming)
    flat = [extent for shape in coming for extent in shape]
    received: list[Tensor] = by_hand.send_receive(
        tensors, targets, sources, flat, [len(shape) for shape in coming], kind, on, list(axes), size
    )
    return received


def _coming(call: str, tensors: Sequence[Tensor], count: int, shapes: Any) -> list[list[int]]:
    """The shapes of the `count` received tensors."""
    if shapes is None and count != len(tensors):
        raise OperatorError(f"{call}: {count} tensors come, and {len(tensors)} are sent; say by recv_shapes what comes")
    coming = [list(x.shape) for x in tensors] if shapes is None else check_shapes(call, "recv_shapes", shapes)
    if len(coming) != count:
        raise OperatorError(f"{call}: recv_shapes has {len(coming)} shapes for {count} ranks; write one for each")
    return coming


def _kind_of(
    call: str, tensors: Sequence[Tensor], dtype: torch.dtype | None, device: Any
) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of the received tensors."""
    kinds = list(dict.fromkeys((x.dtype, x.device) for x in tensors))
    if len(kinds) > 1:
        told = ", ".join(f"{kind} on {where}" for kind, where in kinds)
        raise OperatorError(f"{call}: tensors of several kinds are sent ({told}); exchange each kind by itself")
    if kinds and dtype not in (None, kinds[0][0]):
        raise OperatorError(
            f"{call}: what is sent is {kinds[0][0]}, and what comes {dtype}; exchange one dtype at a time"
        )
    if kinds:
        return kinds[0]
    if dtype is None:
        raise OperatorError(f"{call}: nothing is sent that would tell the dtype of what comes; pass dtype=")
    return dtype, torch.get_default_device() if device is None else torch.device(device)


def _kept(call: str, tensors: Sequence[Tensor], coming: Sequence[Sequence[int]]) -> list[Tensor]:
    """The received tensors in a group of one rank, which sends to itself."""
    sent = [list(x.shape) for x in tensors]
    if sent != list(map(list, coming)):
        raise OperatorError(f"{call}: the one rank of the group sends itself {sent}, and expects {list(coming)}")
    return [x.clone() for x in tensors]


def neighbor_exchange_v2(
    x: Tensor,
    send_rank_ids: Sequence[int],
    send_lens: Sequence[int],
    recv_rank_ids: Sequence[int],
    recv_lens: Sequence[int],
    data_format: str = "NCHW",
    group: Group = None,
) -> Tensor:
    """x (N, C, H, W) with the borders of its neighbours around it: (N, C, top + H + bottom, left + W + right).

    send_rank_ids  the positions in the group of the 8 neighbours to which borders of x are sent, clockwise: top, top
                   right, right, bottom right, bottom, bottom left, left, top left; -1 for none
    send_lens      the numbers of rows or columns sent to the top, bottom, left and right; corners have both
    recv_rank_ids  the neighbours whose borders are received, likewise
    recv_lens      the numbers of rows or columns received from the top, bottom, left and right; ignored at a side
                   without a neighbour
    data_format    "NCHW"

    A corner that no rank sends, between two received sides, is zeros. Gradients of borders go back to the ranks that
    sent them, and are added there. Raises as `all_reduce` does.
    """
    call = "neighbor_exchange_v2"
    targets, sent, sources, wanted = check_borders(
        call, send_rank_ids, send_lens, recv_rank_ids, recv_lens, data_format
    )
    size = here(call).size(group)
    check_ranks(call, "send_rank_ids", targets.values(), size)
    check_ranks(call, "recv_rank_ids", sources.values(), size)
    check_tensor(call, x)
    if x.dim() != 4:
        raise OperatorError(f"{call} takes a tensor (N, C, H, W), not one of shape {list(x.shape)}")
    going = {name: x[_window(call, x, name, sent)] for name in targets}
    around = {side: wanted[side] if side in sources else 0 for side in _SIDES}
    shapes = {
        name: [*x.shape[:2], around.get(rows, x.shape[2]), around.get(columns, x.shape[3])]
        for name, (rows, columns) in _AROUND.items()
    }
    # A border sent to the top arrives from the bottom: in this order, ranks that are neighbours twice, as in a ring of
    # two, receive each border at its place. Borders without elements are neither sent nor received.
    out = [name for name in _AROUND if name in going and going[name].numel()]
    back = [name for name in _OPPOSITE.values() if name in sources and math.prod(shapes[name])]
    came = exchange(
        call,
        [going[name] for name in out],
        [targets[name] for name in out],
        [sources[name] for name in back],
        [shapes[name] for name in back],
        group,
        x.dtype,
        x.device,
    )
    pieces = {name: x.new_zeros(shape) for name, shape in shapes.items() if name not in back}
    pieces |= dict(zip(back, came, strict=True))
    rows = [("top left", "top", "top right"), ("left", "", "right"), ("bottom left", "bottom", "bottom right")]
    return torch.cat([torch.cat([pieces[name] if name else x for name in row], 3) for row in rows], 2)


def _window(call: str, x: Tensor, name: str, lens: Mapping[str, int]) -> tuple[slice, ...]:
    """The part of `x` for the neighbour `name`."""
    window = [slice(None)] * 4
    for dim, side in enumerate(_AROUND[name], 2):
        if not side:
            continue
        count, extent = lens[side], x.shape[dim]
        if count > extent:
            what = "rows" if dim == 2 else "columns"
            raise OperatorError(
                f"{call}: send_lens has {count} {what} for the {side}, and a tensor of shape {list(x.shape)} has "
                f"{extent}"
            )
        window[dim] = slice(count) if side in ("top", "left") else slice(extent - count, None)
    return tuple(window)


# -- Checks


def check_ranks(call: str, what: str, ranks: Any, size: int | None = None) -> list[int]:
    """Positions in a group, of `size` ranks if given. Raises OperatorError for invalid ones."""
    given = _list(call, what, ranks, "positions in the group")
    for rank in given:
        check_position(call, f"{what} has", rank, size)
    return given


def check_shapes(call: str, what: str, shapes: Any) -> list[list[int]]:
    """The shapes of several tensors, as lists. Raises OperatorError for invalid ones."""
    given = _list(call, what, shapes, "shapes")
    for shape in given:
        sizes = list(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else [None]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
            raise OperatorError(f"{call}: {what} has {shown(shape)}, which is no shape")
    return [list(shape) for shape in given]


def check_borders(
    call: str, send_rank_ids: Any, send_lens: Any, recv_rank_ids: Any, recv_lens: Any, data_format: object
) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
    """The existing ranks by neighbour, and the lengths by side: of sent borders, and of received ones. Raises
    OperatorError for invalid arguments."""
    if data_format != "NCHW":
        raise OperatorError(f"{call}: data_format is {shown(data_format)}; write 'NCHW', the one there is")
    read = []
    for what, ids in (("send_rank_ids", send_rank_ids), ("recv_rank_ids", recv_rank_ids)):
        ranks = _list(call, what, ids, "positions in the group")
        if len(ranks) != len(_AROUND):
            raise OperatorError(
                f"{call}: {what} has {len(ranks)} ranks; write one for each of {', '.join(_AROUND)}, -1 where there is "
                "none"
            )
        there = {name: rank for name, rank in zip(_AROUND, ranks, strict=True) if rank != -1}
        check_ranks(call, what, there.values())
        read.append(there)
    lens = []
    for what, given in (("send_lens", send_lens), ("recv_lens", recv_lens)):
        counts = _list(call, what, given, "lengths")
        if len(counts) != len(_SIDES) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts
        ):
            raise OperatorError(f"{call}: {what} is {shown(given)}; write how many for the {', '.join(_SIDES)}")
        lens.append(dict(zip(_SIDES, counts, strict=True)))
    return read[0], lens[0], read[1], lens[1]


def _list(call: str, what: str, given: Any, kind: str) -> list[Any]:
    if isinstance(given, Tensor | str) or not isinstance(given, Iterable):
        raise OperatorError(f"{call}: {what} is {shown(given)}; write a list of {kind}")
    return list(given)
