"""Exchanges of borders: the convolution of an image in pieces is that of the whole image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partway as pw
from partway import ops
from partway.strategy import CaptureError, OperatorError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def around(rows: int, columns: int, here: int, *, periodic: bool = False) -> list[int]:
    """The neighbours, clockwise from above, of a rank in a grid; -1 where there is none."""
    row, column = divmod(here, columns)
    ranks = []
    for down, right in [(-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]:
        i, j = row + down, column + right
        inside = 0 <= i < rows and 0 <= j < columns
        ranks.append(i % rows * columns + j % columns if inside or periodic else -1)
    return ranks


def convolved(rows: int, columns: int, halo: tuple[int, int], *, classes: bool = False, periodic: bool = False) -> Any:
    """The program of a rank of a grid: its part of the convolution of an image whose borders are zeros (or which is
    periodic), by a kernel that reaches over `halo` rows and columns."""

    def program(x: Tensor, kernel: Tensor) -> Tensor:
        ranks = around(rows, columns, pw.axis_index(), periodic=periodic)
        lens = [halo[0], halo[0], halo[1], halo[1]]
        if classes:
            whole = ops.NeighborExchangeV2(ranks, lens, ranks, lens)(x)
        else:
            whole = ops.neighbor_exchange_v2(x, ranks, lens, ranks, lens)
        top, right, bottom, left = (ranks[i] == -1 for i in (0, 2, 4, 6))
        return F.conv2d(F.pad(whole, (left * halo[1], right * halo[1], top * halo[0], bottom * halo[0])), kernel)

    return program


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


GRIDS = [
    pytest.param(1, 8, (16, 3, 16, 64), (3, 3), id="the seeds' image, by width"),
    pytest.param(4, 1, (2, 3, 16, 5), (5, 3), id="rows"),
    pytest.param(2, 2, (2, 3, 8, 12), (3, 5), id="2x2"),
    pytest.param(2, 4, (2, 3, 8, 16), (3, 3), id="2x4"),
    pytest.param(3, 3, (1, 2, 12, 12), (5, 5), id="3x3"),
]


@pytest.mark.parametrize(("rows", "columns", "shape", "size"), GRIDS)
@pytest.mark.parametrize("classes", [False, True])
def test_a_manual_function_convolves_the_image(rows: int, columns: int, shape: Any, size: Any, classes: bool) -> None:
    x, kernel = image(*shape).requires_grad_(), image(4, shape[1], *size).requires_grad_()
    halo = (size[0] // 2, size[1] // 2)
    split = (None, None, "h", "w")
    manual = pw.manual(
        convolved(rows, columns, halo, classes=classes), (split, None), (split,), mesh={"h": rows, "w": columns}
    )
    own, whole = manual(x, kernel), F.conv2d(x, kernel, padding=halo)
    torch.testing.assert_close(own, whole, **EXACT)
    weights = torch.rand_like(whole)
    for found, right in zip(
        *(torch.autograd.grad((y * weights).sum(), (x, kernel)) for y in (own, whole)), strict=True
    ):
        torch.testing.assert_close(found, right, **EXACT)


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_ranks_that_are_neighbours_twice_have_each_border_in_its_place(rows: int, columns: int) -> None:
    x, kernel = image(1, 2, 8, 8), image(3, 2, 3, 5)
    split = (None, None, "h", "w")
    manual = pw.manual(
        convolved(rows, columns, (1, 2), periodic=True), (split, None), (split,), mesh={"h": rows, "w": columns}
    )
    whole = F.conv2d(F.pad(x, (2, 2, 1, 1), mode="circular"), kernel)
    torch.testing.assert_close(manual(x, kernel), whole, **EXACT)


def test_other_lengths_on_either_side() -> None:
    """A kernel that reaches two rows up and none down; ranks say lengths for neighbours that they do not have, too."""
    x = image(1, 1, 8, 4)

    def program(x: Tensor) -> Tensor:
        ranks = around(4, 1, pw.axis_index())
        above = ranks[:1] + [-1] * 7
        below = [-1] * 4 + ranks[4:5] + [-1] * 3
        return ops.neighbor_exchange_v2(x, below, [0, 2, 9, 9], above, [2, 0, 1, 1])[:, :, -2:]

    split = (None, None, "h", None)
    torch.testing.assert_close(pw.manual(program, (split,), (split,), mesh={"h": 4})(x), x)


def test_a_corner_that_nobody_sends_is_zeros() -> None:
    def program(x: Tensor) -> Tensor:
        ranks = [rank if i % 2 == 0 else -1 for i, rank in enumerate(around(2, 2, pw.axis_index()))]
        return ops.neighbor_exchange_v2(x, ranks, [1] * 4, ranks, [1] * 4)

    split = (None, None, "h", "w")
    found = pw.manual(program, (split,), (split,), mesh={"h": 2, "w": 2})(torch.ones(1, 1, 4, 4))
    part = torch.ones(3, 3)
    part[2, 2] = 0
    assert torch.equal(found[0, 0], torch.cat([torch.cat([p, p.flip(1)], 1) for p in (part, part.flip(0))]))


# -- on processes


def convolve_part(rows: int, columns: int) -> None:
    pw.set_mesh({"h": rows, "w": columns})
    kernel, x = image(3, 2, 3, 5).requires_grad_(), image(1, 2, 8, 8).requires_grad_()
    whole = F.conv2d(x, kernel, padding=(1, 2))
    weights = torch.rand_like(whole)
    right = torch.autograd.grad((whole * weights).sum(), (x, kernel))

    def part(of: Tensor) -> Tensor:
        down, across = 8 // rows, 8 // columns
        i, j = pw.axis_index("h") * down, pw.axis_index("w") * across
        return of[:, :, i : i + down, j : j + across]

    mine = part(x.detach()).clone().requires_grad_()
    y = convolved(rows, columns, (1, 2))(mine, kernel)
    torch.testing.assert_close(y, part(whole), **EXACT)
    found = torch.autograd.grad((y * part(weights)).sum(), (mine, kernel))
    torch.testing.assert_close(found[0], part(right[0]), **EXACT)
    torch.testing.assert_close(ops.all_reduce(found[1]), right[1], **EXACT)


@pytest.mark.gloo
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 1), (2, 2)])
def test_processes_convolve_the_image(on_ranks: Any, rows: int, columns: int) -> None:
    on_ranks(rows * columns, convolve_part, rows, columns)


def send_unevenly() -> None:
    rank = pw.get_rank()
    x = torch.arange(3.0 + rank).requires_grad_()
    (came,) = ops.neighbor_exchange([x], [1 - rank], [1 - rank], [[4 - rank]])
    assert torch.equal(came, torch.arange(4.0 - rank))
    (came * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0 - rank))
    nothing: list[Tensor] = []
    came = (
        ops.neighbor_exchange([x, x.exp()], [1, 1], [], [])
        if rank == 0
        else ops.neighbor_exchange(nothing, [], [0, 0], [[3], [3]], dtype=torch.float32)
    )
    assert not came if rank == 0 else torch.equal(came[1], torch.arange(3.0).exp())
    exchange = ops.NeighborExchange([1 - rank], [1 - rank], [[4 - rank]], [[3 + rank]], torch.float32)
    assert torch.equal(exchange([x.detach()])[0], torch.arange(4.0 - rank))


@pytest.mark.gloo
def test_processes_exchange_tensors_of_other_sizes(on_ranks: Any) -> None:
    on_ranks(2, send_unevenly)


# -- errors


def manual(program: Any) -> Any:
    return pw.manual(program, ((None, None, "w", None),), None, mesh={"w": 2})(torch.ones(1, 1, 4, 4))


NOBODY = [-1] * 8


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (lambda x: ops.neighbor_exchange(x, [1], [1]), "neighbor_exchange: xs is .*; write a list of tensors"),
        (lambda x: ops.neighbor_exchange([x], [1, 0], [1, 0]), "send_rank_ids has 2 ranks for 1 tensors; write one"),
        (lambda x: ops.neighbor_exchange([x], [1], []), "0 tensors come, and 1 are sent; say by recv_shapes what"),
        (lambda x: ops.neighbor_exchange([x], [1], [1], []), "recv_shapes has 0 shapes for 1 ranks; write one"),
        (lambda x: ops.neighbor_exchange([x], [1], [1], [(2, "a")]), r"recv_shapes has \(2, 'a'\), which is no shape"),
        (lambda x: ops.neighbor_exchange([x], [2], [1]), "send_rank_ids has 2; the positions in the group are 0 to 1"),
        (lambda x: ops.neighbor_exchange([x], [1], [-1]), "recv_rank_ids has -1; the positions in the group are 0 to"),
        (lambda x: ops.neighbor_exchange([], [], [], []), "nothing is sent that would tell the dtype .* pass dtype="),
        (lambda x: ops.neighbor_exchange([x], [1], [1], dtype=torch.int8), "what is sent is torch.float32, and"),
        (lambda x: ops.neighbor_exchange([x, x.int()], [1, 1], [1, 1]), "tensors of several kinds are sent"),
        (lambda x: ops.neighbor_exchange_v2(x[0], NOBODY, [0] * 4, NOBODY, [0] * 4), r"\(N, C, H, W\), not one of"),
        (lambda x: ops.neighbor_exchange_v2(x, [-1] * 4, [0] * 4, NOBODY, [0] * 4), "send_rank_ids has 4 ranks; write"),
        (lambda x: ops.neighbor_exchange_v2(x, NOBODY, [0] * 3, NOBODY, [0] * 4), "send_lens is"),
        (lambda x: ops.neighbor_exchange_v2(x, [1] * 8, [3] * 4, NOBODY, [0] * 4), "send_lens has 3 rows for"),
        (lambda x: ops.neighbor_exchange_v2(x, [7] * 8, [1] * 4, NOBODY, [0] * 4), "send_rank_ids has 7; the"),
        (lambda x: ops.neighbor_exchange_v2(x, NOBODY, [0] * 4, NOBODY, [0] * 4, "NHWC"), "data_format is 'NHWC'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(program: Any, match: str) -> None:
    with pytest.raises(OperatorError, match=match):
        manual(program)


def test_what_is_sent_and_not_expected_is_refused() -> None:
    def program(x: Tensor) -> Any:
        return ops.neighbor_exchange([x], [1 - pw.axis_index()], [1 - pw.axis_index()], [[1]])[0]

    with pytest.raises(
        CaptureError, match=r"the rank at 0 along w sends float32\[1, 1, 2, 4\] to the one at 1, which exp"
    ):
        manual(program)
