"""The operators that look up an index in a dim that may be split, by themselves."""

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.capture.capture import capture
from partway.propagation.ops import cross_entropy
from partway.propagation.ops.cross_entropy import class_terms
from partway.propagation.ops.indexing import part_index, position

aten = torch.ops.aten


def drawn(*shape, classes, dtype=torch.float64, scale=1.0, ignored=-100):
    """Logits with the classes in dim 1, and targets of which a third is ignored."""
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(shape[0], classes, *shape[1:], generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, classes, shape, generator=generator)
    return x.requires_grad_(), target.masked_fill(torch.rand(shape, generator=generator) < 1 / 3, ignored)


def captured(loss, x, target):
    """What the captured graph of `loss` computes, and the gradient of its weighed sum."""
    value = torch.fx.Interpreter(capture(loss, (x, target), {}).module).run(x, target)[0]
    return value, gradient(value, x)


def gradient(value, x):
    return torch.autograd.grad((value * torch.linspace(1, 2, value.numel()).view(value.shape)).sum(), x)[0]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1e4])
@pytest.mark.parametrize("shape", [(6,), (4, 3), (2, 3, 5)])
@pytest.mark.parametrize("at_once", [2**18, pytest.param(8, marks=pytest.mark.slow)])
def test_cross_entropy_is_as_exact_as_torchs(monkeypatch, shape, scale, ignored, reduction, at_once):
    monkeypatch.setitem(cross_entropy._AT_ONCE, "cpu", at_once)
    x, target = drawn(*shape, classes=7, scale=scale, ignored=ignored)

    def loss(x, target):
        return F.cross_entropy(x, target, ignore_index=ignored, reduction=reduction)

    found, slope = captured(loss, x, target)
    expected = loss(x, target)
    assert {node.target for node in capture(loss, (x, target), {}).nodes} & {class_terms}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, gradient(expected, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_low_precision_is_computed_in_float32_and_cast_back(dtype, reduction):
    x, target = drawn(16, classes=33, dtype=dtype)

    def loss(x, target):
        return F.cross_entropy(x, target, reduction=reduction)

    found, slope = captured(loss, x, target)
    exact = x.detach().double().requires_grad_()
    expected = loss(exact, target)
    rounding = torch.finfo(dtype).eps
    assert (found.dtype, slope.dtype) == (dtype, dtype)
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-6)
    torch.testing.assert_close(slope.double(), gradient(expected, exact), rtol=2 * rounding, atol=1e-6)


def test_of_the_size_of_the_logits_only_the_logits_are_kept():
    x, target = drawn(64, classes=512, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        class_terms(x, x.detach().amax(1), target, None, [0, 512], -100)
    large = [t for t in kept if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]


def test_parts_of_the_classes_add_up():
    x, target = drawn(5, 3, classes=8)
    largest = x.detach().amax(1)
    whole = class_terms(x, largest, target, None, [0, 8], -100)
    bounds = [0, 2, 4, 6, 8]
    parts = [class_terms(p, largest, target, torch.tensor(i), bounds, -100) for i, p in enumerate(x.chunk(4, 1))]
    for i in range(2):
        torch.testing.assert_close(sum(part[i] for part in parts), whole[i], rtol=1e-14, atol=1e-14)


def test_the_index_in_a_part():
    index = torch.tensor([[0, 3], [4, 7]], dtype=torch.int32)
    assert part_index(index, torch.tensor(0), [0, 4, 8]).tolist() == [[0, 3], [-1, -1]]
    assert part_index(index, torch.tensor(1), [0, 4, 8]).tolist() == [[-1, -1], [0, 3]]
    assert part_index(index, torch.tensor(1), [0, 4, 8]).dtype is torch.int64
    assert part_index(torch.tensor([-1, 2, -4]), torch.tensor(1), [0, 2, 5], True).tolist() == [2, 0, -1]


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_index_out_of_range_is_an_error(wrong):
    message = f"index {wrong} is out of range of a dim of size 8"
    with pytest.raises(IndexError, match=message):
        part_index(torch.tensor([0, wrong]), torch.tensor(0), [0, 4, 8])
    x = torch.rand(2, 8)
    with pytest.raises(IndexError, match=message):
        class_terms(x, x.amax(1), torch.tensor([0, wrong]), None, [0, 8], -100)


def test_a_position_has_a_meaning_only_on_a_rank():
    with pytest.raises(NotImplementedError, match="partway::position"):
        position(["x"], [2])


def log_softmax_and_nll(x, target):
    y = x.log_softmax(1)
    return y.sum(), F.nll_loss(y, target)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda x, t: F.cross_entropy(x, t, weight=x[0].detach().abs()),
        lambda x, t: F.cross_entropy(x, x.detach().softmax(1)),
        F.nll_loss,
        lambda x, t: F.nll_loss(x.log_softmax(0), t),
        lambda x, t: F.nll_loss(x.log_softmax(1), t, weight=x[0].detach().abs()),
        log_softmax_and_nll,
    ],
)
def test_other_losses_keep_their_classes_whole(loss):
    graph = capture(loss, drawn(4, classes=3), {})
    targets = {node.target for node in graph.nodes}
    assert class_terms not in targets
    assert targets & {aten.cross_entropy_loss.default, aten.nll_loss_nd.default}


def test_nll_of_log_softmax_is_cross_entropy():
    x, target = drawn(4, 3, classes=5)

    def loss(x, target):
        return F.nll_loss(x.log_softmax(1), target, reduction="sum")

    targets = {node.target for node in capture(loss, (x, target), {}).nodes}
    assert class_terms in targets
    assert not targets & {aten.log_softmax.int, aten.nll_loss_nd.default}
    found, slope = captured(loss, x, target)
    torch.testing.assert_close(found, loss(x, target), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, gradient(loss(x, target), x), rtol=1e-12, atol=1e-12)
