"""Each expansion computes what the operator that it replaces does: value, gradients, buffers, random numbers.

Those of a family with a test file of its own are there; here are the others.
"""

import pytest
import torch
import torch.nn.functional as F
from expansions import check, randn

from partway.propagation.capture.capture import capture

aten = torch.ops.aten


def written_into(z):
    out = torch.zeros_like(z)
    out[:, 1:3], out[2] = z[:, :2] * 2, z[0]
    return out


def two_sided(z):
    return torch.istft(z, 4, window=torch.ones(4).double(), onesided=False, return_complex=True)


@pytest.mark.parametrize(
    "fn",
    [
        written_into,
        two_sided,
        lambda z: torch.istft(z, 4, window=torch.ones(4).double(), onesided=False),
        lambda z: z.conj() * z[0],
        lambda z: (z @ z.mH).imag.neg(),
        lambda z: z.var(1),
        lambda z: torch.cat([part.reshape(-1) for part in torch.std_mean(z, 0, correction=0)]),
        lambda z: torch.linalg.vector_norm(z, dim=1),
        lambda z: torch.linalg.vector_norm(z, 3, dim=0, dtype=torch.complex128),
        lambda z: torch.linalg.vector_norm(z, torch.inf, keepdim=True),
        lambda z: F.pad(z, (1, 2), value=1.0),
        lambda z: aten.constant_pad_nd(z, [1, 1], 1 + 2j),
    ],
    ids=[
        "written_into", "istft", "istft_real", "conj", "imag", "var", "std_mean", "norm", "norm_3", "norm_inf", "pad",
        "pad_complex",
    ],
)  # fmt: skip
def test_complex_numbers(lab, fn):
    def of_parts(x):
        y = fn(torch.view_as_complex(x))
        return torch.view_as_real(y) if y.is_complex() else y

    x = randn(4, 6, 2)
    check(lab, of_parts, x)
    lab.check_optimum(capture(of_parts, (x,), {}), of_parts, (x,), lab.LINE)


@pytest.mark.parametrize(
    ("fn", "gone"),
    [
        (lambda x: torch.cat([torch.tensor([]), x], -2), aten.cat.default),
        (lambda x: torch.cat([x, torch.tensor([], dtype=torch.float64), 2 * x], 0), None),
        (lambda x: torch.cat([torch.tensor([], dtype=torch.float64), x.float()], -2), aten.cat.default),
        (lambda x: torch.concat([x, 2 * x], 1), aten.concat.default),
        (lambda x: torch.concatenate([x, 2 * x]), aten.concatenate.default),
        (lambda x: x.repeat_interleave(3, -1), aten.repeat_interleave.self_int),
        (lambda x: x.repeat_interleave(2), aten.repeat_interleave.self_int),
        (lambda x: x.float().type_as(x) * x, aten.type_as.default),
        (lambda x: (2 * x).copy_(x.sum(0)) + x, aten.copy.default),
        (lambda x: (2 * x.float()).copy_(x), aten.copy.default),
        (lambda x: (2 * x).fill_(x.sum()) + x, aten.fill.Tensor),
        (lambda x: (2 * x).fill_(3.0) + x, aten.fill.Scalar),
        (lambda x: torch._weight_norm(x, x.sum(0, keepdim=True), 1), aten._weight_norm.default),
        (lambda x: torch._weight_norm(x, x.sum(), -1), aten._weight_norm.default),
    ],
)
def test_what_is_written_with_other_operators(lab, fn, gone):
    check(lab, fn, randn(4, 3), gone=gone)


@pytest.mark.parametrize(
    ("fn", "target"),
    [
        (aten.__and__, aten.bitwise_and.Tensor),
        (aten.__or__, aten.bitwise_or.Tensor),
        (aten.__xor__, aten.bitwise_xor.Tensor),
        (aten.divide, aten.div.Tensor),
        (aten.multiply, aten.mul.Tensor),
        (aten.subtract, aten.sub.Tensor),
    ],
)
def test_an_operator_by_another_name_is_the_operator(fn, target):
    args = torch.tensor([5, 6]), torch.tensor([3, 4])

    def call(x, y):
        return fn(x, y)

    graph = capture(call, args, {})
    assert [node.target for node in graph.nodes] == [target]
    assert torch.equal(torch.fx.Interpreter(graph.module).run(*args)[0], fn(*args))
