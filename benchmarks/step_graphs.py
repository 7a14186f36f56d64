"""The two graphs of one rank as plain Python functions, without a runtime and without other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from partway.propagation.collectives import convert, convert_group, kind_of
from partway.propagation.graph import Role
from partway.propagation.indexing import position
from partway.strategy import Mesh
from partway.strategy.placement import Kind, Shard, placement_from_code

aten = torch.ops.aten
# A view of a fake tensor may need a copy of a real one, whose strides differ; the runtime does the same.
_STRIDE_FREE = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


@dataclass(frozen=True)
class LocalStep:
    """One rank's forward and backward graph, on its parts of a call's tensors.

    A collective gives what it was given; where sizes change, a tensor that was there before: no time is spent on it.
    Conversions that need no other rank are done.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    outputs: int
    tangents: tuple[Tensor, ...]

    def timed(self) -> tuple[float, float]:
        """The CPU seconds of both graphs, and of the forward alone."""
        with torch.no_grad():
            start = time.thread_time()
            saved = self.forward(*self.inputs)[self.outputs :]
            computed = time.thread_time()
            found = self.backward(*saved, *self.tangents)
            seconds = time.thread_time() - start
            del found, saved
        return seconds, computed - start


def local_step(model: Any, batch: Sequence[Tensor], rank: int) -> LocalStep:
    """The LocalStep of `rank` for a sharded `model` and a whole `batch`; the model plans if it has not."""
    model(*batch)
    step = model.program.step
    program, mesh = step.program, model.plan.mesh
    given = iter(batch)
    inputs = []
    for placed in program.inputs:
        tensor = next(given) if placed.port.role is Role.INPUT else _held(model, placed.port.name)
        inputs.append(tensor[placed.layout.slices(tuple(tensor.shape), rank)].contiguous())
    tangents = [
        torch.ones(placed.local_shape, dtype=placed.dtype)
        for placed, wanted in zip(program.outputs, step.wanted, strict=True)
        if wanted
    ]
    forward, backward = (_function(graph, mesh, rank) for graph in (step.forward, step.backward))
    return LocalStep(forward, backward, tuple(inputs), len(program.outputs), tuple(tangents))


def _held(model: Any, name: str) -> Tensor:
    """A parameter, buffer or constant of `model`, whole."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name].detach()
    return held.full_tensor() if isinstance(held, DTensor) else held


def _function(module: fx.GraphModule, mesh: Mesh, rank: int) -> fx.GraphModule:
    """A graph as PyTorch writes it as Python, with stand-ins for what needs other ranks."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.target in (convert, convert_group):
            grouped = node.target is convert_group
            operands, source, target, axes, _, _ = node.args
            value = node.meta["val"]
            stand_ins = tuple(
                _stand_in(source, target, mesh.position(rank, *axes), v) for v in (value if grouped else (value,))
            )
            node.target = _each(stand_ins) if grouped else stand_ins[0]
            node.args = (operands,)
        elif node.target is position:
            node.target, node.args = _constant(torch.tensor(mesh.position(rank, *node.args[0]))), ()
        else:
            node.target = _STRIDE_FREE.get(node.target, node.target)
    return fx.GraphModule(module, graph)


def _stand_in(source: str, target: str, where: int, value: Tensor) -> Callable[[Tensor], Tensor]:
    """One conversion of a rank at position `where`, which gives a tensor like `value`."""
    before, after = placement_from_code(source), placement_from_code(target)
    match kind_of(source, target):
        case Kind.SLICE:
            assert isinstance(after, Shard)
            dim, size = after.dim, value.shape[after.dim]
            return _named(lambda x: x.narrow(dim, where * size, size).contiguous())
        case Kind.PAD:
            assert isinstance(before, Shard)
            shape, dim = tuple(value.shape), before.dim

            def pad(x: Tensor) -> Tensor:
                whole = x.new_zeros(shape)
                whole.narrow(dim, where * x.shape[dim], x.shape[dim]).copy_(x)
                return whole

            return _named(pad)
        case Kind.KEEP:
            return _named(torch.zeros_like if where else _same)
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER | Kind.ALL_TO_ALL:
            there = torch.ones(tuple(value.shape), dtype=value.dtype)
            return _constant(there)
    return _named(_same)


def _same(x: Tensor) -> Tensor:
    return x


def _constant(value: Tensor) -> Callable[..., Tensor]:
    """A function that gives `value`, whatever it is given."""
    return _named(lambda *_: value)


def _each(stand_ins: Sequence[Callable[[Tensor], Tensor]]) -> Callable[..., list[Tensor]]:
    """What `stand_ins` give for one tensor each."""
    return _named(lambda tensors: [stand_in(x) for stand_in, x in zip(stand_ins, tensors, strict=True)])


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a name that can be written in the text of a graph."""

    def stand_in(*args: Any) -> Any:
        return function(*args)

    return stand_in
