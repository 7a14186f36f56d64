"""Find the placement of a value on each axis of the mesh from its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from partway.strategy import PARTIAL, REPLICATE, Mesh, Partial, Replicate, Shard

EXACT = 1e-9  # relative to the largest element; float64 has 16 digits
Placed = Replicate | Shard | Partial


@dataclass(frozen=True)
class Measured:
    """The placements of a value by axis, and its factor: combined over the ranks, it is `factor` times the value of one
    device."""

    placements: tuple[Placed, ...]
    factor: Fraction = Fraction(1)

    def axes(self, placement: Placed, mesh: Mesh) -> list[str]:
        """The axes on which it has `placement`."""
        return [axis for axis, own in zip(mesh.axes, self.placements, strict=True) if own == placement]

    @property
    def slices(self) -> list[Shard]:
        """Its Shard placements."""
        return [placement for placement in self.placements if isinstance(placement, Shard)]

    def of_means(self, mesh: Mesh) -> bool:
        """Whether ranks have means of their own parts, and the mean of these is the value of one device."""
        addends = self.axes(PARTIAL, mesh)
        return bool(addends) and self.factor == mesh.size(*addends)

    def told(self, mesh: Mesh) -> str:
        """The placements in words."""
        means = self.of_means(mesh)
        words = [
            _word(placement, axis, means)
            for placement, axis in zip(self.placements, mesh.axes, strict=True)
            if mesh.size(axis) > 1
        ]
        times = "" if self.factor == 1 or means else f", {self.factor} times what it should be"
        return f"{' and '.join(words) or 'whole'}{times}"


def _word(placement: Placed, axis: str, means: bool) -> str:
    match placement:
        case Shard():
            return f"a slice of dim {placement.dim} over {axis}"
        case Partial():
            return f"a mean of each rank's own part over {axis}" if means else f"a partial sum over {axis}"
        case _:
            return f"replicated over {axis}"


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ by rounding only."""
    if one is None or other is None or one.shape != other.shape:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    scale = other.abs().nan_to_num(0, 0, 0).max().item() if other.numel() else 0.0
    return torch.allclose(one, other, EXACT, EXACT * scale, equal_nan=True)


def measure(values: Sequence[Tensor], whole: Tensor, mesh: Mesh) -> tuple[Measured, ...]:
    """The possible placements of `values`, one of each rank, relative to the `whole`; empty if none match. Those with
    factor 1 come first, and then those that need no sum."""
    found: list[Measured] = []
    for placements, together in _together(list(values), tuple(whole.shape), mesh, len(mesh.axes)):
        if equal(together, whole):
            found.append(Measured(placements))
        elif (factor := _factor(together, whole, mesh)) is not None:
            found.append(Measured(placements, factor))
    return tuple(sorted(found, key=lambda m: (m.factor != 1, m.placements.count(PARTIAL))))


def _together(
    values: list[Tensor], shape: tuple[int, ...], mesh: Mesh, count: int
) -> Iterator[tuple[tuple[Placed, ...], Tensor]]:
    """Ways to combine the values of all ranks along the first `count` axes, the last one first."""
    if not count:
        yield (), values[0]
        return
    size = mesh.sizes[count - 1]
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    for placement in _candidates(groups, shape, size):
        merged = [_merged(group, placement) for group in groups]
        for before, whole in _together(merged, shape, mesh, count - 1):
            yield (*before, placement), whole


def _candidates(groups: Sequence[Sequence[Tensor]], shape: tuple[int, ...], size: int) -> Iterator[Placed]:
    alike = all(equal(value, group[0]) for group in groups for value in group[1:])
    if alike:
        yield REPLICATE
    if size == 1:
        return
    one = groups[0][0]
    if one.dim() == len(shape):
        for dim in range(one.dim()):
            others = [s for d, s in enumerate(one.shape) if d != dim]
            fits = all([s for d, s in enumerate(v.shape) if d != dim] == others for g in groups for v in g)
            if fits and all(sum(v.shape[dim] for v in group) <= shape[dim] for group in groups):
                yield Shard(dim)
    if all(value.shape == one.shape for group in groups for value in group) and one.dtype is not torch.bool:
        yield PARTIAL


def _merged(group: Sequence[Tensor], placement: Placed) -> Tensor:
    match placement:
        case Shard():
            return torch.cat(list(group), placement.dim)
        case Partial():
            return torch.stack(list(group)).sum(0, dtype=group[0].dtype)
        case _:
            return group[0]


def _factor(found: Tensor, whole: Tensor, mesh: Mesh) -> Fraction | None:
    """`found` / `whole`, if that is a product of axis sizes, or the quotient of such products; else None."""
    if found.shape != whole.shape or not whole.is_floating_point() or not whole.numel():
        return None
    at = whole.abs().argmax()
    if not whole.flatten()[at]:
        return None
    ratio = (found.flatten()[at] / whole.flatten()[at]).item()
    counts = {math.prod(sizes) for n in range(len(mesh.sizes) + 1) for sizes in itertools.combinations(mesh.sizes, n)}
    for factor in (Fraction(a, b) for a in counts | {c * c for c in counts} for b in counts):
        if factor != 1 and math.isclose(ratio, factor, rel_tol=EXACT) and equal(found, whole * float(factor)):
            return factor
    return None
