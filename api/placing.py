"""Where a call runs: all ranks simulated in this process, or this rank of a process group."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from partway.annotate import Request, given_mesh
from partway.compile import Compiled
from partway.context import ParallelContext
from partway.propagation.graph import Role
from partway.propagation.lower import PlacedPort
from partway.propagation.structure import Call
from partway.runtime.process import init, launched
from partway.runtime.simulate import Simulator
from partway.runtime.step import Executor
from partway.strategy import Mesh


class Placing(Protocol):
    """What differs between simulation and a process group, around the step itself."""

    processes: int | None

    def executor(self, mesh: Mesh) -> Executor: ...

    def whole_call(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request, context: ParallelContext
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with tensors of their global shapes."""
        ...

    def settle(self, fn: Any, compiled: Compiled, context: ParallelContext) -> None:
        """After the first plan: put the parameters where it wants them."""
        ...

    def enter(self, tensor: Tensor, placed: PlacedPort) -> Tensor: ...

    def leave(self, value: Tensor, placed: PlacedPort, mesh: Mesh) -> Tensor: ...


class Simulated:
    """Every rank in this process: tensors are whole on both sides, parameters stay ordinary parameters."""

    processes = None

    def executor(self, mesh: Mesh) -> Executor:
        return _simulator(mesh)

    def whole_call(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request, context: ParallelContext
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def settle(self, fn: Any, compiled: Compiled, context: ParallelContext) -> None:
        return None

    def enter(self, tensor: Tensor, placed: PlacedPort) -> Tensor:
        return tensor

    def leave(self, value: Tensor, placed: PlacedPort, mesh: Mesh) -> Tensor:
        return value


@functools.cache
def _simulator(mesh: Mesh) -> Simulator:
    return Simulator(mesh)


def placing_for(local_inputs: bool) -> Placing:
    """The Placing of this process. `local_inputs`: a launched rank is given only its part of every input."""
    if not launched():
        return Simulated()
    raise NotImplementedError
