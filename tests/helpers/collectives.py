"""Each collective of `partway.ops` as the program of one rank, and as a formula over the values of all ranks of a
group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import partway as pw
from partway.strategy import Mesh
from partway.strategy.place import Place

ROWS = 24  # of a rank's tensor: 2, 3, 4 and 8 ranks divide them
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


@dataclass(frozen=True)
class Case:
    """A collective: `program(x, group)` is the program of a rank; `formula(xs)` gives the results of all ranks of a
    group from their values."""

    program: Callable[[Tensor, Any], Tensor]
    formula: Callable[[list[Tensor]], list[Tensor]]


def uneven(total: int, count: int) -> list[int]:
    """`total` elements in `count` parts of different sizes."""
    parts = [total // count] * count
    parts[0] += 1
    parts[-1] -= 1
    return parts


def reduced(op: str) -> Case:
    """The reduction `op`."""
    return Case(
        lambda x, group: pw.ops.all_reduce(x, op, group),
        lambda xs: [REDUCTIONS[op](torch.stack(xs))] * len(xs),
    )


def scattered(op: str, dim: int) -> Case:
    """Slices along `dim` of the reduction `op`."""
    return Case(
        lambda x, group: pw.ops.reduce_scatter(x, op, dim, group),
        lambda xs: list(REDUCTIONS[op](torch.stack(xs)).chunk(len(xs), dim)),
    )


def exchanged(split: int, concat: int) -> Case:
    """Pieces split along `split` and concatenated along `concat`."""
    return Case(
        lambda x, group: pw.ops.all_to_all(x, split, concat, group),
        lambda xs: [torch.cat([x.chunk(len(xs), split)[rank] for x in xs], concat) for rank in range(len(xs))],
    )


def gathered(dim: int) -> Case:
    """The values of all ranks, concatenated along `dim`."""
    return Case(lambda x, group: pw.ops.all_gather(x, dim, group), lambda xs: [torch.cat(xs, dim)] * len(xs))


def broadcast(root: int) -> Case:
    """The value of `root` on all ranks."""
    return Case(lambda x, group: pw.ops.broadcast(x, root, group), lambda xs: [xs[root].clone()] * len(xs))


def permuted(pairs: list[tuple[int, int]]) -> Case:
    """The values sent by pairs of source and target."""
    sources = {target: source for source, target in pairs}
    return Case(
        lambda x, group: pw.ops.permute(x, pairs, group),
        lambda xs: [xs[sources[i]] if i in sources else 0 * x for i, x in enumerate(xs)],  # 0 * x: with a gradient
    )


def _shifted(x: Tensor, group: Any) -> Tensor:
    size = pw.axis_size(group)
    return pw.ops.permute(x, [(rank, rank + 1) for rank in range(size - 1)], group)


def _from_neighbours(x: Tensor, group: Any) -> Tensor:
    """Twice the value of the rank above plus three times that of the rank below; the ends do not wrap around."""
    here, size = pw.axis_index(group), pw.axis_size(group)
    others = [other for other in (here - 1, here + 1) if 0 <= other < size]
    came = dict(
        zip(others, pw.ops.neighbor_exchange([x.sin()] * len(others), others, others, group=group), strict=True)
    )
    return x + sum(came[other] * (2 if other < here else 3) for other in others)


def _neighbours(xs: list[Tensor]) -> list[Tensor]:
    ends = [torch.zeros_like(xs[0]), *(x.sin() for x in xs), torch.zeros_like(xs[0])]
    return [x + 2 * ends[rank] + 3 * ends[rank + 2] for rank, x in enumerate(xs)]


CASES = {
    **{f"all_reduce {op}": reduced(op) for op in REDUCTIONS},
    **{f"reduce_scatter {op}": scattered(op, 0) for op in REDUCTIONS},
    "reduce_scatter along 1": scattered("sum", 1),
    "all_gather": gathered(0),
    "all_gather along -1": gathered(-1),
    "broadcast": broadcast(1),
    "all_to_all 0 to 1": exchanged(0, 1),
    "all_to_all 1 to 0": exchanged(1, 0),
    "all_to_all 0 to 0": exchanged(0, 0),
    "permute": Case(_shifted, lambda xs: [torch.zeros_like(xs[0]), *xs[:-1]]),
    "neighbor_exchange": Case(_from_neighbours, _neighbours),
}


def values(mesh: Mesh, seed: int = 0) -> Tensor:
    """The value of each rank: [ranks, rows, columns], near 1, all different."""
    generator = torch.Generator().manual_seed(seed)
    return 1 + torch.rand(mesh.device_num, ROWS, ROWS, dtype=torch.float64, generator=generator) / 8


def expected(case: Case, x: Tensor, mesh: Mesh, group: Any) -> Tensor:
    """The results of the ranks by the formula, stacked, if all of them have x."""
    results: dict[int, Tensor] = {}
    for ranks in mesh.groups(*Place(mesh, 0).axes(group)):
        results |= zip(ranks, case.formula([x[rank].sin() for rank in ranks]), strict=True)
    return torch.stack([results[rank] for rank in range(mesh.device_num)])


def program(case: Case, group: Any) -> Callable[[Tensor], Tensor]:
    """The program of a rank with a nonlinear function of the result, so that not all second derivatives are zero."""
    return lambda x: case.program(x.sin(), group)


def derivatives(y: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of sum(y w) with respect to x, and the derivative of half its square."""
    (first,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() / 2, x)
    return first.detach(), second
