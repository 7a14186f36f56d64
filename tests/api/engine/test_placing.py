"""Parts of a batch that ranks hold make a whole, or are refused on every rank."""

import pytest

from partway.engine.placing import whole_of_parts
from partway.strategy import StrategyError


def held(*sizes: int) -> list[tuple[int, ...]]:
    """The shapes of what ranks hold of an input."""
    return [(size, 3) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "whole"),
    [((2, 2), 4), ((2, 1), 3), ((1, 4), 5), ((3, 3, 3, 1), 10), ((3, 3, 2, 2), 10), ((1, 1, 1, 0), 3), ((5,), 5)],
)
def test_the_whole_is_the_sum_of_the_parts(sizes: tuple[int, ...], whole: int) -> None:
    assert whole_of_parts("input 'x'", held(*sizes), (len(sizes), 1)) == (whole, 3)


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (2, 1, 2, 1)])
def test_parts_that_several_ranks_hold_count_once(sizes: tuple[int, ...]) -> None:
    assert whole_of_parts("input 'x'", held(*sizes), (2, 1)) == (3, 3)


@pytest.mark.parametrize(("sizes", "parts"), [((2, 1, 1, 1), 2), ((4, 3), 1)])
def test_parts_that_make_no_whole_are_refused_with_their_sizes(sizes: tuple[int, ...], parts: int) -> None:
    said = f"input 'x': the ranks hold parts of sizes {', '.join(map(str, sizes))} of dim 0, {parts} parts in all; "
    with pytest.raises(StrategyError, match=f"{said}give ranks that share a part the same one"):
        whole_of_parts("input 'x'", held(*sizes), (parts, 1))
