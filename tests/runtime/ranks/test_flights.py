"""Over NCCL a rank whose GPU waits in vain is ended, with what the others say. The record of what its GPU waits for is
made up here, on gloo; that PyTorch writes one like it is tested too, and on GPUs in tests/gpu/test_nccl.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flight_records import entry, record
from heard import Heard
from scripts import run_ranks

from partway.runtime.ranks import flights as module
from partway.runtime.ranks.doing import MEETS, Doing
from partway.runtime.ranks.flights import Overdue, flights, given
from partway.strategy.torch_mesh import new_group


def what_gloo_records() -> tuple[list[Any], Any, int]:
    group = new_group([0, 1], None, "a test")
    for _ in range(3):
        dist.all_reduce(torch.ones(4, 2), group=group)
    recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    mine = [each for each in recorded["entries"] if each["process_group"] == [group.group_name, "partway: a test"]]
    count = given(recorded)[group.group_name]
    last = dict(mine[-1], retired=False)  # gloo ends them at once
    recorded["pg_config"] = {group.group_name: {"ranks": "[0, 1]"}}
    return mine, flights({**recorded, "entries": [last]}, time.time()), count


@pytest.mark.gloo
def test_pytorch_records_groups_by_our_names_and_what_was_given_to_each(on_ranks: Any) -> None:
    for mine, (flight,), count in on_ranks(2, what_gloo_records):
        assert len(mine) == count == flight.number == 3
        assert flight.ranks == (0, 1)
        assert flight.text == "all_reduce of float [4, 2] (partway: a test)"
        assert 0 <= flight.since < 100
        assert flight.limit > 100
        assert set(entry(1, over=True)) <= set(mine[0])


class Asked:
    """An Overdue whose looks are made by hand, and what came of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorded: dict[str, Any]) -> None:
        monkeypatch.setattr(module, "_LOOK", 1e6)
        self.recorded, self.doing, self.said = recorded, Doing("computes"), list[str]()
        self.overdue = Overdue(0, lambda _: self.recorded, lambda ranks: dict.fromkeys(ranks, self.doing), self.end)

    def end(self, text: str) -> None:
        self.said.append(text)

    def looks(self, count: int) -> list[str]:
        for _ in range(count):
            self.overdue.look()
        return self.said


def test_a_rank_that_has_not_come_and_has_ended_will_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, record(entry(1, over=True), entry(2, over=False), entry(3, over=False), done=1))
    asked.doing = Doing("has ended", mark="ended", given={"3": 1})
    assert asked.looks(1) == []  # what is there for the first time may just have been given
    text, *_ = asked.looks(1)
    assert text == (
        "the GPU of rank 0 waits in all_reduce of float [4, 2] (partway: dp) for 5 s, and rank 1 cannot come:\n"
        "  rank 1: has ended\n"
        "  not over here: all_reduce of float [4, 2] (partway: dp), for 5 s\n"
        "  not over here: all_reduce of float [4, 2] (partway: dp), for 5 s"
    )


@pytest.mark.parametrize("doing", [
    Doing("has ended", mark="ended", given={"3": 2}),
    Doing("waits for the other ranks to save", mark=MEETS, given={"3": 2}),
    Doing("computes", given={"3": 1}),
    Doing("waits in a collective", (0,), "some frame", {"3": 1}),
    Doing("does not answer"),
])  # fmt: skip
def test_a_rank_that_has_come_or_may_come_is_waited_for(monkeypatch: pytest.MonkeyPatch, doing: Doing) -> None:
    asked = Asked(monkeypatch, record(entry(1, over=True), entry(2, over=False), done=1))
    asked.doing = doing
    assert asked.looks(9) == []


def test_a_rank_that_waits_for_all_elsewhere_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, record(entry(1, over=False)))
    asked.doing = Doing("waits for the other ranks to save", mark=MEETS)
    assert asked.looks(3) == []
    assert (
        "and rank 1 waits for all ranks elsewhere:\n  rank 1: waits for the other ranks to save\n" in asked.looks(1)[0]
    )


