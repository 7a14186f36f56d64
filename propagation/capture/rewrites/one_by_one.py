"""Decomposes a program call by call, reusing the decompositions of equal calls.

As long as nothing is written in place, PyTorch's decomposition of a call depends only on the operator, its arguments,
the metadata of its operands, and torch's settings. So one call of each kind is traced, as torch.export's
`run_decompositions` traces the whole program, and the other calls of the kind copy the result. The numbers in names
continue as in a trace of the whole program, since each call takes as many names.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, TensorArgument
from torch.fx.node import map_arg

from ...torch_internals import FakeTensor, OpOverload, graph_module, moved_meta, schema_of, tracing_calls, tree_leaves

_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_CALLS_OF_A_KIND = 2  # on average; from here on this is faster than tracing all
_NUMBER = re.compile(r"_\d+$")


def written_one_by_one(
    exported: ExportedProgram, composite: Mapping[Any, Any], others: Mapping[Any, Any]
) -> tuple[fx.GraphModule, ExportGraphSignature] | None:
    """The graph and the signature that `decompose` would give for a program. None where few calls repeat, and for
    programs that write in place, have symbols for sizes, or have branches and loops."""
    if not _is_plain(exported):
        return None
    try:
        if not _repeats(exported.graph):
            return None
        made = _written(exported, composite, others)
    except Exception:  # `decompose` then handles the program, or raises torch's error
        return None
    returned = next(iter(made.find_nodes(op="output"))).args[0]
    outputs = [
        replace(spec, arg=TensorArgument(node.name)) if isinstance(spec.arg, TensorArgument) else spec
        for spec, node in zip(exported.graph_signature.output_specs, returned, strict=True)
    ]
    signature = ExportGraphSignature(list(exported.graph_signature.input_specs), outputs)
    return graph_module(exported.graph_module, made), signature


def _written(exported: ExportedProgram, composite: Mapping[Any, Any], others: Mapping[Any, Any]) -> fx.Graph:
    """The graph of a program with its calls decomposed."""
    made, env = fx.Graph(), dict[fx.Node, Any]()
    inputs = exported.graph.find_nodes(op="placeholder")
    kinds: dict[Any, tuple[fx.Node, fx.Graph]] = {}  # the first call of each kind, and its decomposition
    with tracing_calls(inputs[0].meta["val"].fake_mode, composite, others) as trace:
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                env[node] = made.placeholder(node.name, node.type)
                env[node].meta = dict(node.meta)
            elif node.op == "get_attr":
                env[node] = getattr(exported.graph_module, node.target)
            elif node.op == "output":
                made.output(map_arg(node.args[0], env.__getitem__))
            elif node.target is operator.getitem:
                env[node] = env[node.args[0]][node.args[1]]
            else:
                arguments, operands, kind = _call(node, env)
                if kind not in kinds:
                    run = functools.partial(_run, node.target, arguments, operands)
                    kinds[kind] = node, trace(run, [_example(operand.meta["val"]) for operand in operands], node)
                env[node] = _copied(made, *kinds[kind], node, operands)
    made.eliminate_dead_code()
    return made


def _repeats(graph: fx.Graph) -> bool:
    """Whether the calls of a graph repeat often enough, on average."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    kinds = {_call(node, {each: each for each in node.all_input_nodes})[2] for node in calls}
    return len(calls) >= _CALLS_OF_A_KIND * len(kinds)


def _is_plain(exported: ExportedProgram) -> bool:
    """Whether a program consists of operators that return tensors of known sizes and write nothing in place."""
    signature = exported.graph_signature
    return (
        all(spec.kind in _INPUTS for spec in signature.input_specs)
        and all(spec.kind is OutputKind.USER_OUTPUT for spec in signature.output_specs)
        and all(_is_plain_node(node) for node in exported.graph.nodes)
        and all(
            not (isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable)
            for module in exported.graph_module.modules()
            if isinstance(module, fx.GraphModule)
            for node in module.graph.nodes
        )
    )


def _is_plain_node(node: fx.Node) -> bool:
    if node.op in ("output", "get_attr"):
        return True
    known = isinstance(node.target, OpOverload) or node.target is operator.getitem or str(node.target) in _REGIONS
    vals = tree_leaves(node.meta.get("val"))
    return (known or node.op == "placeholder") and all(val is None or _is_plain_tensor(val) for val in vals)


def _is_plain_tensor(val: Any) -> bool:
    return (
        type(val) is FakeTensor
        and val.layout is torch.strided
        and all(type(n) is int for n in val.shape)
        and not (val.is_conj() or val.is_neg() or val.is_quantized)
    )


def _call(node: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[Any, list[fx.Node], Any]:
    """The arguments of a call in the decomposed graph; the operands among them, each once (two may be one node, for
    example after a cast to the same dtype); and its kind: calls of one kind have the same decomposition."""
    arguments: Any = map_arg((node.args, node.kwargs), env.__getitem__)
    operands = list(dict.fromkeys(each for each in tree_leaves(arguments) if isinstance(each, fx.Node)))
    if not isinstance(node.target, OpOverload):
        return arguments, operands, node  # each region is its own kind
    text = repr(map_arg(arguments, lambda operand: ("operand", operands.index(operand))))  # 1, 1.0 and True differ
    return arguments, operands, (node.target, text, tuple(_known(operand.meta["val"]) for operand in operands))


def _run(target: Any, arguments: Any, operands: list[fx.Node], *tensors: torch.Tensor) -> Any:
    """The result of a call for `tensors` in place of its operands."""
    args, kwargs = map_arg(arguments, dict(zip(operands, tensors, strict=True)).__getitem__)
    return target(*args, **kwargs)


def _known(val: torch.Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor."""
    return val.dtype, val.device, tuple(val.shape), val.stride(), val.storage_offset(), val.requires_grad


def _example(val: torch.Tensor) -> torch.Tensor:
    """A tensor with the same metadata."""
    reach = sum((n - 1) * stride for n, stride in zip(val.shape, val.stride(), strict=True))
    memory = torch.empty(val.storage_offset() + max(0, reach + 1), dtype=val.dtype, device=val.device)
    return memory.as_strided(val.shape, val.stride(), val.storage_offset()).requires_grad_(val.requires_grad)


def _copied(made: fx.Graph, first: fx.Node, graph: fx.Graph, node: fx.Node, operands: list[fx.Node]) -> Any:
    """Write the decomposition of the call `node`, which is `graph` for the call `first` of its kind, into `made`, and
    return its results: a node, several, or none. Raises KeyError where the graph has more than operands and calls, such
    as constants."""
    own = dict(zip(graph.find_nodes(op="placeholder"), operands, strict=True))
    for inner in graph.nodes:
        if inner.op == "call_function":
            args, kwargs = map_arg((inner.args, inner.kwargs), own.__getitem__)
            own[inner] = made.create_node(inner.op, inner.target, args, kwargs, _NUMBER.sub("", inner.name), inner.type)
            own[inner].meta = moved_meta(inner, first, node)
    return map_arg(graph.output_node().args[0], own.__getitem__)
