"""One graph for all values of the numbers that change from call to call, such as the length of a text so far.

torch.export runs the function with a symbol in place of each such number, as it does with sizes (any_size.py): the size
of an empty tensor stands for the number. Where the function decides something by it, torch records a guard;
`CapturedCounts` tells whether the guards hold for the numbers of another call. In the graph the number becomes a tensor
of one element, an input like any other, and operators compute with it (numbers.py). A function with tensors whose sizes
depend on the number has no such graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ...strategy.errors import CaptureError
from ..graph.structure import NUMBERS
from ..torch_internals import FakeTensor, at_symbols, symbols_in
from .any_size import OtherSizesError, check_kept, is_symbolic, values_of_symbols, with_sizes
from .export.tracing import Attempt, Traced, checked

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class CapturedCounts:
    """The conditions of a graph on numbers: the guards on the traced `numbers`, and that everything `computed` from
    them fits int64, unlike Python's unbounded integers."""

    numbers: tuple[int | torch.SymInt, ...]
    computed: tuple[torch.SymInt, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.numbers)

    def hold(self, given: Sequence[int]) -> bool:
        """Whether a call with the numbers `given` has the same graph."""
        try:
            values = values_of_symbols(list(zip(self.numbers, given, strict=True)))
        except OtherSizesError:
            return False
        return all(abs(at_symbols(each, values)) < 2**63 for each in self.computed)


def at_numbers(attempt: Attempt, traced: Traced) -> Traced:
    """The trace of a call with changing numbers, with the numbers of that call substituted. Raises CaptureError where
    the function depends on a number, or may have it in a value that only Python reads."""
    nodes = _stand_ins(attempt, traced)
    sizes = tuple(node.meta["val"].shape[0] for node in nodes)
    if fixed := [number for size, number in zip(sizes, attempt.numbers, strict=True) if not symbols_in(size)]:
        raise CaptureError(f"it counts on the number {fixed[0]}")
    check_kept(traced, sizes)
    pairs = [(node.meta["val"].shape[0], number) for node, number in zip(nodes, attempt.numbers, strict=True)]
    return replace(traced, module=with_sizes(traced.module, values_of_symbols(pairs)))


def counted(attempt: Attempt, traced: Traced) -> tuple[Traced, CapturedCounts]:
    """The trace of a call with changing numbers, with tensors for these (in place), and its conditions. Raises
    CaptureError where a size depends on one of them."""
    module = traced.module
    nodes = _stand_ins(attempt, traced)
    sizes = tuple(node.meta["val"].shape[0] for node in nodes)
    vals = [node.meta.get("val") for node in module.graph.nodes if node.op == "call_function"]
    computed = tuple(val for val in vals if isinstance(val, torch.SymInt) and symbols_in(val))
    for node in nodes:
        _become_number(module.graph, node)
    traced = checked(replace(traced, module=module), attempt.fn)
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, tuple(NUMBERS)) or is_symbolic(val):
            raise CaptureError(f"a size, or what {node.name} does, follows from a number that changes")
    return traced, CapturedCounts(sizes, computed)


def _stand_ins(attempt: Attempt, traced: Traced) -> list[fx.Node]:
    """The inputs that stand for numbers."""
    placeholders = {node.name: node for node in traced.module.graph.nodes if node.op == "placeholder"}
    inputs = [spec.arg.name for spec in traced.signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return [placeholders[name] for name in inputs[len(inputs) - attempt.call.numbers :]]


def _become_number(graph: fx.Graph, node: fx.Node) -> None:
    """Turn an empty input, whose size stands for a number, into a 0-dim tensor of that number."""
    stood_for: FakeTensor = node.meta["val"]
    for user in list(node.users):
        if user.target is not aten.sym_size.int:
            raise CaptureError(f"{user.name} reads what stands for a number")
        with graph.inserting_before(user):
            number: Any = graph.call_function(aten._local_scalar_dense.default, (node,))
        number.meta = {**user.meta}
        user.replace_all_uses_with(number)
        graph.erase_node(user)
    with stood_for.fake_mode:
        node.meta["val"] = torch.empty((), dtype=torch.int64)
