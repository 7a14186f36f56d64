"""torchdata's StatefulDataLoader in a checkpoint: training goes on within an epoch, with the very next batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import FORKS
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import partway as pw

Ranks = Callable[..., list[Any]]
SAMPLES, BATCH, BEFORE = range(24), 3, 2


def made(workers: int) -> tuple[Any, Any]:
    """A model, and a loader of this rank's samples, which on virtual devices are all."""
    torch.manual_seed(0)
    model = pw.shard(nn.Linear(1, 1), mesh={"dp": 2})
    sampler = StatefulDistributedSampler(SAMPLES, pw.get_group_size(), pw.get_rank(), seed=3)
    context = FORKS if workers else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
        return model, StatefulDataLoader(
            SAMPLES, BATCH, sampler=sampler, num_workers=workers, multiprocessing_context=context
        )


def batches(loader: Iterator[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def goes_on(folder: str, workers: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The batches before a checkpoint, those after it, and those of a loader that was loaded, to the epoch's end."""
    model, loader = made(workers)
    stream = iter(loader)
    before = [next(stream).tolist() for _ in range(BEFORE)]
    pw.save(folder, model, loader=loader)
    after = batches(stream)
    model, other = made(workers)
    pw.load(folder, model, loader=other)
    return before, after, batches(iter(other))


def assert_goes_on(rank: tuple[list[list[int]], list[list[int]], list[list[int]]], ranks: int) -> None:
    before, after, loaded = rank
    assert loaded == after
    assert len(before) == BEFORE
    assert len({sample for batch in before + loaded for sample in batch}) == len(SAMPLES) // ranks


@pytest.mark.parametrize("workers", [0, 2])
def test_on_virtual_devices(tmp_path: Path, workers: int) -> None:
    assert_goes_on(goes_on(str(tmp_path), workers), 1)


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [0, 2])
def test_each_of_two_ranks_goes_on_with_its_own_batches(tmp_path: Path, workers: int, on_ranks: Ranks) -> None:
    one, other = on_ranks(2, goes_on, str(tmp_path), workers)
    for rank in (one, other):
        assert_goes_on(rank, 2)
    assert not {sample for batch in one[2] for sample in batch} & {sample for batch in other[2] for sample in batch}
