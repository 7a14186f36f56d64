"""The placement algebra, checked against one device: a stack [rank, ...] is the value on all ranks of one axis."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from torch import Tensor

from partway.strategy import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    Broadcast,
    Kind,
    Partial,
    Placement,
    Replicate,
    Shard,
    StrategyError,
    dual,
    kind,
    placement_from_code,
    transpose,
)
from partway.strategy.placement import PARTIAL_MAX, converts

PLACEMENTS = (Shard(0), Shard(1), Shard(2), REPLICATE, BROADCAST, PARTIAL)
PAIRS = list(itertools.product(PLACEMENTS, PLACEMENTS))


def dim_of(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim


def copies(value: Tensor, n: int) -> Tensor:
    return torch.stack([value] * n)


def split(value: Tensor, n: int, dim: int) -> Tensor:
    return torch.stack(value.chunk(n, dim))


def joined(stack: Tensor, dim: int) -> Tensor:
    return torch.cat(stack.unbind(), dim)


def only(stack: Tensor, rank: int) -> Tensor:
    """The stack with zeros on all ranks but one."""
    return torch.stack([part if r == rank else torch.zeros_like(part) for r, part in enumerate(stack)])


def convert(stack: Tensor, source: Placement, target: Placement) -> Tensor:
    """What all ranks hold after `source → target`: the meaning of each Kind."""
    n = len(stack)
    match kind(source, target):
        case Kind.NOTHING:
            return stack
        case Kind.ALL_REDUCE:
            return copies(stack.sum(0), n)
        case Kind.ALL_GATHER:
            return copies(joined(stack, dim_of(source)), n)
        case Kind.REDUCE_SCATTER:
            return split(stack.sum(0), n, dim_of(target))
        case Kind.ALL_TO_ALL:
            return split(joined(stack, dim_of(source)), n, dim_of(target))
        case Kind.SLICE:
            return torch.stack([whole.chunk(n, dim_of(target))[rank] for rank, whole in enumerate(stack)])
        case Kind.PAD:
            return torch.stack([joined(only(stack, rank), dim_of(source)) for rank in range(n)])
        case Kind.KEEP:
            return only(stack, 0)


class Conversion(torch.autograd.Function):
    """`convert`, whose backward is the conversion that `transpose` names."""

    @staticmethod
    def forward(ctx, stack, source, target):
        ctx.backward_conversion = transpose(source, target)
        return convert(stack, source, target)

    @staticmethod
    def backward(ctx, gradient):
        return convert(gradient, *ctx.backward_conversion), None, None


def place(value: Tensor, n: int, placement: Placement) -> Tensor:
    """A stack that means `value`."""
    match placement:
        case Shard(dim):
            return split(value, n, dim)
        case Partial():
            weights = torch.rand(n, *value.shape, dtype=value.dtype)
            return weights / weights.sum(0) * value
        case Replicate() | Broadcast():
            return copies(value, n)


def meaning(stack: Tensor, placement: Placement) -> Tensor:
    """The value that a stack means; what must be the same on all ranks is checked to be."""
    match placement:
        case Shard(dim):
            return joined(stack, dim)
        case Partial():
            return stack.sum(0)
        case Replicate() | Broadcast():
            assert all(torch.allclose(part, stack[0]) for part in stack)
            return stack[0]


@st.composite
def chains(draw):
    n = draw(st.sampled_from([2, 3, 4]))
    ndim = draw(st.sampled_from([2, 3]))
    shape = [n * draw(st.integers(1, 2)) for _ in range(ndim)]
    possible = [p for p in PLACEMENTS if not isinstance(p, Shard) or p.dim < ndim]
    return n, shape, draw(st.lists(st.sampled_from(possible), min_size=2, max_size=7)), draw(st.integers(0, 2**16))


def loss_of(stack: Tensor, placement: Placement, coefficient: Tensor) -> Tensor:
    """One rank's loss on each rank, all of them the same scalar: sum(coefficient * value**2), or for an addend,
    which only linear operators may use, sum(coefficient * value).
    """
    n = len(stack)
    match placement:
        case Shard(dim):
            addends = (stack**2 * split(coefficient, n, dim)).flatten(1).sum(1)
        case Replicate():
            return (stack**2 * coefficient).flatten(1).sum(1)
        case Broadcast():  # every rank does a part of the work of its own
            addends = (stack**2 * place(coefficient, n, PARTIAL)).flatten(1).sum(1)
        case Partial():
            addends = (stack * coefficient).flatten(1).sum(1)
    return Conversion.apply(addends, PARTIAL, REPLICATE)


@examples(400)
@given(chains())
def test_every_chain_of_conversions_is_right_forward_and_backward_against_one_device(chain):
    n, shape, placements, seed = chain
    torch.default_generator.manual_seed(seed)
    value, coefficient = torch.randn(2, *shape, dtype=torch.float64)
    leaf = place(value, n, placements[0]).requires_grad_()
    stack = leaf
    for source, target in itertools.pairwise(placements):
        stack = Conversion.apply(stack, source, target)
        torch.testing.assert_close(meaning(stack.detach(), target), value)

    losses = loss_of(stack, placements[-1], coefficient)
    losses.backward(torch.ones_like(losses))

    one_device = value.clone().requires_grad_()
    power = 1 if placements[-1] == PARTIAL else 2
    (coefficient * one_device**power).sum().backward()
    torch.testing.assert_close(meaning(leaf.grad, dual(placements[0])), one_device.grad)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_conversion_and_its_transpose_keep_what_a_stack_means(source, target):
    n, shape = 2, (4, 2, 6)
    value, cotangent = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = meaning(convert(place(value, n, source), source, target), target)
    torch.testing.assert_close(moved, value)
    back_source, back_target = transpose(source, target)
    assert (back_source, back_target) == (dual(target), dual(source))
    returned = meaning(convert(place(cotangent, n, back_source), back_source, back_target), back_target)
    torch.testing.assert_close(returned, cotangent)


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (Shard(0), Shard(1), Kind.ALL_TO_ALL, Kind.ALL_TO_ALL),
        (Shard(0), REPLICATE, Kind.ALL_GATHER, Kind.SLICE),
        (Shard(0), BROADCAST, Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
        (REPLICATE, Shard(0), Kind.SLICE, Kind.ALL_GATHER),
        (REPLICATE, BROADCAST, Kind.NOTHING, Kind.ALL_REDUCE),
        (BROADCAST, Shard(0), Kind.SLICE, Kind.PAD),
        (BROADCAST, REPLICATE, Kind.NOTHING, Kind.KEEP),
        (BROADCAST, PARTIAL, Kind.KEEP, Kind.KEEP),
        (PARTIAL, REPLICATE, Kind.ALL_REDUCE, Kind.NOTHING),
        (PARTIAL, BROADCAST, Kind.ALL_REDUCE, Kind.ALL_REDUCE),
        (PARTIAL, Shard(0), Kind.REDUCE_SCATTER, Kind.ALL_GATHER),
        (REPLICATE, PARTIAL, Kind.KEEP, Kind.NOTHING),
        (Shard(0), PARTIAL, Kind.PAD, Kind.SLICE),
    ],
)
def test_the_table_of_the_design(source, target, forward, backward):
    assert kind(source, target) is forward
    assert kind(*transpose(source, target)) is backward


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_staying_as_it_is_takes_nothing(placement):
    assert kind(placement, placement) is Kind.NOTHING


def test_six_kinds_communicate():
    communicating = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_allv", "exchange"]
    assert [str(k) for k in Kind if k.communicates] == communicating


@pytest.mark.parametrize("placement", [*PLACEMENTS, PARTIAL_MAX])
def test_codes_and_placements_are_inverse(placement):
    assert placement_from_code(str(placement)) == placement


@pytest.mark.parametrize("code", ["", "S", "S-1", "Q", "Sx", "r", "Pmin"])
def test_a_wrong_code_is_rejected(code):
    with pytest.raises(StrategyError, match="is not a placement; write S<dim>, R, B, P or Pmax"):
        placement_from_code(code)


@pytest.mark.parametrize("dim", [-1, 1.0, True, "0"])
def test_shard_takes_a_dim_counted_from_the_front(dim):
    with pytest.raises(StrategyError, match=r"Shard\(dim\) takes a dim of 0 or more"):
        Shard(dim)


def test_partial_is_a_sum_or_a_maximum():
    assert (str(Partial()), str(Partial("sum")), str(Partial("max"))) == ("P", "P", "Pmax")
    with pytest.raises(StrategyError, match=r"Partial\(reduce\) takes 'sum' or 'max', not 'avg'"):
        Partial("avg")


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        (PARTIAL_MAX, REPLICATE, Kind.ALL_REDUCE),
        (PARTIAL_MAX, BROADCAST, Kind.ALL_REDUCE),
        (REPLICATE, PARTIAL_MAX, Kind.NOTHING),
        (BROADCAST, PARTIAL_MAX, Kind.NOTHING),
        (PARTIAL_MAX, PARTIAL_MAX, Kind.NOTHING),
    ],
)
def test_a_maximum_is_taken_of_whole_values(source, target, found):
    assert converts(source, target)
    assert kind(source, target) is found


@pytest.mark.parametrize(
    ("source", "target"),
    [(PARTIAL_MAX, Shard(0)), (Shard(1), PARTIAL_MAX), (PARTIAL_MAX, PARTIAL), (PARTIAL, PARTIAL_MAX)],
)
def test_a_maximum_is_no_step_from_a_split_or_a_sum(source, target):
    assert not converts(source, target)
    with pytest.raises(StrategyError, match=f"no single step turns {source} into {target}; convert to R first"):
        kind(source, target)


def test_every_pair_of_the_others_is_one_step():
    assert all(converts(source, target) for source, target in PAIRS)


def test_a_maximum_has_no_gradient():
    for asked in (lambda: dual(PARTIAL_MAX), lambda: transpose(PARTIAL_MAX, REPLICATE)):
        with pytest.raises(StrategyError, match=r"Partial\('max'\) has no dual: .* detach the operand"):
            asked()
