"""The only rank of a mesh of one device: a value is a tensor, and a conversion needs no other rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...propagation.program.program import PlacedPort
from ...strategy.mesh import Mesh
from ..code.instructions import CallOperator, Code, ConvertLayout, Instruction, Mark, Relayout, TellPosition
from ..code.recorders import note
from ..code.slices import LOCAL, Placed
from ..code.straight_line import Bind, Run, compile_code
from ..code.strides import laid_out
from .meetings import MEETINGS


class OneDevice:
    """Runs the program of the only rank of `mesh`, without the overhead of `Simulator` for several ranks, which for a
    small model is as much as a dozen kernels."""

    late = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def enter(
        self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort], views: frozenset[int] = frozenset()
    ) -> list[Tensor]:
        """The tensors, contiguous as the graphs were traced, except those at the places `views`."""
        if not views:
            return [*map(Tensor.contiguous, tensors)]
        return [tensor if i in views else tensor.contiguous() for i, tensor in enumerate(tensors)]

    def leave(self, values: Sequence[Tensor], placed: Sequence[Placed], shared: Sequence[bool]) -> list[Tensor]:
        """The values with the strides of `placed`; those in `shared` are copied."""
        results = []
        for value, place, held in zip(values, placed, shared, strict=True):
            whole = value if place.strides is None else laid_out(value, place.strides)
            same = held and (whole is value or (whole.layout is torch.strided and whole.data_ptr() == value.data_ptr()))
            results.append(whole.clone() if same else whole)
        return results

    def zeros(self, placed: PlacedPort, device: torch.device) -> Tensor:
        """A zero tensor placed like `placed`."""
        return torch.zeros(placed.local_shape, dtype=placed.dtype, device=device)

    def pack(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values are tensors already."""
        return list(values)

    unpack = pack

    def load(self, code: Code, mark: Mark | None = None) -> Run:
        """`code` as a function of the values of its inputs."""
        return compile_code(code, self, mark)

    def run(self, code: Code, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of `code`."""
        return self.load(code)(list(inputs))

    def ranks(self, c: Relayout) -> tuple[int, ...]:
        """None: there is no other process."""
        return ()

    def express(self, step: Instruction, bind: Bind) -> str:
        """`step` with conversions as functions of their operands."""
        match step:
            case CallOperator():
                return step.expression(in_place=True, late=False)
            case ConvertLayout():
                return f"{bind(_converter(step.relayout))}({', '.join(f'v{slot}' for slot in step.operands)})"
            case TellPosition():
                return bind(torch.tensor(self.mesh.position(0, *step.axes)))


def _converter(c: Relayout) -> Callable[..., Any]:
    def local(place: int, part: Tensor) -> Tensor:
        return LOCAL[c.kind](c, part, 0)

    def met(place: int, part: Tensor) -> Tensor:
        handed = MEETINGS[c.kind](c, c.owned[place])
        handed.add(part)
        return handed.results(1)[0]

    def convert(*parts: Tensor) -> Any:
        if c.kind.communicates:
            note(c, parts)
        results = [one(place, part) for place, part in enumerate(parts)]
        return results if c.grouped else results[0]

    one = met if c.kind.communicates else local
    return convert
