"""scaled_dot_product_attention: batch, heads and queries split, and each query sees all keys.

In causal attention, the mask of a rank with a part of the queries starts at the first of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ....strategy.errors import CaptureError
from ...graph.nodes import argument, at_source, operands, shape, value
from ...ops.by_rank import causal_mask
from ..builder import Builder, Expansion
from ..local_forms import replaced
from ..row import Row, RowFunction, parse_row
from ..rule import Emitter, Rule
from ..tensors.random import dropped

aten = torch.ops.aten


def attention(node: fx.Node) -> Rule | None:
    """Each key head serves a group of query heads, and is the major part of their factor. In the padding of an uneven
    shard a mask is filled with ones, which hide nothing: a softmax over no key is NaN."""
    if argument(node, "dropout_p"):
        return None
    q, k, v, *mask = (shape(o) for o in operands(node))
    key_heads, query_heads = _heads(node, q, k, v)
    texts = [_text(q, query_heads, "s 1"), _text(k, key_heads, "1 1"), _text(v, key_heads, "1 1")]
    texts += [_text(m, query_heads if m[-3:-2] != (1,) else "1", "s 1") for m in mask]
    local = _local_causal if argument(node, "is_causal") else None
    row = Row(f"{', '.join(texts)} -> {_text(q, query_heads, 's 1')}", fill=1.0, local=local)
    return replace(parse_row(row, node), flops=2.0 * math.prod(shape(node)[:-1]) * k[-2] * (q[-1] + v[-1]))


def _heads(node: fx.Node, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[str, str]:
    """The factors of the heads of keys and values, and of the heads of queries."""
    if not argument(node, "enable_gqa") or q[-3] == k[-3] == v[-3]:
        return "h", "h"
    if k[-3] != v[-3]:
        return "1", "1"
    return ("1", "g") if k[-3] == 1 else ("h", "(h g)")


def _text(size: tuple[int, ...], heads: str, rest: str) -> str:
    """The spec of a tensor of `size` (see `row.py`)."""
    return " ".join([f"... {heads}" if len(size) > 2 else "", *rest.split()[-len(size) :]])


def _local_causal(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Use a mask in place of `is_causal` on a rank with a part of the queries."""
    place = emit.position("s")
    if place is not None:
        starts = [start for start, _ in emit.cut("s").spans]
        mask = emit.call(causal_mask, args[0], place, starts, emit.whole[1][-2])
        args, kwargs = replaced(emit.node, args, kwargs, attn_mask=mask, is_causal=False)
    return emit.call(emit.node.target, *args, **kwargs)


def _expand_attention(b: Builder, node: fx.Node) -> fx.Node | None:
    """Write out attention with dropout, so that its dropout mask is the same in all layouts (see `random.py`). Raises
    CaptureError where the mask would have to match that of a fused kernel."""
    p = argument(node, "dropout_p")
    q, k, v = operands(node)[:3]
    if not p:
        return _padded(b, node)
    if b.keys is None and value(q).device.type != "cpu":
        raise CaptureError(
            f"scaled_dot_product_attention with dropout_p={p} draws its mask inside of a fused kernel on "
            f"{value(q).device.type}, which no split attention can repeat: set random_numbers to 'counter', or the "
            f"dropout of attention to 0{at_source(node)}"
        )
    if argument(node, "enable_gqa"):
        k, v = (_repeated(b, x, shape(q)[-3]) for x in (k, v))
    mask, scale = argument(node, "attn_mask"), argument(node, "scale")
    scores = b(aten.matmul.default, q, b(aten.transpose.int, k, len(shape(k)) - 2, len(shape(k)) - 1))
    scores = b(aten.mul.Scalar, scores, shape(q)[-1] ** -0.5 if scale is None else scale)
    if argument(node, "is_causal"):
        ones = b(aten.ones.default, list(shape(scores)[-2:]), dtype=torch.bool, device=value(q).device)
        mask = b(aten.tril.default, ones)
    if mask is not None and value(mask).dtype is torch.bool:
        scores = b(aten.masked_fill.Scalar, scores, b(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = b(aten.add.Tensor, scores, mask)
    weights = b(aten._safe_softmax.default, scores, len(shape(scores)) - 1)  # zeros where a mask hides all
    return b(aten.matmul.default, dropped(b, weights, p)[0], v)


def _padded(b: Builder, node: fx.Node) -> fx.Node | None:
    """Attention whose values have another width than its keys, with zeros beside the narrower ones. On a CPU, and on
    the meta device, PyTorch has a kernel for equal widths alone, and computes all scores for others."""
    q, k, v = operands(node)[:3]
    width, of_values = shape(q)[-1], shape(v)[-1]
    if width == of_values or value(q).device.type not in ("cpu", "meta"):
        return None

    def wide(x: fx.Node) -> fx.Node:
        more = max(width, of_values) - shape(x)[-1]
        return b(aten.constant_pad_nd.default, x, [0, more]) if more else x

    scale = argument(node, "scale")
    args, kwargs = replaced(node, node.args, dict(node.kwargs), query=wide(q), key=wide(k), value=wide(v))
    kwargs["scale"] = width**-0.5 if scale is None else scale
    out = b(node.target, *args, **kwargs)
    return b(aten.slice.Tensor, out, len(shape(out)) - 1, 0, of_values)


def _repeated(b: Builder, x: fx.Node, heads: int) -> fx.Node:
    """Keys or values with each of their heads repeated, `heads` in all."""
    *batch, own, length, width = shape(x)
    each = b(aten.expand.default, b(aten.unsqueeze.default, x, -3), [*batch, own, heads // own, length, width])
    return b(aten.reshape.default, each, [*batch, heads, length, width])


ROWS: dict[Any, Row | RowFunction] = {
    aten.scaled_dot_product_attention.default: attention,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.scaled_dot_product_attention.default: _expand_attention,
}