def test_what_goes_on_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, record(entry(1, over=False)))
    asked.doing = Doing("waits for the other ranks to save", mark=MEETS)
    for number in range(2, 9):
        asked.looks(2)
        asked.recorded = record(entry(number, over=False))
    asked.recorded = record(entry(9, over=True), done=1)
    assert asked.looks(9) == []


def test_a_long_wait_is_told_of_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(monkeypatch, record(entry(1, over=False, timeout_ms=9000)))
    assert asked.looks(9) == []
    assert capsys.readouterr().err == (
        "partway: the GPU of rank 0 waits in all_reduce of float [4, 2] (partway: dp) for 5 s, and rank 1 has not come "
        "yet:\n"
        "  rank 1: computes\n"
        "  not over here: all_reduce of float [4, 2] (partway: dp), for 5 s\n"
    )


def test_the_thread_looks_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.001)
    counts, recorded = [0], record(entry(1, over=True), done=1)

    def counted(_: bool) -> dict[str, Any]:
        counts[0] += 1
        return recorded

    overdue = Overdue(0, counted, lambda ranks: {}, pytest.fail)
    while counts[0] < 20:
        assert overdue.thread.is_alive()
        time.sleep(0.001)
    overdue.stop()
    overdue.thread.join(60)
    assert not overdue.thread.is_alive()


def test_a_record_that_cannot_be_read_is_said_and_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.001)
    with Heard() as lines:
        Overdue(0, lambda _: {}, lambda ranks: {}, pytest.fail).thread.join(60)
    assert lines == [
        "PyTorch's record of collectives cannot be read (KeyError: 'pg_status'): where ranks wait for each other over "
        "NCCL, PyTorch alone tells of it"
    ]


WAITS = """
import sys, threading, time
import torch
import partway as pw
from partway.runtime import agree
from partway.runtime.ranks import watch as watches
from flight_records import entry, record

pw.init(backend="gloo", timeout=60)
waits, how = pw.get_rank() == int(sys.argv[2]), sys.argv[1]
torch.cuda.current_device, torch.cuda.set_device = (lambda: 0), (lambda gpu: None)
watches.has_nccl = lambda group=None: True
entries = [entry(1, over=True)] + ([entry(2, over=False)] if waits else [])
watches.flight_record = lambda entries_too=True, under_way=False: record(*entries, done=1)
agree("begin", [])
print("begins")
if waits:
    threading.Event().wait()  # as if within CUDA
if how == "raises":
    raise ValueError("no more data")
agree("save", [])
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("waits", "how", "said"),
    [
        (0, "raises", "rank 1 cannot come:\n  rank 1: has ended\n"),
        (
            1,
            "raises",
            "rank 0 cannot come:\n  rank 0: cannot be asked: the store by which the processes met",
        ),
        (1, "meets", "rank 0 waits for all ranks elsewhere:\n  rank 0: waits for the other ranks to save"),
    ],
)
def test_a_process_whose_gpu_waits_in_vain_ends_with_what_the_other_does(
    tmp_path: Path, waits: int, how: str, said: str
) -> None:
    (tmp_path / "run.py").write_text(WAITS)
    ended = run_ranks(["run.py", how, str(waits)], tmp_path)
    stuck, other = ended[waits], ended[1 - waits]
    assert (stuck.returncode, other.returncode) == (1, 1)
    assert stuck.stdout == "begins\n"  # what is in the buffer is written
    begins = f"partway: the GPU of rank {waits} waits in all_reduce of float [4, 2] (partway: dp) for "
    assert begins in stuck.stderr
    assert f" s, and {said}" in stuck.stderr
    if how == "meets":
        assert "RuntimeStateError: rank 0 would save, and rank 1 cannot come; run the same program on " in other.stderr
        assert "rank 1: the GPU of rank 1 waits in all_reduce of float [4, 2] (partway: dp) for" in other.stderr
