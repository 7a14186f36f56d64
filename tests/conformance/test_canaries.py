"""The text of each canary of canaries.py occurs in its file, and its test is part of `make test`."""

import canaries
import mutations
import pytest
import tiers
from sources import functions_of

ROWS = canaries.CANARIES


@pytest.mark.parametrize("row", ROWS, ids=[row.words for row in ROWS])
def test_the_fault_can_be_made(row: mutations.Mutation) -> None:
    compile(mutations.changed(row), row.file, "exec")


@pytest.mark.parametrize("row", ROWS, ids=[row.words for row in ROWS])
def test_the_test_that_catches_it_is_there_and_is_not_long(row: mutations.Mutation) -> None:
    file, _, name = row.test.partition("::")
    assert name.partition("[")[0] in functions_of(mutations.ROOT / file)
    assert [test for test in tiers.long() if test == row.test or test.startswith(f"{row.test}[")] == []


def test_there_is_one_of_each_class() -> None:
    assert len({row.words for row in ROWS}) == len(ROWS)
