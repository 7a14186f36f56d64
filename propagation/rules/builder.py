"""The builder with which expansions add nodes to a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..graph.nodes import value
from ..ops.random_numbers import keys
from ..torch_internals import tree_map


class Builder:
    """Adds nodes before one node of a graph, each with its value and with that node's provenance.

    batch_norm_parts   the number of parts, each with its own statistics, of a training BatchNorm's batch
    written            the last values of the tensors that operators wrote to
    keys               the keys of random numbers; None: PyTorch draws them
    added              the nodes added so far
    """

    def __init__(
        self,
        graph: fx.Graph,
        before: fx.Node,
        batch_norm_parts: int,
        written: dict[fx.Node, fx.Node],
        keys: Keys | None = None,
    ) -> None:
        self._graph, self._before, self.batch_norm_parts, self._written = graph, before, batch_norm_parts, written
        self.keys = keys
        self.added: list[fx.Node] = []
        self._mode = next(
            mode
            for node in graph.nodes
            if isinstance(val := node.meta.get("val"), torch.Tensor)
            and (mode := getattr(val, "fake_mode", None)) is not None
        )

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        self.added.append(node)
        node.meta = {k: v for k, v in self._before.meta.items() if k in ("stack_trace", "nn_module_stack", "custom")}
        node.meta["val"] = self.value_of(target, *args, **kwargs)
        return node

    def value_of(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The fake tensors that the operator returns."""
        with self._mode:
            values = tree_map(lambda a: value(a) if isinstance(a, fx.Node) else a, (args, kwargs))
            return target(*values[0], **values[1])

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in `dtype`; `x` itself if it has that dtype."""
        return x if value(x).dtype == dtype else self(torch.ops.aten._to_copy.default, x, dtype=dtype)

    def write(self, old: fx.Node, new: fx.Node) -> None:
        """Replace `old` by `new` from here on: the expanded operator writes to `old`, which its schema does not say."""
        before = {self._before, new}
        for node in self._graph.nodes:
            if node is self._before:
                break
            before.add(node)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in before)
        origin = next((first for first, last in self._written.items() if last is old), old)
        self._written[origin] = new


class Keys:
    """Gives each operator of a graph that draws random numbers its own key, in the order of the calls."""

    def __init__(self, graph: fx.Graph, stream: bool) -> None:
        self._graph, self.stream = graph, stream
        self._node: fx.Node | None = None

    def take(self, b: Builder) -> fx.Node:
        """The next key."""
        if self._node is None:
            first = next(node for node in self._graph.nodes if node.op != "placeholder")
            with self._graph.inserting_before(first):
                self._node = self._graph.call_function(keys, (0,))
            self._node.meta["val"] = []
        count = len(value(self._node)) + 1
        self._node.args, self._node.meta["val"] = (count,), b.value_of(keys, count)
        return b(operator.getitem, self._node, count - 1)


# (builder, call) -> the replacement of its result, or of each result that something may read; None: the call stays
Expansion = Callable[[Builder, fx.Node], fx.Node | tuple[fx.Node | None, ...] | None]
