"""Elimination against brute force; arrays that are shared are solved once."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, copied, random_costs

from partway.propagation.minsum.eliminate import MANY_ENTRIES, affordable, eliminate, elimination_order
from partway.propagation.minsum.network import Costs


@examples(400)
@given(random_costs())
def test_elimination_finds_the_optimum_and_proves_it(costs):
    solution = eliminate(costs)
    best = brute_force(costs)
    assert solution.cost == best == solution.bound
    assert math.isinf(best) or solution.proven
    assert costs.of(solution.choice) == solution.cost


@examples(400)
@given(random_costs(vertices=7, options=3, forbidden=False), st.integers(1, 30))
def test_with_small_tables_the_optimum_lies_between_the_bound_and_the_cost(costs, limit):
    solution = eliminate(costs, limit)
    assert solution.bound <= brute_force(costs) <= solution.cost
    assert costs.of(solution.choice) == solution.cost
    if solution.proven:
        assert solution.cost == brute_force(costs)


def test_each_vertex_goes_when_it_has_the_fewest_neighbours_left():
    chain = Costs((np.zeros(2),) * 5, {(i, i + 1): np.zeros((2, 2)) for i in range(4)})
    assert eliminate(chain).width == 2
    star = Costs((np.zeros(2),) * 5, {(0, i): np.zeros((2, 2)) for i in range(1, 5)})
    assert eliminate(star).width == 2
    clique = Costs((np.zeros(2),) * 4, {pair: np.zeros((2, 2)) for pair in itertools.combinations(range(4), 2)})
    assert eliminate(clique).width == 4


def test_a_table_that_would_be_too_large_is_never_built():
    wide = Costs((np.zeros(8),) * 12, {pair: np.ones((8, 8)) for pair in itertools.combinations(range(12), 2)})
    solution = eliminate(wide, 600)
    assert solution.width <= 3
    assert solution.bound <= 66 == solution.cost


def test_vertices_with_one_option_join_nothing_however_many_there_are():
    fixed = 70  # more than an array may have dims
    unary = (np.array([1.0, 0.0]), *(np.array([0.5]) for _ in range(fixed)))
    pairs = {(0, i): np.array([[0.0], [0.25]]) for i in range(1, fixed + 1)} | {(1, 2): np.array([[2.0]])}
    costs = Costs(unary, pairs)
    found = eliminate(costs)
    assert found.choice == (0,) * (fixed + 1)
    assert found.cost == found.bound == costs.of(found.choice) == 1.0 + 0.5 * fixed + 2.0
    assert found.width == 1


def test_nothing_is_computed_for_an_order():
    costs = Costs((np.zeros(3),) * 4, {(i, i + 1): np.full((3, 3), np.nan) for i in range(3)})
    order = elimination_order(costs)
    assert len(order.steps) == 4
    assert order.width == 2
    assert order.work == sum(math.prod([3] * len(joint)) for _, joint in order.recipes.values())
    assert eliminate(Costs(costs.unary, {ends: np.ones((3, 3)) for ends in costs.pairs})).cost == 3


# -- arrays that are shared are solved once


@st.composite
def repeated_costs(draw, most=40):
    """A chain of equal blocks, its arrays the same objects in each, between a prefix and a suffix of its own; a vertex
    may be next to all blocks, as a tied weight is. Returns the costs and how many blocks there are."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, size = draw(st.integers(1, most)), draw(st.integers(1, 3))
    ends = [draw(st.integers(0, 2)) for _ in range(2)]
    tied = draw(st.booleans())

    def numbers(*shape):
        return rng.integers(0, 9, shape).astype(float)

    sizes = [int(n) for n in rng.integers(2, 4, size)]
    alone = [numbers(n) for n in sizes]
    inside = {(a, b): numbers(sizes[a], sizes[b]) for a, b in itertools.combinations(range(size), 2)}
    inside = {pair: matrix for pair, matrix in inside.items() if pair[1] == pair[0] + 1 or rng.random() < 0.4}
    link, tie = numbers(sizes[-1], sizes[0]), [numbers(2, sizes[i]) for i in range(size)]
    unary, pairs = ([numbers(2)], {}) if tied else ([], {})

    def add(costs):
        unary.append(costs)
        return len(unary) - 1

    def block(before):
        at = [add(costs) for costs in alone]
        pairs.update({(at[a], at[b]): matrix for (a, b), matrix in inside.items()})
        if before is not None:
            pairs[before, at[0]] = link if len(unary[before]) == sizes[-1] else numbers(len(unary[before]), sizes[0])
        if tied:
            pairs.update({(0, vertex): tie[i] for i, vertex in enumerate(at[:1])})
        return at[-1]

    last = None
    for place in range(ends[0] + count + ends[1]):
        if ends[0] <= place < ends[0] + count:
            last = block(last)
            continue
        vertex = add(numbers(3))
        if last is not None:
            pairs[last, vertex] = numbers(len(unary[last]), 3)
        last = vertex
    return Costs(tuple(unary), pairs), count


