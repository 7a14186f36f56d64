"""The samples that a rank reads: those of its data-parallel group."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from partway.data.part import Part
from partway.data.random_views import check_seed
from partway.strategy import DataError, shown


def distributed_sampler(
    dataset: Dataset[Any],
    part: Part,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    dim: int = 0,
) -> DistributedSampler[Any]:
    """PyTorch's DistributedSampler for the rank that holds `part` of an input whose dim `dim` is the batch.

    Ranks whose parts differ along the batch get different samples; ranks that share an image, each with a part of it,
    get the same ones. Call its `set_epoch` before each epoch. The other arguments are PyTorch's.

    Raises DataError for anything but a Part, a seed below 0, or a dim that it does not have.
    """
    group, groups = group_of(part, dim)
    check_seed(seed)
    if not hasattr(dataset, "__len__") or isinstance(dataset, type) or getattr(dataset, "ndim", 1) == 0:
        raise DataError(f"distributed_sampler takes a data set that has a length, not {shown(dataset)}")
    return DistributedSampler(dataset, num_replicas=groups, rank=group, shuffle=shuffle, seed=seed, drop_last=drop_last)


def group_of(part: Part, dim: int) -> tuple[int, int]:
    """The data-parallel group of the rank that holds `part`, and the number of groups. Raises DataError."""
    if not isinstance(part, Part):
        raise DataError(f"the part is {shown(part)}; write part_of(strategy), with the strategy of the input")
    return part.along(dim)
