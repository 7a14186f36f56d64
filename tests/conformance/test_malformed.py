"""Malformed arguments and edited files raise Partway's own errors; nothing in them runs, and no result is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import malformed
import pytest
import torch

import partway as pw


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTWAY_CACHE", "0")
    yield tmp_path
    malformed.reset()


@pytest.mark.parametrize(("kind", "count"), [("arguments", 100), ("plans", 25), ("profiles", 12), ("caches", 10)])
def test_some_malformed_arguments_and_edits(tmp_path: Path, kind: str, count: int) -> None:
    found = malformed.KINDS[kind](count, 5, tmp_path)
    assert found.failures == []
    assert found.cases == count


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "count"), [("arguments", 2000), ("plans", 400), ("profiles", 400), ("caches", 400)])
def test_many_malformed_arguments_and_edits(tmp_path: Path, kind: str, count: int) -> None:
    found = malformed.KINDS[kind](count, 6, tmp_path)
    assert found.failures == []
    assert found.cases == count


def test_a_foreign_error_a_wrong_number_and_code_that_runs_are_seen(tmp_path: Path) -> None:
    def refused() -> None:
        raise pw.StrategyError("x")

    def foreign() -> None:
        _ = {}["x"]  # type: ignore[var-annotated]

    def wrong() -> None:
        malformed.same(torch.ones(2), torch.zeros(2).double())

    def hostile() -> None:
        (tmp_path / "ran").mkdir()

    def wrong_call() -> None:
        pw.shard(zz=1)  # type: ignore[call-arg]

    found = malformed.Found()
    for case in (refused, foreign, wrong, hostile, wrong_call, lambda: len(3)):  # type: ignore[arg-type]
        malformed.examine(found, case.__name__, case, tmp_path / "ran")
    assert [failure.split(":")[0] for failure in found.failures] == [
        "foreign | KeyError", "wrong | WrongError", "hostile | code was run", "wrong_call | TypeError",
        "<lambda> | TypeError",
    ]  # fmt: skip
    assert found.refused == 1


def test_edits_change_a_file_and_follow_from_the_seed() -> None:
    tree = {"a": [1, {"b": "c"}], "d": 2}
    made = [malformed.edited(tree, random.Random(seed)) for seed in range(200)]
    assert tree == {"a": [1, {"b": "c"}], "d": 2}
    assert made == [malformed.edited(tree, random.Random(seed)) for seed in range(200)]
    assert sum(one != tree for one in made) > 150
    text = bytes(range(200))
    damaged = [malformed.bytes_of(text, random.Random(seed)) for seed in range(100)]
    assert all(one != text for one in damaged)
