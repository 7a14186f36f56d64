"""Views, and what joins tensors and cuts them up."""

from itertools import product
from math import prod

import pytest
import torch
from expansions import check, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from partway.propagation.rules.rule import axis_options
from partway.propagation.rules.table import rule_of
from partway.strategy import Layout, Mesh, Partial

aten = torch.ops.aten


def test_broadcast_tensors(lab):
    check(
        lab,
        lambda x, y: torch.broadcast_tensors(x, y, x + y),
        randn(4, 1),
        randn(3),
        gone=aten.broadcast_tensors.default,
    )


def reshape_node(before, after):
    """A call of reshape that was never captured: the rule needs only shapes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(before, device="meta")
    node = graph.call_function(aten.reshape.default, (x, list(after)))
    node.meta["val"] = torch.empty(after, device="meta")
    return node


def grouped(draw, factors):
    """Dims whose sizes are products of neighbouring `factors`, and some of size 1."""
    dims, current = [], 1
    for factor in factors:
        current *= factor
        if draw(st.booleans()):
            dims.append(current)
            current = 1
    dims.append(current)
    for _ in range(draw(st.integers(0, 2))):
        dims.insert(draw(st.integers(0, len(dims))), 1)
    return tuple(dims)


@st.composite
def reshapes(draw):
    """Two shapes of as many elements: of common factors, or of any."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3, 4, 6]), min_size=1, max_size=4))
    other = factors if draw(st.booleans()) else draw(st.permutations(factors))
    return grouped(draw, factors), grouped(draw, other)


@given(reshapes(), st.sampled_from([(2,), (3,), (2, 2), (2, 3), (4,)]))
def test_a_view_of_a_part_is_the_part_of_the_view(shapes, sizes):
    before, after = shapes
    mesh = Mesh.of_sizes(sizes)
    rule = rule_of(reshape_node(before, after))
    x = torch.arange(prod(before)).reshape(before)
    y = x.reshape(after)
    for chosen in product([o for o in axis_options(rule) if "P" not in map(str, o.results)], repeat=len(sizes)):
        parts = {}
        for option, size in zip(chosen, sizes, strict=True):
            parts[option.factor] = parts.get(option.factor, 1) * size
        if any(f is not None and f not in rule.uneven and rule.sizes[f] % n for f, n in parts.items()):
            continue
        source = Layout(mesh, tuple(o.operands[0] for o in chosen))
        target = Layout(mesh, tuple(o.results[0] for o in chosen))
        assert Partial() not in target.placements
        for rank in range(mesh.device_num):
            local, right = x[source.slices(before, rank)], y[target.slices(after, rank)]
            assert torch.equal(local.flatten(), right.flatten()), f"{before} -> {after} as {source} -> {target}"


@pytest.mark.parametrize(
    ("before", "after", "splits"),
    [
        ((4, 6), (4, 2, 3), "S0>S0 S1>S1"),
        ((4, 2, 3), (4, 6), "S0>S0 S1>S1"),
        ((8, 12), (96,), "S0>S0"),
        ((2, 3), (3, 2), ""),
        ((4, 3), (6, 2), "S0>S0"),
        ((5, 2, 3), (5, 3, 2), "S0>S0"),
        ((1, 4, 1), (4,), "S1>S0"),
        ((4,), (1, 2, 1, 2), "S0>S1"),
        ((2, 1, 4), (2, 4), "S0>S0 S2>S1"),
        ((3, 4, 8), (12, 2, 4), "S0>S0 S2>S1"),
    ],
)
def test_the_major_part_of_a_merged_dim_splits(before, after, splits):
    options = axis_options(rule_of(reshape_node(before, after)))
    assert [f"{o.operands[0]}>{o.results[0]}" for o in options if o.factor] == splits.split()


def test_a_view_of_nothing_has_nothing_to_split():
    rule = rule_of(reshape_node((0, 4), (4, 0)))
    assert (rule.operands, rule.results, rule.sizes) == ((((), ()),), (((), ()),), {})
