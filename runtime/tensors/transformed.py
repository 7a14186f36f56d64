"""A module inside of a transform of torch.func, or of forward-mode differentiation: it runs whole, on every rank. Its
parameters are gathered for the call, by operators that transforms can differentiate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...propagation.torch_internals import parameters_in, untransformed
from ...strategy.basics.blocks import afterwards
from .gather import gather


@contextlib.contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the parameters of `module` by plain tensors in the block. Their gradients are DTensors, placed like
    them."""
    stores = [parameters_in(inner) for inner in module.modules()]
    held = [dict(store) for store in stores]

    def restore() -> None:
        for store, before in zip(stores, held, strict=True):
            store.update(before)

    gathered: dict[int, Tensor] = {}
    with afterwards(restore):
        for store, before in zip(stores, held, strict=True):
            for name, parameter in before.items():
                if parameter is not None and isinstance(untransformed(parameter), DTensor):
                    if id(parameter) not in gathered:
                        gathered[id(parameter)] = _Gather.apply(parameter)  # type: ignore[no-untyped-call]
                    store[name] = gathered[id(parameter)]
        yield


class _Gather(torch.autograd.Function):
    """The whole of a DTensor."""

    @staticmethod
    def forward(split: Any) -> Any:
        return gather(split, "a transform") if isinstance(split, DTensor) else split.clone()  # a tangent may be whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        split: Any = untransformed(inputs[0])
        ctx.place = (split.device_mesh, split.placements) if isinstance(split, DTensor) else None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.place is None else _Scatter.apply(gradient, *ctx.place)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return _Gather.apply(tangent)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], split: Any) -> Any:
        return _Gather.apply(split.movedim(in_dims[0], 0)), 0  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """A tensor that every rank holds whole, as a DTensor."""

    @staticmethod
    def forward(whole: Tensor, mesh: Any, placements: Any) -> Any:
        every = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return every.redistribute(mesh, placements)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.mesh, ctx.placements = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Gather.apply(gradient), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _Scatter.apply(tangent, ctx.mesh, ctx.placements)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], whole: Tensor, mesh: Any, placements: Any) -> Any:
        moved = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements]
        assert in_dims[0] is not None
        return _Scatter.apply(whole.movedim(in_dims[0], 0), mesh, moved), 0  # type: ignore[no-untyped-call]
