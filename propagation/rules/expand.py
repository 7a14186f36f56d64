"""Replaces operators that cannot be computed from local parts by operators that can.

A mean is a sum divided by the *global* count; batch statistics are sums; a loss that averages over its valid targets is
a sum divided by a count. After this pass each of them splits like any sum, and conversions do the rest (the local
element count never enters). The expansion of an operator is in the file of its family (`EXPANSIONS`, merged in
`table.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from torch import fx

from ..ops.random_numbers import RandomNumbers
from .builder import Builder, Keys
from .table import EXPANSIONS


def expand(
    module: fx.GraphModule,
    batch_norm_parts: int = 1,
    random_numbers: RandomNumbers = RandomNumbers.COUNTER,
    own: Collection[Any] = (),
) -> dict[fx.Node, fx.Node]:
    """Replace every node of `module` that has an expansion, recursively (in place; capture owns the module). Operators
    in `own` stay: users gave them rules.

    Returns the last value of each input that an operator wrote to without torch.export noticing. Raises StrategyError
    for a training BatchNorm whose batch `batch_norm_parts` does not divide.
    """
    written: dict[fx.Node, fx.Node] = {}
    by_torch = random_numbers is RandomNumbers.TORCH
    keys = None if by_torch else Keys(module.graph, stream=random_numbers is RandomNumbers.RANK)
    queue = deque(module.graph.nodes)
    while queue:
        node = queue.popleft()
        expansion = EXPANSIONS.get(node.target) if node.op == "call_function" else None
        if expansion is None or node.target in own:
            continue
        builder = Builder(module.graph, node, batch_norm_parts, written, keys)
        new = expansion(builder, node)
        queue.extendleft(reversed(builder.added))
        if new is not None:
            _replace(module.graph, node, new)
    return {old: new for old, new in written.items() if old.op == "placeholder"}


def _replace(graph: fx.Graph, node: fx.Node, new: fx.Node | tuple[fx.Node | None, ...]) -> None:
    """Replace `node` by `new`. With several results, each getitem is replaced by its own; one that is None stays."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for item in list(node.users):
            replacement = new[item.args[1]]  # type: ignore[index]
            if replacement is not None:
                item.replace_all_uses_with(replacement)
                graph.erase_node(item)
    if not node.users:
        graph.erase_node(node)
