"""Conversions that need no other rank: every kind has an entry. (What they compute is tested in test_simulate.py.)"""

from partway.runtime.code.slices import LOCAL as CONVERSIONS
from partway.strategy.placement import LOCAL


def test_every_kind_that_needs_no_other_rank_has_an_entry():
    assert set(CONVERSIONS) == LOCAL
