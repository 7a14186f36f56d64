"""Rules of linear algebra: products, and decompositions of the last two dims, which stay whole.

A batch of decompositions splits along its leading dims, and a solve along its right-hand sides too. The padding of an
uneven shard is filled with a matrix for which every decomposition exists. Products without a rule become an `einsum`,
every letter of which can be split.
"""

from __future__ import annotations

import itertools
import operator
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ...graph.nodes import argument, operands, shape, value
from ...ops.by_rank import regular
from ..builder import Builder, Expansion
from ..dims import whole
from ..row import Row, RowFunction, parse_row
from ..rule import Emitter, Rule

aten = torch.ops.aten


# -- Products


def with_addend(text: str, reduce: str, linear: Sequence[str]) -> RowFunction:
    """A product plus the first operand, of any shape that broadcasts to the result."""
    factors, _, result = text.partition("->")

    def rule(node: fx.Node) -> Rule | None:
        count = len(shape(operands(node)[0]))
        addend = " ".join(result.split()[len(result.split()) - count :])
        row = Row(f"+{addend}, {factors} -> {result}", reduce=reduce, linear=tuple(linear), contraction=True)
        return parse_row(row, node)

    return rule


def matmul(node: fx.Node) -> Rule:
    """matmul: batches of matrices, which broadcast, or vectors, which lack m or n."""
    a, b = (shape(o) for o in operands(node))
    left = "k" if len(a) == 1 else "... m k"
    right = "k" if len(b) == 1 else "... k n"
    result = " ".join(f for f in ("...", "m", "n") if f in left or f in right)
    row = Row(f"{left}, {right} -> {result}", reduce="k", linear=("0", "1"), contraction=True)
    return parse_row(row, node)


def einsum(node: fx.Node) -> Rule | None:
    """Each letter is a factor, summed over where the result lacks it."""
    left, _, right = argument(node, "equation").partition("->")
    terms = left.split(",")
    summed = sorted(set(left) - set(right) - {","})
    every = tuple(str(i) for i in range(len(terms)))
    text = f"{', '.join(map(' '.join, terms))} -> {' '.join(right)}"
    return parse_row(Row(text, reduce=" ".join(summed), linear=every, contraction=True), node)


def _plain(b: Builder, node: fx.Node) -> fx.Node | None:
    """einsum with an explicit result, letters for "...", and diagonals for letters repeated in a term."""
    text = argument(node, "equation").replace(" ", "")
    left, arrow, right = text.partition("->")
    tensors, terms = list(operands(node)), left.split(",")
    named = [term.replace("...", "") for term in terms]
    if not arrow:
        counts = {letter: "".join(named).count(letter) for letter in "".join(named)}
        right = "..." * ("..." in left) + "".join(sorted(f for f, count in counts.items() if count == 1))
    hidden = [len(shape(t)) - len(name) for t, name in zip(tensors, named, strict=True)]
    free = [f for f in string.ascii_letters if f not in text][: max(hidden)]
    terms = [term.replace("...", "".join(free[len(free) - n :])) for term, n in zip(terms, hidden, strict=True)]
    right = right.replace("...", "".join(free) if "..." in left else "")
    for i, term in enumerate(terms):
        while repeated := [f for f in term if term.count(f) > 1]:
            first, second, *_ = (d for d, f in enumerate(term) if f == repeated[0])
            tensors[i] = b(aten.diagonal.default, tensors[i], 0, first, second)
            term = "".join(f for d, f in enumerate(term) if d not in (first, second)) + repeated[0]
        terms[i] = term
    equation = f"{','.join(terms)}->{right}"
    return None if equation == text else b(aten.einsum.default, equation, tensors)


def _inner(b: Builder, node: fx.Node) -> fx.Node:
    """inner: a sum over the last dims of both; with a 0-dim tensor an elementwise product."""
    x, y = operands(node)
    if not shape(x) or not shape(y):
        return b(aten.mul.Tensor, x, y)
    return _contracted(b, x, y, [len(shape(x)) - 1], [len(shape(y)) - 1])


