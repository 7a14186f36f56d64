"""The number of the epoch, shared with a loader's workers."""

from __future__ import annotations

import torch

from partway.data.window import is_int
from partway.strategy import DataError, shown


class Epoch:
    """A number in shared memory: workers that a DataLoader keeps (`persistent_workers`) see later calls of `set`.

    epoch = Epoch()          # the data set keeps it, and reads int(epoch) when it draws
    epoch.set(3)             # in the training loop, like a sampler's set_epoch
    """

    def __init__(self) -> None:
        self._number = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set(self, epoch: int) -> None:
        """Set the epoch. Raises DataError unless it is an int of 0 or more."""
        if not is_int(epoch, 0) or epoch >= 2**63:
            raise DataError(f"epoch is {shown(epoch)}; write an int of 0 or more")
        self._number.fill_(epoch)

    def __int__(self) -> int:
        return int(self._number)

    def __repr__(self) -> str:
        return f"Epoch({int(self)})"
