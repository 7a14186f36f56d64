"""How collectives are issued: every kind has an entry. (What they compute is tested in test_execute.py.)"""

from partway.propagation.ops.kinds import COLLECTIVES
from partway.runtime.issue import ISSUERS


def test_every_kind_of_collective_has_an_entry():
    assert set(ISSUERS) == set(COLLECTIVES)
