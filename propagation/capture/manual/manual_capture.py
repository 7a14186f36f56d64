"""From a function that a person wrote for one rank to the program of all ranks.

The function is traced where it is called, during the capture of the surrounding function, since Python may change its
behaviour later. (A lambda in a loop sees the loop's variable.) Its call becomes one operator of the surrounding graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....strategy.errors import CaptureError
from ....strategy.layout import Layout
from ....strategy.mesh import Mesh
from ....strategy.place import Place, placed
from ...graph.graph import Graph
from ...graph.nodes import at_source, draws_random_numbers, operator_name
from ...graph.port import Role
from ...graph.structure import Call, name_of
from ...ops.random_numbers import keys
from ...torch_internals import FakeTensor, beside_export
from ..capture import CaptureOptions, capture
from .by_rank import merged


def trace_ranks(fn: Callable[..., Any], call: Call, layouts: Sequence[Layout], mesh: Mesh) -> Graph:
    """Trace `fn` on each rank's parts of the tensors of `call`, laid out by `layouts`, as one program of all ranks.

    `fn` is traced for the first rank and, if it asks for its place along some axes, for each place along these.
    Constants become inputs.

    Raises CaptureError where `fn` has no static graph, uses outside tensors that need a gradient, or writes to its
    arguments.
    """
    traced: dict[int, Graph] = {}
    asked: set[str] = set()
    while True:
        axes = [axis for axis in mesh.axes if axis in asked]
        ranks = [rank for rank in range(mesh.device_num) if _is_first(mesh, rank, axes)]
        for rank in ranks:
            if rank not in traced:
                place = Place(mesh, rank)
                traced[rank] = _trace(fn, call, layouts, place)
                asked |= place.asked
        if asked <= set(axes):
            break
    graphs = [traced[rank] for rank in ranks]
    graph = graphs[0]
    if len(graphs) > 1:
        with beside_export():
            graph = merged(graphs, axes, [mesh.size(axis) for axis in axes])
    # traces keep all collectives, so that ranks can be compared; drop those whose results no rank reads
    graph.module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph


def _is_first(mesh: Mesh, rank: int, axes: Sequence[str]) -> bool:
    """Whether a rank is the first of those at its place along `axes`."""
    return all(i == 0 for axis, i in zip(mesh.axes, mesh.coordinate(rank), strict=True) if axis not in axes)


def _trace(fn: Callable[..., Any], call: Call, layouts: Sequence[Layout], place: Place) -> Graph:
    """The program of the rank at `place`."""
    gradients = torch.is_grad_enabled()
    parts = []
    for tensor, layout in zip(call.tensors, layouts, strict=True):
        able = tensor.is_floating_point() or tensor.is_complex()
        shape = layout.local_shape(tuple(tensor.shape))
        parts.append(torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=able and gradients))
    with beside_export(), placed(place):
        args, kwargs = call.structure.build(list(parts))
        graph = capture(fn, args, kwargs, CaptureOptions(gradients=gradients))
    _check(fn, graph)
    return graph


def _check(fn: Callable[..., Any], graph: Graph) -> None:
    """Raise CaptureError for a program that is more than a function of its arguments and of constants."""
    for port in graph.inputs:
        if port.role is Role.INPUT:
            continue
        tensor = graph.constants[port.name]
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter | FakeTensor):
            raise CaptureError(
                f"{name_of(fn)} is the program of one rank and uses a tensor from outside ({list(tensor.shape)}), of "
                "which nothing says what part a rank has; pass it as an argument, with an entry of in_strategy"
            )
    for port in graph.outputs:
        if port.role is not Role.RESULT:
            raise CaptureError(
                f"{name_of(fn)} is the program of one rank and writes to {port.name} in place; compute a new tensor "
                "and return it"
            )
    for node in graph.nodes:
        if draws_random_numbers(node) and node.target is not keys:
            raise CaptureError(
                f"{name_of(fn)} is the program of one rank and calls {operator_name(node)}, which draws whole tensors "
                f"from PyTorch's generator, the same on all ranks; call it outside of the manual "
                f"function{at_source(node)}"
            )
    if graph.hooks.by_number:
        raise CaptureError(
            f"{name_of(fn)} is the program of one rank and registers hooks, which a manual function cannot have; "
            f"register them "
            "outside"
        )
