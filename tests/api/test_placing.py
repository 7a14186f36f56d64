"""Parts of a batch that ranks hold make a whole, or are refused on every rank."""

import pytest

from partway.placing import whole_shapes
from partway.strategy import StrategyError


def held(*sizes: int) -> list[list[list[int]]]:
    """What ranks hold of two inputs: parts of a batch, and all of another tensor."""
    return [[[size, 3], [7]] for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "whole"),
    [((2, 2), 4), ((2, 1), 3), ((3, 3, 3, 1), 10), ((4, 4, 4, 1), 13), ((1, 1, 1, 1), 4), ((5,), 5), ((1, 1, 1, 0), 3)],
)
def test_the_whole_is_the_sum_of_the_parts(sizes: tuple[int, ...], whole: int) -> None:
    found = whole_shapes(["input 'x'", "input 'y'"], held(*sizes), [(len(sizes), 1), (1,)])
    assert found == [(whole, 3), (7,)]


def test_parts_that_several_ranks_hold_count_once() -> None:
    assert whole_shapes(["x", "y"], held(2, 2, 1, 1), [(2, 1), (1,)]) == [(3, 3), (7,)]


@pytest.mark.parametrize(("sizes", "parts"), [((4, 1), 2), ((2, 2, 1, 1), 4), ((3, 2, 1, 3), 4), ((2, 1, 1, 1), 2)])
def test_parts_that_no_cut_of_a_whole_gives_are_refused_with_their_sizes(sizes: tuple[int, ...], parts: int) -> None:
    said = rf"input 'x': the ranks hold parts of sizes {', '.join(map(str, sizes))} of dim 0; give every rank "
    said += (
        "equally many, as a loader with drop_last=True does; only the last part may be .*, as torch.chunk cuts into "
    )
    said += f"{parts} parts"
    with pytest.raises(StrategyError, match=said):
        whole_shapes(["input 'x'", "input 'y'"], held(*sizes), [(parts, 1), (1,)])
