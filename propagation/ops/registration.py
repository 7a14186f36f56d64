"""Defines Partway's own operators: one call with the schema, the kernel, the fake form and the derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("partway", "DEF")
formulas: dict[Any, Callable[..., Any]] = {}  # the formulas of operators, for a compiler
differentiable: set[Any] = set()  # operators that have a derivative
own_memory: set[Any] = set()  # operators whose results all have memory of their own
written_forms: dict[Any, Callable[..., Any]] = {}  # forms of operators that can be differentiated more than once


def define(
    schema: str,
    kernel: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    *,
    backward: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
    composite: bool = False,
    fresh: bool = False,
    formula: Callable[..., Any] | None = None,
    written: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define the operator `partway::<schema>`, and return its overload, `torch.ops.partway.<name>.default`.

    schema      "name(Tensor x, int count) -> Tensor"
    kernel      computes the results, on every device; None: a symbol, which the executors of `runtime/` run
    fake        returns a tensor of the shape, dtype and strides of each result
    backward    (ctx, gradients of the results) -> a gradient, or None, for each argument
    keep        (ctx, arguments, results): keeps on `ctx` the values that `backward` reads
    composite   `kernel` consists of operators with fake forms and derivatives, so it needs none
    fresh       every result has memory of its own
    formula     the same as `kernel`, in PyTorch's operators and on whole tensors, for a compiler that fuses several
                operators into one kernel and keeps no intermediate values
    written     the same as `kernel`, in PyTorch's operators, whose gradients have gradients; None: the formula
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
    if fresh:
        own_memory.add(made)
    if formula is not None:
        formulas[made] = formula
    if (form := written or formula) is not None:
        written_forms[made] = form
    return made
