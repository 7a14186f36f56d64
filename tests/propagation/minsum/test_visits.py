"""Plans by visits: what they claim, and what revisiting improves."""

import math

from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, random_costs

from partway.propagation.minsum.network import network
from partway.propagation.minsum.visits import propagate, revisit


@examples(200)
@given(random_costs(forbidden=False), st.data())
def test_propagation_claims_the_cost_of_its_plan_and_is_never_better_than_the_optimum(costs, data):
    sources = data.draw(st.lists(st.integers(0, len(costs.unary) - 1), unique=True))
    solution = propagate(network(costs), sources)
    assert costs.of(solution.choice) == solution.cost >= brute_force(costs)
    assert solution.bound == -math.inf
    assert not solution.proven


@examples(400)
@given(random_costs(vertices=7), st.data())
def test_revisiting_never_makes_a_plan_worse_and_claims_its_cost(costs, data):
    start = propagate(network(costs), data.draw(st.lists(st.integers(0, len(costs.unary) - 1), unique=True)))
    found = revisit(network(costs), start)
    assert brute_force(costs) <= found.cost == costs.of(found.choice) <= start.cost
    assert revisit(network(costs), found).cost == found.cost


def alone(costs, choice):
    """The least cost after one vertex changes its option."""
    changed = (
        costs.of((*choice[:v], option, *choice[v + 1 :])) for v, u in enumerate(costs.unary) for option in range(len(u))
    )
    return min(changed)


@examples(300)
@given(random_costs(vertices=7))
def test_after_revisiting_no_vertex_gains_by_changing(costs):
    found = revisit(network(costs), propagate(network(costs), [0]))
    assert alone(costs, found.choice) >= found.cost or math.isinf(found.cost)
