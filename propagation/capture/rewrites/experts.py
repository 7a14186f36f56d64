"""Mixtures of experts as people write them, in terms of `dispatch` and `combine` (ops/experts.py), which can be split.

The rows of a mixture are its *slots*, one for each expert of a token, in the order of tokens or sorted by expert. From
a flat tensor of the experts' numbers, the operators that follow are read one by one, with what each result stands for:

    sort(ids)                                the order of rows sorted by expert
    index(x, [order // k])                   the tokens of these rows               dispatch(x, ids, experts)
    cumsum(histc(ids)), or of one_hot        the end of each expert's rows          its second result
    index(bias, [ids])                       what each row has of its expert        per_expert(bias, ...)
    bmm(index(weights, [ids]), rows)         the product of each row                grouped_matmul(rows, weights, ...)
    index(rows, [the order inverted])        the rows in the order of tokens        the same rows
    sum(reshape(rows, [tokens, k, ...]), 1)  the sum of each token's rows           combine(rows, where, weights)
    index(x, [order // k]) * weights[order]  weighted before their experts          dispatch(x, ids, experts, weights)

Between these may be operators on each row by itself. If anything else reads a row, all stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ....strategy.placement import Routed
from ...graph.nodes import argument, draws_random_numbers, operands, operator_name, shape, value
from ...ops.experts import combine, dispatch, grouped_matmul, per_expert
from ...rules.builder import Builder
from ...rules.layers.experts import EXPERT, TOKEN, Routing, routed
from ...rules.table import rule_of

aten = torch.ops.aten
_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default", "partway.grouped_matmul.default")
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
SLOTS, SORTED = "slots", "sorted"  # the orders of rows


def form_experts(module: fx.GraphModule) -> None:
    """Write the mixtures of experts that are recognised with `dispatch` and `combine` (in place)."""
    flat: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in _RESHAPES and _is_flat(node):
            flat.setdefault(node.all_input_nodes[0], []).append(node)
    for ids, each in flat.items():
        _Mixture(module.graph, ids, each).form()


def _is_flat(node: fx.Node) -> bool:
    """Whether a node flattens the numbers of the experts of tokens, two dims."""
    ids = node.all_input_nodes[0]
    flat, whole = node.meta.get("val"), ids.meta.get("val")
    if not isinstance(flat, Tensor) or not isinstance(whole, Tensor) or flat.dtype not in (torch.int64, torch.int32):
        return False
    sizes = (*flat.shape, *whole.shape)
    return flat.ndim == 1 and whole.ndim == 2 and all(isinstance(size, int) for size in sizes)


@dataclass(frozen=True)
class _Reading:
    """What a value of a mixture stands for.

    kind      "ids", "one_hot" (of these), "perm" (the slots of sorted rows), "inverse", "token" (of each row), "counts"
              and "ends" of the experts' rows, "rows", "tokens" (rows as [tokens, k, ...]), "weight" (of each row),
              "matrix" (of each row, that of its expert), "several" (a tuple of rows), "copies" (of each token for its
              slots, that nothing has read), or "sorted" (the results of a sort)
    order     of its rows
    node      the value after the rewriting, if it has one; for a weight that of all slots, [tokens, k]; of a sort the
              kind of what it sorts
    weight    by which the rows still have to be multiplied
    """

    kind: str
    order: str = SORTED
    node: Any = None
    weight: fx.Node | None = None


class _Mixture:
    """An attempt to rewrite the mixture whose experts have the numbers `ids`, with their `flat` forms in the order of
    the graph."""

    def __init__(self, graph: fx.Graph, ids: fx.Node, flat: list[fx.Node]) -> None:
        self.graph, self.ids, self.flat = graph, ids, flat
        self.tokens, self.each = shape(self.ids)
        self.known: dict[fx.Node, _Reading] = dict.fromkeys(flat, _Reading("ids", SLOTS))
        self.x: fx.Node | None = None
        self.experts: int | None = None
        self.made: list[fx.Node] = []
        self.weighted: fx.Node | None = None

    def form(self) -> None:
        """Rewrite the mixture, if all of it is recognised."""
        nodes = list(self.graph.nodes)
        place = nodes.index(self.flat[0])
        after = nodes[place + 1 :]
        self.experts = next((e for e in map(self._experts_of, after) if e is not None), None)
        if self.experts is None:
            return
        self.known |= {node: _Reading("copies", SLOTS, x) for node in nodes if (x := self._repeated(node)) is not None}
        try:
            end, result = self._read(after)
            self._check_readers(end)
            if self.weighted is not None and _is_read(self._rows):
                raise _Unknown  # without their weights, too
            end.replace_all_uses_with(result)
        except _Unknown:
            for node in reversed(self.made):
                self.graph.erase_node(node)

    def _experts_of(self, node: fx.Node) -> int | None:
        """The number of experts, if `node` counts their rows, or indexes tensors of all experts."""
        if node.target is aten.histc.default and self._leads_from_ids(node.args[0]):
            return int(argument(node, "bins"))
        if node.target is aten.one_hot.default and self._leads_from_ids(node.args[0]):
            return shape(node)[-1]
        if node.target is aten.index.Tensor and any(node.args[1] in ([flat], (flat,)) for flat in self.flat):
            first: Any = node.args[0]
            return shape(first)[0] if value(first).is_floating_point() and shape(first)[0] < 2**31 else None
        return None

    def _leads_from_ids(self, node: Any) -> bool:
        while isinstance(node, fx.Node) and node not in self.flat:
            if node.target not in _REARRANGES:
                return False
            node = node.args[0]
        return node in self.flat

    def _read(self, nodes: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
        """The node that the mixture ends with, and its replacement."""
        for node in nodes:
            if node.op != "call_function" or not any(operand in self.known for operand in node.all_input_nodes):
                continue
            self.before = node
            for operand in node.all_input_nodes:
                if copies := self._is(operand, "copies"):
                    self.known[operand] = self._dispatched(copies.node, SLOTS) or copies
            if node.target in _LIKE and not self._is(node.args[0], "rows"):
                continue  # it reads the size alone
            try:
                found = self._stands_for(node)
            except _Unknown:
                if any(each.kind in _OF_ROWS for o in node.all_input_nodes if (each := self.known.get(o))):
                    raise
                continue  # statistics of the experts' numbers, which stay as they are
            if found.kind == "end":
                return node, found.node
            self.known[node] = found
        raise _Unknown

    def _check_readers(self, end: fx.Node) -> None:
        """Raise _Unknown if rows are read by what is not part of the mixture: they would be computed twice."""
        for node, each in self.known.items():
            if each.kind in _OF_ROWS and any(user not in self.known and user is not end for user in node.users):
                raise _Unknown

    # -- What a call stands for

    def _stands_for(self, node: fx.Node) -> _Reading:
        reader = _READERS.get(node.target)
        found = reader(self, node) if reader else None
        if found is None and operator_name(node) in _PRODUCTS:
            found = self._product(node)
        return found or self._row_by_row(node)

    def _is(self, node: Any, kind: str) -> _Reading | None:
        known = self.known.get(node) if isinstance(node, fx.Node) else None
        return known if known and known.kind == kind else None

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        builder = Builder(self.graph, self.before, 1, {})
        made = builder(target, *args, **kwargs)
        self.made.extend(builder.added)
        return made

    def _sort(self, node: fx.Node) -> _Reading | None:
        (what,) = node.all_input_nodes
        known = self.known[what]
        sorts = (known.kind, known.order) in (("ids", SLOTS), ("perm", SORTED))
        if not sorts or argument(node, "descending") or len(shape(what)) != 1:
            return None
        return _Reading("sorted", node=known.kind)

    def _item(self, node: fx.Node) -> _Reading | None:
        source, place = node.args
        if by := self._is(source, "sorted"):
            order = _Reading("perm" if by.node == "ids" else "inverse")
            return order if place == 1 else _Reading("ids", SORTED) if by.node == "ids" else None
        known = self._is(source, "several")
        if known is None:
            return None
        return _Reading("rows", known.order, self._call(operator.getitem, known.node, place))

    def _divided(self, node: fx.Node) -> _Reading | None:
        by_k = node.args[1] == self.each and node.kwargs.get("rounding_mode", "floor") in ("floor", "trunc")
        return _Reading("token") if by_k and self._is(node.args[0], "perm") else None

    def _counted(self, node: fx.Node) -> _Reading | None:
        if not self._is(node.args[0], "ids"):
            return None
        if node.target is aten.histc.default:
            least, most = argument(node, "min"), argument(node, "max")
            # with as many bins as numbers, or one more at the end, each bin has one number
            fits = least == 0 and most in (self.experts, self.experts - 1 if self.experts else 0)
            return _Reading("counts") if fits and int(argument(node, "bins")) == self.experts else None
        return _Reading("one_hot") if shape(node) == (self.tokens * self.each, self.experts) else None

    def _summed_up(self, node: fx.Node) -> _Reading | None:
        return _Reading("ends") if self._is(node.args[0], "counts") and node.args[1] in (0, -1) else None

    def _cast(self, node: fx.Node) -> _Reading | None:
        (x,) = node.all_input_nodes
        known = self.known[x]
        return known if known.kind in ("ids", "counts", "ends", "perm", "inverse", "token") else None

    def _reshaped(self, node: fx.Node) -> _Reading | None:
        x: Any = node.args[0]
        known = self.known[x]
        if known.kind in ("ids", "token", "perm") and node.meta["val"].numel() == self.tokens * self.each:
            return known  # as a column, for gather and scatter
        sizes = tuple(node.meta["val"].shape)
        if known.kind == "weight":
            return known
        if known.kind != "rows" or known.order != SLOTS or sizes[:2] != (self.tokens, self.each):
            return None
        return replace(known, kind="tokens") if sizes[2:] == tuple(value(x).shape[1:]) else None

    def _expanded(self, node: fx.Node) -> _Reading | None:
        known = self.known.get(node.all_input_nodes[0])
        return known if known and known.kind in ("token", "perm", "weight") else None

    def _indexed(self, node: fx.Node) -> _Reading | None:
        arguments: tuple[Any, ...] = node.args
        x, indices = arguments
        if len(indices) != 1 or not isinstance(indices[0], fx.Node):
            return None
        by = self.known.get(indices[0])
        return self._taken(x, self.known.get(x), by) if by else None

    def _gathered(self, node: fx.Node) -> _Reading | None:
        arguments: tuple[Any, ...] = node.args
        x, dim, index = arguments[:3]
        by = self.known.get(index)
        return self._taken(x, self.known.get(x), by) if by and dim == 0 else None

    def _taken(self, x: Any, known: _Reading | None, by: _Reading) -> _Reading | None:
        """What rows of `x` stand for, taken `by` an index."""
        if known is None:
            by_token = by.kind == "token" or (by.kind == "perm" and self.each == 1)
            if by_token and value(x).ndim == 2 and shape(x)[0] == self.tokens:
                return self._dispatched(x, by.order)
            if by.kind == "ids" and shape(x)[0] == self.experts and value(x).is_floating_point():
                self._dispatch_copies()
                if value(x).ndim == 2:
                    return _Reading("rows", by.order, self._call(per_expert, x, self._ends, self._rows))
                return _Reading("matrix", by.order, x) if value(x).ndim == 3 else None
            if by.kind == "perm" and (tokens := self._repeated(x)) is not None:
                return self._dispatched(tokens, SORTED)
            if by.kind == "perm" and (weights := self._flattened(x)) is not None:
                return _Reading("weight", SORTED, weights)
            return None
        if by.kind == "perm" and known.order == SLOTS and known.kind in ("rows", "ids", "weight"):
            return replace(known, order=SORTED)
        if by.kind == "inverse" and known.order == SORTED and known.kind in ("rows", "weight"):
            return replace(known, order=SLOTS)
        return None

    def _inverted(self, node: fx.Node) -> _Reading | None:
        """The inverse of the order, as the numbers of all rows at its places."""
        _, indices, numbers = node.args[:3]
        if not isinstance(indices, list | tuple) or len(indices) != 1 or argument(node, "accumulate"):
            return None
        index: Any = indices[0]
        if not self._is(index, "perm") or not isinstance(numbers, fx.Node) or numbers.target is not aten.arange.default:
            return None
        return _Reading("inverse") if numbers.args == (self.tokens * self.each,) else None

    def _product(self, node: fx.Node) -> _Reading | None:
        rows, weights, ends = self._operands(node)
        known = self._is(rows, "rows")
        if not known or known.order != SORTED or not self._is(ends, "ends") or weights in self.known:
            return None
        known = self._weighted(known, value(rows).dtype) if known.weight is not None else known
        return replace(known, node=self._call(grouped_matmul, known.node, weights, self._ends))

    def _operands(self, node: fx.Node) -> tuple[Any, Any, Any]:
        """The rows, the matrices and the ends of a product of groups; Nones for one with anything else."""
        names = ("input", "weight", "offs") if "transformers" in operator_name(node) else ("self", "mat2", "offs")
        names = ("rows", "weights", "offsets") if node.target is grouped_matmul else names
        if node.target is aten._grouped_mm.default and argument(node, "bias") is not None:
            return None, None, None
        rows, weights, ends = (argument(node, name) for name in names)
        return rows, weights, ends

    def _squeezed(self, node: fx.Node) -> _Reading | None:
        known, dim = self._is(node.args[0], "rows"), node.args[1]
        if not known or known.weight or dim == 0:
            return None
        return replace(known, node=self._call(aten.squeeze.dims, known.node, [dim]))

    def _bmm(self, node: fx.Node) -> _Reading | None:
        """A row times the matrix of its expert: as a row, or as a column."""
        for place, dim in ((1, -1), (0, 1)):
            rows, matrix = self._is(node.args[place], "rows"), self._is(node.args[1 - place], "matrix")
            if not rows or not matrix or rows.order != matrix.order or rows.weight or shape(rows.node)[dim] != 1:
                continue
            x = self._call(aten.squeeze.dims, rows.node, [dim])
            weights = self._call(aten.transpose.int, matrix.node, 1, 2) if dim == -1 else matrix.node
            product = self._call(grouped_matmul, x, weights, self._ends)
            return replace(rows, node=self._call(aten.unsqueeze.default, product, dim))
        return None

    def _multiplied(self, node: fx.Node) -> _Reading | None:
        """Rows times their weights, which are kept until the rows are added up."""
        for place in (0, 1):
            rows, other = self._is(node.args[place], "rows"), node.args[1 - place]
            if not rows or not isinstance(other, fx.Node):
                continue
            weight = self._is(other, "weight")
            if weight is None and other not in self.known and rows.order == SLOTS:
                found = self._flattened(other)
                weight = _Reading("weight", SLOTS, found) if found is not None else None
            if weight and weight.order == rows.order and not rows.weight and value(rows.node).ndim == 2:
                column = tuple(value(other).shape) == (self.tokens * self.each, 1)
                return replace(rows, weight=weight.node) if column else None
        return None

    def _weighted(self, rows: _Reading, dtype: torch.dtype) -> _Reading:
        """Rows that were multiplied by their weights before their experts, and are of `dtype` then: `dispatch` makes
        them, if nothing else was done to them."""
        raw: fx.Node = rows.node
        cast = raw.target is aten._to_copy.default
        raw = raw.all_input_nodes[0] if cast else raw
        weights: Any = rows.weight
        own, wide, by = (value(each).dtype for each in (raw, rows.node, weights))
        same = torch.promote_types(own, wide) == wide and torch.promote_types(own, by) == torch.promote_types(wide, by)
        if raw is not self._rows or own != dtype or not same:
            raise _Unknown
        if self.weighted is None:
            if not weights < self._dispatch:
                raise _Unknown
            self._dispatch.args = (*self._dispatch.args, weights)
            self.weighted = self._call(operator.getitem, self._dispatch, 0)
        if self._dispatch.args[-1] is not weights:
            raise _Unknown
        return replace(rows, node=self.weighted, weight=None)

    def _added_up(self, node: fx.Node) -> _Reading | None:
        known, dims, keeps = self.known[node.all_input_nodes[0]], list(argument(node, "dim")), argument(node, "keepdim")
        if known.kind == "one_hot" and dims == [0] and not keeps:
            return _Reading("counts")
        return self._end(node, known) if known.kind == "tokens" and dims == [1] and not keeps else None

    def _scattered(self, node: fx.Node) -> _Reading | None:
        """Rows added to zeros at their tokens."""
        start, dim, index, rows = node.args[:4]
        known = self._is(rows, "rows")
        zeros = isinstance(start, fx.Node) and start.target in _ZEROS and start not in self.known
        by = self._is(index, "token")
        if not known or not zeros or dim != 0 or not by or by.order != known.order or node.kwargs.get("alpha", 1) != 1:
            return None
        return self._end(node, known)

    def _end(self, node: fx.Node, known: _Reading) -> _Reading:
        rows = known.node
        weights = known.weight or self._call(aten.new_ones.default, rows, [self.tokens, self.each])
        result = self._call(combine, rows, self._where, weights)
        if value(result).dtype != value(node).dtype:
            result = self._call(aten._to_copy.default, result, dtype=value(node).dtype)
        if tuple(value(result).shape) != tuple(value(node).shape):
            raise _Unknown
        return _Reading("end", SLOTS, result)

    def _row_by_row(self, node: fx.Node) -> _Reading:
        """The result of an operator on each row by itself. Raises _Unknown for another one."""
        given = operands(node)
        known = [self.known.get(operand) for operand in given]
        orders = {each.order for each in known if each}
        whole = next((self._slots_of(o) for o, each in zip(given, known, strict=True) if not each), None)
        if whole is not None or len(orders) != 1 or any(each and each.kind != "rows" for each in known):
            if all(each is None or each.kind == "weight" for each in known) and node.target in _COLUMNS and known[0]:
                return known[0]
            raise _Unknown
        rule = None if draws_random_numbers(node) else rule_of(node)
        if rule is None or any(each and each.weight for each in known):
            if node.target is aten._to_copy.default and known[0] and known[0].weight:
                return known[0]
            raise _Unknown
        rows = Routing(self.ids, self.tokens, int(self.experts or 0), Routed(TOKEN), Routed(EXPERT))
        results = routed(node, rule, [rows if each else None for each in known])[1]
        if any(each is None or each.token.dim != 0 for each in results):
            raise _Unknown
        arguments: Any = map_arg((node.args, node.kwargs), lambda o: self.known[o].node if o in self.known else o)
        args, kwargs = arguments
        made = self._call(node.target, *args, **kwargs)
        made.meta |= {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        return _Reading("several" if isinstance(value(node), list | tuple) else "rows", orders.pop(), made)

    # -- Tokens, their weights, and their rows

    def _dispatched(self, x: fx.Node, order: str) -> _Reading | None:
        if value(x).ndim != 2 or (self.x is not None and self.x is not x):
            return None
        if self.x is None:
            self.x = x
            self._dispatch = self._call(dispatch, x, self.ids, self.experts)
            self._rows, self._ends, self._where = (self._call(operator.getitem, self._dispatch, i) for i in range(3))
        return _Reading("rows", order, self._rows)

    def _dispatch_copies(self) -> None:
        """Dispatch the tokens that were copied last, if no others were dispatched."""
        if self.x is None:
            copied = [each.node for node, each in self.known.items() if each.kind == "copies" and node < self.before]
            if not copied or self._dispatched(copied[-1], SLOTS) is None:
                raise _Unknown

    def _slots_of(self, node: fx.Node) -> fx.Node | None:
        """The tokens of which a value outside of the mixture has a copy for each slot, or the weights of slots."""
        return self._repeated(node) or self._flattened(node)

    def _repeated(self, node: Any) -> fx.Node | None:
        """x, of x.repeat_interleave(k, 0), or of x[:, None].expand(tokens, k, ...).reshape(tokens * k, ...)."""
        if isinstance(node, fx.Node) and node.target is aten.repeat_interleave.self_int:
            source: Any = node.args[0]
            same = argument(node, "dim") == 0 and node.args[1] == self.each and shape(source)[0] == self.tokens
            return source if same and isinstance(source, fx.Node) else None
        if not isinstance(node, fx.Node) or node.target not in _RESHAPES:
            return None
        wide: Any = node.args[0]
        wide = wide.args[0] if wide.target is aten.clone.default else wide
        if wide.target is not aten.expand.default or tuple(value(wide).shape[:2]) != (self.tokens, self.each):
            return None
        narrow: Any = wide.args[0]
        if narrow.target is not aten.unsqueeze.default or narrow.args[1] != 1:
            return None
        x: fx.Node = narrow.args[0]
        same = tuple(value(node).shape) == (self.tokens * self.each, *value(x).shape[1:])
        return x if same and shape(x)[0] == self.tokens else None

    def _flattened(self, node: Any) -> fx.Node | None:
        """The weights of tokens, [tokens, k], of which `node` is a flat form, or a column."""
        while isinstance(node, fx.Node) and node.target in (*_RESHAPES, aten.unsqueeze.default):
            sizes = tuple(size for size in value(node).shape if size != 1)
            if value(node).numel() != self.tokens * self.each or len(sizes) > 1:
                return None
            node = node.args[0]
            if isinstance(node, fx.Node) and tuple(value(node).shape) == (self.tokens, self.each):
                return node
        return None


_REARRANGES = (
    aten._to_copy.default,
    aten.sort.default,
    aten.sort.stable,
    aten.index.Tensor,
    operator.getitem,
    *_RESHAPES,
)
_OF_ROWS = ("rows", "tokens", "matrix")


def _is_read(rows: fx.Node) -> bool:
    """Whether anything reads the values of these rows: `per_expert` reads their number alone."""
    readers = (user for user in rows.users if user.target is not per_expert)
    return any(user.target is not aten._to_copy.default or _is_read(user) for user in readers)


class _Unknown(Exception):
    """A mixture with something that is not recognised."""


_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
_COLUMNS = (aten.unsqueeze.default, *_RESHAPES)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.full.default)
_READERS: Mapping[Any, Callable[[_Mixture, fx.Node], _Reading | None]] = {
    aten.sort.default: _Mixture._sort,
    aten.sort.stable: _Mixture._sort,
    operator.getitem: _Mixture._item,
    aten.floor_divide.default: _Mixture._divided,
    aten.div.Tensor_mode: _Mixture._divided,
    aten.histc.default: _Mixture._counted,
    aten.one_hot.default: _Mixture._counted,
    aten.cumsum.default: _Mixture._summed_up,
    aten._to_copy.default: _Mixture._cast,
    aten.reshape.default: _Mixture._reshaped,
    aten.view.default: _Mixture._reshaped,
    aten.expand.default: _Mixture._expanded,
    aten.index.Tensor: _Mixture._indexed,
    aten.gather.default: _Mixture._gathered,
    aten.index_put.default: _Mixture._inverted,
    aten.bmm.default: _Mixture._bmm,
    aten.squeeze.dim: _Mixture._squeezed,
    aten.mul.Tensor: _Mixture._multiplied,
    aten.sum.dim_IntList: _Mixture._added_up,
    aten.index_add.default: _Mixture._scattered,
    aten.scatter_add.default: _Mixture._scattered,
}
