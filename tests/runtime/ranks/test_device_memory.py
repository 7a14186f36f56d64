"""The memory that a plan may use follows from what the ranks' devices have."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import partway as pw
from partway.runtime.ranks import device_memory
from partway.runtime.ranks.device_memory import host_memory, memory_of_a_rank, rounded_down, shares


def test_processes_on_one_device_share_it() -> None:
    answers = [["a", "cpu", 24e9], ["a", "cpu", 24e9], ["b", "cpu", 16e9]]
    assert shares(answers) == [12e9, 12e9, 16e9]
    assert shares([["a", 0, 80e9], ["a", 1, 79e9]]) == [80e9, 79e9]


@pytest.mark.parametrize(("size", "rounded"), [(84_987_654_321, 84e9), (12.04e9, 12e9), (12e9, 12e9), (999.0, 990.0)])
def test_two_digits_are_kept(size: float, rounded: float) -> None:
    assert rounded_down(size) == pytest.approx(rounded)


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch) -> None:
    machine = host_memory()
    assert machine > 1e8
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(device_memory, "_CGROUP", limit)
    whole = host_memory()  # there is no such file
    limit.write_text("max\n")
    assert host_memory() == whole >= machine
    limit.write_text("123456789\n")
    assert host_memory() == 123456789.0


def test_gpus_are_told_apart_by_what_they_are_and_not_by_their_number(monkeypatch) -> None:
    """Tasks of Slurm may each see one GPU, as number 0."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (60e9, 80e9))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 2e9)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    answers = []
    for uuid in ("one", "other", "other"):
        monkeypatch.setattr(cuda, "get_device_properties", lambda index, uuid=uuid: SimpleNamespace(uuid=uuid))
        answers.append(device_memory._mine("cuda"))
    assert shares(answers) == [62e9, 31e9, 31e9]


def test_the_rank_that_has_the_least_counts(monkeypatch) -> None:
    asked = []

    def others(purpose: str, mine: object, among: object) -> list[object]:
        asked.append((purpose, mine))
        return [["a", "cpu", 64e9], ["b", "cpu", 16.09e9]]

    monkeypatch.setattr(device_memory, "gathered", others)
    memory_of_a_rank.cache_clear()
    try:
        assert memory_of_a_rank("cpu") == memory_of_a_rank("cpu") == 16e9
    finally:
        memory_of_a_rank.cache_clear()
    ((purpose, (_, device, size)),) = asked
    assert (purpose, device, size) == ("count the memory of its device", "cpu", host_memory())


def over_the_memory_of_a_rank() -> tuple[str, str]:
    """The errors of two calls that hold more than a rank's memory: by default, and with a profile of one's own."""
    model = pw.shard(nn.Linear(8, 8), mesh={"dp": 2}, in_strategy=(("dp", None),))
    said = []
    for profile in (None, "cpu"):
        pw.set_auto_parallel_context(device_profile=profile)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_memory, "host_memory", lambda: 2000.0)
            memory_of_a_rank.cache_clear()
            try:
                model(torch.ones(4 if profile else 6, 8))
                said.append("")
            except pw.StrategyError as error:
                said.append(str(error))
            finally:
                memory_of_a_rank.cache_clear()
                pw.reset_auto_parallel_context()
    return said[0], said[1]


@pytest.mark.gloo
def test_ranks_plan_for_the_memory_that_they_have_unless_a_profile_is_given(on_ranks) -> None:
    (first, own), (second, other) = on_ranks(2, over_the_memory_of_a_rank)
    assert first == second
    assert "and memory_limit is 940 B" in first  # half of what the host has, less 6 %
    assert own == other == ""
