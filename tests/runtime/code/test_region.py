"""What a compiler gives twice is copied; what it gives once is not."""

import torch

from partway.runtime.code.region import Region


def test_results_of_their_own_are_left_alone():
    region = Region(lambda x: (x + 1, x.view(-1)), (True, False))
    x = torch.rand(3, 3)
    for _ in range(2):
        own, view = region(x)
        assert own.data_ptr() not in (x.data_ptr(), view.data_ptr())
        assert view.data_ptr() == x.data_ptr()


def test_results_that_share_memory_are_copied():
    def merged(x):
        y = x + 1
        return y, y, x, torch.zeros(8)[:4], torch.zeros(0)

    region = Region(merged, (True, True, True, True, True))
    x = torch.rand(4)
    for _ in range(2):
        results = region(x)
        assert len({x.data_ptr(), *(r.data_ptr() for r in results[:4])}) == 5
        assert results[3].untyped_storage().nbytes() == 16
        assert torch.equal(results[0], x + 1)
        assert torch.equal(results[1], x + 1)
        assert torch.equal(results[2], x)
