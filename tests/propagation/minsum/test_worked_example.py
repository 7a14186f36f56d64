"""The three operators of minsum/__init__.py have the costs, choices and bounds that the docstrings of its modules
state."""

import numpy as np
import pytest

from partway.propagation.minsum.eliminate import eliminate
from partway.propagation.minsum.least import least
from partway.propagation.minsum.many import optimum_of_many
from partway.propagation.minsum.messages import Messages, colours
from partway.propagation.minsum.narrow import Narrowing
from partway.propagation.minsum.network import Costs, Found, network
from partway.propagation.minsum.reduce import reduced
from partway.propagation.minsum.visits import propagate, revisit


@pytest.fixture
def costs():
    a, b, c = (np.array(own, dtype=float) for own in ((1, 0), (3, 2), (0, 6)))
    differ = 1.0 - np.eye(2)
    return Costs((a, b, c), {(0, 1): 5 * differ, (1, 2): 4 * differ})


def test_elimination_finds_the_choice_and_proves_it(costs):
    assert eliminate(costs) == Found((0, 0, 0), cost=4, bound=4, width=2)
    assert costs.of((1, 1, 0)) == 6


def test_visits_come_to_six_and_revisits_to_four(costs):
    first = propagate(network(costs), [0])
    assert (first.choice, first.cost) == ((1, 1, 0), 6)
    assert revisit(network(costs), first).choice == (0, 0, 0)
    assert (costs.of((1, 0, 0)), costs.of((0, 1, 0))) == (8, 12)


def test_one_pass_of_messages_proves_four_and_drops_an_option(costs):
    narrowing = Narrowing(network(costs), 6.0)
    narrowing.sweep(forward=True)
    assert (narrowing.bound, narrowing.left) == (4, 5)
    np.testing.assert_array_equal(narrowing.worth[2], [4, 8])
    assert colours([[1], [0, 2], [1]]) == [1, 0, 1]
    messages = Messages(costs, 6.0)
    bounds = [messages.bound]
    for forward in (True, False):
        messages.sweep(forward=forward)
        bounds.append(messages.bound)
    assert bounds == [0, 2.5, 4]


def test_reductions_leave_nothing_but_the_constant(costs):
    rest = reduced(costs)
    assert (rest.vertices, rest.constant, rest.whole(())) == ([], 4, (0, 0, 0))
    assert least(costs).cost == 4


def test_leaves_go_into_their_neighbours(costs):
    found = optimum_of_many(network(costs), lambda: (1, 1, 0), np.inf, lambda _: True, lambda left, _: eliminate(left))
    assert (found.choice, found.cost) == ((0, 0, 0), 4)
