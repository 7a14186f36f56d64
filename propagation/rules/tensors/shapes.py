"""Operators that rearrange elements into other dims: views, permutations, concatenation, splits.

The factors of a view are the common refinement of both shapes, so that a dim that is cut in two, or merged from two,
stays split along its major part. The others have a rule dim by dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, shape, value
from ..builder import Builder, Expansion
from ..dims import broadcast, letters_of, sizes_of, whole, whole_dims, without
from ..local_forms import with_local_shape
from ..row import Row, RowFunction
from ..rule import Rule

aten = torch.ops.aten
_FIRST = frozenset({0})  # linear in the first operand

# -- Rules


def _view_rule(node: fx.Node) -> Rule | None:
    """view, reshape, flatten, ...: factors are the common refinement of both shapes, major first."""
    x = operands(node)[0]
    before, after = shape(x), shape(node)
    if math.prod(before) == 0:  # there is nothing to split
        return whole(node)
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    rest_left, rest_right = list(before), list(after)
    i = j = 0
    while i < len(before) and j < len(after):
        common = math.gcd(rest_left[i], rest_right[j])
        if rest_left[i] == 1 or rest_right[j] == 1:
            i, j = i + (rest_left[i] == 1), j + (rest_right[j] == 1)
        elif common > 1:
            name = f"f{len(sizes)}"
            sizes[name] = common
            left[i].append(name)
            right[j].append(name)
            rest_left[i] //= common
            rest_right[j] //= common
        else:  # no common factor: these dims stay whole up to where both shapes cover equally many elements
            a, b = rest_left[i], rest_right[j]
            while a != b:
                if a < b:
                    i += 1
                    a *= before[i]
                else:
                    j += 1
                    b *= after[j]
            i, j = i + 1, j + 1
    dims = zip((*left, *right), (*before, *after), strict=True)
    # an uneven shard of a factor that is only part of a dim is not an uneven shard of the dim
    begun = frozenset(f for parts, size in dims if math.prod(sizes[f] for f in parts) != size for f in parts)
    return Rule(
        (tuple(map(tuple, left)),),
        (tuple(map(tuple, right)),),
        sizes,
        linear=(_FIRST,),
        local=with_local_shape(1),
        even=begun,
    )


def _expand_rule(node: fx.Node) -> Rule | None:
    """The dims of the operand, aligned from the right; those of size 1 are repeated."""
    letters = letters_of(shape(node))
    dims = broadcast(letters, shape(operands(node)[0]))
    return Rule((dims,), (letters,), sizes_of(letters, shape(node)), linear=(_FIRST,), local=with_local_shape(1))


def _reorder(order: Callable[[fx.Node, int], list[int]]) -> RowFunction:
    """Permutations: result dim d is operand dim order[d]."""

    def rule(node: fx.Node) -> Rule | None:
        size = shape(operands(node)[0])
        letters = letters_of(size)
        out = tuple(letters[d] for d in order(node, len(size)))
        return Rule((letters,), (out,), sizes_of(letters, size), linear=(_FIRST,))

    return rule


def _transposed(node: fx.Node, count: int) -> list[int]:
    """The order of `count` dims with the two transposed ones exchanged."""
    order = list(range(count))
    if count:
        a, b = argument(node, "dim0") % count, argument(node, "dim1") % count
        order[a], order[b] = order[b], order[a]
    return order


def _squeezed_rule(node: fx.Node) -> Rule | None:
    """squeeze, unsqueeze, and any view that only adds or drops dims of size 1."""
    x = operands(node)[0]
    letters = letters_of(shape(x))
    rest = [parts for parts in letters if parts]
    out = tuple(() if n == 1 else rest.pop(0) for n in shape(node))
    return Rule((letters,), (out,), sizes_of(letters, shape(x)), linear=(_FIRST,))


def _cat_rule(node: fx.Node) -> Rule | None:
    """cat: the dim of concatenation stays whole."""
    parts = operands(node)
    if any(shape(o) == (0,) for o in parts):  # expansion keeps empty ones only if there are no others
        return whole(node)
    dim = argument(node, "dim") % len(shape(node))
    letters = without(letters_of(shape(node)), {dim})
    every = frozenset(range(len(parts)))
    return Rule((letters,) * len(parts), (letters,), sizes_of(letters, shape(node)), linear=(every,))


def _stack_rule(node: fx.Node) -> Rule | None:
    """stack: the new dim stays whole."""
    parts = operands(node)
    dim = argument(node, "dim") % len(shape(node))
    letters = letters_of(shape(parts[0]))
    every = frozenset(range(len(parts)))
    out = (*letters[:dim], (), *letters[dim:])
    return Rule((letters,) * len(parts), (out,), sizes_of(letters, shape(parts[0])), linear=(every,))


def _pieces_rule(node: fx.Node) -> Rule | None:
    """split, unbind: several results along one dim, which stays whole."""
    x = operands(node)[0]
    size = shape(x)
    dim = argument(node, "dim") % len(size)
    letters = without(letters_of(size), {dim})
    results = value(node)
    out = letters if len(results[0].shape) == len(size) else letters[:dim] + letters[dim + 1 :]
    return Rule((letters,), (out,) * len(results), sizes_of(letters, size), linear=(_FIRST,))


def _shuffle_rule(node: fx.Node) -> Rule | None:
    """channel_shuffle: channels (dim 1) stay whole."""
    size = shape(operands(node)[0])
    letters = without(letters_of(size), {1})
    return Rule((letters,), (letters,), sizes_of(letters, size), linear=(_FIRST,))


def _diag_embed_rule(node: fx.Node) -> Rule:
    """diag_embed: the last dim becomes the diagonal of two new ones, which stay whole."""
    (x,) = operands(node)
    size, out = shape(x), shape(node)
    letters = without(letters_of(size), {len(size) - 1})
    new, rest = whole_dims(node, ("dim1", "dim2"), len(out)), list(letters[:-1])
    dims = tuple(() if d in new else rest.pop(0) for d in range(len(out)))
    return Rule((letters,), (dims,), sizes_of(letters, size), linear=(_FIRST,))


def _complex_parts_rule(node: fx.Node) -> Rule:
    """view_as_complex and view_as_real: real and imaginary parts are in a last dim, which stays whole."""
    (x,) = operands(node)
    size, out = shape(x), shape(node)
    letters = letters_of(size[: min(len(size), len(out))])
    dims = [(*letters, *((),) * (len(extents) - len(letters))) for extents in (size, out)]
    return Rule((dims[0],), (dims[1],), sizes_of(letters, size[: len(letters)]), linear=(_FIRST,))


# -- Expansions


def _expand_broadcast_tensors(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Expand each tensor to the common shape (mse_loss broadcasts its arguments this way)."""
    tensors: Any = node.args[0]
    common = tuple(torch.broadcast_shapes(*map(shape, tensors)))
    return tuple(t if shape(t) == common else b(aten.expand.default, t, list(common)) for t in tensors)


