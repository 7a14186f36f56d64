"""What a function asks of the values of its tensors: it takes the course that it takes on one device, in every call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partway as pw
from partway.requests.request import engine_of

MESH = {"x": 4}


def outcome(fn: Callable[..., Any], *given: Tensor) -> Any:
    """What a call gives, and the gradients of its inputs and parameters; or what it raises."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    owned = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    try:
        result = fn(*inputs)
    except Exception as error:
        return (
            f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else repr(error)
        )  # pytest adds lines
    tensors = [*inputs, *owned]
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result, None
    sources = [t for t in tensors if t.requires_grad]
    return result.detach(), torch.autograd.grad(result.square().sum(), sources, allow_unused=True)


def assert_takes_every_course(fn: Any, calls: list[tuple[Tensor, ...]], courses: int, **given: Any) -> Any:
    """Every call, in turn and then again, does what it does on one device."""
    plain = copy.deepcopy(fn)
    sharded = pw.shard(fn, mesh=MESH, **given)
    for call in (*calls, *calls):
        found, expected = outcome(sharded, *call), outcome(plain, *call)
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (
        len(engine_of(sharded).last.courses if isinstance(fn, nn.Module) else sharded._engine.last.courses) == courses
    )
    return sharded


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- conditions


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x.relu() - x


def writes_before_it_asks(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 1.0
    return y * 2 if (y[0] == 1).all() and (x[1] > 0).any() else y * 3


def asks_in_a_composite(x: Tensor) -> Tensor:
    return x * 2 if torch.allclose(x, x.abs()) else x * 3


def asks_again(x: Tensor) -> Tensor:
    if x.max() > 0:
        return x * 2 if x.min() > 0 else x * 3
    return x.cos() if x.min() < -1 else x.sin()


@pytest.mark.parametrize("fn", [branches, writes_before_it_asks, asks_in_a_composite])
def test_a_branch_on_values_is_taken_as_on_one_device(fn: Any) -> None:
    x = wide(8, 3).abs() + 1
    assert_takes_every_course(fn, [(x,), (-x,), (2 * x,)], 2, in_strategy=(("x", None),))


def test_a_question_after_an_answer_is_its_own() -> None:
    x = wide(8, 3).abs()
    calls = [(x,), (x - 0.5,), (-x / 10,), (-x - 1,)]
    assert_takes_every_course(asks_again, calls, 4, in_strategy=(("x", None),))


def test_a_causal_mask_may_be_given_as_a_tensor() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layers(x, mask=mask)

    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    calls = [(wide(4, 5, 8), causal), (wide(4, 5, 8), torch.zeros(5, 5, dtype=torch.float64))]
    given = {
        "in_strategy": (("x", None, None), None),
        "parameter_plan": {"layers.layers.0.linear1.weight": ("x", None)},
    }
    assert_takes_every_course(Encoder().double(), calls, 2, **given)


def test_a_transformer_takes_masks() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
            return self.both(source, target, src_mask=mask, tgt_mask=mask, memory_mask=mask)

    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    calls = [(wide(4, 4, 8), wide(4, 4, 8), causal), (wide(4, 4, 8), wide(4, 4, 8), wide(4, 4))]
    assert_takes_every_course(Pair().double(), calls, 2, in_strategy=(("x", None, None), None, None))


# -- checks: their errors are the caller's own


def asserts(x: Tensor) -> Tensor:
    assert (x > 0).all(), "x has to be positive"
    return x.log()


def asserts_equal(x: Tensor) -> Tensor:
    assert torch.equal(x, x.abs()), "x has a sign"
    return x.sqrt()


def raises(x: Tensor) -> Tensor:
    if torch.isnan(x).any():
        raise FloatingPointError("x is not a number")
    return x * 2


@pytest.mark.parametrize("fn", [asserts, asserts_equal, raises])
def test_a_check_of_values_lets_pass_and_raises_as_on_one_device(fn: Any) -> None:
    x = wide(8, 3).abs() + 1
    assert_takes_every_course(fn, [(x,), (x * -torch.nan,), (x + 1,)], 1, in_strategy=(("x", None),))


def test_a_check_that_fails_in_the_first_call_raises_the_callers_own_error() -> None:
    f: Any = pw.shard(asserts, mesh=MESH)
    with pytest.raises(AssertionError, match=r"^x has to be positive"):
        f(-torch.ones(8, 3))
    assert f(torch.ones(8, 3)).sum() == 0


def test_gaussian_loss_looks_whether_its_variances_are_positive() -> None:
    mean, target, variance = wide(8, 3), wide(8, 3), wide(8, 3).abs()
    for fn in (nn.GaussianNLLLoss(), nn.GaussianNLLLoss(full=True, reduction="sum")):
        assert_takes_every_course(fn, [(mean, target, variance), (mean, target, -variance)], 1)


def test_distributions_look_whether_they_are_valid() -> None:
    def density(x: Tensor, deviation: Tensor) -> Tensor:
        return torch.distributions.Normal(x, deviation).log_prob(x + 1)

    x = wide(8, 3)
    f: Any = pw.shard(density, mesh=MESH, in_strategy=(("x", None), None))
    torch.testing.assert_close(outcome(f, x, x.abs()), outcome(density, x, x.abs()), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"Expected parameter scale .* to satisfy the constraint GreaterThan"):
        f(x, x)


@pytest.mark.parametrize("asked", [None, True])
def test_a_distribution_of_what_a_net_computes_is_checked_if_it_is_asked_for(asked: bool | None) -> None:
    def policy(x: Tensor, w: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=x @ w, validate_args=asked).entropy()

    x, w = wide(8, 3), wide(3, 5)
    f: Any = pw.shard(policy, mesh=MESH, in_strategy=(("x", None), None))
    torch.testing.assert_close(outcome(f, x, w), outcome(policy, x, w), rtol=1e-12, atol=1e-15)
    if asked:
        with pytest.raises(ValueError, match=r"Expected parameter logits .* to satisfy the constraint"):
            f(x * math.inf, w)


def test_the_state_of_a_module_may_be_asked() -> None:
    class Starts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
            self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.shift.copy_(x.detach().mean(0))
                self.ready.fill_(True)
            return x - self.shift

    x = wide(8, 3)
    sharded = assert_takes_every_course(Starts(), [(x,), (2 * x,)], 2, in_strategy=(("x", None),))
    assert sharded.ready
    torch.testing.assert_close(sharded.shift, x.mean(0), rtol=0, atol=1e-15)


# -- numbers


def first_ones(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : int(lengths.max())].sum(0)


def test_a_size_that_is_read_from_a_tensor_is_of_its_course() -> None:
    calls = [(wide(8, 6), torch.tensor(lengths)) for lengths in ([2, 3], [3, 1], [5, 4])]
    assert_takes_every_course(first_ones, calls, 2, in_strategy=(("x", None), None))


def test_many_courses_are_said() -> None:
    f: Any = pw.shard(first_ones, mesh=MESH)
    x = wide(8, 16)
    for n in range(7):
        f(x, torch.tensor([n]))
    with pytest.warns(
        UserWarning, match=r"first_ones was planned for the 8th time(.|\n)*test_courses.py:.*lengths.max"
    ):
        f(x, torch.tensor([9]))


# -- random numbers


def skips(x: Tensor) -> Tensor:
    for _ in range(2):
        if torch.rand([]) < 0.5:
            x = x * 2
    return x


def test_layers_that_a_random_number_drops_are_those_of_one_device() -> None:
    x, f = wide(8, 3), pw.shard(skips, mesh=MESH, in_strategy=(("x", None),))
    torch.manual_seed(1)
    expected = [skips(x) for _ in range(12)]
    torch.manual_seed(1)
    torch.testing.assert_close([f(x) for _ in range(12)], expected, rtol=0, atol=0)


def computes_with_them(x: Tensor) -> Tensor:
    drawn = torch.rand([])
    return x / drawn if drawn < 0.5 else x


def asks_twice(x: Tensor) -> Tensor:
    drawn = torch.rand(2)
    if drawn[0] < 0.5:
        x = x * 2
    return x * 3 if drawn[0] >= 0.5 else x


def draws_in_place(x: Tensor) -> Tensor:
    drawn = torch.empty(2).uniform_()
    x = x * 2 if drawn[0] < 2 else x
    return x * drawn[1]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (computes_with_them, "computes with random numbers that decide its course"),
        (draws_in_place, "computes with random numbers that decide its course"),
        (asks_twice, "follow from random numbers that were asked before"),
    ],
)
def test_random_numbers_that_decide_and_are_used_again_are_refused(fn: Any, why: str) -> None:
    torch.manual_seed(0)  # draws 0.496
    with pytest.raises(pw.CaptureError, match=why):
        pw.shard(fn, mesh=MESH)(torch.ones(8, 3))


