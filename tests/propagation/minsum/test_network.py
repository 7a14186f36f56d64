"""Conversions that are not written out cost what they cost written out."""

import numpy as np
import pytest

from partway.propagation.cost.conversion import conversion_table
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.minsum.network import Converting, Matrix
from partway.strategy import Mesh


@pytest.mark.parametrize("gradient", [True, False])
def test_conversions_that_are_not_written_out_cost_the_same(gradient):
    mesh = Mesh.of_sizes((2, 3, 2))
    table = conversion_table((12, 6), 4, "sum", gradient, mesh, profile_of("cpu"), WEIGHTS[Level.COMMUNICATION])
    rng = np.random.default_rng(0)
    valid = np.flatnonzero(table.valid)
    rows, columns = rng.choice(valid, 40), rng.choice(valid, 30)
    lazy, written = Converting(table, rows, columns), Matrix(table.cost[np.ix_(rows, columns)])
    assert lazy.shape == written.shape == (40, 30)
    for side, count in ((0, 40), (1, 30)):
        alone = rng.random(count)
        np.testing.assert_allclose(lazy.least(alone, side), written.least(alone, side), rtol=1e-12)
        np.testing.assert_allclose(lazy.with_option(3, side), written.with_option(3, side), rtol=1e-12)
    some = rng.random(40) < 0.5, rng.random(30) < 0.5
    np.testing.assert_allclose(
        lazy.take(*some).least(np.zeros(some[0].sum()), 0), written.take(*some).least(np.zeros(some[0].sum()), 0)
    )
