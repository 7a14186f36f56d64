"""The backward of a torch.autograd.Function is that of the graph, though it is not its forward's."""

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import partway as pw
from partway.propagation.capture.capture import capture
from partway.strategy import CaptureError


class Rounded(Function):
    """Rounds, and lets the gradient through where numbers are small."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class Reversed(Function):
    """A product whose gradients are turned round, by a number, and its largest places."""

    @staticmethod
    def forward(x, w, by=2.0):
        return (x * by) @ w, x.argmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, ctx.by = inputs
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return -ctx.by * (g @ w.t()), 3 * (x.t() @ g) if ctx.needs_input_grad[1] else None, None


class Both(Function):
    """Two results, of which each tells its own part of the gradient; none for the second argument."""

    @staticmethod
    def forward(ctx, x, y):
        return x.sin() + y, x.sum(0, keepdim=True)

    @staticmethod
    def backward(ctx, g, h):
        return 5 * g + 7 * h, None


class Through(Function):
    """A straight-through estimator: the gradient is handed on as it is, also to what is only broadcast."""

    @staticmethod
    def forward(ctx, x, y):
        return x.round() + y, x.sum()

    @staticmethod
    def backward(ctx, g, _):
        return g, g


class Saved(Function):
    """A loss whose forward has computed the gradient, and whose backward leaves out the one it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(2 * x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0]


class Stopped(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


class Clipped(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


class Written(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, g):
        return g


rounded = Rounded.apply  # kept before any capture, as people do


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (rounded(2 * x) * x).sum() + w.sum(),
        lambda x, w: (Rounded.apply(2 * x) * x).sum() + w.sum(),
        lambda x, w: Reversed.apply(x.sin(), w)[0].square().sum(),
        lambda x, w: Reversed.apply(x, w, 3.0)[0].square().sum() * (1 + Reversed.apply(x, w)[1].sum()),
        lambda x, w: (Reversed.apply(Rounded.apply(x), w)[0] ** 3).sum(),
        lambda x, w: (Both.apply(x, w[0, 0])[0] ** 2).sum() + w.sum(),
        lambda x, w: (Through.apply(3 * x, w[0])[0] * x).sum(),
        lambda x, w: (Stopped.apply(x) * x).sum() + w.sum(),
    ],
)
@pytest.mark.parametrize("split", [0, 1])
def test_its_gradient_is_that_of_one_device(fn, split):
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    expected = fn(x, w)
    gradients = torch.autograd.grad(expected, (x, w))
    axes = ["a" if dim == split else None for dim in range(2)]
    with torch.random.fork_rng():
        found = pw.shard(fn, mesh={"a": 4}, in_strategy=(tuple(axes), None))(x, w)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (x, w)), gradients)


def test_without_gradients_it_is_its_forward():
    def fn(x):
        with torch.no_grad():
            return Clipped.apply(x) + 1

    assert {str(node.target) for node in capture(fn, (torch.ones(3),), {}).nodes} <= {
        "aten.reshape.default", "aten.add.Tensor", "aten.detach.default",
    }  # fmt: skip


def test_a_function_is_as_it_was_after_the_capture():
    before = Function.__dict__["apply"]
    capture(Rounded.apply, (torch.ones(3),), {})
    assert Function.__dict__["apply"] is before


def test_a_backward_that_leaves_its_gradient_out_is_refused():
    with pytest.raises(CaptureError, match="not linear in the gradient it is given, as one that clips it, or leaves"):
        capture(lambda x: Saved.apply(x) * 3, (torch.ones(3, requires_grad=True),), {})


def test_a_backward_that_is_not_linear_is_refused():
    with pytest.raises(CaptureError, match=r"a backward that is not linear in the gradient it is given(.|\n)*Clipped"):
        capture(lambda x: Clipped.apply(x).sum(), (torch.ones(3, requires_grad=True),), {})


def test_a_forward_that_writes_to_its_arguments_is_refused():
    with pytest.raises(CaptureError, match=r"Written, a torch\.autograd\.Function, writes to its arguments in place"):
        capture(lambda x: Written.apply(x * 1).sum(), (torch.ones(3),), {})
