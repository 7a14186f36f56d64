"""The two graphs of one rank as plain Python functions, without a runtime and without other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from partway.propagation.graph.port import Role
from partway.propagation.ops.collectives import convert, convert_group, kind_of
from partway.propagation.ops.indexing import position
from partway.runtime.code.strides import is_loose
from partway.runtime.loaded import without_saved
from partway.runtime.tensors.parameters import gradient_of
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
    needed: tuple[bool, ...]  # which inputs get a gradient

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

    def loss(self, tensors: Sequence[Tensor]) -> Tensor:
        """The first output for the inputs `tensors` (DTensors stand for their parts), whose backward is autograd's: one
        node with the two graphs, and nothing else."""
        found: Tensor = _Node.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return found


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: LocalStep, *tensors: Tensor) -> Tensor:
        found = step.forward(*(t._local_tensor if isinstance(t, DTensor) else t for t in tensors))
        ctx.step, ctx.tensors = step, tensors
        ctx.save_for_backward(*found[step.outputs :])
        result: Tensor = found[0]
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        step: LocalStep = ctx.step
        with torch.no_grad():
            found = iter(step.backward(*ctx.saved_tensors, slope))
            gradients = [
                gradient_of(t, next(found)) if needs else None
                for t, needs in zip(ctx.tensors, step.needed, strict=True)
            ]
        return None, *gradients


def local_step(model: Any, batch: Sequence[Tensor], rank: int) -> LocalStep:
    """The LocalStep of `rank` for a sharded `model` and a whole `batch`; the model plans if it has not."""
    model(*batch)
    step = model.program
    program, mesh = step, model.plan.mesh
    inputs = []
    for placed, tensor in zip(program.inputs, inputs_of(model, batch), strict=True):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        inputs.append(whole.detach()[placed.layout.slices(tuple(whole.shape), rank)].contiguous())
    tangents = [
        torch.ones(placed.local_shape, dtype=placed.dtype)
        for placed, wanted in zip(program.outputs, step.wanted, strict=True)
        if wanted
    ]
    forward, backward = (_function(graph, mesh, rank) for graph in (step.forward, step.backward))
    return LocalStep(forward, backward, tuple(inputs), len(program.outputs), tuple(tangents), tuple(step.needed))


def inference_step(model: Any, rank: int = 0) -> Callable[[], Any]:
    """What `rank` does in the last call of a sharded `model`, which was one in inference, on made-up tensors of its
    sizes: integers are 0, and booleans true."""
    step = model.program
    module = without_saved(step.forward, len(step.outputs))
    run = _function(module, model.plan.mesh, rank)
    inputs = [
        (torch.rand if placed.dtype.is_floating_point else torch.zeros)(placed.local_shape, dtype=placed.dtype)
        if placed.dtype != torch.bool
        else torch.ones(placed.local_shape, dtype=torch.bool)
        for placed in step.inputs
    ]

    def call() -> Any:
        with torch.inference_mode():
            return run(*inputs)

    return call


def inputs_of(model: Any, batch: Sequence[Tensor]) -> list[Tensor]:
    """What the program of a sharded `model` is given in a call with `batch`: parameters and buffers as they are."""
    given = iter(batch)
    inputs = model.program.inputs
    return [next(given) if p.port.role is Role.INPUT else _held(model, p.port.name) for p in inputs]


def _held(model: Any, name: str) -> Tensor:
    """A parameter, buffer or constant of `model`."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]


def _function(module: fx.GraphModule, mesh: Mesh, rank: int) -> fx.GraphModule:
    """A graph as PyTorch writes it as Python, with stand-ins for what needs other ranks."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.target in (convert, convert_group):
            grouped = node.target is convert_group
            operands, source, target, axes, _, _ = node.args
            value = node.meta["val"]
            loose = is_loose(node)
            stand_ins = tuple(
                _stand_in(source, target, mesh.position(rank, *axes), v, loose)
                for v in (value if grouped else (value,))
            )
            node.target = _each(stand_ins) if grouped else stand_ins[0]
            node.args = (operands,)
        elif node.target is position:
            node.target, node.args = _constant(torch.tensor(mesh.position(rank, *node.args[0]))), ()
        else:
            node.target = _STRIDE_FREE.get(node.target, node.target)
    return fx.GraphModule(module, graph)


def _stand_in(source: str, target: str, where: int, value: Tensor, loose: bool) -> Callable[[Tensor], Tensor]:
    """One conversion of a rank at position `where`, which gives a tensor like `value`; a slice is a view if `loose`."""
    before, after = placement_from_code(source), placement_from_code(target)
    match kind_of(source, target):
        case Kind.SLICE:
            assert isinstance(after, Shard)
            dim, size = after.dim, value.shape[after.dim]
            cut = _named(lambda x: x.narrow(dim, where * size, size))
            return cut if loose else _named(lambda x: cut(x).contiguous())
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
