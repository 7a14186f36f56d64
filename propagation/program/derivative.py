"""The gradients of a program as a program of its own, so that they can be differentiated again, any number of times.

It computes the forward once more, then the backward: inputs, tangents -> outputs, gradients. `differentiate`
differentiates it like any program. The outputs are among the results so that random numbers are drawn in the order of
the forward, whether a gradient needs them or not.
"""

from __future__ import annotations

import itertools
import operator
import re
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...strategy.errors import RuntimeStateError
from ...strategy.layout import layout
from ...strategy.placement import adjoint, placement_from_code
from ..graph.graph import Text
from ..graph.nodes import operator_name
from ..graph.port import Port, Role
from ..ops.collectives import convert
from ..ops.constants import constant, stationary
from ..ops.ctc import ctc_backward
from ..ops.python.functions import run_backward
from ..ops.python.hooked import hooked_backward, observed
from ..ops.registration import differentiable, written_forms
from .differentiate import differentiate
from .local_program import Conversion, LocalProgram, PlacedPort
from .step import Step, calls_of, inputs_with_gradients, returned_by

aten = torch.ops.aten
_WORDS = {
    hooked_backward: "a hook that changes gradients",
    run_backward: "control flow on values of tensors",
    ctc_backward: "the CTC loss, whose gradient PyTorch cannot differentiate",
}
_UNKNOWN = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")


def differentiate_again(program: LocalProgram, wanted: tuple[bool, ...]) -> Step:
    """The Step of `program` if the outputs marked in `wanted` are differentiated more than once. Raises
    RuntimeStateError for an operator whose gradient PyTorch cannot differentiate."""
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            return differentiate(written_out(program), wanted, again=True)
    except RuntimeError as error:
        if (found := _UNKNOWN.search(str(error))) is None:
            raise
        raise RuntimeStateError(_refused(f"{found[1]}, of which PyTorch has no derivative")) from error


def _refused(what: str) -> str:
    return (
        f"the gradient of a sharded function cannot be differentiated again: it has {what}; write with other "
        "operators what is differentiated twice, or compute it outside the sharded function"
    )


def written_out(program: LocalProgram) -> LocalProgram:
    """`program` with Partway's own operators written in PyTorch's, whose gradients all have gradients, and with
    constants that stay constant. Raises RuntimeStateError if a gradient does not depend on the program alone."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.module.graph, {}))
    for node in calls_of(graph):
        node.target = written_forms.get(node.target, node.target)
        if node.target is aten.detach.default:
            node.target = constant
        elif node.target is stationary:
            x, refused = cast(Any, node.args)
            if refused:
                raise RuntimeStateError(_refused(str(refused)))
            node.replace_all_uses_with(x)
            graph.erase_node(node)
    return replace(program, module=Text(program.module, graph))


def gradient_program(step: Step) -> LocalProgram:
    """The program of the gradients of `step`: from its inputs and the tangents of its differentiated outputs to its
    outputs and the existing gradients, in the order of its inputs."""
    assert step.backward is not None
    program, graph = step.program, fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    kept = list(step.backward.graph.find_nodes(op="placeholder"))
    tangents = [kept.pop() for _ in range(sum(step.wanted))][::-1]
    for node in (*step.forward.graph.find_nodes(op="placeholder"), *tangents):
        env[node] = graph.placeholder(node.name)
        env[node].target = env[node].name
        env[node].meta = dict(node.meta)
    conversions: list[Conversion] = []
    ends: list[Any] = []
    for source in (step.forward.graph, step.backward.graph):
        for node in calls_of(source):
            if node.target is aten.detach.default:  # a value that autograd saves: gradients pass through it
                env[node] = env[node.all_input_nodes[0]]
                continue
            if _is_observed(node):  # its hook ran in the forward
                values, index = cast(Any, node.args)
                env[node] = env[values.args[0][index]]
                continue
            if node.target is observed:
                continue
            if source is step.backward.graph and _has_no_derivative(node):
                raise RuntimeStateError(_refused(_WORDS.get(node.target, operator_name(node))))
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.target is convert:
                _, before, after, *_, tag = cast(Any, node.args)
                reason = program.conversions[tag]
                env[node].args = (*env[node].args[:-1], len(conversions))
                conversions.append(
                    replace(
                        reason,
                        tag=len(conversions),
                        source=placement_from_code(before),
                        target=placement_from_code(after),
                        gradient=True,
                        again=False,
                        repeated=False,
                    )
                )
        ends.append([None if end is None else env[end] for end in returned_by(source)])
        if source is step.forward.graph:
            env |= zip(kept, ends[0][len(program.outputs) :], strict=True)
    graph.output((*ends[0][: len(program.outputs)], *(end for end in ends[1] if end is not None)))
    constants = {
        str(node.target): getattr(module, str(node.target))
        for module in (step.forward, step.backward)
        for node in module.graph.find_nodes(op="get_attr")
    }
    differentiated = itertools.compress(program.outputs, step.wanted)
    return LocalProgram(
        Text(constants, graph),
        program.mesh,
        (*program.inputs, *(_placed(output, Role.INPUT) for output in differentiated)),
        (
            *(replace(output, port=replace(output.port, requires_grad=False)) for output in program.outputs),
            *(_placed(program.inputs[i], Role.RESULT) for i in inputs_with_gradients(step)),
        ),
        tuple(conversions),
        program.cost,
    )


def _is_observed(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is observed


def _has_no_derivative(node: fx.Node) -> bool:
    """Whether `node` calls one of Partway's own operators without a derivative."""
    return operator_name(node).startswith("partway.") and node.target not in differentiable


def _placed(of: PlacedPort, role: Role) -> PlacedPort:
    """The gradient of an input or an output as an output or an input of a program."""
    placed = layout(of.layout.mesh, tuple(map(adjoint, of.layout.placements)))
    return PlacedPort(
        Port(of.port.node, role, f"the gradient of {of.port.name}", requires_grad=True), of.shape, of.dtype, placed
    )
