"""Losses, as PyTorch computes them, and in parts."""

import random

import pytest
import torch
import torch.nn.functional as F
from cases import case, index, real, tensors_of
from expansions import check, check_split, integers, randn, run

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.ops.cross_entropy import class_terms

aten = torch.ops.aten


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_cross_entropy(lab, reduction, smoothing, weighted, ignored):
    target = integers(5, 8)
    target[[2, 5]] = ignored if ignored < 0 else target[[2, 5]]
    weight = torch.rand(5, dtype=torch.float64) + 0.5 if weighted else None

    def loss(x, t):
        return F.cross_entropy(
            x, t, weight=weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing
        )

    check_split(lab, loss, randn(8, 5), target)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5, 2)])
@pytest.mark.parametrize("classes", [False, True])
def test_cross_entropy_of_images_and_of_probabilities(lab, shape, classes, weighted, smoothing):
    positions = (shape[0], *shape[2:])
    target = randn(*shape, grad=False).softmax(1) if classes else integers(3, *positions)
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else None

    def loss(x, t):
        return F.cross_entropy(x, t, weight=weight, label_smoothing=smoothing)

    check_split(lab, loss, randn(*shape), target)


def test_cross_entropy_of_one_position(lab):
    check(lab, F.cross_entropy, randn(5), integers(5))
    check(lab, F.cross_entropy, randn(5), randn(5, grad=False).softmax(0))


def test_cross_entropy_without_a_valid_target_is_not_a_number(lab):
    ignored = torch.full((4,), -100)
    graph = capture(F.cross_entropy, (randn(4, 3), ignored), {})
    (found,) = run(graph, F.cross_entropy, (randn(4, 3), ignored)).values()
    assert found.isnan()
    assert F.cross_entropy(randn(4, 3), ignored).isnan()


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(lab, weighted):
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else None

    def loss(x, t):
        return F.nll_loss(x.log_softmax(1), t, weight=weight, ignore_index=2)

    for shape in ((6, 3), (4, 3, 2)):
        target = integers(3, shape[0], *shape[2:])
        check_split(lab, loss, randn(*shape), target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.soft_margin_loss,
        lambda x, t, reduction: F.smooth_l1_loss(x, t, beta=0.3, reduction=reduction),
        lambda x, t, reduction: F.huber_loss(x, t, delta=0.3, reduction=reduction),
        lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
        lambda x, t, reduction: F.binary_cross_entropy(
            x.sigmoid(), t.sigmoid(), weight=torch.arange(1, 4).double(), reduction=reduction
        ),
        lambda x, t, reduction: F.binary_cross_entropy_with_logits(
            x, t.sigmoid(), pos_weight=torch.arange(1, 4).double(), reduction=reduction
        ),
        lambda x, t, reduction: F.kl_div(x, t.sigmoid(), reduction=reduction.replace("mean", "batchmean")),
        lambda x, t, reduction: aten.kl_div(x, t, ["none", "mean", "sum"].index(reduction), log_target=True),
    ],
)
def test_pointwise_losses(lab, loss, reduction):
    def fn(x, t):
        return loss(x, t, reduction=reduction)

    check_split(lab, fn, randn(4, 3), randn(4, 3, grad=False))


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_a_pointwise_loss_counts_the_elements_after_broadcasting(lab):
    check(lab, F.mse_loss, randn(4, 3), randn(4, 1))
    check(lab, F.l1_loss, randn(4, 1), randn(3))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_linear_cross_entropy_in_chunks_splits_like_any(reduction, lab):
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options")
    chunks = options.LinearCrossEntropyOptions(batch_chunk_size=2)

    def f(x, w, b, t):
        return F.linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, options=chunks)

    args = tensors_of(case(None, "", f, real(4, 4), real(4, 4), real(4), index(4, 4)))
    assert lab.check_options(capture(f, args, {}), f, args, class_terms, lab.LINE, 12, random.Random(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_to_float32_for_the_loss_is_not_made(dtype):
    """The loss computes in float32 by itself, and the cast would be the largest tensor of a step."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 3, 5, dtype=dtype, requires_grad=True), torch.randint(5, (2, 3))

    def loss(x, target):
        return F.cross_entropy(x.float()[:, :2].reshape(-1, 5), target[:, :2].reshape(-1))

    graph = capture(loss, (x, target), {})
    terms = next(node for node in graph.nodes if node.target is class_terms)
    assert terms.args[0].meta["val"].dtype is dtype
    assert not [n for n in graph.nodes if n.target is torch.ops.aten._to_copy.default and n.meta["val"].dim() > 1]
    planned = pw.shard(loss, mesh={"d": 2})
    assert planned(x, target).dtype is torch.float32
    found, expected = (torch.autograd.grad(f(x, target), x)[0] for f in (planned, loss))
    torch.testing.assert_close(planned(x, target), loss(x, target))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


def test_a_cast_that_others_read_is_made_once():
    def loss(x, target):
        wide = x.float()
        return F.cross_entropy(wide, target) + wide.logsumexp(1).square().mean()

    graph = capture(loss, (torch.randn(4, 5, dtype=torch.bfloat16), torch.randint(5, (4,))), {})
    assert next(n for n in graph.nodes if n.target is class_terms).args[0].meta["val"].dtype is torch.float32
