"""One call of a compiled function: the forward graph runs, what the backward needs is saved, and autograd
calls the backward graph. The executor (simulated ranks or one rank of a process group) is an argument: with
simulated ranks a call takes and gives whole tensors, with one rank of a process group that rank's parts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..propagation.differentiate import Step
from ..propagation.lower import PlacedPort
from ..strategy.errors import RuntimeStateError
from ..strategy.layout import Layout
from .instructions import Code, Mark, Run, assemble_code
from .parameters import gradient_of

Wanted = tuple[bool, ...]


class Executor(Protocol):
    """Runs code on values; a value is what stands for one tensor (a list of parts, or one rank's part).

    enter, leave    between the tensors of a call and values; what is shared leaves as a copy
    zeros           the value that is zero, for a gradient that did not come
    pack, unpack    between values and flat lists of tensors, for autograd to save
    load            a code as a function of values
    """

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Any]: ...

    def leave(self, values: Sequence[Any], layouts: Sequence[Layout], shared: Sequence[bool]) -> list[Tensor]: ...

    def zeros(self, placed: PlacedPort, device: torch.device) -> Any: ...

    def pack(self, values: Sequence[Any]) -> list[Tensor]: ...

    def unpack(self, tensors: Sequence[Tensor]) -> list[Any]: ...

    def load(self, code: Code, mark: Mark | None = None) -> Run: ...


class Loaded:
    """A code and the function that runs it for one executor."""

    def __init__(self, code: Code, executor: Executor) -> None:
        self.code, self.run = code, executor.load(code)


@dataclass
class CompiledStep:
    """A Step as code, for one executor. `rebuild` makes the Step for other differentiated outputs."""

    step: Step
    executor: Executor
    rebuild: Callable[[Wanted], CompiledStep] = field(repr=False)

    def __post_init__(self) -> None:
        program = self.step.program
        code = assemble_code(self.step.forward, "forward")
        self.results = [placed.layout for placed in program.outputs]
        self.results_shared = code.shared[: len(self.results)]
        self.differentiable = [placed.port.requires_grad for placed in program.outputs]
        self.random = any(instruction.once for instruction in code.instructions)
        self.forward = Loaded(code, self.executor)
        self.inference = Loaded(_without_saved(code, len(self.results)), self.executor)
        self.backward: Loaded | None = None
        if self.step.backward is not None:
            code = assemble_code(self.step.backward, "backward")
            self.backward = Loaded(code, self.executor)
            # one for each input that gets a gradient; an input on which no output depends gets none
            duals = [p.layout.dual() for p, needs in zip(program.inputs, self.step.needed, strict=True) if needs]
            self.arriving = [slot is not None for slot in code.outputs]
            self.gradients = list(itertools.compress(duals, self.arriving))
            self.gradients_shared = list(itertools.compress(code.shared, self.arriving))

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for the `tensors` of the program's inputs, in order."""
        if self.backward is not None and torch.is_grad_enabled():
            results: tuple[Tensor, ...] = _Function.apply(self, *tensors)  # type: ignore[no-untyped-call]
            return results
        with torch.no_grad():
            values = self.inference.run(self.executor.enter(tensors, self.step.program.inputs))
            return tuple(self.executor.leave(values, self.results, self.results_shared))


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
        code,
        instructions=tuple(replace(i, dead=dead) for i, dead in reversed(kept)),
        outputs=code.outputs[:outputs],
        unused=tuple(slot for slot in range(code.inputs) if slot not in live),
    )


class _Function(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledStep, *tensors: Tensor) -> tuple[Tensor, ...]:
        executor, count = compiled.executor, len(compiled.results)
        ctx.generators = _generators(tensors[0].device) if compiled.random else None
        values = compiled.forward.run(executor.enter(tensors, compiled.step.program.inputs))
        results = executor.leave(values[:count], compiled.results, compiled.results_shared)
        ctx.compiled, ctx.inputs = compiled, len(tensors)
        ctx.save_for_backward(*tensors, *executor.pack(values[count:]))
        ctx.set_materialize_grads(False)
        if not all(compiled.differentiable):
            ctx.mark_non_differentiable(
                *(r for r, able in zip(results, compiled.differentiable, strict=True) if not able)
            )
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
                values = compiled.forward.run(executor.enter(primals, program.inputs))
            saved = values[len(program.outputs) :]
        assert compiled.backward is not None
        program = compiled.step.program
        tangents = [
            executor.zeros(placed, primals[0].device) if g is None else executor.enter([g], [placed])[0]
            for g, placed, want in zip(gradients, program.outputs, wanted, strict=True)
            if want
        ]
        values = compiled.backward.run([*saved, *tangents])
        arrived = [value for value in values if value is not None]
        left = iter(executor.leave(arrived, compiled.gradients, compiled.gradients_shared))
        arriving = iter(compiled.arriving)
        return tuple(
            gradient_of(primal, next(left)) if needs and next(arriving) else None
            for primal, needs in zip(primals, compiled.step.needed, strict=True)
        )


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
