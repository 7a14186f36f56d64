"""The parameters of a worker: this process's own, or, if the worker is a group of ranks, each rank's part.

One of the ranks speaks for them to the servers, with whole tensors; the others wait for its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from partway.requests import is_dtensor, whole
from partway.runtime import launched
from partway.runtime.ranks import first_line
from partway.strategy import RuntimeStateError

T = TypeVar("T")


class Parameters(Protocol):
    """The parameters of a worker, in the order of the optimizer's."""

    speaks: bool  # whether this process is the one that speaks to the servers

    def whole(self) -> list[Tensor]:
        """Whole tensors, into which the process that speaks writes the values from the servers."""
        ...

    def gradient(self, index: int) -> Tensor | None:
        """The whole gradient of a parameter."""
        ...

    def spread(self, indices: Sequence[int]) -> None:
        """Write the values of the whole tensors into the parameters."""

    def set_gradient(self, index: int, whole: Tensor | None) -> None:
        """Give a parameter a gradient, which the process that speaks has."""

    def tell(self, run: Callable[[], T]) -> T:
        """Return the result of `run` in the process that speaks; if it fails, all raise."""
        ...


def parameters_of(parameters: Sequence[Tensor], tables: Sequence[int]) -> Parameters:
    """The parameters of this worker. `tables`: the positions of tables by rows, which have no whole tensors."""
    if launched():
        return _OfGroup(parameters, tables)
    return _Own(parameters)


class _Own:
    """The parameters of a single process."""

    speaks = True

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def whole(self) -> list[Tensor]:
        return list(self._parameters)

    def gradient(self, index: int) -> Tensor | None:
        return self._parameters[index].grad

    def spread(self, indices: Sequence[int]) -> None:
        pass

    def set_gradient(self, index: int, whole: Tensor | None) -> None:
        self._parameters[index].grad = whole

    def tell(self, run: Callable[[], T]) -> T:
        return run()


class _OfGroup:
    """The parameters of a group of ranks: rank 0 speaks."""

    def __init__(self, parameters: Sequence[Tensor], tables: Sequence[int]) -> None:
        if tables:
            raise RuntimeStateError(
                "a worker that is a group of ranks has no tables by rows; give set_param_ps(..., rows=False), or start "
                "each worker as one process"
            )
        self._parameters = parameters
        self.speaks = dist.get_rank() == 0
        self._wholes = [
            torch.empty(each.shape, dtype=each.dtype, device=each.device if self.speaks else "meta")
            for each in parameters
        ]

    def whole(self) -> list[Tensor]:
        return self._wholes

    def gradient(self, index: int) -> Tensor | None:
        own = self._parameters[index].grad
        return None if own is None else whole(own)

    def spread(self, indices: Sequence[int]) -> None:
        for index in indices:
            with torch.no_grad():
                self._parameters[index].copy_(self._spread(index, self._wholes[index]))

    def set_gradient(self, index: int, whole: Tensor | None) -> None:
        self._parameters[index].grad = None if whole is None else self._spread(index, whole)

    def _spread(self, index: int, whole: Tensor) -> Tensor:
        own: Any = self._parameters[index]
        if not self.speaks:
            whole = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        dist.broadcast(whole, 0)
        if is_dtensor(own):
            from torch.distributed.tensor import distribute_tensor

            return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
        return whole

    def tell(self, run: Callable[[], T]) -> T:
        result: Any = None
        error: Exception | None = None
        if self.speaks:
            try:
                result = run()
            except Exception as raised:
                error = raised
        said = [(result, None if error is None else f"{type(error).__name__}: {first_line(error)}")]
        dist.broadcast_object_list(said, 0)
        if error is not None:
            raise error
        result, text = said[0]
        if text is not None:
            raise RuntimeStateError(f"rank 0 of this worker failed: {text}")
        return result  # type: ignore[no-any-return]