def test_random_courses_of_torchs_own_numbers_are_refused() -> None:
    pw.set_auto_parallel_context(random_numbers="torch")
    with pytest.raises(pw.CaptureError, match="follow from random numbers"):
        pw.shard(skips, mesh=MESH)(wide(8, 3))


# -- covariances


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("weighed", [(), ("fweights",), ("aweights",), ("fweights", "aweights")])
def test_covariances_are_those_of_one_device(correction: int, weighed: tuple[str, ...]) -> None:
    weights = {"fweights": torch.tensor([1, 2, 0, 3, 1, 1]), "aweights": torch.rand(6, dtype=torch.float64)}
    given = {name: weights[name] for name in weighed}

    def f(x: Tensor) -> Tensor:
        return torch.cov(x, correction=correction, **given)

    assert_takes_every_course(f, [(wide(8, 6),)], 1, in_strategy=(("x", None),))


def test_a_negative_weight_of_a_covariance_is_refused_as_on_one_device() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x.cov(aweights=w)

    w = torch.rand(6, dtype=torch.float64)
    assert_takes_every_course(f, [(wide(8, 6), w), (wide(8, 6), -w)], 1)


def test_correlations_are_those_of_one_device() -> None:
    assert_takes_every_course(torch.corrcoef, [(wide(8, 6),)], 1, in_strategy=(("x", None),))


# -- what stays refused


def test_a_branch_of_torch_beside_one_of_python_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return y if (x > -1).all() else x

    with pytest.raises(pw.CaptureError, match="may not have a cond as well"):
        pw.shard(f, mesh=MESH)(wide(8, 3).abs())


def test_a_question_behind_a_product_is_refused_saying_why() -> None:
    def f(x: Tensor) -> Tensor:
        return F.relu(x) * sum(range(int((x @ x.mT).argmax())))

    with pytest.raises(pw.CaptureError, match=r"follow from a matrix product or a convolution \(aten.mm.default\)"):
        pw.shard(f, mesh=MESH)(wide(8, 8))
