"""What reads and writes the elements that an index names."""

import pytest
import torch
from expansions import check_split, randn

from partway.propagation.capture.capture import capture
from partway.strategy import CaptureError

aten = torch.ops.aten


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.as_strided((4, 4, 3), (8, 1, 2)),  # windows of each row
        lambda x: x.as_strided((4, 4), (8, 2), 1),
        lambda x: x.as_strided((3, 12), (8, 1)),  # rows that overlap
        lambda x: x.t().as_strided((8, 4), (1, 8)) * 2,
        lambda x: x[1:].as_strided((3, 2), (8, 0), 8),
        lambda x: torch.as_strided_copy(x, (2, 16), (16, 1)),
        lambda x: x.as_strided((), (), 5),
    ],
)
def test_elements_at_strides_are_picked_by_number(lab, fn):
    graph = check_split(lab, fn, randn(4, 8))
    assert not {node.target for node in graph.nodes} & {aten.as_strided.default, aten.as_strided_copy.default}


def test_windows_of_rows_stay_with_their_rows(lab):
    graph = capture(lambda x: x.as_strided((4, 4, 3), (8, 1, 2)), (randn(4, 8),), {})
    (picked,) = [node for node in graph.nodes if node.target is aten.index_select.default]
    assert picked.args[1] == 1


def test_elements_that_another_tensor_has_are_refused():
    with pytest.raises(CaptureError, match=r"as_strided in the function takes \[2\] out of the memory of a tensor"):
        capture(lambda x: x[1:].as_strided((2,), (1,), 0), (randn(4, 8, grad=False),), {})
