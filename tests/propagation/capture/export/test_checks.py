"""What torch.export captures, and Partway refuses."""

import pytest
import torch

from partway.propagation.capture.capture import capture
from partway.strategy import CaptureError


def expanded(x):
    return x[:1].expand(8, 4).add_(1)


@pytest.mark.parametrize(
    "fn", [expanded, lambda x: x[0].expand(8, 4).mul_(x), lambda x: torch.empty(1).expand(8).fill_(x[0, 0])]
)
def test_a_write_to_what_was_expanded_is_refused(fn):
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
        fn(torch.ones(8, 4))
    with pytest.raises(
        CaptureError, match=r"writes in place .* to a tensor that was expanded, whose elements share memory"
    ):
        capture(fn, (torch.ones(8, 4),), {})
