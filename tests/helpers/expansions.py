"""Checks for tests of expansions: the captured graph of a function gives the results of the function."""

import copy

import torch
from torch import fx, nn

from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.graph.port import Role
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.strategy import Layout, Shard

SEED = 7


def randn(*shape, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_(
        grad
    )


def integers(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def run(graph, fn, args):
    """The outputs of a captured graph on real tensors, by name."""
    given, tensors = iter(args), []
    for port in graph.inputs:
        if port.role is Role.INPUT:
            tensors.append(next(given))
        elif port.role is Role.CONSTANT:
            tensors.append(graph.constants[port.name])
        else:
            tensors.append(fn.get_parameter(port.name) if port.role is Role.PARAMETER else fn.get_buffer(port.name))
    torch.manual_seed(SEED)
    outputs = fx.Interpreter(graph.module).run(*tensors)
    return {(port.role, port.name): out for port, out in zip(graph.outputs, outputs, strict=True)}


def check(lab, fn, *args, gone=None):
    """Check that the graph of `fn` gives the same results as `fn`, and that `gone` is not in it."""
    graph = capture(fn, args, {}, CaptureOptions(random_numbers=RandomNumbers.TORCH))
    if gone is not None:
        assert gone not in {node.target for node in graph.nodes}
    modules = isinstance(fn, nn.Module)
    leaves = [t for t in args if t.requires_grad] + (list(fn.parameters()) if modules else [])
    found = run(graph, fn, args)
    results = [out for (role, _), out in found.items() if role is Role.RESULT]
    got = lab.value_and_gradients(results, leaves)
    torch.manual_seed(SEED)
    real = copy.deepcopy(fn) if modules else fn
    real_leaves = [t for t in args if t.requires_grad] + (list(real.parameters()) if modules else [])
    expected = lab.value_and_gradients(lab.as_tuple(real(*args)), real_leaves)
    lab.assert_same(got, expected, str(graph))
    for (role, name), out in found.items():
        if role is Role.BUFFER_UPDATE:
            lab.assert_same([out], [real.get_buffer(name)], name)
    return graph


def check_split(lab, fn, *args):
    """As `check`, also with the first argument split along its first dim."""
    graph = check(lab, fn, *args)
    split = Layout(lab.LINE, (Shard(0),))
    name = next(port.name for port in graph.inputs if port.role is Role.INPUT)
    lab.check_optimum(graph, fn, args, lab.LINE, {name: ((split,), "by hand")})
    return graph
