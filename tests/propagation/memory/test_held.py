"""Lives added up by hand."""

import numpy as np

from partway.propagation.memory.held import Held, Life, Moment, Purpose, added_up


def test_a_life_counts_from_its_first_moment_to_its_last():
    lives = [Life(Purpose.KEPT, 0, 4, 4), Life(Purpose.WORKING, 1, 2, 2), Life(Purpose.WORKING, 2, 2, 1)]
    phases = ["forward"] * 3 + ["backward"] * 2
    held = Held([Moment(phase, str(i), str(i)) for i, phase in enumerate(phases)], added_up(lives, 5))
    assert held.total.tolist() == [4, 6, 7, 4, 4]
    assert (held.peak, held.when) == (7, 2)
    assert {part: size for part, size in held.at_peak.items() if size} == {Purpose.KEPT: 4, Purpose.WORKING: 3}


def test_the_first_of_equal_moments_is_the_peak():
    held = Held([Moment("forward", name, name) for name in "ab"], added_up([Life(Purpose.INPUTS, 0, 1, 8)], 2))
    assert held.when == 0
    assert np.array_equal(held.by_purpose[Purpose.INPUTS], [8, 8])


def test_a_step_without_operators_holds_nothing():
    assert Held([], added_up([], 0)).peak == 0
