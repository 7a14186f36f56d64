"""Passes over a captured module: tensors of the meta device, names of manual functions, and what nothing needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.nodes import stays
from ...ops.python.manual import call_manual, manual_of
from ...torch_internals import FakeTensor, OpOverload, makes_memory, tree_map

# Written as others, and what they give is new whatever these are.
_PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.matmul.default}


def leave_meta(module: fx.GraphModule) -> None:
    """Plan tensors of the meta device as if they were on the CPU: kernels and constants have to agree on one."""

    known: dict[
        int, tuple[FakeTensor, torch.Tensor]
    ] = {}  # copies of a module have the tensors of the first (copies.py)

    def moved(val: Any) -> Any:
        if not isinstance(val, FakeTensor) or val.device.type != "meta":
            return val
        if id(val) not in known:
            with val.fake_mode:
                new = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cpu")
            known[id(val)] = val, new
        return known[id(val)][1]

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if str(node.kwargs.get("device")) == "meta":
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}


def prune(module: fx.GraphModule) -> None:
    """Drop asserts on meta data (they hold for the captured signature), copies that nobody can tell from what they are
    of (dropout in evaluation is one), and what nothing uses. Views become reshapes: whether one needs a copy depends on
    strides, and a local part has strides of its own."""
    for node in reversed(list(module.graph.nodes)):
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
        if node.op == "call_function" and "_assert" in str(node.target):
            module.graph.erase_node(node)
        elif _copies_in_vain(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.eliminate_dead_code(is_impure_node=stays)
    module.recompile()


def _copies_in_vain(node: fx.Node) -> bool:
    """Whether a call copies what an operator has just made, and the copy lies in memory as that does. What is returned
    stays a copy: it may be written into."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    (made,) = node.all_input_nodes
    if not isinstance(made.target, OpOverload) or not (made.target in _PRODUCTS or makes_memory(made.target)):
        return False
    value, copy = made.meta.get("val"), node.meta.get("val")
    alike = isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor) and value.stride() == copy.stride()
    return alike and all(user.op != "output" for user in node.users)


def name_manuals(module: fx.GraphModule) -> None:
    """Let the call of a manual function have the name of its function (in place)."""
    for node in module.graph.find_nodes(op="call_function", target=call_manual):
        word = manual_of(str(node.args[1])).word
        with module.graph.inserting_before(node):
            named = module.graph.create_node("call_function", call_manual, node.args, name=word)
        named.meta = node.meta
        node.replace_all_uses_with(named)
        module.graph.erase_node(node)
