"""Ranks that meet wait for each other as long as they are told to, and all hear of it. (What else a watch tells, of
ranks that are killed or wait elsewhere, is in tests/kits/checkpoints/test_killed_ranks.py,
tests/api/ops/test_groups.py and tests/conformance/test_ranks.py.)"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partway.runtime import agree, shutdown
from partway.runtime.ranks import watch as watches
from partway.runtime.ranks.watch import watch
from partway.strategy import RuntimeStateError


def comes_late():
    """Rank 1 comes to a meeting when rank 0 has given up."""
    own = watch()
    before, own.timeout = own.timeout, 0.2
    verdict = f"verdict/{own.next_meeting()}"
    try:
        while own.rank and not own._store.check([verdict]):
            time.sleep(0.01)
        with pytest.raises(RuntimeStateError) as error:
            agree("try", [])
    finally:
        own.timeout = before
    return str(error.value)


@pytest.mark.gloo
def test_a_rank_that_is_busy_elsewhere_is_waited_for_until_the_timeout(on_ranks):
    first, second = on_ranks(2, comes_late)
    assert first == second
    said = (
        "rank 0 would try, and rank 1 did not come within 0.2 s; run the same program on every rank:\n  rank 1: is out"
    )
    assert first.startswith(said)


def hears_late():
    """Whether rank 1, which is slow to hear that a meeting has failed, has heard of it when rank 0 goes on."""
    own = watch()
    before, watches._ANSWER = watches._ANSWER, 60.0
    if own.rank:
        own.part = lambda among: (time.sleep(0.3), type(own).part(own, among))
    try:
        with pytest.raises(RuntimeStateError, match="at different points of the program"):
            agree(f"try {own.rank}", [])
        return own._store.check([f"parted/{own.next_meeting()}/1"])
    finally:
        watches._ANSWER = before
        vars(own).pop("part", None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(8, 8)

    def forward(self, x):
        return x + self.places(torch.arange(x.shape[1]))


def is_asked_while_it_captures():
    """Capture a model many times while another thread asks what this rank does; the errors, and an answer."""
    own, ends, answers = watch(), threading.Event(), []

    def ask():
        while not ends.is_set():
            answers.append(own.doing().text)

    asker = threading.Thread(target=ask)
    failed = []
    with own.planning("is about to capture"):
        asker.start()
        for _ in range(20):
            try:
                torch.export.export(Net(), (torch.ones(2, 8, 8),))
            except Exception as error:
                failed.append(str(error))
        ends.set()
        asker.join()
    return failed, answers[-1]


@pytest.mark.gloo
def test_a_rank_that_captures_says_so_and_is_not_disturbed(on_ranks):
    for failed, answer in on_ranks(2, is_asked_while_it_captures):
        assert failed == []
        assert answer.startswith("is about to capture, at test_watch.py:")
        assert answer.endswith('with own.planning("is about to capture"):')


@pytest.mark.gloo
def test_rank_0_stays_until_the_others_know_that_a_meeting_has_failed(on_ranks):
    assert on_ranks(2, hears_late) == [True, True]


def test_a_second_process_group_has_a_watch_of_its_own():
    seen = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            seen.append(watch())
            assert seen[-1].group is dist.group.WORLD
        finally:
            shutdown()
    assert seen[0] is not seen[1]
