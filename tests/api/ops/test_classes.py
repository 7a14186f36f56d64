"""The collectives as MindSpore has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partway as pw
from partway import ops
from partway.strategy import OperatorError, StrategyError

MESH = {"dp": 2, "tp": 2}
NOBODY, NOTHING = [-1] * 8, [0] * 4


def values() -> torch.Tensor:
    return torch.randn(8, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("made", "function"),
    [
        (ops.AllReduce(), ops.all_reduce),
        (ops.AllReduce("max", "tp"), lambda x: ops.all_reduce(x, "max", "tp")),
        (ops.AllGather(("dp", "tp")), ops.all_gather),
        (ops.ReduceScatter("mean", "dp"), lambda x: ops.reduce_scatter(x, "mean", group="dp")),
        (ops.AlltoAll(2, 0, 2, "tp"), lambda x: ops.all_to_all(x, 0, 2, "tp")),
        (ops.AlltoAll(split_count=4, split_dim=-2, concat_dim=0), lambda x: ops.all_to_all(x, -2, 0)),
        (lambda x: ops.Broadcast(1, "tp")((x, x.exp()))[1], lambda x: ops.broadcast(x, 1, "tp").exp()),
        (
            lambda x: (
                ops.NeighborExchange([1], [1], [[2, 4, 6]], [[2, 4, 6]], torch.float64, "tp")([x])[0]
                if pw.axis_index("tp") == 0
                else ops.NeighborExchange([0], [0], [[2, 4, 6]], [[2, 4, 6]], torch.float64, "tp")((x,))[0]
            ),
            lambda x: ops.permute(x, [(0, 1), (1, 0)], "tp"),
        ),
    ],
)
def test_they_compute_what_the_functions_do(made: Any, function: Any) -> None:
    split = ((("dp", "tp"), None, None),)
    results = []
    for program in (made, function):
        x = values().requires_grad_()
        y = pw.manual(lambda x, program=program: program(x), split, split, mesh=MESH)(x)
        results.append((y, torch.autograd.grad((y * y.detach().sin()).sum(), x)[0]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_they_are_values() -> None:
    assert ops.AllReduce("max", "tp") == ops.AllReduce("max", group="tp")
    assert str(ops.AllReduce()) == "AllReduce(op='sum', group=None)"
    with pytest.raises(AttributeError):
        ops.AllReduce().op = "max"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ops.AllReduce("average"), OperatorError, "AllReduce: op is 'average'; write one of 'sum'"),
        (lambda: ops.AllReduce(group=3), StrategyError, "a group is the name of a mesh axis, a tuple of several"),
        (lambda: ops.AllGather([]), StrategyError, "a group is the name of a mesh axis, a tuple of several"),
        (lambda: ops.ReduceScatter("sum", ("a", "a")), StrategyError, "names an axis twice; name each once"),
        (lambda: ops.Broadcast(-1), OperatorError, "Broadcast: root_rank is -1, which is no position in a group"),
        (lambda: ops.Broadcast("tp"), OperatorError, "Broadcast: root_rank is 'tp', which is no position in a group"),
        (lambda: ops.AlltoAll(0, 0, 1), OperatorError, "AlltoAll: split_count is 0; write a whole number"),
        (lambda: ops.AlltoAll(2, 0.5, 1), OperatorError, "AlltoAll: split_dim is 0.5; write a whole number"),
        (
            lambda: ops.NeighborExchange([0], [0], [[2]], [[2]], "float32"), OperatorError,
            "NeighborExchange: recv_type is 'float32'; write a dtype, as torch.float32",
        ),
        (
            lambda: ops.NeighborExchange([0, 1], [0], [[2]], [[2]], torch.float32), OperatorError,
            "NeighborExchange: send_rank_ids has 2 ranks, and send_shapes 1 shapes; write one for each",
        ),
        (
            lambda: ops.NeighborExchange([-1], [0], [[2]], [[2]], torch.float32), OperatorError,
            "NeighborExchange: send_rank_ids has -1, which is no position in a group",
        ),
        (
            lambda: ops.NeighborExchange([0], [0], [2], [[2]], torch.float32), OperatorError,
            "NeighborExchange: recv_shapes has 2, which is no shape",
        ),
        (
            lambda: ops.NeighborExchangeV2([0] * 7, NOTHING, NOBODY, NOTHING), OperatorError,
            "NeighborExchangeV2: send_rank_ids has 7 ranks; write one for each of top, top right, right, bottom right",
        ),
        (
            lambda: ops.NeighborExchangeV2(NOBODY, NOTHING, NOBODY, [1, 1, 1]), OperatorError,
            r"NeighborExchangeV2: recv_lens is \[1, 1, 1\]; write how many for the top, bottom, left, right",
        ),
        (
            lambda: ops.NeighborExchangeV2(NOBODY, NOTHING, NOBODY, NOTHING, "NHWC"), OperatorError,
            "NeighborExchangeV2: data_format is 'NHWC'; write 'NCHW', the one there is",
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(make: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (ops.Broadcast(0), r"Broadcast takes a tuple of tensors, not a tensor; call it with \(x,\), and take \[0\]"),
        (ops.AlltoAll(3, 0, 1), "AlltoAll: split_count is 3, and the group has 4 ranks; make them equal"),
        (
            lambda x: ops.NeighborExchange([0], [0], [[2]], [[2]], torch.float64)([x]),
            r"NeighborExchange: tensor 0 has the shape \[8, 4, 6\], and send_shapes says \[2\]",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(program: Any, match: str) -> None:
    with pytest.raises(OperatorError, match=match):
        pw.manual(lambda x: program(x), mesh=MESH)(values())  # noqa: PLW0108 - a class has no __name__
