"""Whether two runs count as equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import partway as pw

Batch = Mapping[str, Any]


def loss_of(result: Any) -> Tensor:
    """The loss in the result of a model."""
    return result if isinstance(result, Tensor) else result.loss


def gradients(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of one call and every parameter's gradient."""
    model.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), gradients_of(model)


def whole(value: Any) -> Any:
    """`value` with each DTensor replaced by the plain tensor of all its values, also in lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def curve(model: nn.Module, optimizer: Callable[..., Any], batches: Iterable[Batch], **options: Any) -> list[float]:
    """The losses of training on `batches` in turn."""
    stepper = optimizer(model.parameters(), **options)
    losses = []
    for batch in batches:
        stepper.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def tolerance(dtype: torch.dtype, single: bool = False) -> float:
    """The relative difference allowed between two right results. `single`: the model itself computes in float32."""
    if dtype is torch.float32:
        return 1e-4
    return 1e-6 if single else 1e-10


def assert_same_gradients(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], relative: float
) -> None:
    """Check that the same gradients exist, and that |found - expected| <= relative |expected| + 4 eps * the largest.

    The last term allows for rounding of a gradient that is zero in exact arithmetic. A key's bias shifts all scores of
    a query equally, which softmax cancels. The result is the remainder of terms as large as other gradients. It is four
    units of rounding (9e-16 in float64): each run adds its terms in its own order, and the limit is too small to hide a
    wrong factor.
    """
    assert list(found) == list(expected)
    assert {n for n, g in found.items() if g is None} == {n for n, g in expected.items() if g is None}
    largest = max(g.norm().item() for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        if gradient is not None:
            other = found[name]
            assert other is not None
            assert (other.shape, other.dtype) == (gradient.shape, gradient.dtype), name
            error = (other - gradient).norm().item()
            allowed = relative * gradient.norm().item() + 4 * torch.finfo(gradient.dtype).eps * largest
            assert error <= allowed, f"gradient of {name} is {error:.2e} off, {allowed:.2e} is allowed"


def assert_same_loss(found: Tensor, expected: Tensor, relative: float) -> None:
    """Check that losses agree. Hugging Face casts logits to float32 for some losses, whatever the model's dtype."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if found.dtype is torch.float32:
        relative = max(relative, 1e-6)
    error = abs(found.item() - expected.item())
    assert error <= relative * abs(expected.item()), f"loss {found.item()} instead of {expected.item()}"


def counted(collectives: Iterable[Any]) -> Counter[tuple[Any, ...]]:
    """Collectives (of a plan, of a program, or those that ran) as a multiset."""
    return Counter((str(c.kind), c.axes, c.group_size, c.payload_bytes, c.phase) for c in collectives)


def carried(collectives: Iterable[Any]) -> tuple[Counter[tuple[Any, ...]], Counter[tuple[Any, ...]]]:
    """The tensors and bytes that the collectives of a plan or a program carry, however they are grouped."""
    tensors: Counter[tuple[Any, ...]] = Counter()
    payload: Counter[tuple[Any, ...]] = Counter()
    for c in collectives:
        key = str(c.kind), c.axes, c.group_size, c.phase
        tensors.update((*key, name) for name in c.members)
        payload[key] += c.payload_bytes
    return tensors, payload


def run_and_count(model: Any, batch: Batch) -> Counter[tuple[Any, ...]]:
    """The collectives of one training step of `model`."""
    with pw.record_collectives() as events:
        loss_of(model(**batch)).backward()
    return counted(events)


def assert_sends_as_planned(model: Any, batch: Batch) -> None:
    """Check that the step runs the collectives that the program lists, which are those of the plan, in groups."""
    assert run_and_count(model, batch) == counted(model.program.collectives)
    assert carried(model.program.collectives) == carried(model.plan.collectives)
