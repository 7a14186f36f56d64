"""Convolutions that take the padding of their operands upon themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.ops.padded_convolution import padded_convolution

aten = torch.ops.aten


def targets(fn, *shapes):
    return [node.target for node in capture(fn, tuple(torch.rand(shape) for shape in shapes), {}).nodes]


IMAGE, WEIGHT = (1, 2, 6, 6), (2, 2, 3, 3)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_a_convolution_that_pads_is_one_operator(mode):
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode)
    expected = aten.conv2d.default if mode == "zeros" else padded_convolution
    assert targets(conv, IMAGE) == [expected]


def test_zeros_before_and_behind_are_added_to_those_of_the_convolution():
    def fn(x, w):
        return F.conv2d(F.pad(x, (0, 1, 2, 0)), w, padding=1, stride=(2, 1))

    (node,) = capture(fn, (torch.rand(IMAGE), torch.rand(WEIGHT)), {}).nodes
    assert node.target is padded_convolution
    assert node.args[3:8] == ([1, 2, 3, 1], "constant", 0.0, [2, 1], [1, 1])


def test_all_convolutions_that_read_a_padded_tensor_take_it():
    def fn(x, w):
        padded = F.pad(x, (1, 1, 1, 1), mode="circular")
        return F.conv2d(padded, w) + F.conv2d(padded, w.flip(0))

    assert targets(fn, IMAGE, WEIGHT).count(padded_convolution) == 2


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x, w: (p := F.pad(x, (1, 1, 1, 1)), F.conv2d(p, w)), id="the padded tensor is a result"),
        pytest.param(lambda x, w: F.conv2d(p := F.pad(x, (1, 1)), w).sum() + p.sum(), id="something else reads it"),
        pytest.param(lambda x, w: F.conv2d(F.pad(x, (1, 1), value=2.0), w, padding=1), id="two paddings"),
        pytest.param(lambda x, w: F.conv2d(F.pad(x, (0, 0, 0, 0, 0, 1)), w[:, :1].repeat(1, 3, 1, 1)), id="channels"),
        pytest.param(lambda x, w: F.conv2d(F.pad(x, (1, 1), value=float("nan")), w), id="no number"),
        pytest.param(lambda x, w: F.conv2d(w, F.pad(x, (1, 1)).view(2, 2, -1, 8)[:, :, :3, :3]), id="the weight"),
    ],
)
def test_other_padding_stays_by_itself(fn):
    found = targets(fn, IMAGE, WEIGHT)
    assert aten.pad.default in found
    assert padded_convolution not in found


def test_a_padded_convolution_computes_what_the_two_operators_do():
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (IMAGE, WEIGHT, (2,)))
    found = padded_convolution(x, w, b, [1, 2, 0, 3], "reflect", 0.0, [1, 2], [2, 1], 1)
    expected = F.conv2d(F.pad(x, (1, 2, 0, 3), mode="reflect"), w, b, (1, 2), 0, (2, 1))
    assert torch.equal(found, expected)
    for a, e in zip(
        torch.autograd.grad(found.sum(), (x, w, b)), torch.autograd.grad(expected.sum(), (x, w, b)), strict=True
    ):
        assert torch.equal(a, e)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_one_exchange_brings_the_padding_along(mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode).double()
    run = pw.shard(conv, mesh={"a": 4}, in_strategy=((None, None, "a", None),), out_strategy=((None, None, "a", None),))
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(run(x), F.conv2d(F.pad(x, (1, 1, 1, 1), mode=mode), conv.weight, conv.bias))
    assert [(str(c.kind), c.phase) for c in run.plan.collectives if c.tensor == "input"] == [
        ("exchange", "forward"),
        ("exchange", "backward"),
    ]


def test_a_circle_that_is_cut_is_cut_before_it_comes_round():
    def fn(x, w):
        return F.conv1d(F.pad(x, (-1, 2), mode="circular"), w)

    x, w = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(2, 2, 2, dtype=torch.float64)
    run = pw.shard(fn, {"x": (None, None, "a"), "w": (None, None, None)}, mesh={"a": 4})
    torch.testing.assert_close(run(x, w), fn(x, w))
