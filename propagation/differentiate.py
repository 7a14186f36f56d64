"""From a local program to its forward and backward graphs, in which every collective is visible.

Autograd itself writes the backward: the program runs once on fake tensors under `make_fx`, forward and
`torch.autograd.grad`, and the graph is cut where the tangents come in. What the backward needs of the forward is
saved, as autograd would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..strategy.errors import VerifyError
from .graph import Role
from .lower import LocalProgram
from .torch_internals import FakeTensorMode, OpOverload, make_fx


@dataclass(frozen=True)
class Step:
    """One training step of a rank, as two graphs.

    forward    inputs -> (outputs..., saved...)
    backward   (saved..., tangents of the differentiated outputs...) -> gradients of the inputs that need one
    wanted     for each output whether it is differentiated
    needed     for each input whether it gets a gradient
    """

    program: LocalProgram
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    wanted: tuple[bool, ...]
    needed: tuple[bool, ...]


def differentiate(program: LocalProgram, wanted: tuple[bool, ...]) -> Step:
    """The Step of `program` when the outputs marked in `wanted` are differentiated."""
    needed = tuple(placed.port.requires_grad for placed in program.inputs)
    if not any(wanted) or not any(needed):
        return Step(program, program.module, None, wanted, (False,) * len(needed))
    device = program.inputs[0].port.node.meta["val"].device
    with FakeTensorMode(), torch.enable_grad():
        inputs = [
            torch.empty(placed.local_shape, dtype=placed.dtype, device=device, requires_grad=needs)
            for placed, needs in zip(program.inputs, needed, strict=True)
        ]
        tangents = [
            torch.empty(placed.local_shape, dtype=placed.dtype, device=device)
            for placed, want in zip(program.outputs, wanted, strict=True)
            if want
        ]
        count = len(inputs)

        def joint(*flat: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            primals, cotangents = flat[:count], flat[count:]
            outputs = program.module(*primals)
            chosen = [output for output, want in zip(outputs, wanted, strict=True) if want]
            leaves = [primal for primal, needs in zip(primals, needed, strict=True) if needs]
            gradients = torch.autograd.grad(chosen, leaves, cotangents, allow_unused=True)
            return (*outputs, *gradients)

        traced = make_fx(joint)(*inputs, *tangents)
        if any(map(_overwrites, traced.graph.nodes)):  # some of autograd's formulas fill a buffer, as that of rfft
            with torch.no_grad():
                traced = make_fx(torch.func.functionalize(traced))(*inputs, *tangents)
    for node in traced.graph.nodes:
        if _overwrites(node):
            raise VerifyError(f"the traced program writes in place: {node.format_node()}")
    forward, backward = _cut(traced, len(inputs), len(program.outputs))
    return Step(program, forward, backward, wanted, needed)


def _overwrites(node: fx.Node) -> bool:
    """Whether `node` writes to a tensor that something else reads. (Filling a fresh tensor is how make_fx shows
    `bernoulli`; only the result is read then.)"""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return False
    written = node.args[0]
    if not isinstance(written, fx.Node) or written.op != "call_function" or len(written.users) > 1:
        return True
    return not isinstance(written.target, OpOverload) or any(r.alias_info for r in written.target._schema.returns)


def _cut(traced: fx.GraphModule, inputs: int, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph: what depends on a tangent is backward, the rest is forward."""
    traced.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    returned = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    late = set(placeholders[inputs:])
    for node in traced.graph.nodes:
        if node.op != "placeholder" and any(operand in late for operand in node.all_input_nodes):
            late.add(node)
    results, gradients = returned[:outputs], returned[outputs:]
    body = [node for node in traced.graph.nodes if node.op in ("call_function", "get_attr")]
    saved: dict[fx.Node, None] = {}
    for node in body:
        if node in late:
            saved |= {operand: None for operand in node.all_input_nodes if operand not in late}
    saved |= {g: None for g in gradients if isinstance(g, fx.Node) and g not in late}

    def graph(starts: list[fx.Node], nodes: list[fx.Node], ends: tuple[fx.Node | None, ...]) -> fx.GraphModule:
        part, env = fx.Graph(), {}
        for node in starts:
            env[node] = part.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in nodes:
            env[node] = part.node_copy(node, env.__getitem__)
        part.output(tuple(env[end] if isinstance(end, fx.Node) else end for end in ends))
        part.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        part.lint()
        return fx.GraphModule(traced, part)

    forward = graph(placeholders[:inputs], [n for n in body if n not in late], (*results, *saved))
    backward = graph([*saved, *placeholders[inputs:]], [n for n in body if n in late], gradients)
    return forward, backward


def scale_parameter_gradients(step: Step, factor: float) -> Step:
    """`step` with the gradient of every parameter multiplied by `factor`."""
    if step.backward is None or factor == 1:
        return step
    graph = fx.Graph()
    returned: Any = graph.graph_copy(step.backward.graph, {})
    placed = [p for p, needs in zip(step.program.inputs, step.needed, strict=True) if needs]
    scaled = [
        graph.call_function(torch.ops.aten.mul.Scalar, (gradient, factor))
        if p.port.role is Role.PARAMETER and gradient is not None
        else gradient
        for p, gradient in zip(placed, returned, strict=True)
    ]
    graph.output(tuple(scaled))
    return replace(step, backward=fx.GraphModule(step.backward, graph))
