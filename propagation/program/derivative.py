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
from ..graph.nodes import calls_of, operator_name, returned_by
from ..graph.port import Port, Role
from ..ops.collectives import TAG, convert
from ..ops.constants import constant, stationary
from ..ops.ctc import ctc_backward
from ..ops.python.functions import run_backward
from ..ops.python.hooked import hooked_backward, observed
from ..ops.registration import differentiable, written_forms
from .collective import Conversion
from .differentiate import differentiate
from .program import PlacedPort, Program

aten = torch.ops.aten
_WORDS = {
    hooked_backward: "a hook that changes gradients",
    run_backward: "control flow on values of tensors",
    ctc_backward: "the CTC loss, whose gradient PyTorch cannot differentiate",
}
_UNKNOWN = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")


def differentiate_again(program: Program, wanted: tuple[bool, ...]) -> Program:
    """`program` with a backward of the outputs marked in `wanted`, which are differentiated more than once. Raises
    RuntimeStateError for an operator whose gradient PyTorch cannot differentiate."""
    if program.resized is not None:
        raise RuntimeStateError(_refused("rows of experts, whose numbers are known only when it runs"))
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


def written_out(program: Program) -> Program:
    """`program` with Partway's own operators written in PyTorch's, whose gradients all have gradients, and with
    constants that stay constant. Raises RuntimeStateError if a gradient does not depend on the program alone."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.lowered.graph, {}))
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
    return replace(program, lowered=Text(program.lowered, graph))


def gradient_program(program: Program) -> Program:
    """The program of the gradients of `program`: from its inputs and the tangents of its differentiated outputs to its
    outputs and the existing gradients, in the order of its inputs."""
    assert program.backward is not None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    kept = list(program.backward.graph.find_nodes(op="placeholder"))
    tangents = [kept.pop() for _ in range(sum(program.wanted))][::-1]
    for node in (*program.forward.graph.find_nodes(op="placeholder"), *tangents):
        env[node] = graph.placeholder(node.name)
        env[node].target = env[node].name
        env[node].meta = dict(node.meta)
    conversions: list[Conversion] = []
    ends: list[Any] = []
    for source in (program.forward.graph, program.backward.graph):
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
            if source is program.backward.graph and _has_no_derivative(node):
                raise RuntimeStateError(_refused(_WORDS.get(node.target, operator_name(node))))
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.target is convert:
                before, after, tag = (cast(Any, node.args[place]) for place in (1, 2, TAG))
                reason = program.conversions[tag]
                env[node].update_arg(TAG, len(conversions))
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
        if source is program.forward.graph:
            env |= zip(kept, ends[0][len(program.outputs) :], strict=True)
    graph.output((*ends[0][: len(program.outputs)], *(end for end in ends[1] if end is not None)))
    constants = {
        str(node.target): getattr(module, str(node.target))
        for module in (program.forward, program.backward)
        for node in module.graph.find_nodes(op="get_attr")
    }
    differentiated = itertools.compress(program.outputs, program.wanted)
    return Program.of_forward(
        Text(constants, graph),
        program.mesh,
        (*program.inputs, *(_placed(output, Role.INPUT) for output in differentiated)),
        (
            *(replace(output, port=replace(output.port, requires_grad=False)) for output in program.outputs),
            *(_placed(program.inputs[i], Role.RESULT) for i in program.places_of_gradients),
        ),
        tuple(conversions),
        program.profile,
        program.cost,
        parts=program.parts,
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