def _tensordot(b: Builder, node: fx.Node) -> fx.Node:
    x, y = operands(node)
    ours, theirs = (
        [d % len(shape(t)) for d in argument(node, name)] for t, name in ((x, "dims_self"), (y, "dims_other"))
    )
    return _contracted(b, x, y, ours, theirs)


def _contracted(b: Builder, x: fx.Node, y: fx.Node, ours: Sequence[int], theirs: Sequence[int]) -> fx.Node:
    """The product of x and y, summed over the pairs of dims `ours` and `theirs`."""
    letters = string.ascii_letters
    left = letters[: len(shape(x))]
    free = iter(letters[len(left) :])
    shared = {theirs: left[ours] for ours, theirs in zip(ours, theirs, strict=True)}
    right = "".join(shared.get(d) or next(free) for d in range(len(shape(y))))
    result = "".join(f for f in left + right if (f in left) != (f in right))
    return b(aten.einsum.default, f"{left},{right}->{result}", [x, y])


def _outer(b: Builder, node: fx.Node) -> fx.Node:
    x, y = operands(node)
    return b(aten.mul.Tensor, b(aten.unsqueeze.default, x, 1), y)


def _kron(b: Builder, node: fx.Node) -> fx.Node:
    """kron: each element of x times y, with interleaved dims merged in pairs."""
    x, y = (_led(b, t, max(map(len, map(shape, operands(node))))) for t in operands(node))
    pairs = [(n, m) for n, m in zip(shape(x), shape(y), strict=True)]
    left = b(aten.reshape.default, x, [extent for n, _ in pairs for extent in (n, 1)])
    right = b(aten.reshape.default, y, [extent for _, m in pairs for extent in (1, m)])
    return b(aten.reshape.default, b(aten.mul.Tensor, left, right), [n * m for n, m in pairs])


def _led(b: Builder, x: fx.Node, count: int) -> fx.Node:
    """`x` with leading dims of size 1, `count` dims in all."""
    more = count - len(shape(x))
    return b(aten.reshape.default, x, [1] * more + list(shape(x))) if more else x


def _bilinear(b: Builder, node: fx.Node) -> fx.Node:
    x, y, weight, *bias = operands(node)
    product = b(aten.einsum.default, "...i,oij,...j->...o", [x, weight, y])
    return b(aten.add.Tensor, product, bias[0]) if bias else product


def _chain(b: Builder, node: fx.Node) -> fx.Node:
    """A product of several matrices in the order that takes the fewest operations; the outer ones may be vectors."""
    tensors = operands(node)
    widths = [shape(t)[-1] for t in tensors]
    if len(shape(tensors[-1])) == 1 < len(tensors):
        widths[-1] = 1
    heights = [shape(t)[0] if len(shape(t)) == 2 else 1 for t in tensors[:1]]
    bounds = [*heights, *widths]
    cost: dict[tuple[int, int], tuple[int, int]] = {(i, i): (0, i) for i in range(len(tensors))}
    for length in range(1, len(tensors)):
        for i in range(len(tensors) - length):
            j = i + length
            cost[i, j] = min(
                (cost[i, m][0] + cost[m + 1, j][0] + bounds[i] * bounds[m + 1] * bounds[j + 1], m) for m in range(i, j)
            )

    def product(i: int, j: int) -> fx.Node:
        if i == j:
            return tensors[i]
        m = cost[i, j][1]
        return b(aten.matmul.default, product(i, m), product(m + 1, j))

    return product(0, len(tensors) - 1)


def _trace(b: Builder, node: fx.Node) -> fx.Node:
    x = operands(node)[0]
    rows, columns = (b(aten.arange.default, n, device=value(x).device) for n in shape(x))
    diagonal = b(aten.eq.Tensor, b(aten.unsqueeze.default, rows, 1), columns)
    return b(aten.sum.default, b(aten.masked_fill.Scalar, x, b(aten.logical_not.default, diagonal), 0))


