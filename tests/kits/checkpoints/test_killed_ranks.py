"""Ranks are killed while they save: the others end with an error, and the last good checkpoint loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from killed_ranks import killed_at, made, train, until_killed

import partway as pw


def last_good(folder: str) -> int:
    """The step of the last good checkpoint, which holds what its training has come to."""
    model, optimizer = made()
    step: int = pw.load(folder, model, optimizer)["step"]
    expected, stepper = made()
    for i in range(step + 1):
        train(expected, stepper, i)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["momentum_buffer"], stepper.state[other]["momentum_buffer"])
    return step


def begin(folder: str) -> None:
    model, optimizer = made()
    train(model, optimizer, 0)
    pw.save(folder, model, optimizer, step=0)


@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "asynchronous"), [
    (1, True), *(pytest.param(50, asynchronous, marks=pytest.mark.slow) for asynchronous in (False, True)),
])  # fmt: skip
def test_after_a_kill_of_one_rank_or_both_the_last_good_one_loads(
    tmp_path: Path, kills: int, asynchronous: bool
) -> None:
    folder, moments, step = str(tmp_path), random.Random(asynchronous), 0
    begin(folder)
    for kill in range(kills):
        doomed = [(0,), (1,), (0, 1)][(kill + asynchronous) % 3]
        said = until_killed(folder, doomed, killed_at(moments.uniform(0.0, 0.2)), asynchronous)
        for text in said.values():
            assert text.startswith("RuntimeStateError: rank ")
            assert f"rank {doomed[0]}: has ended without a word, as a process does that is killed" in text
        before, step = step, last_good(folder)
        assert step >= before
    assert step >= kills // 10, "hardly any checkpoint was completed"


@pytest.mark.gloo
def test_a_rank_0_that_ends_before_it_says_how_a_meeting_went_is_named(tmp_path: Path) -> None:
    begin(str(tmp_path))
    said = until_killed(str(tmp_path), (0,), lambda processes: None, early="meeting")
    assert said[1].startswith(f"RuntimeStateError: rank 1 would load the checkpoint in {tmp_path}, and rank 0 cannot c")
    assert "rank 0: has ended without a word, as a process does that is killed" in said[1]
    assert last_good(str(tmp_path)) == 0


@pytest.mark.gloo
def test_a_rank_that_ends_while_the_ranks_connect_is_named_before_the_timeout(tmp_path: Path) -> None:
    begin(str(tmp_path))
    said = until_killed(str(tmp_path), (1,), lambda processes: None, early="connecting")
    assert said[0].startswith("RuntimeStateError: rank 0 would connect the processes for checkpoints, and rank 1")
    assert "rank 1: has ended without a word, as a process does that is killed" in said[0]
