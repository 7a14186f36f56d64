"""One call of a compiled function: the forward graph runs, what the backward needs is saved, and autograd
calls the backward graph. The executor (simulated ranks or one rank of a process group) is an argument: with
simulated ranks a call takes and gives whole tensors, with one rank of a process group that rank's parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..propagation.differentiate import Step
from ..propagation.lower import PlacedPort
from ..strategy.errors import RuntimeStateError
from ..strategy.layout import Layout
from .instructions import Code, assemble_code

Wanted = tuple[bool, ...]


class Executor(Protocol):
    """Runs code on values; a value is what stands for one tensor (a list of parts, or one rank's part).

    enter, leave    between the tensors of a call and values
    zeros           the value that is zero, for a gradient that did not come
    pack, unpack    between values and flat lists of tensors, for autograd to save
    run             the values that a code computes of values
    """

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Any]: ...

    def leave(self, values: Sequence[Any], layouts: Sequence[Layout]) -> list[Tensor]: ...

    def zeros(self, placed: PlacedPort, device: torch.device) -> Any: ...

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
        self.random = any(instruction.once for instruction in self.forward.instructions)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for the `tensors` of the program's inputs, in order."""
        if torch.is_grad_enabled() and self.backward is not None:
            results: tuple[Tensor, ...] = _Function.apply(self, *tensors)  # type: ignore[no-untyped-call]
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
        ctx.generators = _generators(tensors[0].device) if compiled.random else None
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
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = _Function.gradients(ctx, gradients)
        if torch.is_grad_enabled():  # create_graph=True
            results = _Once.apply(torch.empty(0, requires_grad=True), *results)  # type: ignore[no-untyped-call]
        return (None, *results)

    @staticmethod
    def gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        compiled: CompiledStep = ctx.compiled
        tensors = ctx.saved_tensors
        primals, packed = tensors[: ctx.inputs], tensors[ctx.inputs :]
        wanted = compiled.step.wanted
        asked = tuple(g is not None for g in gradients)
        executor = compiled.executor
        saved = executor.unpack(packed)
        if any(a and not w for a, w in zip(asked, wanted, strict=True)):
            # An output whose gradient was not planned for: run the forward again, with the random numbers that it
            # drew, for the backward that is.
            compiled = compiled.rebuild(tuple(a or w for a, w in zip(asked, wanted, strict=True)))
            wanted, program = compiled.step.wanted, compiled.step.program
            with _drawing_again(ctx.generators, primals[0].device):
                values = executor.run(compiled.forward, executor.enter(primals, program.inputs))
            saved = values[len(program.outputs) :]
        assert compiled.backward is not None
        program = compiled.step.program
        tangents = [
            executor.zeros(placed, primals[0].device) if g is None else executor.enter([g], [placed])[0]
            for g, placed, want in zip(gradients, program.outputs, wanted, strict=True)
            if want
        ]
        found = iter(executor.run(compiled.backward, [*saved, *tangents]))
        results: list[Tensor | None] = []
        for placed, needs in zip(program.inputs, compiled.step.needed, strict=True):
            value = next(found) if needs else None
            results.append(None if value is None else executor.leave([value], [placed.layout.dual()])[0])
        return tuple(results)


class _Once(torch.autograd.Function):
    """Gradients as they are; to differentiate them again is an error instead of a silent zero."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeStateError(
            "a sharded function has no second derivative: its gradients, made with create_graph=True, cannot be "
            "differentiated again; compute them with the plain function"
        )


Generators = tuple[Tensor, Tensor | None]  # the states of the CPU's and, where there is one, the GPU's


def _generators(device: torch.device) -> Generators:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _drawing_again(generators: Generators | None, device: torch.device) -> Iterator[None]:
    """Draw the numbers that come after the states `generators` again, and leave the generators as they are."""
    if generators is None:
        yield
        return
    cpu, gpu = generators
    with torch.random.fork_rng([] if gpu is None else [device]):
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
        yield
