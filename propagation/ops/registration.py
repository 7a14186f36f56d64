"""How an operator of Partway's own is made: one call with its schema, its kernel, its fake form and its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("partway", "DEF")
formulas: dict[Any, Callable[..., Any]] = {}  # of operators, for a compiler
differentiable: set[Any] = set()  # operators that have a derivative
written_forms: dict[Any, Callable[..., Any]] = {}  # of operators, to be differentiated more than once


def define(
    schema: str, kernel: Callable[..., Any] | None = None, fake: Callable[..., Any] | None = None, *,
    backward: Callable[..., Any] | None = None, keep: Callable[..., None] | None = None,
    composite: bool = False, formula: Callable[..., Any] | None = None,
    written: Callable[..., Any] | None = None, tags: Sequence[torch.Tag] = (),
) -> Any:  # fmt: skip
    """Define the operator `partway::<schema>`, and return its overload, as `torch.ops.partway.<name>.default`.

    schema      "name(Tensor x, int count) -> Tensor"
    kernel      what it computes, on every device; None: a symbol, which the executors of `runtime/` give its meaning
    fake        a tensor of the shape, dtype and strides of each result
    backward    (ctx, gradients of the results) -> a gradient, or None, for each argument
    keep        (ctx, arguments, results): keeps on `ctx` what `backward` reads
    composite   `kernel` is made of operators that have fake forms and derivatives, so it needs none
    formula     what `kernel` computes, in PyTorch's operators and on whole tensors, for a compiler that makes one
                kernel of several operators and keeps nothing in between
    written     what `kernel` computes, in PyTorch's operators, whose gradients have gradients; None: the formula
    tags        torch's tags of the operator
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tuple(tags))
    if kernel is not None:
        _LIBRARY.impl(name, kernel, "CompositeImplicitAutograd" if composite else "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"partway::{name}", fake)
    if backward is not None:
        torch.library.register_autograd(f"partway::{name}", backward, setup_context=keep)
    made = getattr(torch.ops.partway, name).default
    if backward is not None or composite:
        differentiable.add(made)
    if formula is not None:
        formulas[made] = formula
    if (form := written or formula) is not None:
        written_forms[made] = form
    return made
