"""scaled_dot_product_attention: batch, heads and queries split, and each query sees all keys.

A rank that has a part of the queries of a causal attention is told which: its mask begins elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import argument, operands, shape
from ..ops.by_rank import causal_mask
from .convolution import replaced
from .rule import Emitter, Row, Rule, parse_row

aten = torch.ops.aten


def attention(node: fx.Node) -> Rule | None:
    """Each head of keys serves a group of heads of queries, of which it is the major part. Behind the end of a short
    slice a mask of ones hides nothing: a softmax of nothing is no number."""
    if argument(node, "dropout_p"):
        return None
    q, k, v, *mask = (shape(o) for o in operands(node))
    theirs, ours = _heads(node, q, k, v)
    texts = [_text(q, ours, "s 1"), _text(k, theirs, "1 1"), _text(v, theirs, "1 1")]
    texts += [_text(m, ours if m[-3:-2] != (1,) else "1", "s 1") for m in mask]
    causal = argument(node, "is_causal")
    row = Row(f"{', '.join(texts)} -> {_text(q, ours, 's 1')}", fill=1.0, local=_local_causal if causal else None)
    return replace(parse_row(row, node), flops=2.0 * math.prod(shape(node)[:-1]) * k[-2] * (q[-1] + v[-1]))


def _heads(node: fx.Node, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[str, str]:
    """The factors of the heads of keys and values, and of those of queries."""
    if not argument(node, "enable_gqa") or q[-3] == k[-3] == v[-3]:
        return "h", "h"
    if k[-3] != v[-3]:
        return "1", "1"
    return ("1", "g") if k[-3] == 1 else ("h", "(h g)")


def _text(size: tuple[int, ...], heads: str, rest: str) -> str:
    return " ".join([f"... {heads}" if len(size) > 2 else "", *rest.split()[-len(size) :]])


def _local_causal(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    place = emit.position("s")
    if place is not None:
        starts = [start for start, _ in emit.cut("s").spans]
        mask = emit.call(causal_mask, args[0], place, starts, emit.whole[1][-2])
        args, kwargs = replaced(emit.node, args, kwargs, attn_mask=mask, is_causal=False)
    return emit.call(emit.node.target, *args, **kwargs)
