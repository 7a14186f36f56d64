"""From a lowered program to its forward and backward graphs, in which every collective is visible.

Autograd itself writes the backward. The program is cut into pieces, of which a deep model has few different ones
(segments.py). Each different piece runs once on fake tensors under `make_fx`, forward and
`torch.autograd.grad`, and its graph is cut where the tangents come in. The backward saves the same values of the
forward as autograd would. The forward is the forwards of the pieces in their order; the backward is their
backwards from the last to the first, and gradients of a value that several pieces read are summed in this order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from ...strategy.errors import CaptureError, VerifyError
from ...strategy.placement import BROADCAST, REPLICATE
from ..graph.graph import Text
from ..graph.nodes import (
    calls_of,
    inherit,
    is_port,
    mark,
    number,
    operator_name,
    position,
    region_of,
    returned_by,
    tracing,
)
from ..ops.batch_norm import merge_gradients
from ..ops.collectives import TAG, convert
from ..ops.experts import LAYER, counted
from ..ops.recurrent import rnn_layer
from ..torch_internals import (
    FakeTensorMode,
    OpOverload,
    compiled_when_run,
    data_dependent,
    make_fx,
    schema_of,
    steps_of_layers,
)
from .program import Program
from .segments import Like, Piece, pieces_of

_add = torch.ops.aten.add.Tensor
# operators that keep less if no gradients are recorded, and their replacements
_RECORDING: dict[Any, Any] = {torch.ops.aten.mkldnn_rnn_layer.default: rnn_layer}
# Devices whose kernels of recurrent layers look for the weights in one piece of memory, which no traced value has.
_BY_STEPS = ("cuda",)
_FILLS = (torch.ops.aten.masked_fill_.Scalar, torch.ops.aten.masked_fill_.Tensor)  # of the dtype that they write to
_TRANSPOSES = {torch.ops.aten.t.default, torch.ops.aten.transpose.int}
_RESHAPES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}
T = TypeVar("T")
_Renumbered = Mapping[int, int] | Sequence[int]  # from the tag or the region of a node to that of its copy


def differentiate(program: Program, wanted: tuple[bool, ...], again: bool = False) -> Program:
    """`program` with a backward if the outputs marked in `wanted` are differentiated; `again`: by operators whose
    gradients have gradients, as autograd does with create_graph=True."""
    if program.resized is None:
        return _differentiated(program, wanted, again)
    one, other = (
        _differentiated(replace(program, lowered=lowered, resized=None), wanted, again)
        for lowered in (program.lowered, program.resized)
    )
    return one.of_any_size(other)


def _differentiated(program: Program, wanted: tuple[bool, ...], again: bool) -> Program:
    needed = tuple(placed.port.requires_grad for placed in program.inputs)
    if not any(wanted) or not any(needed):
        return replace(program.undifferentiated, wanted=wanted)
    graph = program.lowered.graph
    device = program.inputs[0].port.node.meta["val"].device
    quietly = torch.autograd.set_detect_anomaly(False)  # anomaly detection would read the values of fake tensors
    with FakeTensorMode(), torch.enable_grad(), compiled_when_run(), quietly:
        inputs = {
            node: Like.whole(placed.local_shape, placed.dtype, device, needs)
            for node, placed, needs in zip(graph.find_nodes(op="placeholder"), program.inputs, needed, strict=True)
        }
        pieces, likes = pieces_of(graph, inputs)
        tangents = [
            (node, Like.whole(placed.local_shape, placed.dtype, device, False))
            for node, placed, want in zip(returned_by(graph), program.outputs, wanted, strict=True)
            if want
        ]
        derivatives = _derivatives(pieces, likes, tangents, again)
        forward, backward = _stitched(graph, likes, tangents, pieces, derivatives)
        constants = {name: constant for derivative in derivatives for name, constant in derivative.constants.items()}
        return replace(
            program,
            forward=Text(constants, forward),
            backward=Text(constants, backward),
            wanted=wanted,
            needed=needed,
        )


@dataclass(frozen=True)
class _Derivative:
    """The traced graphs of a piece. The tag of a conversion is its position among those of the piece.

    forward     inputs -> (outputs..., saved...)
    backward    (saved..., tangents of the outputs that have one...) -> a gradient or None for each input
    gradients   the likeness of each gradient; None: there is none
    constants   the tensors that the graphs have as attributes
    """

    forward: fx.Graph
    backward: fx.Graph
    gradients: tuple[Like | None, ...]
    constants: Mapping[str, Any]


def _derivatives(
    pieces: Sequence[Piece], likes: Mapping[fx.Node, Any], tangents: Sequence[tuple[fx.Node, Like]], again: bool
) -> list[_Derivative]:
    """The derivative of each piece. Pieces with equal keys and equal tangents of their outputs share one."""
    known: dict[Hashable, _Derivative] = {}
    chosen: dict[int, _Derivative] = {}

    def backward(i: int, given: Sequence[Like | None]) -> Sequence[Like | None]:
        key = pieces[i].key, tuple(given)
        if key not in known:
            known[key] = _derivative(pieces[i], given, f"_{len(known)}", again)
        chosen[i] = known[key]
        return chosen[i].gradients

    @functools.cache
    def add(a: Like, b: Like) -> Like:
        return Like.of(_add(a.empty(), b.empty()), False)

    _flow(pieces, likes, tangents, backward, add)
    return [chosen[i] for i in range(len(pieces))]


def _flow(
    pieces: Sequence[Piece],
    likes: Mapping[fx.Node, Any],
    tangents: Sequence[tuple[fx.Node, T]],
    backward: Callable[[int, Sequence[T | None]], Sequence[T | None]],
    add: Callable[[T, T], T],
) -> dict[fx.Node, T]:
    """The gradients of the values of a program, from those of its outputs: the pieces from the last to the first.

    `backward(i, ...)` returns the gradients of the inputs of piece i, given those of its outputs (None: there is none).
    """
    gradients: dict[fx.Node, T] = {}

    def arrive(node: fx.Node, gradient: T) -> None:
        if likes[node].requires_grad:
            gradients[node] = add(gradients[node], gradient) if node in gradients else gradient

    for node, tangent in tangents:
        arrive(node, tangent)
    for i in reversed(range(len(pieces))):
        arriving = backward(i, [gradients.get(node) for node in pieces[i].outputs])
        for node, gradient in zip(pieces[i].inputs, arriving, strict=True):
            if gradient is not None:
                arrive(node, gradient)
    return gradients


def _derivative(piece: Piece, tangents: Sequence[Like | None], suffix: str, again: bool) -> _Derivative:
    """Trace `piece` and its backward for `tangents` of its outputs; `suffix` makes names of its constants unique."""
    inputs = [like.empty() for like in piece.likes]
    given = [tangent.empty().requires_grad_(again) for tangent in tangents if tangent is not None]
    module = _as_module(piece)
    if any(x.device.type in _BY_STEPS for x in inputs):
        for node in calls_of(module.graph):
            node.target = steps_of_layers().get(node.target, node.target)
    needed = [like.requires_grad for like in piece.likes]

    def joint(*flat: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        primals, cotangents = flat[: len(inputs)], flat[len(inputs) :]
        with tracing() as run:
            outputs = run(module, *primals)
            chosen = [output for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
            leaves = [primal for primal, needs in zip(primals, needed, strict=True) if needs]
            grad = functools.partial(torch.autograd.grad, create_graph=again, allow_unused=True)
            computed = iter(grad(chosen, leaves, cotangents) if chosen else ())
        gradients = [next(computed, None) if needs else None for needs in needed]
        # these are the tangents for which the piece before is traced, and a Like makes no lazy tensor
        return (*outputs, *(None if g is None else g.resolve_conj().resolve_neg() for g in gradients))

    try:
        traced = make_fx(joint)(*inputs, *given)
    except data_dependent as error:
        called = [operator_name(node) for node in piece.nodes if isinstance(node.target, OpOverload)]
        names = ", ".join(dict.fromkeys(name for name in called if not name.startswith("partway.")))
        raise CaptureError(
            f"the gradient of one of {names} depends on the values of tensors, as PyTorch computes it: it asks for "
            f"{str(error).splitlines()[0]}. Compute it outside the sharded function, or of what needs no gradient"
        ) from error
    _out_of_place(traced.graph, _views_in_place)
    if any(map(_overwrites, traced.graph.nodes)):  # some of autograd's formulas fill a buffer, such as that of rfft
        with torch.no_grad():
            traced = make_fx(torch.func.functionalize(functools.partial(_again, traced)))(*inputs, *given)
    for node in traced.graph.nodes:
        if _overwrites(node):
            raise VerifyError(f"the traced program writes in place: {node.format_node()}")
    # an out-of-place program has a form on disk, and the runtime finds what may be overwritten
    _out_of_place(traced.graph, _computes_in_place)
    if not again:
        _replicate_broadcasts(traced.graph, len(inputs))
    for node in calls_of(traced.graph):
        node.target = _RECORDING.get(node.target, node.target)
    gradients = tuple(
        Like.of(node.meta["val"], False) if isinstance(node, fx.Node) else None
        for node in returned_by(traced.graph)[len(piece.outputs) :]
    )
    undo_views(traced.graph)
    forward, backward = _cut(traced.graph, len(inputs), len(piece.outputs))
    constants = {}
    for node in (*forward.find_nodes(op="get_attr"), *backward.find_nodes(op="get_attr")):
        constants[f"{node.target}{suffix}"] = getattr(traced, str(node.target))
        node.target = f"{node.target}{suffix}"
    return _Derivative(forward, backward, gradients, constants)


def _again(module: fx.GraphModule, *inputs: torch.Tensor) -> tuple[Any, ...]:
    """The outputs of `module`, a traced graph. Nodes traced from its nodes keep the meta data of these."""
    with tracing() as run:
        return run(module, *inputs)


def _as_module(piece: Piece) -> fx.GraphModule:
    """`piece` by itself, with positions in it as the tags of its conversions and as its regions, and with the positions
    of its nodes noted."""
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in piece.inputs}
    positions = {tag: i for i, tag in enumerate(piece.tags)}
    _copy(piece.nodes, graph, env, positions, {region: i for i, region in enumerate(piece.regions)})
    number([env[node] for node in piece.nodes])
    graph.output(tuple(env[node] for node in piece.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _copy(
    nodes: Iterable[fx.Node], graph: fx.Graph, env: dict[fx.Node, fx.Node], tags: _Renumbered, regions: _Renumbered
) -> None:
    """Append copies of `nodes` to `graph`, with `tags[t]` for the tag t of a conversion and `regions[r]` for the region
    r of a node. `env` maps nodes to their copies in `graph`, and gets the new ones."""
    for node in nodes:
        if node.target is convert:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].update_arg(TAG, tags[node.args[TAG]])  # type: ignore[index]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
        region = region_of(node)
        env[node].meta.pop("custom", None)
        mark(env[node], None if region is None else regions[region])


def _overwrites(node: fx.Node) -> bool:
    """Whether `node` writes to a tensor that something else reads. (make_fx shows `bernoulli` as filling a fresh tensor
    whose result alone is read.)"""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    written = node.args[0]
    if not isinstance(written, fx.Node) or written.op != "call_function" or len(written.users) > 1:
        return True
    return not isinstance(written.target, OpOverload) or any(r.alias_info for r in schema_of(written.target).returns)


def _views_in_place(node: fx.Node) -> bool:
    """Whether an operator makes a view in place, as the product of a vector and a matrix squeezes its result: earlier
    readers of the tensor read its former sizes, and the operator may run again in the backward."""
    op: Any = node.target
    return torch.Tag.inplace_view in op.tags


def _computes_in_place(node: fx.Node) -> bool:
    """Whether an operator computes in place what it could compute out of place, as RMSNorm adds its eps and the
    gradient of a maximum is zeroed elsewhere."""
    op: Any = node.target
    if op in _FILLS:
        return True
    if not schema_of(op).name.endswith("_") or torch.Tag.pointwise not in op.tags:
        return False
    return len({operand.meta["val"].dtype for operand in node.all_input_nodes}) == 1


def _out_of_place(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> None:
    """Replace the `chosen` in-place operators by their out-of-place forms."""
    for node in calls_of(graph):
        if isinstance(node.target, OpOverload) and chosen(node):
            namespace, name = schema_of(node.target).name.split("::")
            packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"))
            every = (getattr(packet, overload) for overload in packet.overloads())
            node.target = next(each for each in every if _taken_by(each) == _taken_by(node.target))


def _taken_by(op: OpOverload) -> list[tuple[str, str]]:
    """The arguments of an operator by name and type."""
    return [(argument.name, str(argument.type)) for argument in schema_of(op).arguments]


def _late(joint: fx.Graph, inputs: int) -> set[fx.Node]:
    """The nodes that depend on a tangent, in a joint graph with `inputs` inputs before the tangents."""
    late = set(joint.find_nodes(op="placeholder")[inputs:])
    for node in calls_of(joint):
        if any(operand in late for operand in node.all_input_nodes):
            late.add(node)
    return late


def _replicate_broadcasts(joint: fx.Graph, inputs: int) -> None:
    """Replace Broadcast by Replicate in the backward, since no gradient of these gradients will be an addend, and
    remove conversions that this leaves without effect."""
    for node in _late(joint, inputs):
        if node.target is convert:
            x, *codes = node.args[:3]
            source, target = (str(REPLICATE) if code == str(BROADCAST) else code for code in codes)
            node.args = (x, source, target, *node.args[3:])
            if source == target:
                node.replace_all_uses_with(x)  # type: ignore[arg-type]
                joint.erase_node(node)


def _cut(joint: fx.Graph, inputs: int, outputs: int) -> tuple[fx.Graph, fx.Graph]:
    """Split a joint graph: nodes that depend on a tangent are backward, the rest is forward."""
    joint.eliminate_dead_code(is_impure_node=is_port)
    placeholders = joint.find_nodes(op="placeholder")
    returned = returned_by(joint)
    late, body = _late(joint, inputs), calls_of(joint)
    results, gradients = returned[:outputs], returned[outputs:]
    saved: dict[fx.Node, None] = {}
    for node in body:
        if node in late:
            saved |= {operand: None for operand in node.all_input_nodes if operand not in late}
    saved |= {g: None for g in gradients if isinstance(g, fx.Node) and g not in late}

    def part(starts: Sequence[fx.Node], nodes: Sequence[fx.Node], ends: Sequence[fx.Node | None]) -> fx.Graph:
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in starts}
        for node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(None if end is None else env[end] for end in ends))
        return graph

    forward = part(placeholders[:inputs], [n for n in body if n not in late], (*results, *saved))
    backward = part([*saved, *placeholders[inputs:]], [n for n in body if n in late], gradients)
    return forward, backward


def _stitched(
    program: fx.Graph,
    likes: Mapping[fx.Node, Any],
    tangents: Sequence[tuple[fx.Node, Like]],
    pieces: Sequence[Piece],
    derivatives: Sequence[_Derivative],
) -> tuple[fx.Graph, fx.Graph]:
    """The forward and the backward graph of a program from those of its pieces."""
    forward, backward = fx.Graph(), fx.Graph()
    fake = functools.cache(Like.empty)
    inputs = program.find_nodes(op="placeholder")
    values = {node: _placeholder(forward, node.name, fake(likes[node])) for node in inputs}
    saved: list[list[fx.Node]] = []
    for piece, derivative in zip(pieces, derivatives, strict=True):
        env = _inlined(derivative.forward, forward, [values[node] for node in piece.inputs], piece)
        ends = [env[end] for end in returned_by(derivative.forward)]
        _check_alike(piece.outputs, ends, likes)
        values |= zip(piece.outputs, ends[: len(piece.outputs)], strict=True)
        saved.append(ends[len(piece.outputs) :])
    distinct = dict.fromkeys(node for nodes in saved for node in nodes)  # several pieces may save one value
    kept = {node: _placeholder(backward, node.name, node.meta["val"]) for node in distinct}
    starts = [(node, _placeholder(backward, "tangent", fake(like))) for node, like in tangents]

    def copy(i: int, given: Sequence[fx.Node | None]) -> Sequence[fx.Node | None]:
        arguments = [*(kept[node] for node in saved[i]), *(tangent for tangent in given if tangent is not None)]
        env = _inlined(derivatives[i].backward, backward, arguments, pieces[i])
        return [None if end is None else env[end] for end in returned_by(derivatives[i].backward)]

    def add(a: fx.Node, b: fx.Node) -> fx.Node:
        added = backward.call_function(_add, (a, b))
        added.meta["val"] = _add(a.meta["val"], b.meta["val"])
        return added

    gradients = _flow(pieces, likes, starts, copy, add)
    backward.output(tuple(gradients.get(node) for node in inputs if likes[node].requires_grad))
    backward.eliminate_dead_code(is_impure_node=is_port)
    merge_gradients(backward)
    for node, placeholder in list(kept.items()):
        if not placeholder.users:  # only an unwanted gradient was computed from it
            backward.erase_node(kept.pop(node))
    forward.output((*(values[node] for node in returned_by(program)), *kept))
    undo_views(forward)
    undo_views(backward)
    forward.eliminate_dead_code(is_impure_node=is_port)
    return forward, backward


def _check_alike(outputs: Sequence[fx.Node], traced: Sequence[fx.Node], likes: Mapping[fx.Node, Any]) -> None:
    """Raise VerifyError unless the traced results of a piece have the strides that their readers were traced with."""
    for node, value in zip(outputs, traced, strict=False):
        if value.meta["val"].layout is torch.strided and value.meta["val"].stride() != likes[node].stride:
            raise VerifyError(
                f"{node.name} was traced with strides {value.meta['val'].stride()}, its readers with "
                f"{likes[node].stride}"
            )


def _inlined(source: fx.Graph, target: fx.Graph, starts: Sequence[fx.Node], piece: Piece) -> dict[fx.Node, fx.Node]:
    """Append the calls of `source`, traced from a piece like `piece`, to `target`, with `starts` for its inputs; return
    the copy of each node."""
    env = dict(zip(source.find_nodes(op="placeholder"), starts, strict=True))
    calls = calls_of(source)
    _copy(calls, target, env, piece.tags, piece.regions)
    for node in calls:
        if (at := position(node)) is not None:
            inherit(env[node], piece.nodes[at])
            if node.target is counted:
                env[node].update_arg(LAYER, piece.nodes[at].args[LAYER])
    return env


def _placeholder(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.target = node.name  # an argument of the graph's function, so it must be unique too
    node.meta["val"] = value
    return node


def undo_views(graph: fx.Graph) -> None:
    """Replace a view of a view by the original where the two are equal: autograd's formulas transpose the weight of a
    matrix product a second time, and its gradient; parts of a batch are a dim for a norm only. Calling a view takes
    as long as a small kernel."""
    for node in calls_of(graph):
        before = _undone(node)
        if before is None:
            continue
        node.replace_all_uses_with(before)
        while node is not before and not node.users:
            inner: Any = node.args[0]
            graph.erase_node(node)
            node = inner


def _undone(node: fx.Node) -> fx.Node | None:
    """The original of a view of views, if the view has its shape and strides again; else None."""
    inner = node.args[0] if node.target in _TRANSPOSES | _RESHAPES else None
    if not isinstance(inner, fx.Node):
        return None
    if node.target in _TRANSPOSES:
        dims: tuple[Any, ...] = node.args[1:]
        before: tuple[Any, ...] = inner.args[1:]
        again = inner.target is node.target and {*dims} == {*before}
        return inner.all_input_nodes[0] if again else None
    while inner.target in _RESHAPES:
        inner = inner.all_input_nodes[0]
        if (_shape(inner), inner.meta["val"].stride()) == (_shape(node), node.meta["val"].stride()):
            return inner
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
