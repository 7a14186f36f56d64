"""The initialisation of a module's tensors, as a Graph whose only inputs are values that exist already.

An initialiser writes into tensors in place. Run on fake tensors, it becomes a graph that computes them, with random
numbers drawn in parts as in any graph. A rank can so compute its part of a parameter too large for any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...strategy.basics.blocks import afterwards
from ..graph.graph import Graph, verify
from ..graph.port import Port, Role
from ..graph.structure import flatten
from ..ops.random_numbers import RandomNumbers
from ..rules.table import expand
from ..torch_internals import FakeTensorMode, buffers_in, make_fx, parameters_in
from .rewrites.cleanup import prune

aten = torch.ops.aten


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block, replace the parameters and buffers of `module` by `tensors`, by name. If another tensor is in
    the place of one at the end, `tensors`, if it is a dict, gets that one."""
    places = {}
    for name in tensors:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        store = parameters_in(owner) if attribute in parameters_in(owner) else buffers_in(owner)
        places[name] = store, attribute, store[attribute]

    def restore() -> None:
        for name, (store, attribute, own) in places.items():
            if store[attribute] is not own:
                if isinstance(tensors, dict):
                    tensors[name] = store[attribute]
                store[attribute] = own

    with afterwards(restore):
        for name, (store, attribute, _) in places.items():
            store[attribute] = tensors[name]
        yield


def initial(
    run: Callable[[], object],
    module: nn.Module,
    fresh: Sequence[str],
    filled: Sequence[str],
    aliases: Mapping[str, str],
    device: torch.device,
    random_numbers: RandomNumbers,
) -> Graph:
    """A graph whose outputs are the values that `run` writes into the tensors of `module`.

    fresh     the names of tensors without values
    filled    the names of tensors with values
    aliases   other names of these tensors

    Raises the errors of `run`, and those of tracing where its course depends on the values of tensors.
    """
    like = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def written(*values: Tensor) -> tuple[Tensor, ...]:
        tensors = {n: torch.empty(like[n].shape, dtype=like[n].dtype, device=device) for n in fresh}
        tensors |= {name: tensor.clone() for name, tensor in zip(filled, values, strict=True)}
        every = {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}
        with holding(module, every), torch.no_grad():
            run()
        return tuple(every[name] for name in tensors)

    with FakeTensorMode():
        examples = [torch.empty(like[name].shape, dtype=like[name].dtype, device=device) for name in filled]
        traced = make_fx(torch.func.functionalize(written))(*examples)
    final = traced.graph.find_nodes(op="output")[0]
    kept = [(name, node) for name, node in zip([*fresh, *filled], final.args[0], strict=True) if not _untouched(node)]
    final.args = (tuple(node for _, node in kept),)
    expand(traced, random_numbers=random_numbers)
    prune(traced)
    inputs = []
    for name, node in zip(filled, traced.graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            inputs.append(Port(node, Role.PARAMETER, name))
        else:
            traced.graph.erase_node(node)
    nodes: Any = final.args[0]
    outputs = tuple(Port(node, Role.RESULT, name) for node, (name, _) in zip(nodes, kept, strict=True))
    return verify(Graph(traced, tuple(inputs), outputs, flatten(())[1], {}, {}, device.type))


def _untouched(node: fx.Node) -> bool:
    """Whether an output is an unchanged input of the initialiser."""
    if node.target is aten.clone.default:
        return node.all_input_nodes[0].op == "placeholder"
    return node.target is aten.empty.memory_format
