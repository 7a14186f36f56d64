"""Alternatives if no plan stays within the memory limit: more devices or a smaller batch, each found by planning
again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from partway.propagation.torch_internals import tree_leaves, tree_map
from partway.strategy import Mesh
from partway.strategy.errors import DoesNotFitError

MORE_DEVICES = (2, 4, 8, 16)  # times as many, along one axis
HALVINGS = 6  # of a batch
HIGHER = 8  # limits to try, each higher than the one before
PATIENCE = 120.0  # seconds after which no other plan is tried


class InTime:
    """A time limit of `seconds` from now for trying plans; `over`: whether it was found to have passed."""

    def __init__(self, seconds: float = PATIENCE) -> None:
        self._end, self.over = time.monotonic() + seconds, False

    def __call__(self) -> bool:
        """Whether there is time left."""
        self.over = self.over or time.monotonic() > self._end
        return not self.over


def what_fits(
    meshes: Sequence[Mesh],
    fits_on: Callable[[Mesh], bool],
    batch: int | None,
    fits_with: Callable[[int], bool],
    in_time: InTime,
) -> str:
    """The alternatives, as a sentence: the smallest larger mesh for which `fits_on` is true, and the largest part of
    `batch` for which `fits_with` is; "" if nothing was tried."""
    mesh = next((mesh for mesh in itertools.takewhile(lambda _: in_time(), _larger(meshes)) if fits_on(mesh)), None)
    on_none = bool(meshes) and not in_time.over
    part = next(
        (part for part in itertools.takewhile(lambda _: in_time(), _parts(batch or 1)) if fits_with(part)), None
    )
    with_none = batch is not None and batch > 0 and batch % 2 == 0 and not in_time.over
    found = [
        *([f"on {mesh.device_num} devices, the mesh {mesh}"] if mesh else []),
        *([f"with a batch of {part} in place of {batch}"] if part else []),
    ]
    tried = [
        *([f"on no mesh with up to {MORE_DEVICES[-1]} times as many devices"] if on_none else []),
        *(["with no smaller batch"] if with_none else []),
    ]
    return f"Planned again, it fits {', or '.join(found) or ' and '.join(tried)}" if found or tried else ""


def least_limit(error: DoesNotFitError, within: Callable[[float], Any], in_time: InTime) -> float:
    """The bytes of the smallest plan that `within` makes: those of `error`, or more if they are not enough."""
    for _ in range(HIGHER):
        if not in_time():
            break
        try:
            within(error.enough)
        except DoesNotFitError as too_little:
            error = error.changed(max(too_little.least, error.enough), error.limit)
        else:
            break
    return error.least


def _larger(meshes: Sequence[Mesh]) -> Iterator[Mesh]:
    """`meshes` with one axis longer, the smallest first."""
    for times in MORE_DEVICES:
        for mesh in meshes:
            for axis in mesh.axes:
                yield Mesh({each: mesh.size(each) * (times if each == axis else 1) for each in mesh.axes})


def _parts(batch: int) -> Iterator[int]:
    for _ in range(HALVINGS):
        if batch % 2:
            return
        batch //= 2
        yield batch


def batch_of(tree: Any) -> int | None:
    """The batch size of a call: the first dim of the first tensor that has dims. None if no tensor has any."""
    return next((len(tensor) for tensor in _tensors(tree) if tensor.dim()), None)


def with_batch(tree: Any, batch: int, part: int) -> Any:
    """The arguments of a call with tensors whose first dim is `batch` cut to `part` of it."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != batch:
            return value
        return value.detach()[:part].requires_grad_(value.requires_grad)

    return tree_map(cut, tree)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
