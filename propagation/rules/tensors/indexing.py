"""Rules of operators that read or write the elements of a tensor at an index.

An indexed dim can be split. A rank that reads looks up the elements of its part and has zeros for the rest, so that its
result is an addend. A rank that writes extends its part by one place, directs all writes for other parts there, and
drops it at the end. Indices can be split too: where an operator reads, their dims are dims of the result; where it
adds, each part of them gives an addend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from ....strategy.errors import CaptureError
from ...graph.nodes import argument, argument_names, module_path, operands, shape, value
from ...ops.indexing import behind, part_index
from ...torch_internals import schema_of
from ..builder import Builder, Expansion
from ..dims import whole
from ..row import Row, RowFunction, parse_row
from ..rule import Emitter, Localize, Rule

aten = torch.ops.aten

_ADDS = frozenset({"sum", "add"})
_WRAPS = frozenset({"_unsafe_index", "_unsafe_index_put", "index", "index_fill", "index_put"})  # take negative indices


def _row(operand_dims: Sequence[Sequence[str]], result: Sequence[str], **what: Any) -> Row:
    return Row(f"{', '.join(map(' '.join, operand_dims))} -> {' '.join(result)}", **what, fill=0.0)


def _reading(
    node: fx.Node, operand_dims: Sequence[Sequence[str]], result: Sequence[str], split: str, local: Localize
) -> Rule:
    """The rule of an operator that reads along the dims `split`. No index points into the padding of a shard."""
    return replace(parse_row(_row(operand_dims, result, reduce=split, linear=("0",), local=local), node), masks=True)


# -- Along the dims with an index tensor


def _indexed(node: fx.Node) -> tuple[list[str], list[list[str]], list[str], int] | None:
    """The factors of x, of each index and of the result of x[indices], and the number of dims after those of the
    indices; None for a mask."""
    indices: Any = argument(node, "indices")
    tensors = [t for t in indices if t is not None]
    if not tensors or any(value(t).dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    places = [d for d, t in enumerate(indices) if t is not None]
    dims = [f"v{d}" if d in places else f"f{d}" for d in range(len(shape(operands(node)[0])))]
    count = max(len(shape(t)) for t in tensors)
    spread = [f"b{d}" for d in range(count)]
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    kept = [f for f in dims if f[0] == "f"]
    read = [*kept[:first], *spread, *kept[first:]]
    return dims, [spread[count - len(shape(t)) :] for t in tensors], read, len(kept) - first


def index(node: fx.Node) -> Rule | None:
    """x[i, :, j]: the broadcast dims of the indices replace the first indexed dim, or come before all others."""
    factors = _indexed(node)
    if factors is None:
        return None
    dims, indices, read, after = factors
    split = " ".join(f for f in dims if f[0] == "v")
    return _reading(node, [dims, *indices], read, split, _reads_indexed(after))


def index_put(node: fx.Node) -> Rule | None:
    """x[indices] = values: any of several values for one element may be the last, so indices split only if values are
    added."""
    factors = _indexed(node)
    if factors is None:
        return None
    dims, indices, read, _ = factors
    size = shape(operands(node)[-1])
    values = read[len(read) - len(size) :]
    spread = [f for f in read if f[0] == "b"]
    adds = argument(node, "accumulate")
    before = [f"+{dims[0]}", *dims[1:]] if adds else dims
    rule = parse_row(
        _row([before, *indices, values], dims, reduce=" ".join(spread) if adds else "",
             whole="" if adds else " ".join(spread), linear=(f"0 {len(indices) + 1}",), local=_writes_indexed), node,
    )  # fmt: skip
    # an index in the padding adds zero only if the values have its dim
    have = {factor for factor, extent in zip(values, size, strict=True) if extent != 1}
    return replace(rule, even=rule.even | (set(spread) - have))


def _own(emit: Emitter, index: fx.Node, factor: str) -> fx.Node:
    """`index` relative to the rank's part of `factor`, or -1 outside of it."""
    name = str(schema_of(emit.node.target).name).removeprefix("aten::")
    return emit.call(part_index, index, emit.position(factor), emit.bounds(factor), name in _WRAPS)


