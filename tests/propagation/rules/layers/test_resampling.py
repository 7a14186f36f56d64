"""Where interpolation takes its elements from, against PyTorch; and dtypes in which operators with windows round."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

import partway as pw
from partway.propagation.rules.layers.resampling import Enlarged, Sampling, taps

aten = torch.ops.aten
MODES = ("nearest", "nearest-exact", "linear", "cubic")
SCALES = st.one_of(st.none(), st.sampled_from([2.0, 3.0, 1.1, 0.5, 1.5, 49.0]), st.floats(0.3, 4.0))


def interpolated(x, mode, made, scale, corners):
    """What PyTorch makes of a series."""
    size, scales = (None, [scale]) if scale else ([made], None)
    match mode:
        case "nearest":
            return aten.upsample_nearest1d.vec(x, size, scales)
        case "nearest-exact":
            return aten._upsample_nearest_exact1d.vec(x, size, scales)
        case "linear":
            return aten.upsample_linear1d.vec(x, size, corners, scales)
    row = x.unsqueeze(2)
    return aten.upsample_bicubic2d.vec(row, size and [1, *size], corners, scales and [1.0, *scales]).squeeze(2)


def resampled(x, sampling):
    """The sum over all places, times their weights."""
    places, weights = (torch.from_numpy(table.copy()) for table in taps(sampling))
    return (x[..., places] * weights.to(x.dtype)).sum(-1)


@given(st.integers(1, 60), st.integers(1, 120), SCALES, st.sampled_from(MODES), st.booleans(), st.booleans())
def test_the_places_and_weights_are_pytorchs(held, made, scale, mode, corners, single):
    assume(not (scale and held * scale < 1))
    corners = corners and "nearest" not in mode
    dtype = torch.float32 if single else torch.float64
    x = torch.randn(1, 2, held, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = interpolated(x, mode, made, scale, corners)
    sampling = Sampling(held, expected.shape[-1], scale, mode, corners, single)
    found = resampled(x, sampling)
    exact = "nearest" in mode
    tolerance = 0.0 if exact else 1e-4 if single else 1e-11
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if sampling.steady:
        weight = torch.linspace(1, 2, found.numel(), dtype=dtype).view(found.shape)
        (gradient,), (pytorchs,) = (torch.autograd.grad(y, x, weight) for y in (found, expected))
        torch.testing.assert_close(gradient, pytorchs, rtol=1e-3 if single else 1e-11, atol=1e-3 if single else 1e-11)


def test_pytorchs_backward_is_not_that_of_its_forward_where_a_dim_is_not_steady():
    sampling = Sampling(5, 5, 1.1, "nearest", False, False)
    assert not sampling.steady
    x = torch.randn(1, 1, 5, dtype=torch.float64, requires_grad=True)
    y = interpolated(x, "nearest", None, 1.1, False)
    assert torch.equal(y, resampled(x, sampling))
    (found,) = torch.autograd.grad(y.sum(), x)
    (true,) = torch.autograd.grad(resampled(x, sampling).sum(), x)
    assert not torch.equal(found, true)


@pytest.mark.parametrize(
    ("sampling", "ratio"),
    [
        (Sampling(4, 8, None, "linear", False, False), 2),
        (Sampling(4, 8, 2.0, "cubic", False, False), 2),
        (Sampling(4, 12, None, "nearest", False, True), 3),
        (Sampling(4, 8, None, "linear", True, False), 0),
        (Sampling(4, 9, None, "linear", False, False), 0),
        (Sampling(4, 8, 2.1, "linear", False, False), 0),
        (Sampling(8, 4, None, "nearest", False, False), 0),
    ],
)
def test_a_part_is_enlarged_as_the_whole_is_by_whole_numbers(sampling, ratio):
    assert sampling.ratio == ratio


@given(st.integers(2, 20), st.integers(1, 5), st.sampled_from(MODES), st.data())
def test_an_enlarged_range_reaches_all_of_its_places(held, ratio, mode, data):
    sampling = Sampling(held, held * ratio, None, mode, False, False)
    start = data.draw(st.integers(0, sampling.made - 1))
    stop = data.draw(st.integers(start + 1, sampling.made))
    margin = {"linear": 1, "cubic": 2}.get(mode, 0)
    begin, end = Enlarged(ratio, margin)(start, stop)
    first, last = sampling(start, stop)
    assert max(begin, 0) <= first
    assert last <= min(end, held)


# -- Through the whole of Partway, in other dtypes


def run_split(fn, x, strategy):
    """The value and the gradient of `fn` split by `strategy`, and of `fn` itself; and the plan."""
    run = pw.shard(fn, mesh={"a": 4}, in_strategy=(strategy,), out_strategy=(strategy,))
    found = []
    for call in (run, fn):
        leaf = x.detach().clone()
        leaf.requires_grad_(x.dtype.is_floating_point)
        y = call(leaf)
        found.append((y, torch.autograd.grad(y.sum(), leaf)[0] if leaf.requires_grad else None))
    return *found, run.plan


CALLS = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, size=(12, 8), mode="bilinear"),
    "corners": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
    "mean": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "largest": lambda x: F.max_pool2d(x, 3, 1, 1),
    "reflected": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_as_on_one_device(name, dtype):
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    (found, gradient), (expected, whole), plan = run_split(CALLS[name], x, (None, None, "a", None))
    assert found.dtype == dtype
    kinds = {str(c.kind) for c in plan.collectives}
    assert kinds <= {"exchange"}
    assert kinds or name == "nearest"  # of which slices are made of slices
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    torch.testing.assert_close(gradient, whole, rtol=close, atol=close)


def test_whole_numbers_are_split_where_nothing_is_rounded():
    x = torch.randint(-9, 9, (1, 2, 8, 8), generator=torch.Generator().manual_seed(0))
    (found, _), (expected, _), plan = run_split(CALLS["largest"], x, (None, None, "a", None))
    assert torch.equal(found, expected)
    assert "exchange" in {str(c.kind) for c in plan.collectives}
    for way in ((None, None, "a", None), (None, None, None, "a")):
        (found, _), (expected, _), _ = run_split(CALLS["mean"], x, way)
        assert torch.equal(found, expected)
    pixels = x.add(9).to(torch.uint8)
    for name in ("nearest", "bilinear"):
        (found, _), (expected, _), _ = run_split(CALLS[name], pixels, (None, None, "a", None))
        assert torch.equal(found, expected)