def _vecdot(b: Builder, node: fx.Node) -> fx.Node:
    x, y = operands(node)
    x = b(aten.conj_physical.default, x) if value(x).is_complex() else x
    return b(aten.sum.dim_IntList, b(aten.mul.Tensor, x, y), [argument(node, "dim")])


def cross(node: fx.Node) -> Rule:
    """linalg_cross: vectors along one dim, which stays whole."""
    size = shape(node)
    dim = argument(node, "dim") % len(size)
    result = ["1" if d == dim else f"f{d}" for d in range(len(size))]
    specs = (" ".join(result[len(size) - len(shape(o)) :]) for o in operands(node))
    return parse_row(Row(f"{', '.join(specs)} -> {' '.join(result)}", linear=("0", "1")), node)


def _named_cross(b: Builder, node: fx.Node) -> fx.Node:
    """cross along the named dim, else the first of size 3 in the whole tensor: in a part it may be another."""
    dim = argument(node, "dim")
    return b(aten.linalg_cross.default, *operands(node), dim=shape(node).index(3) if dim is None else dim)


def _local_vander(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Compute as many powers as the whole call, whose default is the number of elements."""
    return emit.call(emit.node.target, args[0], N=shape(emit.node)[-1])


def distances(node: fx.Node) -> Rule:
    """cdist: distances between all pairs of vectors. For norms of order below 1 a derivative may be infinite."""
    return parse_row(Row("... m 1, ... n 1 -> ... m n", even=argument(node, "p") < 1), node)


# -- Decompositions


def _with_regular(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The call itself, with the padding of uneven shards filled with matrices that can be decomposed, and pivots."""
    count = itertools.count()
    filled: Any = map_arg((args, kwargs), lambda part: _regular_padding(emit, next(count), part))
    return emit.call(emit.node.target, *filled[0], **filled[1])


def _regular_padding(emit: Emitter, i: int, part: fx.Node) -> fx.Node:
    dims, numbers = emit.rule.operands[i], value(operands(emit.node)[i])
    worked_along = 2 if numbers.is_floating_point() or numbers.is_complex() else 1
    if len(dims) >= worked_along and not any(dims[-worked_along:]):
        like = emit.call(aten.detach.default, part)
        for mask in emit.padding_masks(i, part):
            part = emit.call(aten.where.self, mask, emit.call(regular, like), part)
    return part


_batched = partial(Row, local=_with_regular)


def _solve(node: fx.Node) -> Rule:
    """linalg_solve: a matrix of columns on the right, or of rows."""
    sides = _sides(node)
    info = ", ..." if isinstance(value(node), tuple | list) else ""
    return parse_row(_batched(f"... 1 1, {sides} -> {sides}{info}", linear=() if info else ("1",)), node)


def _columns(b: Builder, node: fx.Node) -> fx.Node | tuple[fx.Node, ...] | None:
    """linalg_solve with as many dims on the right as on the left. PyTorch tells a batch of vectors from one matrix for
    all by their sizes, and those of a part may be ambiguous."""
    a, x = operands(node)
    left, right = shape(a), shape(x)
    vector = len(right) == 1 or right == left[:-1]
    if not vector and len(right) != len(left) - 1:
        return None
    solved = b(node.target, a, b(aten.unsqueeze.default, x, len(right) if vector else 0), **node.kwargs)
    several = isinstance(value(node), tuple | list)
    solution = b(operator.getitem, solved, 0) if several else solved
    solution = b(aten.squeeze.dims, solution, [len(shape(solution)) - 1]) if vector else solution
    return (solution, b(operator.getitem, solved, 1)) if several else solution


def _sides(node: fx.Node) -> str:
    """The spec of the right-hand sides: columns, or rows."""
    return "... 1 n" if argument(node, "left") else "... n 1"


def _for_sides(text: str, linear: str) -> RowFunction:
    """A row in which X stands for the right-hand sides."""

    def rule(node: fx.Node) -> Rule:
        return parse_row(_batched(text.replace("X", _sides(node)), linear=(linear,)), node)

    return rule


def _unpacked(node: fx.Node) -> Rule:
    """lu_unpack: whole if a result is not requested, and so is empty."""
    if any(v.ndim < 2 for v in value(node)):
        return whole(node)
    return parse_row(_batched("... 1 1, ... 1 -> ... 1 1, ... 1 1, ... 1 1"), node)


def _upper_only(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """qr in the mode "r", by a reduced qr: the Q that is not requested would be empty, with no dims to split."""
    if argument(node, "mode") != "r":
        return None
    both = b(aten.linalg_qr.default, operands(node)[0], "reduced")
    return (None, b(operator.getitem, both, 1))


_LIKE, _SCALAR, _VECTOR = "... 1 1 -> ... 1 1", "... 1 1 -> ...", "... 1 1 -> ... 1"

_UNTIL_2_13 = {"cholesky": _LIKE, "qr": "... 1 1 -> ... 1 1, ... 1 1"}  # later versions of PyTorch do not have them
_BATCHED = {
    **{getattr(aten, name).default: row for name, row in _UNTIL_2_13.items() if hasattr(aten, name)},
    aten._lu_with_info.default: "... 1 1 -> ... 1 1, ... 1, ...",
    aten.cholesky_inverse.default: _LIKE,
    aten.det.default: _SCALAR,
    aten.geqrf.default: "... 1 1 -> ... 1 1, ... 1",
    aten.inverse.default: _LIKE,
    aten.linalg_cholesky.default: _LIKE,
    aten.linalg_cholesky_ex.default: "... 1 1 -> ... 1 1, ...",
    aten.linalg_cond.default: _SCALAR,
    aten.linalg_cond.p_str: _SCALAR,
    aten.linalg_det.default: _SCALAR,
    aten.linalg_eig.default: "... 1 1 -> ... 1, ... 1 1",
    aten.linalg_eigh.default: "... 1 1 -> ... 1, ... 1 1",
    aten.linalg_eigvals.default: _VECTOR,
    aten.linalg_eigvalsh.default: _VECTOR,
    aten.linalg_householder_product.default: "... 1 1, ... 1 -> ... 1 1",
    aten.linalg_inv.default: _LIKE,
    aten.linalg_inv_ex.default: "... 1 1 -> ... 1 1, ...",
    aten.linalg_ldl_factor.default: "... 1 1 -> ... 1 1, ... 1",
    aten.linalg_ldl_factor_ex.default: "... 1 1 -> ... 1 1, ... 1, ...",
    aten.linalg_lu.default: "... 1 1 -> ... 1 1, ... 1 1, ... 1 1",
    aten.linalg_lu_factor.default: "... 1 1 -> ... 1 1, ... 1",
    aten.linalg_lu_factor_ex.default: "... 1 1 -> ... 1 1, ... 1, ...",
    aten.linalg_matrix_exp.default: _LIKE,
    aten.linalg_matrix_power.default: _LIKE,
    aten.linalg_matrix_rank.atol_rtol_float: _SCALAR,
    aten.linalg_matrix_rank.atol_rtol_tensor: "... 1 1, ..., ... -> ...",
    aten.linalg_matrix_rank.default: _SCALAR,
    aten.linalg_matrix_rank.tol_tensor: "... 1 1, ... -> ...",
    aten.linalg_pinv.atol_rtol_float: _LIKE,
    aten.linalg_pinv.atol_rtol_tensor: "... 1 1, ..., ... -> ... 1 1",
    aten.linalg_pinv.default: _LIKE,
    aten.linalg_pinv.rcond_tensor: "... 1 1, ... -> ... 1 1",
    aten.linalg_qr.default: "... 1 1 -> ... 1 1, ... 1 1",
    aten.linalg_slogdet.default: "... 1 1 -> ..., ...",
    aten.linalg_svd.default: "... 1 1 -> ... 1 1, ... 1, ... 1 1",
    aten.linalg_svdvals.default: _VECTOR,
    aten.logdet.default: _SCALAR,
    aten.matrix_exp.default: _LIKE,
    aten.matrix_power.default: _LIKE,
    aten.orgqr.default: "... 1 1, ... 1 -> ... 1 1",
    aten.pinverse.default: _LIKE,
    aten.slogdet.default: "... 1 1 -> ..., ...",
    aten.svd.default: "... 1 1 -> ... 1 1, ... 1, ... 1 1",
    aten.triangular_solve.default: "... 1 1, ... 1 1 -> ... 1 1, ... 1 1",
}

ROWS: dict[Any, Row | RowFunction] = {
    **{target: _batched(text) for target, text in _BATCHED.items()},
    # solvers, which split their right-hand sides
    aten.cholesky_solve.default: _batched("... 1 n, ... 1 1 -> ... 1 n", linear=("0",)),
    aten.linalg_ldl_solve.default: _batched("... 1 1, ... 1, ... 1 n -> ... 1 n", linear=("2",)),
    aten.linalg_lu_solve.default: _for_sides("... 1 1, ... 1, X -> X", "2"),
    aten.linalg_solve.default: _solve,
    aten.linalg_solve_ex.default: _solve,
    aten.linalg_solve_triangular.default: _for_sides("... 1 1, X -> X", "1"),
    aten.linalg_tensorinv.default: whole,
    aten.linalg_tensorsolve.default: whole,
    aten.lu_solve.default: _batched("... 1 n, ... 1 1, ... 1 -> ... 1 n", linear=("0",)),
    aten.lu_unpack.default: _unpacked,
    aten.ormqr.default: _for_sides("... 1 1, ... 1, X -> X", "2"),
    # products
    aten.addbmm.default: with_addend("b m k, b k n -> m n", "b k", ("0 1", "0 2")),
    aten.addmm.default: with_addend("m k, k n -> m n", "k", ("0 1", "0 2")),
    aten.addmv.default: with_addend("m k, k -> m", "k", ("0 1", "0 2")),
    aten.addr.default: with_addend("m, n -> m n", "", ("0 1", "0 2")),
    aten.baddbmm.default: with_addend("b m k, b k n -> b m n", "k", ("0 1", "0 2")),
    aten.bmm.default: Row("b m k, b k n -> b m n", reduce="k", linear=("0", "1"), contraction=True),
    aten.cdist.default: distances,
    aten.dot.default: Row("k, k ->", reduce="k", linear=("0", "1"), contraction=True),
    aten.einsum.default: einsum,
    aten.linalg_cross.default: cross,
    aten.linalg_vander.default: Row("... -> ... 1", local=_local_vander),
    aten.linear.default: Row("... k, n k, +n -> ... n", reduce="k", linear=("0 2", "1 2"), contraction=True),
    aten.matmul.default: matmul,
    aten.mm.default: Row("m k, k n -> m n", reduce="k", linear=("0", "1"), contraction=True),
    aten.mv.default: Row("m k, k -> m", reduce="k", linear=("0", "1"), contraction=True),
    aten.pdist.default: Row("1 1 -> 1"),
    aten.vdot.default: Row("k, k ->", reduce="k", linear=("0", "1"), contraction=True),
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.bilinear.default: _bilinear,
    aten.chain_matmul.default: _chain,
    aten.cross.default: _named_cross,
    aten.einsum.default: _plain,
    aten.inner.default: _inner,
    aten.kron.default: _kron,
    aten.linalg_multi_dot.default: _chain,
    aten.linalg_qr.default: _upper_only,
    aten.linalg_solve.default: _columns,
    aten.linalg_solve_ex.default: _columns,
    aten.linalg_vecdot.default: _vecdot,
    aten.outer.default: _outer,
    aten.tensordot.default: _tensordot,
    aten.trace.default: _trace,
}