@examples(300)
@given(repeated_costs())
def test_shared_arrays_change_nothing_but_the_time(drawn):
    costs, _ = drawn
    once, each = eliminate(costs), eliminate(copied(costs))
    assert once.cost == once.bound == each.cost == each.bound
    assert costs.of(once.choice) == once.cost
    if math.prod(len(unary) for unary in costs.unary) < 3000:
        assert once.cost == brute_force(costs)


@examples(300)
@given(repeated_costs(most=6), st.integers(1, 60))
def test_shared_arrays_with_small_tables_keep_the_bound(drawn, limit):
    costs, _ = drawn
    optimum, found = eliminate(copied(costs)).cost, eliminate(costs, limit)
    assert found.bound <= optimum <= found.cost == costs.of(found.choice)


@examples(300)
@given(random_costs(), st.data())
def test_equal_arrays_in_any_places_are_still_the_same_problem(costs, data):
    """The same objects also where nothing repeats in a row: unary costs of one size, matrices of one shape."""
    unary = [data.draw(st.sampled_from([u for u in costs.unary if len(u) == len(own)])) for own in costs.unary]
    shapes = {pair: [m for m in costs.pairs.values() if m.shape == own.shape] for pair, own in costs.pairs.items()}
    mixed = Costs(tuple(unary), {pair: data.draw(st.sampled_from(same)) for pair, same in shapes.items()})
    found = eliminate(mixed)
    assert found.cost == found.bound == brute_force(mixed)


def chain_of(blocks, size=4, seed=0):
    """`blocks` equal blocks of `size` vertices, each a small clique, in a chain."""
    rng = np.random.default_rng(seed)
    alone = [rng.random(5) for _ in range(size)]
    inside = {pair: rng.random((5, 5)) for pair in itertools.combinations(range(size), 2)}
    link = rng.random((5, 5))
    pairs = {(b * size + i, b * size + j): m for b in range(blocks) for (i, j), m in inside.items()}
    pairs.update({((b + 1) * size - 1, (b + 1) * size): link for b in range(blocks - 1)})
    return Costs(tuple(alone * blocks), pairs)


def test_the_tables_computed_grow_with_the_logarithm_of_the_repeats():
    def tables(costs):
        return len(elimination_order(costs).recipes)

    for size in (1, 2, 4):
        counts = [tables(chain_of(blocks, size)) for blocks in (8, 16, 32, 64, 128, 256)]
        steps = np.diff(counts)
        assert steps.max() <= 4, counts  # twice as many blocks, a few tables more
        assert counts[-1] < tables(copied(chain_of(256, size))) / 4


def test_a_chain_of_many_blocks_is_solved_exactly():
    costs = chain_of(1000)
    once, each = eliminate(costs), eliminate(copied(costs))
    assert once.cost == pytest.approx(each.cost, rel=1e-12)
    assert once.cost == pytest.approx(once.bound, rel=1e-12)


def test_work_that_no_float_can_say_is_too_much():
    clique = {pair: np.zeros((40, 40)) for pair in itertools.combinations(range(250), 2)}
    order = elimination_order(Costs((np.zeros(40),) * 250, clique), give_up=1e9)
    assert order.work == math.inf
    assert order.too_much
    assert 0 < len(order.steps) < 250


def test_tables_together_are_bounded_not_only_each():
    rng = np.random.default_rng(0)
    dense = {(a, b): rng.random((8, 8)) for a in range(120) for b in range(a + 1, min(a + 12, 120))}
    costs = Costs(tuple(rng.random(8) for _ in range(120)), dense)
    whole = elimination_order(costs)
    assert whole.too_much
    order = affordable(costs, whole)
    assert not order.too_much
    assert order.entries <= MANY_ENTRIES
    assert sum(array.size for array in order.arrays.values()) < order.entries
