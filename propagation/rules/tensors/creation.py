"""Tensors created in the shape of another tensor. They do not depend on its values, so they are created without it, and
its layout is free."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.nodes import draws_random_numbers, shape, value
from ..builder import Builder, Expansion

aten = torch.ops.aten


def _expand_copy(b: Builder, node: fx.Node) -> fx.Node:
    """A copy over a tensor takes its shape and dtype, and none of its values."""
    source = b.cast(node.args[1], value(node).dtype)  # type: ignore[arg-type]
    return source if shape(source) == shape(node) else b(aten.expand.default, source, list(shape(node)))


def _made_by(maker: Any) -> Expansion:
    """`zeros_like(x)` needs only the shape of x: it becomes `zeros(shape)`. An empty tensor loses its strides, too,
    unless random numbers are drawn into it: PyTorch draws them in the order of its memory."""

    def expansion(b: Builder, node: fx.Node) -> fx.Node | None:
        like = value(node)
        if maker is aten.empty.memory_format and any(map(draws_random_numbers, node.users)):
            return None
        number = [node.args[-1]] if maker is aten.full.default else []
        return b(maker, list(like.shape), *number, dtype=like.dtype, device=like.device)

    return expansion


EXPANSIONS: dict[Any, Expansion] = {
    aten.copy.default: _expand_copy,
    aten.empty_like.default: _made_by(aten.empty.memory_format),
    aten.empty_permuted.default: _made_by(aten.empty.memory_format),
    aten.empty_strided.default: _made_by(aten.empty.memory_format),
    aten.fill.Scalar: _made_by(aten.full.default),
    aten.fill.Tensor: _expand_copy,
    aten.full_like.default: _made_by(aten.full.default),
    aten.new_empty.default: _made_by(aten.empty.memory_format),
    aten.new_empty_strided.default: _made_by(aten.empty.memory_format),
    aten.new_full.default: _made_by(aten.full.default),
    aten.new_ones.default: _made_by(aten.ones.default),
    aten.new_zeros.default: _made_by(aten.zeros.default),
    aten.ones_like.default: _made_by(aten.ones.default),
    aten.zero.default: _made_by(aten.zeros.default),
    aten.zeros_like.default: _made_by(aten.zeros.default),
}