def _expand_cat(b: Builder, node: fx.Node) -> fx.Node | None:
    """Drop the empty 1-dim tensors that PyTorch skips, such as the initial one of a cache."""
    parts = [part for part in operands(node) if shape(part) != (0,)]
    if not parts or (len(parts) == len(operands(node)) and node.target is aten.cat.default):
        return None
    parts = [b.cast(part, value(node).dtype) for part in parts]
    return parts[0] if len(parts) == 1 else b(aten.cat.default, parts, argument(node, "dim"))


def _expand_repeat_interleave(b: Builder, node: fx.Node) -> fx.Node:
    """Repeat each element along a new dim, which is then merged."""
    x, repeats, dim = operands(node)[0], argument(node, "repeats"), argument(node, "dim")
    if dim is None:
        x, dim = b(aten.reshape.default, x, [-1]), 0
    size, after = list(shape(x)), dim % len(shape(x)) + 1
    several = b(aten.expand.default, b(aten.unsqueeze.default, x, after), [*size[:after], repeats, *size[after:]])
    return b(aten.reshape.default, several, list(shape(node)))


def _expand_squeeze(b: Builder, node: fx.Node) -> fx.Node | None:
    """Squeeze by number only the dims of size 1 in the whole tensor: a rank may hold one element of a split dim."""
    x = operands(node)[0]
    size = shape(x)
    asked = argument(node, "dim") if "dim" in argument_names(node) else range(len(size))
    named = [asked] if isinstance(asked, int) else list(asked)
    dims = [d for d in sorted({d % max(len(size), 1) for d in named}) if size[d : d + 1] == (1,)]
    return None if node.target is aten.squeeze.dims and named == dims else b(aten.squeeze.dims, x, dims)


ROWS: dict[Any, Row | RowFunction] = {
    aten.cat.default: _cat_rule,
    aten.channel_shuffle.default: _shuffle_rule,
    aten.diag_embed.default: _diag_embed_rule,
    aten.expand.default: _expand_rule,
    aten.permute.default: _reorder(lambda node, n: [d % n for d in argument(node, "dims")]),
    aten.pixel_shuffle.default: Row("... (c p q) h w -> ... c (h p) (w q)", linear=("0",)),
    aten.pixel_unshuffle.default: Row("... c (h p) (w q) -> ... (c p q) h w", linear=("0",)),
    aten.reshape.default: _view_rule,
    aten.split.Tensor: _pieces_rule,
    aten.split_with_sizes.default: _pieces_rule,
    aten.squeeze.dims: _squeezed_rule,
    aten.stack.default: _stack_rule,
    aten.t.default: _reorder(lambda node, n: list(range(n))[::-1]),
    aten.transpose.int: _reorder(_transposed),
    aten.unbind.int: _pieces_rule,
    aten.unsqueeze.default: _squeezed_rule,
    aten.view_as_complex.default: _complex_parts_rule,
    aten.view_as_real.default: _complex_parts_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.broadcast_tensors.default: _expand_broadcast_tensors,
    aten.cat.default: _expand_cat,
    aten.concat.default: _expand_cat,
    aten.concatenate.default: _expand_cat,
    aten.repeat_interleave.self_int: _expand_repeat_interleave,
    aten.squeeze.default: _expand_squeeze,
    aten.squeeze.dim: _expand_squeeze,
    aten.squeeze.dims: _expand_squeeze,
}
