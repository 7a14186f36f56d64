"""A rank that the others wait for is named while they train."""

import time

import pytest
import torch
from heard import Heard
from torch import nn

import partway as pw
from partway.runtime.ranks import ledger as ledgers
from partway.runtime.ranks import stragglers
from partway.runtime.ranks.agreement import gathered
from partway.runtime.ranks.stragglers import Looks, Waits, slow_in, told


@pytest.mark.parametrize(
    ("shares", "slow"),
    [
        ((0.4, 0.4, 0.1, 0.45), (2,)),
        ((0.4, 0.4, 0.3, 0.45), ()),
        ((0.1, 0.5, 0.12, 0.5), (0, 2)),
        ((0.1, 0.1, 0.12, 0.5), ()),  # one that is faster
        ((0.0, 0.2), (0,)),
        ((0.5,), ()),
    ],
)
def test_who_is_slow(shares, slow):
    assert slow_in(shares) == slow


def test_what_is_said_of_them():
    assert told((0.38, 0.031, 0.41), (1,)) == (
        "rank 1 is slower than the others: of the last minute ranks 0, 2 waited in collectives for 38 to 41 %, and "
        "rank 1 for 3 %; see what it does between collectives, such as loading data, and what else runs there"
    )
    assert told((0.5, 0.0, 0.1, 0.5), (1, 2)) == (
        "ranks 1, 2 are slower than the others: of the last minute ranks 0, 3 waited in collectives for 50 %, and "
        "ranks 1, 2 for 0 to 10 %; see what they do between collectives, such as loading data, and what else runs there"
    )


def test_it_is_said_once_until_another_one_is_slow():
    looks = Looks(None, 0, 2)
    with Heard() as lines:
        for shares in [(0.5, 0.1)] * 3 + [(0.3, 0.3)] + [(0.1, 0.5)] * 3:
            looks._compare(shares)
    assert [line.partition(":")[0] for line in lines] == [f"rank {slow} is slower than the others" for slow in (1, 0)]


def test_a_wait_that_goes_on_counts():
    own = Waits()
    with own:
        before = own.total()
        while own.total() == before:
            pass
    assert own.total() == own.total() > before


def slow_rank():
    """Train until it is said that a rank is slow; what is said, on rank 0."""
    ledgers._PERIOD, stragglers._LOOKS = 0.005, 40
    model = pw.shard(nn.Linear(8, 8), mesh={"dp": pw.get_group_size()}, in_strategy=(("dp", None),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Heard() as lines:
        for step in range(10_000):
            model(torch.ones(8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if pw.get_rank() == 1:
                time.sleep(0.02)
            if step % 50 == 49 and gathered("say what is heard", bool(lines))[0]:
                return lines
    return ["nothing"]


@pytest.mark.gloo
def test_a_slow_rank_is_named_while_they_train(on_ranks):
    heard, _ = on_ranks(2, slow_rank)
    assert heard[0].startswith("rank 1 is slower than the others: of the last minute rank 0 waited in collectives for ")
