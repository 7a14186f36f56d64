"""Gradients for several tangents at once, for `is_grads_batched=True`, `vectorize=True` and `torch.vmap`: a step runs
for one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...propagation.torch_internals import is_batched, is_transformed
from ...strategy.errors import RuntimeStateError
from ..torch_internals import add_batch_dim, outside_batching, remove_batch_dim

Gradients = Sequence[Tensor | None]


def one_by_one(run: Callable[[Gradients], Gradients], tangents: Gradients) -> list[Tensor | None]:
    """The results of `run` for each of the tangents in a batch, as batched tensors."""
    given = [tangent for tangent in tangents if tangent is not None]
    there: list[bool] = []

    def of(each: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(each)
        arguments = [None if tangent is None else next(rest) for tangent in tangents]
        results = one_by_one(run, arguments) if any(map(is_batched, each)) else run(arguments)
        there[:] = [result is not None for result in results]
        return tuple(result for result in results if result is not None)

    values: Sequence[Tensor]
    if any(map(is_transformed, given)):
        values = _Each.apply(of, *given)  # type: ignore[no-untyped-call]
    else:
        with outside_batching(given) as level:
            apart = [remove_batch_dim(tangent, level, 1, 0) for tangent in given]
            count = max(len(tangent) for tangent in apart)
            stacked = _stacked(of, [tangent.expand(count, *tangent.shape[1:]) for tangent in apart], count)
            values = [add_batch_dim(value, 0, level) for value in stacked]
    rest = iter(values)
    return [next(rest) if present else None for present in there]


def _stacked(of: Callable[[Sequence[Tensor]], tuple[Tensor, ...]], batches: Sequence[Any], count: int) -> list[Tensor]:
    """The results of `of` for each element of the batches, along a first dim."""
    each = [of([batch[i] for batch in batches]) for i in range(count)]
    return [torch.stack(values) for values in zip(*each, strict=True)]


class _Each(torch.autograd.Function):
    """The result of `of` inside of `torch.vmap`."""

    @staticmethod
    def forward(of: Callable[[Sequence[Tensor]], tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        return of(given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Refuse the gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeStateError(
            "a gradient of torch.func reached the gradients of a sharded function, which was called outside of the "
            "transform; call the sharded function inside of it"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], of: Any, *given: Tensor) -> Any:
        batches = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(given, in_dims[1:], strict=True)
        ]
        results = _stacked(of, batches, info.batch_size)
        return tuple(results), (0,) * len(results)
