"""The operator that calls a Python function that capture wrote as text: control flow, and operators that write.

    partway::run(operands, key)      the results of the Python functions with the key `key`: `forward` computes them
                                     from values, `like` from shapes alone
    partway::run_backward(gradients, operands, key)
                                     the gradients of the operands: `forward` runs again and is differentiated

Every device runs the whole call. The key is a digest of the text, so that a graph stays a plain list of calls on disk:
the next start captures the same text, and finds it under the same key. A key that capture did not make in this process
is refused: an operator that ran a text would run any code in a file with a program.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....strategy.errors import RuntimeStateError, shown
from ...torch_internals import storage_key, with_autograd
from ..keyed import FUNCTIONS
from ..registration import define


@dataclass(frozen=True)
class CapturedFunctions:
    """A text that capture wrote, and the functions that it defines."""

    text: str
    forward: Callable[..., Sequence[Tensor]]
    like: Callable[..., Sequence[Tensor]]


def made_of(text: str) -> str:
    """Define the functions of `text`, which capture wrote, and return their key."""
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in FUNCTIONS:
        names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
        exec(compile(text, "<control flow>", "exec"), names)
        FUNCTIONS[key] = CapturedFunctions(text, names["forward"], names["like"])
    return key


def functions_of(key: str) -> CapturedFunctions:
    """The functions called `key`. Raises RuntimeStateError for a key that capture did not make in this process."""
    if key not in FUNCTIONS:
        raise RuntimeStateError(
            f"partway::run is called with {shown(key)}, which is not a key of what was captured in this process; "
            "it runs nothing else. Shard the model itself, and not a program in which the operator was kept"
        )
    captured: CapturedFunctions = FUNCTIONS[key]
    return captured


def _own(results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """`results`, with copies of those that share memory with an operand or another result."""
    taken = {storage_key(operand) for operand in operands}
    own = []
    for result in results:
        again = storage_key(result) in taken
        own.append(result.clone(memory_format=torch.contiguous_format) if again else result)
        taken.add(storage_key(own[-1]))
    return own


def _run(operands: list[Tensor], key: str) -> list[Tensor]:
    return _own(functions_of(key).forward(*operands), operands)


def _run_backward(gradients: list[Tensor], operands: list[Tensor], key: str) -> list[Tensor]:
    able = [x.is_floating_point() or x.is_complex() for x in operands]
    with with_autograd():
        leaves = [x.detach().requires_grad_(needs) for x, needs in zip(operands, able, strict=True)]
        results = functions_of(key).forward(*leaves)
        pairs = [(result, grad) for result, grad in zip(results, gradients, strict=True) if result.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        computed: Any = ()
        if pairs and wanted:
            outputs, weights = zip(*pairs, strict=True)
            computed = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
    by_leaf = dict(zip(map(id, wanted), computed, strict=False))
    every = [by_leaf.get(id(leaf)) for leaf in leaves]
    return _own([torch.zeros_like(x) if g is None else g for g, x in zip(every, operands, strict=True)], operands)


def _fake_run(operands: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in functions_of(key).like(*operands)]


def _fake_run_backward(gradients: list[Tensor], operands: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_like(x) for x in operands]


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    operands, ctx.key = inputs
    ctx.save_for_backward(*operands)


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor | None], None]:
    operands = list(ctx.saved_tensors)
    computed = run_backward(gradients, operands, ctx.key)
    return [
        g if x.is_floating_point() or x.is_complex() else None for g, x in zip(computed, operands, strict=True)
    ], None


# -- The operators

run = define("run(Tensor[] operands, str key) -> Tensor[]", _run, _fake_run, backward=_backward, keep=_keep_context)
run_backward = define(
    "run_backward(Tensor[] gradients, Tensor[] operands, str key) -> Tensor[]", _run_backward, _fake_run_backward
)
