"""Collectives that ranks call by hand give what their formulas say, and so do their derivatives."""

from __future__ import annotations

from typing import Any

import collectives
import pytest
import torch
from collectives import CASES, ROWS, derivatives, expected, program, values
from torch import Tensor

import partway as pw
from partway.strategy import Mesh

EXACT = {"rtol": 1e-12, "atol": 1e-12}
GROUPS: list[tuple[dict[str, int], Any]] = [
    ({"a": 3}, "a"), ({"dp": 2, "tp": 2}, "tp"), ({"dp": 2, "tp": 4}, ("tp", "dp")),
    ({"a": 2, "b": 2, "c": 2}, ("a", "c")),
]  # fmt: skip
MORE: list[tuple[dict[str, int], Any]] = [
    ({"a": 2}, None), ({"a": 4}, "a"), ({"a": 8}, None), ({"dp": 2, "tp": 2}, "dp"), ({"dp": 2, "tp": 2}, None),
    ({"dp": 2, "tp": 4}, "dp"), ({"dp": 2, "tp": 4}, "tp"), ({"a": 2, "b": 2, "c": 2}, ("b", "c")),
    ({"a": 2, "b": 2, "c": 2}, "b"), ({"a": 2, "b": 2, "c": 2}, ("b", "a")),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "group"), [*GROUPS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)])
def test_islands_compute_the_formulas(sizes: dict[str, int], group: Any) -> None:
    mesh = Mesh(sizes)
    split = ((mesh.axes, None, None),)
    for name, case in CASES.items():
        x = values(mesh).requires_grad_()
        own = program(case, group)
        y = pw.manual(lambda x, own=own: own(x[0])[None], split, split, mesh=mesh)(x)
        wanted = expected(case, x, mesh, group)
        weights = torch.rand_like(wanted)
        (found,), (right,) = (torch.autograd.grad((z * weights).sum(), x) for z in (y, wanted))
        torch.testing.assert_close(y, wanted, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found, right, **EXACT, msg=lambda text, name=name: f"gradient of {name}: {text}")


# -- on processes


def every_case(sizes: dict[str, int], group: Any) -> None:
    mesh = Mesh(sizes)
    pw.set_mesh(mesh)
    for name, case in CASES.items():
        whole, rank = values(mesh).requires_grad_(), pw.get_rank()
        wanted = expected(case, whole, mesh, group)
        weights = torch.rand_like(wanted)
        x = whole.detach()[rank].clone().requires_grad_()
        y = program(case, group)(x)
        torch.testing.assert_close(y, wanted[rank], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        orders = zip(derivatives(y, x, weights[rank]), derivatives(wanted, whole, weights), strict=True)
        for order, (found, right) in enumerate(orders, 1):
            torch.testing.assert_close(
                found, right[rank], **EXACT, msg=lambda text, at=(order, name): f"derivative {at[0]} of {at[1]}: {text}"
            )


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("sizes", "group"),
    [
        ({"tp": 2}, None), ({"dp": 2, "tp": 2}, "tp"), ({"dp": 2, "tp": 2}, "dp"), ({"dp": 2, "tp": 2}, ("tp", "dp")),
    ],
)  # fmt: skip
def test_processes_compute_the_formulas(on_ranks: Any, sizes: dict[str, int], group: Any) -> None:
    on_ranks(Mesh(sizes).device_num, every_case, sizes, group)


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.complex64, torch.complex128, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def numbers(dtype: torch.dtype, ranks: int) -> Tensor:
    """Small whole numbers, which every dtype sums and multiplies exactly."""
    x = torch.randint(0, 2 if dtype is torch.bool else 3, (ranks, ROWS, 2), generator=torch.Generator().manual_seed(1))
    return x.to(dtype) * (1 + 1j) if dtype.is_complex else x.to(dtype)


def reductions_of(dtype: torch.dtype) -> list[str]:
    if dtype is torch.bool:
        return ["max", "min"]
    if dtype.is_complex:
        return ["sum", "mean", "prod"]
    return ["sum", "max", "min", "prod", *(["mean"] if dtype.is_floating_point else [])]


def _of_dtype(x: Tensor, op: str, gathered: bool) -> Tensor:
    total = pw.ops.all_reduce(x, op) if op else x
    slices = pw.ops.reduce_scatter(x, op) if op else pw.ops.all_to_all(x)
    if not gathered:
        return total
    return torch.cat([pw.ops.all_gather(slices), pw.ops.broadcast(x, 1), pw.ops.permute(x, [(0, 1), (1, 0)])])


def _right_of_dtype(x: Tensor, op: str, rank: int) -> Tensor:
    total = collectives.REDUCTIONS[op](x).to(x.dtype)
    return torch.cat([total, x[1], x[1 - rank] if rank < 2 else torch.zeros_like(x[0])])


def every_dtype(ranks: int) -> None:
    for dtype in DTYPES:
        x, rank = numbers(dtype, ranks), pw.get_rank()
        for op in reductions_of(dtype):
            found = _of_dtype(x[rank], op, True)
            assert found.dtype is dtype, (op, dtype, found.dtype)
            torch.testing.assert_close(found, _right_of_dtype(x, op, rank), rtol=0, atol=0)
            torch.testing.assert_close(_of_dtype(x[rank], op, False), collectives.REDUCTIONS[op](x).to(dtype))


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_reduce_every_dtype(on_ranks: Any, ranks: int) -> None:
    on_ranks(ranks, every_dtype, ranks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_islands_reduce_every_dtype(dtype: torch.dtype) -> None:
    x = numbers(dtype, 2)
    for op in reductions_of(dtype):
        split = (("a", None, None),)
        found = pw.manual(lambda x, op=op: _of_dtype(x[0], op, True)[None], split, split, mesh={"a": 2})(x)
        wanted = torch.stack([_right_of_dtype(x, op, rank) for rank in range(2)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
