"""Dropout; what each operator draws is tested in tests/propagation/ops/test_random_numbers.py."""

import pytest
import torch
import torch.nn.functional as F
from expansions import SEED, check, randn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import CaptureError, Layout, Shard

BY_TORCH = CaptureOptions(random_numbers=RandomNumbers.TORCH)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.3),
        lambda x: F.dropout(x, 0.9) + F.dropout(x, 0.1),
        lambda x: nn.Dropout(0.5)(x * 2),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.4, training=False),
        lambda x: F.dropout(F.dropout(x, 0.5).float(), 0.5),
    ],
)
def test_dropout_draws_the_numbers_that_pytorch_draws(lab, fn):
    check(lab, fn, randn(8, 6))


def test_dropout_of_a_split_tensor_is_that_of_the_whole(lab):
    x = randn(8, 6)

    def fn(x):
        return F.dropout(x, 0.5) * x

    split = Layout(lab.LINE, (Shard(0),))
    problem = lab.problem_of(fn, (x,), lab.LINE, {"x": ((split,), "by hand"), "result": ((split,), "by hand")})
    step = lab.compiled(problem, dynamic_programming(problem).choice)
    torch.manual_seed(SEED)
    found = lab.value_and_gradients(step([x]), [x])
    torch.manual_seed(SEED)
    lab.assert_same(found, lab.value_and_gradients([fn(x)], [x]))


def on_cuda(*shape):
    with FakeTensorMode():
        return torch.empty(*shape, device="cuda")


@pytest.mark.parametrize("x", [on_cuda(8, 6), on_cuda(8, 6).t(), on_cuda(1, 6)])
def test_on_cuda_a_kernel_of_its_own_draws_for_a_tensor_that_lies_as_the_whole(x):
    graph = capture(lambda x: F.dropout(x, 0.3), (x,), {}, BY_TORCH)
    (drawn,) = (node for node in graph.nodes if node.target is torch.ops.aten.native_dropout.default)
    assert drawn.args[1:] == (0.3, True)
    assert drawn.args[0].meta["val"].stride() == x.stride()


def test_on_cuda_dropout_of_what_is_not_dense_is_refused():
    message = r"not dense \(its shape is \[8\], its strides \(6,\)\) draws other numbers on CUDA"
    with pytest.raises(CaptureError, match=message):
        capture(lambda x: F.dropout(x.unbind(1)[0], 0.3), (on_cuda(8, 6),), {}, BY_TORCH)


def test_on_cuda_attention_that_drops_is_refused():
    q = on_cuda(2, 4, 8, 16)
    with pytest.raises(CaptureError, match=r"with dropout_p=0\.2 draws its mask inside of a fused kernel on cuda"):
        capture(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2), (q,), {}, BY_TORCH)
    capture(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2), (q,), {}, CaptureOptions())