def _read(emit: Emitter, owns: Sequence[fx.Node], read: Callable[[list[fx.Node]], fx.Node], after: int) -> fx.Node:
    """The result of `read` for indices in the rank's part, with zeros for those in other parts; `after` dims follow
    those of the indices."""
    read_here = read([emit.call(aten.clamp.default, own, 0) for own in owns])
    others = reduce(
        lambda a, b: emit.call(aten.logical_or.default, a, b), [emit.call(aten.lt.Scalar, own, 0) for own in owns]
    )
    for _ in range(after):
        others = emit.call(aten.unsqueeze.default, others, -1)
    return emit.call(aten.masked_fill.Scalar, read_here, others, 0)


def _written(
    emit: Emitter,
    x: fx.Node,
    dims: Sequence[int],
    owns: Sequence[fx.Node],
    write: Callable[[fx.Node, list[fx.Node]], fx.Node],
) -> fx.Node:
    """The result of `write` on x extended by one place along `dims`, which takes writes to other parts, without that
    place."""
    size = emit.shapes.operands[0]
    more = [int(d in dims and side) for d in reversed(range(len(size))) for side in (0, 1)]
    places = [
        emit.call(aten.masked_fill.Scalar, own, emit.call(aten.lt.Scalar, own, 0), size[d])
        for d, own in zip(dims, owns, strict=True)
    ]
    written = write(emit.call(aten.constant_pad_nd.default, x, more), places)
    for d in dims:
        written = emit.call(aten.slice.Tensor, written, d, 0, size[d])
    return written


def _split_places(emit: Emitter, indices: Sequence[Any]) -> list[int]:
    return [d for d, t in enumerate(indices) if t is not None and f"v{d}" in emit.split]


def _with(indices: Sequence[Any], places: Sequence[int], new: Sequence[fx.Node]) -> list[Any]:
    return [dict(zip(places, new, strict=True)).get(d, t) for d, t in enumerate(indices)]


