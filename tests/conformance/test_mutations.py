"""The text of each mutation of mutations.py occurs in its file, and the test that fails without it exists."""

import mutations
import pytest
from sources import functions_of

ROWS = mutations.all_of()
SLICE = ("elements of lists that it reads are compared", "the program that runs has a line")


@pytest.mark.parametrize("file", sorted({row.file for row in ROWS}))
def test_what_is_taken_out_is_in_its_file_once(file: str) -> None:
    for row in mutations.all_of([file]):
        compile(mutations.changed(row), file, "exec")


def test_the_tests_that_fail_are_there() -> None:
    places = [row.test.partition("[")[0].split("::") for row in ROWS]
    assert sorted(f"{file}::{name}" for file, name in places if name not in functions_of(mutations.ROOT / file)) == []


def test_the_page_is_what_the_list_says() -> None:
    assert mutations.PAGE.read_text(encoding="utf-8") == mutations.page(), "run mutations.py --write"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_test_fails_without_its_mechanism() -> None:
    rows = [row for row in ROWS if row.words in SLICE]
    assert len(rows) == len(SLICE)
    with mutations.copied() as tree:
        assert mutations.run(tree, [row.test for row in rows])[0] == mutations.PASSED
        assert [mutations.fails_without(tree, row) for row in rows] == [""] * len(rows)
