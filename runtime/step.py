"""One call of a compiled function: the forward graph runs, what the backward needs is saved, and autograd
calls the backward graph. The executor (simulated ranks or one rank of a process group) is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..propagation.differentiate import Step
from ..propagation.lower import PlacedPort
from ..strategy.layout import Layout
from .instructions import Code, assemble_code

Wanted = tuple[bool, ...]


class Executor(Protocol):
    """Runs code on values; a value is what stands for one tensor (a list of parts, or one rank's part)."""

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Any]: ...

    def leave(self, values: Sequence[Any], layouts: Sequence[Layout]) -> list[Tensor]: ...

    def pack(self, values: Sequence[Any]) -> list[Tensor]: ...

    def unpack(self, tensors: Sequence[Tensor]) -> list[Any]: ...

    def run(self, code: Code, inputs: Sequence[Any]) -> list[Any]: ...


@dataclass
class CompiledStep:
    """A Step as code, for one executor. `rebuild` makes the Step for other differentiated outputs."""

    step: Step
    executor: Executor
    rebuild: Callable[[Wanted], CompiledStep] = field(repr=False)

    def __post_init__(self) -> None:
        self.forward = assemble_code(self.step.forward, "forward")
        self.backward = assemble_code(self.step.backward, "backward") if self.step.backward else None
        self.inference = _without_saved(self.forward, len(self.step.program.outputs))

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for the `tensors` of the program's inputs, in order."""
        if torch.is_grad_enabled() and self.backward is not None:
            results: tuple[Tensor, ...] = _Function.apply(self, *tensors)
            return results
        with torch.no_grad():
            program = self.step.program
            values = self.executor.run(self.inference, self.executor.enter(tensors, program.inputs))
            return tuple(self.executor.leave(values, [placed.layout for placed in program.outputs]))


def _without_saved(code: Code, outputs: int) -> Code:
    """The code with its first `outputs` outputs only, and without what only the others need."""
    live = {slot for slot in code.outputs[:outputs] if slot is not None}
    kept = []
    for instruction in reversed(code.instructions):
        if instruction.out in live:
            newly = tuple(slot for slot in instruction.operands if slot not in live)
            live.update(instruction.operands)
            kept.append((instruction, newly))
    return replace(
        code, instructions=tuple(replace(i, dead=dead) for i, dead in reversed(kept)), outputs=code.outputs[:outputs]
    )


class _Function(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledStep, *tensors: Tensor) -> tuple[Tensor, ...]:
        step, executor = compiled.step, compiled.executor
        program = step.program
        values = executor.run(compiled.forward, executor.enter(tensors, program.inputs))
        count = len(program.outputs)
        saved = executor.pack(values[count:])
        results = executor.leave(values[:count], [placed.layout for placed in program.outputs])
        given = {id(t) for t in tensors}
        results = [r.clone() if id(r) in given else r for r in results]
        ctx.compiled, ctx.inputs = compiled, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        able = [placed.port.requires_grad for placed in program.outputs]
        ctx.mark_non_differentiable(*(r for r, a in zip(results, able, strict=True) if not a))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        compiled: CompiledStep = ctx.compiled
        tensors = ctx.saved_tensors
        primals, packed = tensors[: ctx.inputs], tensors[ctx.inputs :]
        wanted = compiled.step.wanted
        asked = tuple(g is not None for g in gradients)
        executor = compiled.executor
        saved = executor.unpack(packed)
        if any(a and not w for a, w in zip(asked, wanted, strict=True)):
            # An output whose gradient was not planned for: run the forward again for the backward that is.
            compiled = compiled.rebuild(tuple(a or w for a, w in zip(asked, wanted, strict=True)))
            wanted, program = compiled.step.wanted, compiled.step.program
            values = executor.run(compiled.forward, executor.enter(primals, program.inputs))
            saved = values[len(program.outputs) :]
        assert compiled.backward is not None
        program = compiled.step.program
        tangents = executor.enter(
            [
                torch.zeros(placed.shape, dtype=placed.dtype, device=primals[0].device) if g is None else g
                for g, placed, want in zip(gradients, program.outputs, wanted, strict=True)
                if want
            ],
            [placed for placed, want in zip(program.outputs, wanted, strict=True) if want],
        )
        found = iter(executor.run(compiled.backward, [*saved, *tangents]))
        results: list[Tensor | None] = []
        for placed, needs in zip(program.inputs, compiled.step.needed, strict=True):
            value = next(found) if needs else None
            results.append(None if value is None else executor.leave([value], [placed.layout.dual()])[0])
        return (None, *results)
