"""A graph of a program as a function for an executor and a backend, timed if a timeline listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ...propagation.program.collective import Conversion
from ...propagation.program.program import PlacedPort, Program
from ...strategy.basics.choice import Choice
from .assemble import assemble_code
from .inductor import compile_regions, example
from .instructions import AS_TRACED, Code, InputsAs, Mark
from .recorders import begin, marking, timed
from .slices import Placed
from .straight_line import Run


class Executor(Protocol):
    """Runs code on values; a value represents one tensor (as a list of parts, or as one rank's part)."""

    def enter(
        self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort], views: frozenset[int] = frozenset()
    ) -> list[Any]:
        """The values of the tensors of a call. Parts of those at the places `views` may have any strides: they are
        views of the tensors unless a slice is short."""
        ...

    def leave(self, values: Sequence[Any], placed: Sequence[Placed], shared: Sequence[bool]) -> list[Tensor]:
        """The tensors of values; those in `shared` are copied."""
        ...

    def zeros(self, placed: PlacedPort, device: torch.device) -> Any:
        """The zero value, for a missing gradient."""
        ...

    def pack(self, values: Sequence[Any]) -> list[Tensor]:
        """Values as a flat list of tensors, for autograd to save."""
        ...

    def unpack(self, tensors: Sequence[Tensor], /) -> list[Any]:
        """The values of a flat list that `pack` made."""
        ...

    def load(self, code: Code, mark: Mark | None = None) -> Run:
        """A code as a function of values."""
        ...


class Backend(Choice):
    """The backend that runs the operators of a program."""

    EAGER = "eager"  # PyTorch, one operator after another
    INDUCTOR = "inductor"  # TorchInductor's kernels, one for each stretch between collectives


class LoadedGraph:
    """A graph and the function that runs it for one executor.

    code       its instructions
    examples   fake tensors like its outputs, if the backend needs them
    """

    def __init__(
        self,
        module: fx.GraphModule,
        phase: str,
        reasons: Sequence[Conversion],
        examples: Sequence[Any],
        loader: Loader,
        inputs_as: InputsAs = AS_TRACED,
    ) -> None:
        self.examples: list[Any] = []
        if loader.backend is Backend.INDUCTOR:
            module, self.examples = compile_regions(module, examples)
        self.code = assemble_code(module, phase, reasons, inputs_as)
        self._executor = loader.executor
        self._run = loader.executor.load(self.code)

    @cached_property
    def _timed(self) -> Run:
        return self._executor.load(self.code, marking(self.code))

    def run(self, inputs: list[Any]) -> list[Any]:
        """The values of the outputs for those of the inputs."""
        if not timed():
            return self._run(inputs)
        run = self._timed  # loaded before the time starts
        begin(inputs)
        return run(inputs)


class Backward(LoadedGraph):
    """The backward of a Program: from saved values and tangents to the gradients of inputs.

    places      the inputs that get a gradient; one on which no output depends gets none
    placed      the layouts of the gradients
    shared      whether each of them is copied, as `Code.shared`
    """

    def __init__(self, program: Program, examples: Sequence[Any], loader: Loader) -> None:
        assert program.backward is not None
        super().__init__(program.backward, "backward", program.conversions, examples, loader)
        self.places = program.places_of_gradients
        inputs = [program.inputs[i] for i in self.places]
        self.placed = [Placed(p.layout.dual(), p.shape) for p in inputs]
        self.shared = [held for held, slot in zip(self.code.shared, self.code.outputs, strict=True) if slot is not None]

    def values(self, inputs: list[Any]) -> list[Any]:
        """The gradients as values, without missing ones."""
        return [value for value in self.run(inputs) if value is not None]


@dataclass(frozen=True)
class Loader:
    """An executor and a backend, which load code."""

    executor: Executor
    backend: Backend = Backend.EAGER

    def example(self, placed: PlacedPort) -> Any:
        """A fake tensor like the part of an input or output, or None if the backend needs none."""
        if self.backend is Backend.EAGER:
            return None
        return example(placed.local_shape, placed.dtype, placed.port.node.meta["val"].device)
