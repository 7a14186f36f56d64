"""The folders of a run: numbered calls, earlier runs moved aside, nothing written over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partway.graphs import folders
from partway.graphs.folders import call_folder, file_name, same_call
from partway.strategy.files import held


@pytest.fixture
def new_run(monkeypatch: pytest.MonkeyPatch) -> object:
    """Starts another run, whose process is not this one."""

    def start() -> None:
        for folder in folders._of_this_run.values():
            folder.lock.close()
        monkeypatch.setattr(folders, "_of_this_run", {})

    return start


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_calls_are_numbered_in_their_order_and_listed(tmp_path: Path) -> None:
    for name in ("Net.forward", "f", "Net.forward"):
        call_folder(tmp_path, 0, name)
    assert names(tmp_path / "rank_0") == ["000_Net.forward", "001_f", "002_Net.forward", "calls.txt"]
    head, *calls = (tmp_path / "rank_0" / "calls.txt").read_text().splitlines()
    assert head.startswith("partway graphs 1: ")
    assert calls == ["000_Net.forward", "001_f", "002_Net.forward"]


def test_each_rank_has_a_folder_of_its_own(tmp_path: Path) -> None:
    path = call_folder(tmp_path, 0, "f")
    assert same_call(tmp_path, 3, path.name) == tmp_path / "rank_3" / "000_f"
    assert names(tmp_path) == [
        "rank_0",
        "rank_0/000_f",
        "rank_0/calls.txt",
        "rank_3",
        "rank_3/000_f",
        "rank_3/calls.txt",
    ]


def test_a_name_is_one_that_files_can_have() -> None:
    assert file_name("outer.<locals>.f/../x y") == "outer._locals_.f_.._x_y"
    assert len(file_name("x" * 300)) == 80


def test_what_an_earlier_run_saved_is_moved_aside_and_stays(tmp_path: Path, new_run: object) -> None:
    for run in range(3):
        (call_folder(tmp_path, 0, "f") / "index.txt").write_text(str(run))
        assert callable(new_run)
        new_run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", "rank_0.1", "rank_0.2"]
    found = {path.name: (path / "000_f" / "index.txt").read_text() for path in tmp_path.iterdir()}
    assert found == {"rank_0": "2", "rank_0.1": "0", "rank_0.2": "1"}


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="it is there already, and was not written by Partway"):
        call_folder(tmp_path, 0, "f")
    assert names(tmp_path) == ["rank_0", "rank_0/mine.txt"]


def test_the_folder_of_a_process_that_still_runs_is_left_alone(tmp_path: Path, new_run: object) -> None:
    call_folder(tmp_path, 0, "f")
    assert callable(new_run)
    new_run()
    before = names(tmp_path)
    with held(tmp_path / "rank_0") as ours:
        assert ours
        with pytest.raises(FileExistsError, match=re.escape("another process that is running writes there; give each")):
            call_folder(tmp_path, 0, "f")
    assert names(tmp_path) == before


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    import shutil

    call_folder(tmp_path, 0, "f")
    shutil.rmtree(tmp_path / "rank_0")
    assert call_folder(tmp_path, 0, "g").name == "000_g"
