"""Collectives that ranks call by hand give what their formulas say, and so do their derivatives."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import collectives
import pytest
import torch
from collectives import CASES, ROWS, derivatives, expected, program, values
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from torch import Tensor

import partway as pw
from partway.strategy import Mesh
from partway.strategy.place import Place

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
def test_manuals_compute_the_formulas(sizes: dict[str, int], group: Any) -> None:
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
def test_manuals_reduce_every_dtype(dtype: torch.dtype) -> None:
    x = numbers(dtype, 2)
    for op in reductions_of(dtype):
        split = (("a", None, None),)
        found = pw.manual(lambda x, op=op: _of_dtype(x[0], op, True)[None], split, split, mesh={"a": 2})(x)
        wanted = torch.stack([_right_of_dtype(x, op, rank) for rank in range(2)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# -- at random

MESHES = [{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, int], tuple[str, ...], list[int], str, int, int, str]:
    """A mesh, a group, the shape of a rank's tensor, and a collective with two of its dims and a reduction."""
    sizes = draw(st.sampled_from(MESHES))
    group = draw(st.lists(st.sampled_from(list(sizes)), min_size=1, unique=True))
    count = math.prod(sizes[axis] for axis in group)
    shape = [count * n for n in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))]
    dims = st.integers(-len(shape), len(shape) - 1)
    name = draw(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"]))
    return sizes, tuple(group), shape, name, draw(dims), draw(dims), draw(st.sampled_from(list(collectives.REDUCTIONS)))


@examples(25)
@given(calls(), st.integers(0, 1000))
def test_any_call_computes_its_formula(call: Any, seed: int) -> None:
    sizes, group, shape, name, dim, other, op = call
    mesh, random = Mesh(sizes), Random(seed)
    count = Place(mesh, 0).size(group)
    root, places = random.randrange(count), random.sample(range(count), count)
    pairs = list(zip(random.sample(range(count), count), places, strict=True))[: random.randrange(count + 1)]
    if name in ("all_reduce", "reduce_scatter") and op in ("max", "min") and 0 in shape:
        shape = [max(1, n) * count for n in shape]  # amax of nothing has no meaning
    case = {
        "all_reduce": collectives.reduced(op),
        "all_gather": collectives.gathered(dim),
        "reduce_scatter": collectives.scattered(op, dim),
        "all_to_all": collectives.exchanged(dim, other),
        "broadcast": collectives.broadcast(root),
        "permute": collectives.permuted(pairs),
    }[name]
    x = 1 + torch.rand(mesh.device_num, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    split = ((mesh.axes, *[None] * len(shape)),)
    y = pw.manual(lambda x: program(case, group)(x[0])[None], split, split, mesh=mesh)(x)
    wanted = expected(case, x, mesh, group)
    weights = torch.rand(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    (found,), (right,) = (torch.autograd.grad((z * weights).sum(), x) for z in (y, wanted))
    torch.testing.assert_close(y, wanted, **EXACT)
    torch.testing.assert_close(found, right, **EXACT)
