"""Cleanup passes over a captured module: tensors on the meta device, names of manual functions, and dead code."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.nodes import stays
from ...ops.python.manual import call_manual, manual_of
from ...torch_internals import FakeTensor, OpOverload, makes_memory, tree_map

# Composite operators whose results are always new tensors.
_PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.matmul.default}


def leave_meta(module: fx.GraphModule) -> None:
    """Move tensors from the meta device to the CPU (in place): kernels and constants have to agree on a device."""

    known: dict[
        int, tuple[FakeTensor, torch.Tensor]
    ] = {}  # copied calls share the tensors of the first (one_by_one.py)

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
    """Drop asserts on metadata (they hold for the captured signature), copies that cannot be told from their originals
    (dropout in evaluation makes one), and dead code. Views become reshapes: whether one needs a copy depends on
    strides, and a local part has its own."""
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
    """Whether a call copies the new result of an operator with the same strides. Returned copies stay: the caller may
    write into them."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    (made,) = node.all_input_nodes
    if not isinstance(made.target, OpOverload) or not (made.target in _PRODUCTS or makes_memory(made.target)):
        return False
    value, copy = made.meta.get("val"), node.meta.get("val")
    alike = isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor) and value.stride() == copy.stride()
    return alike and all(user.op != "output" for user in node.users)


def name_manuals(module: fx.GraphModule) -> None:
    """Name the calls of manual functions after their functions (in place)."""
    for node in module.graph.find_nodes(op="call_function", target=call_manual):
        word = manual_of(str(node.args[1])).word
        with module.graph.inserting_before(node):
            named = module.graph.create_node("call_function", call_manual, node.args, name=word)
        named.meta = node.meta
        node.replace_all_uses_with(named)
        module.graph.erase_node(node)
