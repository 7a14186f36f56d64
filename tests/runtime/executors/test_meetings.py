"""How collectives are simulated: every kind has an entry. (What they compute is tested in test_simulate.py.)"""

from partway.propagation.ops.collectives import COLLECTIVES
from partway.runtime.executors.meetings import MEETINGS


def test_every_kind_of_collective_has_an_entry():
    assert set(MEETINGS) == set(COLLECTIVES)
