"""Checks of an exported program, each with an error that names the line and says what to write instead."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ....strategy.errors import CaptureError
from ...graph.graph import Graph
from ...graph.nodes import at_source, module_path, operands, operator_name, region_of, source_of, value
from ...graph.port import Role
from ...graph.structure import name_of
from ...torch_internals import OpOverload, schema_of
from ..rewrites.control_flow import CONTROL
from .failures import Undecided


def check_writes(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise CaptureError for a write in place to a tensor whose elements share memory, as PyTorch does."""
    for node in (node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        for operand in _written_operands(node):
            val = operand.meta.get("val")
            strides = zip(val.shape, val.stride(), strict=True) if isinstance(val, torch.Tensor) else ()
            if any(stride == 0 and size > 1 for size, stride in strides):
                raise CaptureError(
                    f"{name_of(fn)} writes in place ({operator_name(node)}) to a tensor that was expanded, whose "
                    f"elements share memory{at_source(node)}; write to a copy of it, x.clone()"
                )


def check_autocast(module: fx.GraphModule, fn: Callable[..., Any], turned_off: bool) -> None:
    """Raise CaptureError where torch.autocast is on and the tensors are on the meta device, where it casts nothing: the
    plan would have other dtypes than a run. `turned_off`: torch disabled autocast for lack of a device."""
    given: list[Any] = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    tensors = [val for val in given if isinstance(val, torch.Tensor)]
    if not tensors or not all(val.is_meta for val in tensors):
        return
    regions = (
        node
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2]
    )
    if turned_off or any(True for _ in regions):
        raise CaptureError(
            f"{name_of(fn)} runs in torch.autocast on tensors of the meta device, where autocast casts nothing: a plan "
            "would be of other dtypes than a run on devices. Plan a model that computes in that dtype "
            "(model.to(torch.bfloat16)), cast where it is used (x.bfloat16()), or give tensors of the device itself"
        )


def _written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call of an operator writes to, except where it only changes their shape or strides."""
    if (
        isinstance(node.target, OpOverload)
        and schema_of(node.target).is_mutable
        and torch.Tag.inplace_view not in node.target.tags
    ):
        for formal, operand in zip(schema_of(node.target).arguments, node.args, strict=False):
            if formal.alias_info is not None and formal.alias_info.is_write and isinstance(operand, fx.Node):
                yield operand


def warn_of_updates(graph: Graph) -> None:
    """Warn of buffers that are updated inside torch.utils.checkpoint, if there is a gradient: PyTorch runs the forward
    once more in the backward, and its updates with it."""
    updates = [port for port in graph.outputs if port.role is Role.BUFFER_UPDATE]
    names = [port.name for port in updates if region_of(source_of(port.node).node) is not None]
    if names and any(port.requires_grad for port in graph.outputs):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        warnings.warn(
            f"{listed} are updated inside torch.utils.checkpoint: once a call, as without checkpoint, where PyTorch on "
            "one device updates them again when its backward runs the forward once more. (A BatchNorm has its running "
            "mean and variance with the momentum 1 - (1 - momentum)**2.)",
            stacklevel=2,
        )


def check_static(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise Undecided if a size or a number in the graph depends on the values of tensors."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, list | tuple) and any(isinstance(part, list | tuple) for part in val):
            raise CaptureError(
                f"could not capture {name_of(fn)}: {operator_name(node)} gives lists of tensors among its results"
                f"{at_source(node)}; do this part outside the sharded function"
            )
        sizes = val.shape if isinstance(val, torch.Tensor) else ()
        if isinstance(val, symbolic) or any(isinstance(size, symbolic) for size in sizes):
            what = "gives a result whose size depends" if sizes else "gives a number that depends"
            maker = node.all_input_nodes[0] if node.target is operator.getitem else node
            raise Undecided(
                f"could not capture {name_of(fn)} as one static graph: {operator_name(maker)} {what} on the values "
                f"of tensors{at_source(node)}; do this part outside the sharded function, or keep it a tensor of fixed "
                "size"
            )


def check_operators(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Raise CaptureError for anything but a functional operator: a branch or loop that control_flow.py does not know,
    or a list of tensors among other results."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or node.target in CONTROL:
            continue
        name, val = operator_name(node), node.meta.get("val")
        if isinstance(val, tuple | list) and any(isinstance(part, tuple | list) for part in val):
            what = f"operator {name} returns lists of tensors beside others; return one list, or single tensors"
        elif isinstance(node.target, OpOverload):
            continue
        else:
            what = f"{name} is a branch or a loop that Partway cannot split; write it without"
        raise CaptureError(
            f"could not capture {name_of(fn)}: {what}, or do this part outside the sharded function{at_source(node)}"
        )


# Operators whose tensors must have one dtype, which torch.export does not check.
_ONE_DTYPE = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)


def check_dtypes(graph: Graph) -> Graph:
    """The graph itself. Raises CaptureError for a product of tensors of different dtypes."""
    for node in graph.nodes:
        if operator_name(node).split(".")[1:2] and operator_name(node).split(".")[1] in _ONE_DTYPE:
            every = [value(operand).dtype for operand in operands(node)]
            dtypes = list(dict.fromkeys(dtype for dtype in every if dtype is not torch.bool))  # a mask may be bool
            if len(dtypes) > 1:
                names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise CaptureError(
                    f"operator {operator_name(node)} in {module_path(node) or 'the function'} gets tensors of dtypes "
                    f"{names}{at_source(node)}; convert them to one, as with .to(torch.{str(dtypes[-1]).split('.')[1]})"
                )
    return graph