def _reads_indexed(after: int) -> Localize:
    def local(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        x, indices = args
        places = _split_places(emit, indices)
        if not places:
            return emit.call(emit.node.target, x, indices)
        owns = [_own(emit, indices[d], f"v{d}") for d in places]
        return _read(emit, owns, lambda new: emit.call(emit.node.target, x, _with(indices, places, new)), after)

    return local


def _writes_indexed(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, indices, *rest = args
    places = _split_places(emit, indices)
    if not places:
        return emit.call(emit.node.target, x, indices, *rest, **kwargs)
    owns = [_own(emit, indices[d], f"v{d}") for d in places]

    def write(wider: fx.Node, new: list[fx.Node]) -> fx.Node:
        return emit.call(emit.node.target, wider, _with(indices, places, new), *rest, **kwargs)

    return _written(emit, x, places, owns, write)


# -- Along the dim named by the argument "dim"


def _dim(node: fx.Node) -> int:
    dim: int = argument(node, "dim")
    return dim % len(shape(operands(node)[0]))


def _numbered(node: fx.Node, dim: int) -> list[str]:
    return ["v" if d == dim else f"f{d}" for d in range(len(shape(operands(node)[0])))]


def _replaced(dims: Sequence[Any], dim: int, new: Sequence[Any]) -> list[Any]:
    return [*dims[:dim], *new, *dims[dim + 1 :]]


def _local_read(after: Callable[[fx.Node], int]) -> Localize:
    """The local form of a read with the arguments (x, dim, index)."""

    def local(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        x, dim, index, *rest = args
        if "v" not in emit.split:
            return emit.call(emit.node.target, *args, **kwargs)

        def read(new: list[fx.Node]) -> fx.Node:
            return emit.call(emit.node.target, x, dim, new[0], *rest, **kwargs)

        return _read(emit, [_own(emit, index, "v")], read, after(emit.node))

    return local


def _local_write(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The local form of a write with the arguments (x, dim, index, ...)."""
    x, dim, index, *rest = args
    if "v" not in emit.split:
        return emit.call(emit.node.target, *args, **kwargs)
    place = _dim(emit.node)

    def write(wider: fx.Node, new: list[fx.Node]) -> fx.Node:
        return emit.call(emit.node.target, wider, dim, new[0], *rest, **kwargs)

    return _written(emit, x, [place], [_own(emit, index, "v")], write)


def index_select(node: fx.Node) -> Rule | None:
    """index_select: a slice of one dim for each index."""
    x, index = operands(node)
    if not shape(x):
        return whole(node)
    dims, count = _numbered(node, _dim(node)), ["i"] * len(shape(index))
    local = _local_read(lambda node: len(shape(node)) - _dim(node) - 1)
    return _reading(node, [dims, count], _replaced(dims, _dim(node), ["i"]), "v", local)


def _writes_slices(adds: bool, *linear: str) -> RowFunction:
    """Operators that write or add a slice of one dim for each index, or one number for all."""

    def rule(node: fx.Node) -> Rule | None:
        x, index, *source = operands(node)
        if not shape(x) or not shape(index):
            return whole(node)
        dims = _numbered(node, _dim(node))
        before = [f"+{dims[0]}", *dims[1:]] if adds else dims
        sources = [_replaced(dims, _dim(node), ["i"]) for _ in source]
        which = {"reduce": "i"} if adds else {"whole": "i"}
        return parse_row(_row([before, ["i"], *sources], dims, **which, linear=linear, local=_local_write), node)

    return rule


def gather(node: fx.Node) -> Rule | None:
    """gather: one element of a dim for each index; along the other dims the index is as long as x (see `_as_long`)."""
    x, index = operands(node)
    if len(shape(x)) != len(shape(index)) or not shape(x):
        return whole(node)
    dims = _common(node, [x, index])
    read = ["i" if d == _dim(node) else f for d, f in enumerate(dims)]
    return _reading(node, [dims, read], read, "v", _local_read(lambda _: 0))


def scatter(node: fx.Node) -> Rule | None:
    """scatter: writes or adds one element of a dim for each index, which may be shorter than x along other dims."""
    x, index, *source = operands(node)
    if any(len(shape(t)) != len(shape(x)) for t in (index, *source)) or not shape(x):
        return whole(node)
    kind = argument(node, "reduce") if "reduce" in argument_names(node) else None
    adds = node.target is aten.scatter_add.default or (kind in _ADDS and bool(source) and _includes(node))
    dims = _common(node, [x, index, *source])
    same = all(shape(o)[_dim(node)] == shape(index)[_dim(node)] for o in source)
    placed = [("i" if same else "1") if d == _dim(node) else f for d, f in enumerate(dims)]
    before = [f"+{dims[0]}", *dims[1:]] if adds else dims
    linear = ("0 2",) if adds or node.target is aten.scatter.src else ()
    which = ({"reduce": "i"} if adds else {"whole": "i"}) if same else {}
    return parse_row(
        _row([before, placed, *([placed] * len(source))], dims, **which, linear=linear, local=_local_write), node
    )


def _includes(node: fx.Node) -> bool:
    """Whether the result includes the previous elements."""
    return "include_self" not in argument_names(node) or bool(argument(node, "include_self"))


def _common(node: fx.Node, tensors: Sequence[fx.Node]) -> list[str]:
    """The factors of x. Dims in which `tensors` differ cannot be split, except the one that is indexed."""
    dims = _numbered(node, _dim(node))
    return [f if f == "v" or len({shape(t)[d] for t in tensors}) == 1 else "1" for d, f in enumerate(dims)]


# -- One place of a dim


def select(node: fx.Node) -> Rule | None:
    """select: the rank whose part has the place returns it, the others zeros."""
    dims = _numbered(node, _dim(node))
    return replace(_reading(node, [dims], _replaced(dims, _dim(node), []), "v", _local_select), fill=None)


def _local_select(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    place = emit.position("v")
    if place is None:
        return emit.call(emit.node.target, *args, **kwargs)
    dim, wanted, spans = _dim(emit.node), argument(emit.node, "index") % emit.rule.sizes["v"], emit.cut("v").spans
    owner = next(part for part, (start, stop) in enumerate(spans) if start <= wanted < stop)
    at = wanted - spans[owner][0]
    piece = emit.call(aten.slice.Tensor, args[0], dim, at, at + 1)
    others = emit.call(behind, piece, place, dim, [int(part == owner) for part in range(len(spans))])
    return emit.call(aten.squeeze.dim, emit.call(aten.masked_fill.Scalar, piece, others, 0), dim)


# -- Expansions


def _flat(b: Builder, x: fx.Node) -> fx.Node:
    return x if len(shape(x)) == 1 else b(aten.reshape.default, x, [-1])


def _expanded(b: Builder, x: fx.Node, size: Sequence[int]) -> fx.Node:
    return x if shape(x) == tuple(size) else b(aten.expand.default, x, list(size))


def _as_long(b: Builder, node: fx.Node) -> fx.Node | None:
    """gather with x cut to the length of the index along the other dims."""
    x, index = operands(node)
    if len(shape(x)) != len(shape(index)) or not shape(x):
        return None
    shorter = [d for d, (n, m) in enumerate(zip(shape(x), shape(index), strict=True)) if n != m and d != _dim(node)]
    for d in shorter:
        x = b(aten.slice.Tensor, x, d, 0, shape(index)[d])
    return b(aten.gather.default, x, argument(node, "dim"), index) if shorter else None


def _take(b: Builder, node: fx.Node) -> fx.Node:
    x, index = operands(node)
    return b(aten.index.Tensor, _flat(b, x), [index])


def _put(b: Builder, node: fx.Node) -> fx.Node:
    x, index, source = operands(node)
    source = b(aten.reshape.default, source, list(shape(index)))
    filled = b(aten.index_put.default, _flat(b, x), [index], source, argument(node, "accumulate"))
    return b(aten.reshape.default, filled, list(shape(x)))


def _index_fill(b: Builder, node: fx.Node) -> fx.Node | None:
    """index_fill with a tensor as the number, by a mask: PyTorch's derivative asks which indices are repeated."""
    x, index, number = operands(node)
    if not shape(x):
        return None
    dim = _dim(node)
    size = [shape(x)[dim] if d == dim else 1 for d in range(len(shape(x)))]
    none = b(aten.zeros.default, size, dtype=torch.bool, device=value(x).device)
    return b(aten.where.self, b(aten.index_fill.int_Scalar, none, dim, index, True), b.cast(number, value(x).dtype), x)


def _take_along_dim(b: Builder, node: fx.Node) -> fx.Node:
    """take_along_dim: flat without a dim; otherwise x and the indices broadcast along the other dims."""
    x, index = operands(node)
    dim = argument(node, "dim")
    if dim is None:
        x, index, dim = _flat(b, x), _flat(b, index), 0
    dim %= len(shape(x))
    common = torch.broadcast_shapes(_replaced(shape(x), dim, [1]), _replaced(shape(index), dim, [1]))
    x, index = (_expanded(b, t, _replaced(common, dim, [shape(t)[dim]])) for t in (x, index))
    from_end = b(aten.add.Scalar, index, shape(x)[dim])
    index = b(aten.where.self, b(aten.lt.Scalar, index, 0), from_end, index)
    return b(aten.gather.default, x, dim, index)


def _order(b: Builder, mask: fx.Node, count: int) -> fx.Node:
    """For each element of the flat mask, its rank among the selected ones, clamped to `count` values: the n-th selected
    element takes the n-th value."""
    return b(aten.clamp.default, b(aten.sub.Tensor, b(aten.cumsum.default, _flat(b, mask), 0), 1), 0, count - 1)


def _masked_put(b: Builder, node: fx.Node) -> fx.Node | None:
    """x[:, mask] = values: one value for all selected elements, or the n-th value for the n-th."""
    indices = argument(node, "indices")
    (x, *tensors, values), adds = operands(node), argument(node, "accumulate")
    if len(tensors) != 1 or value(tensors[0]).dtype not in (torch.bool, torch.uint8):
        return None
    mask = b.cast(tensors[0], torch.bool)
    along = len(shape(mask))
    after = len(shape(x)) - next(d for d, t in enumerate(indices) if t is not None) - along
    size = list(shape(values))
    if len(size) > after:
        lead, rest = size[: len(size) - after - 1], size[len(size) - after :]
        if (count := size[len(lead)]) > 1:
            values = b(aten.index.Tensor, values, [*[None] * len(lead), _order(b, mask, count)])
            values = b(aten.reshape.default, values, [*lead, *shape(mask), *rest])
        else:
            values = b(aten.reshape.default, values, [*lead, *[1] * along, *rest])
    mask = b(aten.reshape.default, mask, [*shape(mask), *[1] * after])
    return b(aten.where.self, mask, b(aten.add.Tensor, x, values) if adds else values, x)


def _within(b: Builder, x: fx.Node, indices: Sequence[Any]) -> list[Any]:
    """`indices` clamped into range, since they may be out of range where a mask hides them."""
    bounds = zip(indices, shape(x), strict=False)
    return [None if t is None else b(aten.clamp.default, t, -size, size - 1) for t, size in bounds]


def _masked_index(b: Builder, node: fx.Node) -> fx.Node:
    x, mask, indices, fill = node.args
    picked = b(aten.index.Tensor, x, _within(b, x, indices))  # type: ignore[arg-type]
    return b(aten.masked_fill.Scalar, picked, b(aten.logical_not.default, mask), fill)


def _masked_accumulate(b: Builder, node: fx.Node) -> fx.Node:
    x, mask, indices, values = node.args
    values = b(aten.masked_fill.Scalar, values, b(aten.logical_not.default, mask), 0)
    return b(aten.index_put.default, x, _within(b, x, indices), values, True)  # type: ignore[arg-type]


def _masked_scatter(b: Builder, node: fx.Node) -> fx.Node:
    """masked_scatter: the n-th selected element becomes the n-th of the source."""
    x, mask, source = operands(node)
    size = list(torch.broadcast_shapes(shape(x), shape(mask)))
    mask, source = _expanded(b, mask, size), _flat(b, source)
    if not shape(source)[0]:
        return _expanded(b, x, size)
    picked = b(aten.index.Tensor, source, [_order(b, mask, shape(source)[0])])
    return b(aten.where.self, mask, b(aten.reshape.default, picked, size), x)


def _strided(node: fx.Node) -> tuple[list[int], int, list[int]] | None:
    """For as_strided of a tensor x without gaps: the order of x's dims in memory; the number of these dims with which
    the result begins, unchanged; and the first element and the strides of the remaining dims, relative to the start of
    such a leading part of x. None where it reads memory outside of x."""
    x, (size, stride, start) = value(operands(node)[0]), (argument(node, name) for name in _STRIDED_ARGUMENTS)
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    extents = [x.shape[d] for d in order]
    if 0 in (*extents, *size) or not x.permute(order).is_contiguous():
        return None
    start = 0 if start is None else start - x.storage_offset()
    kept = 0
    for have, step, extent, want in zip(extents, [x.stride(d) for d in order], size, stride, strict=False):
        inside = math.prod(extents[kept + 1 :])
        last = start + sum((n - 1) * s for n, s in zip(size[kept + 1 :], stride[kept + 1 :], strict=True))
        if have != extent or step != want or not 0 <= start <= last < inside:
            break
        kept += 1
    last = start + sum((n - 1) * s for n, s in zip(size[kept:], stride[kept:], strict=True))
    if not 0 <= start <= last < math.prod(extents[kept:]):
        return None
    return order, kept, [start, *stride[kept:]]


_STRIDED_ARGUMENTS = ("size", "stride", "storage_offset")


def _places(b: Builder, node: fx.Node, size: Sequence[int], steps: Sequence[int]) -> fx.Node:
    """The flat indices of the elements that as_strided takes."""
    device = value(operands(node)[0]).device
    start, *strides = steps
    places = b(aten.full.default, [1] * len(size), start, dtype=torch.int64, device=device)
    for dim, (extent, stride) in enumerate(zip(size, strides, strict=True)):
        along = b(aten.arange.start_step, 0, max(extent * stride, 1), max(stride, 1), device=device)
        along = along if stride else b(aten.zeros.default, [extent], dtype=torch.int64, device=device)
        along = b(aten.reshape.default, along, [-1, *[1] * (len(size) - 1 - dim)])
        places = b(aten.add.Tensor, places, along)
    return b(aten.reshape.default, places, [-1])


_GAPS = (
    "as_strided in {} takes {} out of the memory of a tensor that is not all of what lies there, such as a slice: of "
    "that memory a device has only its part. Take it of the whole tensor, of a .contiguous() copy, or index instead"
)


def _as_strided(b: Builder, node: fx.Node) -> fx.Node | None:
    """as_strided as a lookup of elements by index: a rank's part has other strides. Raises CaptureError where it reads
    memory outside of the tensor."""
    layout = _strided(node)
    if layout is None:
        if value(node).numel():
            raise CaptureError(_GAPS.format(module_path(node) or "the function", list(shape(node))))
        return None
    order, kept, steps = layout
    x, size = operands(node)[0], list(argument(node, "size"))
    x = b(aten.permute.default, x, order) if order != sorted(order) else x
    x = b(aten.reshape.default, x, [*size[:kept], -1])
    picked = b(aten.index_select.default, x, kept, _places(b, node, size[kept:], steps))
    return b(aten.reshape.default, picked, size)


def _embedding_rule(node: fx.Node) -> Rule | None:
    """Split rows give addends. A sparse gradient needs all rows; one scaled by the uses of a row also needs all
    indices."""
    row = Row("v d, ... -> ... d", reduce="v", linear=("0",), local=_local_embedding)
    if argument(node, "scale_grad_by_freq"):
        uses = (f"_{i + 1}" for i in range(len(shape(operands(node)[1]))))
        row = replace(row, whole=" ".join(["v", *uses]))
    elif argument(node, "sparse"):
        row = replace(row, whole="v")
    return replace(parse_row(row, node), masks=True)


def _local_embedding(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Look up the rank's own rows, with zeros for the others."""
    (weight, index, *rest), place = args, emit.position("v")
    for mask in emit.padding_masks(1, index):  # padding may be any number
        index = emit.call(aten.masked_fill.Scalar, index, mask, 0)
    if place is None:
        return emit.call(aten.embedding.default, weight, index, *rest, **kwargs)
    padding = argument(emit.node, "padding_idx")
    local = emit.call(part_index, index, place, emit.bounds("v"))
    rows = emit.call(aten.embedding.default, weight, emit.call(aten.clamp.default, local, 0))
    if padding >= 0:  # that row gets no gradient; its local index depends on the rank, so padding_idx cannot express it
        padded = emit.call(aten.unsqueeze.default, emit.call(aten.eq.Scalar, index, padding), -1)
        rows = emit.call(aten.where.self, padded, emit.call(aten.detach.default, rows), rows)
    others = emit.call(aten.unsqueeze.default, emit.call(aten.lt.Scalar, local, 0), -1)
    return emit.call(aten.masked_fill.Scalar, rows, others, 0.0)


def _expand_one_hot(b: Builder, node: fx.Node) -> fx.Node:
    """one_hot as a comparison of the index with the number of each class."""
    x, count = operands(node)[0], shape(node)[-1]
    classes = b(aten.arange.default, count, dtype=value(x).dtype, device=value(x).device)
    return b(aten._to_copy.default, b(aten.eq.Tensor, b(aten.unsqueeze.default, x, -1), classes), dtype=torch.int64)


ROWS: dict[Any, Row | RowFunction] = {
    aten._unsafe_index.Tensor: index,
    aten._unsafe_index_put.default: index_put,
    aten.embedding.default: _embedding_rule,
    aten.gather.default: gather,
    aten.index.Tensor: index,
    aten.index_add.default: _writes_slices(True, "0 2"),
    aten.index_copy.default: _writes_slices(False, "0 2"),
    aten.index_fill.int_Scalar: _writes_slices(False),
    aten.index_put.default: index_put,
    aten.index_reduce.default: _writes_slices(False),
    aten.index_select.default: index_select,
    aten.nonzero_static.default: whole,
    aten.scatter.reduce: scatter,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter.value_reduce: scatter,
    aten.scatter_add.default: scatter,
    aten.scatter_reduce.two: scatter,
    aten.select.int: select,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten._unsafe_masked_index.default: _masked_index,
    aten._unsafe_masked_index_put_accumulate.default: _masked_accumulate,
    aten.as_strided.default: _as_strided,
    aten.gather.default: _as_long,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_put.default: _masked_put,
    aten.masked_scatter.default: _masked_scatter,
    aten.one_hot.default: _expand_one_hot,
    aten.put.default: _put,
    aten.take.default: _take,
    aten.take_along_dim.default: _take_along_dim,
}
