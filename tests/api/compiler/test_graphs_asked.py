"""What the environment asks to be saved, and what it cannot mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from partway.compiler.graphs_asked import Asked, asked
from partway.strategy import ContextError


@pytest.mark.parametrize("environment", [{}, {"PARTWAY_SAVE_GRAPHS": "0"}, {"MS_DEV_SAVE_GRAPHS": "0"}])
@pytest.mark.parametrize("rest", [{}, {"PARTWAY_SAVE_GRAPHS_RANKS": "3", "PARTWAY_SAVE_GRAPHS_PATH": "x"}])
def test_nothing_is_saved_unless_a_level_is_set(environment: dict[str, str], rest: dict[str, str]) -> None:
    assert asked(environment | rest) is None


@pytest.mark.parametrize("prefix", ["PARTWAY_SAVE_GRAPHS", "MS_DEV_SAVE_GRAPHS"])
@pytest.mark.parametrize("level", [1, 2])
def test_both_names_of_a_variable_mean_the_same(prefix: str, level: int) -> None:
    environment = {prefix: str(level), f"{prefix}_PATH": "/somewhere"}
    assert asked(environment) == Asked(level, Path("/somewhere"))


def test_the_folder_is_in_the_working_directory_unless_a_path_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert asked({"PARTWAY_SAVE_GRAPHS": "1"}) == Asked(1, tmp_path / "partway_graphs")


def test_every_rank_is_saved_where_that_is_asked() -> None:
    found = asked({"PARTWAY_SAVE_GRAPHS": "2", "PARTWAY_SAVE_GRAPHS_RANKS": "all"})
    assert found is not None
    assert found.every_rank


@pytest.mark.parametrize("name", ["PARTWAY_SAVE_GRAPHS", "MS_DEV_SAVE_GRAPHS"])
@pytest.mark.parametrize("value", ["3", "-1", "yes", "1.0", " 1"])
def test_a_level_that_there_is_not_is_refused(name: str, value: str) -> None:
    with pytest.raises(ContextError) as error:
        asked({name: value})
    assert str(error.value) == (
        f"{name} is {value!r}; write 1 for the graphs of the main stages, 2 for those of every pass, or 0 for none "
        "(`partway show` makes pictures of a plan)"
    )


def test_ranks_are_all_or_not_given() -> None:
    with pytest.raises(ContextError) as error:
        asked({"PARTWAY_SAVE_GRAPHS": "1", "PARTWAY_SAVE_GRAPHS_RANKS": "0,1"})
    assert str(error.value) == ("PARTWAY_SAVE_GRAPHS_RANKS is '0,1'; write all, or unset it to save those of rank 0")


def test_two_names_with_two_values_contradict_each_other() -> None:
    with pytest.raises(ContextError) as error:
        asked({"PARTWAY_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS": "2"})
    text = "PARTWAY_SAVE_GRAPHS='1' and MS_DEV_SAVE_GRAPHS='2' mean the same and differ; unset one of them"
    assert str(error.value) == text
    assert asked({"PARTWAY_SAVE_GRAPHS": "1", "MS_DEV_SAVE_GRAPHS": "1"}) is not None
    with pytest.raises(ContextError, match="PARTWAY_SAVE_GRAPHS_PATH='a' and MS_DEV_SAVE_GRAPHS_PATH='b' mean the sa"):
        asked({"PARTWAY_SAVE_GRAPHS": "1", "PARTWAY_SAVE_GRAPHS_PATH": "a", "MS_DEV_SAVE_GRAPHS_PATH": "b"})
