"""Compiles the stretches of a graph between its collectives with TorchInductor.

Collectives, random operators and the getitems of groups stay in the order of fusion, so that collectives are still
issued early, and every backend draws the same numbers. Each stretch between them becomes one call of a compiled
function. Equal stretches, such as those of a model's layers, are compiled once per process; TorchInductor keeps its
kernels on disk.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...propagation.graph.graph import Text
from ...propagation.graph.nodes import draws_random_numbers, returned_by, unsized_dims
from ...propagation.ops.collectives import convert, convert_group, kind_of
from ...propagation.ops.experts import counted
from ...propagation.ops.indexing import position
from ...propagation.ops.python.hooked import HOOKS
from ...propagation.ops.registration import formulas
from ...propagation.program.any_size import EXPECTING, size_of
from ...propagation.torch_internals import FakeTensorMode, OpOverload, schema_of
from ...strategy.placement import Kind
from ..torch_internals import inductor
from .assemble import members_late
from .memory import is_whole_view, owned_by
from .region import Region
from .strides import strides_of

FAKE = FakeTensorMode()  # shared, as all inputs of a compiled graph must come from one mode
Compiler = Callable[[fx.GraphModule, list[Tensor], Sequence[tuple[int, ...]]], Callable[..., Any]]


def compile_regions(
    module: fx.GraphModule, examples: Sequence[Tensor], compiler: Compiler = inductor
) -> tuple[fx.GraphModule, list[Tensor | None]]:
    """`module` with each stretch of operators between its collectives compiled by `compiler` into one call, and fake
    tensors like its outputs. `examples`: fake tensors like its inputs, strides included."""
    order = _getitems_early(members_late(list(module.graph.nodes)))
    values = _values(order, module, examples)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for stretch in _stretches(order):
        if sum(map(_computes, stretch)) > 1:
            _add_region(graph, new, stretch, values, compiler)
        else:
            for node in stretch:
                new[node] = graph.node_copy(node, new.__getitem__)
    graph.lint()
    return Text(module, graph), [None if node is None else values[node] for node in returned_by(module.graph)]


@dataclass(frozen=True)
class _Stretch:
    """The input of a compiler. Stretches with the same text and inputs of the same kinds are equal."""

    compiler: Compiler
    text: str
    kinds: tuple[Hashable, ...]
    body: fx.Graph = field(compare=False)
    examples: Sequence[Tensor] = field(compare=False)
    unsized: Sequence[tuple[int, ...]]
    owned: list[bool] = field(compare=False)


@functools.lru_cache(maxsize=4096)
def _region(stretch: _Stretch) -> Region:
    run = stretch.compiler(fx.GraphModule(torch.nn.Module(), stretch.body), list(stretch.examples), stretch.unsized)
    return Region(run, stretch.owned)


def _add_region(
    graph: fx.Graph,
    new: dict[fx.Node, fx.Node],
    stretch: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    compiler: Compiler,
) -> None:
    """Append one call for all of `stretch` to `graph`."""
    inside = set(stretch)
    read = list(dict.fromkeys(o for node in stretch for o in node.all_input_nodes if o not in inside))
    sizes = [node for node in read if node.target is size_of]
    inputs = list(dict.fromkeys(o for node in read for o in (node.all_input_nodes if node in sizes else [node])))
    inputs = [node for node in inputs if node not in inside]
    results = [n for n in stretch if isinstance(values[n], Tensor) and any(user not in inside for user in n.users)]
    views = _views_among(results, inside)
    outputs = [node for node in results if node not in views]
    body = fx.Graph()
    env = {node: body.placeholder(f"x{i}") for i, node in enumerate(inputs)}
    for i, node in enumerate(_with_sizes(stretch, sizes)):
        env[node] = body.node_copy(node, env.__getitem__)
        env[node].target = formulas.get(node.target, node.target)
        env[node].name = f"v{i}"
        env[node].meta = {}
    body.output(tuple(env[node] for node in outputs))
    examples = [values[node] for node in inputs]
    kinds = tuple(_kind(example) for example in examples)
    unsized = tuple(map(unsized_dims, inputs))
    region = _region(_Stretch(compiler, str(body), kinds, body, examples, unsized, owned_by(inside, outputs)))
    called = graph.call_function(region, tuple(new[node] for node in inputs))
    for i, node in enumerate(outputs):
        new[node] = graph.call_function(operator.getitem, (called, i))
        new[node].meta = dict(node.meta)
    for node in itertools.chain.from_iterable(views.values()):
        new[node] = graph.node_copy(node, new.__getitem__)


def _with_sizes(stretch: Sequence[fx.Node], sizes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """`stretch`, each of `sizes` after the tensor of which it is one."""
    remaining, inside, before = list(sizes), set(stretch), set[fx.Node]()
    for node in (None, *stretch):
        if node is not None:
            yield node
            before.add(node)
        for size in list(remaining):
            if all(o in before or o not in inside for o in size.all_input_nodes):
                remaining.remove(size)
                yield size


def _views_among(results: Sequence[fx.Node], inside: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The results that are views of all of another result, each with the calls that make the view. They stay outside of
    the stretch: if a compiler returns the viewed result with other strides, it is copied only once."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for result in results:
        calls, node = list[fx.Node](), result
        while node in inside and is_whole_view(node) and (not calls or node not in results):
            calls.append(node)
            node = node.all_input_nodes[0]
        if calls and node in results:
            found[result] = calls[::-1]
    return found


def _kind(value: Any) -> Hashable:
    return (tuple(value.shape), value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value


def _stretches(order: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Partition the nodes, in order, into runs of nodes that may be compiled together, and single other nodes."""
    stretch: list[fx.Node] = []
    for node in order:
        if _may_join(node):
            stretch.append(node)
            continue
        if stretch:
            yield stretch
        yield [node]
        stretch = []


def _may_join(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in (convert, convert_group, position) or draws_random_numbers(node):
        return False
    if node.target in HOOKS or node.target is counted:
        return False
    if node.target is size_of or node.target in EXPECTING:
        return False
    return node.target is not operator.getitem or _may_join(node.all_input_nodes[0])


def _computes(node: fx.Node) -> bool:
    """Whether a node computes something, unlike a view or a getitem."""
    returns = schema_of(node.target).returns if isinstance(node.target, OpOverload) else ()
    return bool(returns) and all(result.alias_info is None for result in returns)


def _getitems_early(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` with the getitems of an operator's results right after the operator."""
    place = {node: i for i, node in enumerate(nodes)}

    def when(node: fx.Node) -> tuple[int, int]:
        early = node.target is operator.getitem and node.all_input_nodes[0].target is not convert_group
        return (place[node.all_input_nodes[0]], 1 + place[node]) if early else (place[node], 0)

    return sorted(nodes, key=when)


def _values(order: Sequence[fx.Node], module: fx.GraphModule, examples: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """A fake tensor for each value, with its strides at run time."""
    values: dict[fx.Node, Any] = {}
    remaining = iter(examples)
    with FAKE:
        for node in order:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = FAKE.from_tensor(getattr(module, str(node.target)))
            elif isinstance(traced := node.meta.get("val"), Tensor) and strides_of(traced) is not None:
                values[node] = torch.empty_strided(
                    traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device
                )
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                moves = node.target is not convert or kind_of(*node.args[1:3]) not in (Kind.NOTHING, Kind.KEEP)  # type: ignore[arg-type]
                values[node] = node.target(*args, **kwargs) if moves else args[0]  # type: ignore[operator]
    return values


def example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous fake tensor."""
    with FAKE:
        return torch.empty(shape, dtype=dtype, device=device)
