"""The folder of checkpoints: each is there as a whole or not at all, and nothing else is touched."""

import os
import shutil
from contextlib import ExitStack

import pytest

from partway.checkpoints.folder import begin, begun, check_path, checkpoints, drop, finish, make_unfinished, newest
from partway.checkpoints.manifest import MANIFEST, Manifest
from partway.strategy import RuntimeStateError


def complete(folder, files=("model.safetensors",)):
    """Write what `finish` takes for a checkpoint."""
    for name in (*files, "parts-00000.json", "state.pt"):
        (folder / name).write_text("")
    manifest = Manifest(
        saved="", torch="", processes=1, aliases={}, differ=(), checksums={"parts-00000.json": 0, "state.pt": 0},
        headers=dict.fromkeys(files, 0), sizes=dict.fromkeys((*files, "parts-00000.json", "state.pt"), 0),
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.text())


def one_more(folder, keep=None):
    with begun(folder) as fresh:
        complete(fresh)
        return finish(fresh, keep)


def names(folder):
    return sorted(os.listdir(folder))


def test_checkpoints_are_numbered_and_the_last_are_kept(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert one_more(folder).name == "checkpoint-000001"
    assert one_more(folder).name == "checkpoint-000002"
    assert sorted(checkpoints(folder)) == [1, 2]
    last = one_more(folder, keep=2)
    assert names(folder) == ["checkpoint-000002", "checkpoint-000003"]
    assert newest(folder) == last
    assert newest(folder / "checkpoint-000002").name == "checkpoint-000002"
    one_more(folder, keep=1)
    assert names(folder) == ["checkpoint-000004"]


def test_folders_of_other_programs_are_neither_removed_nor_counted_nor_loaded(tmp_path):
    others = {name: tmp_path / name for name in (
        "checkpoint-000001", "checkpoint-500", "checkpoint-500000", "checkpoint-1", ".checkpoint-000001.saving",
        ".checkpoint-000003.saving", "checkpoint-x",
    )}  # fmt: skip
    for path in others.values():
        path.mkdir()
        (path / "weights").write_text("mine")
    for path in (others["checkpoint-000001"], others["checkpoint-500"]):
        (path / "config.json").write_text("mine")
    (others["checkpoint-500000"] / MANIFEST).write_text('{"format": 1}')  # not what Partway writes there
    (tmp_path / "checkpoint-000009").symlink_to(others["checkpoint-1"])
    (tmp_path / "checkpoint-000007").write_text("a file")
    before = {path: path.read_text() for path in tmp_path.glob("*/*")} | {tmp_path / "checkpoint-000007": "a file"}
    assert one_more(tmp_path, keep=1).name == "checkpoint-500001"
    (others["checkpoint-500000"] / MANIFEST).unlink()
    made = [one_more(tmp_path, keep=1) for _ in range(3)]
    assert newest(tmp_path) == made[-1]
    assert sorted(checkpoints(tmp_path)) == [500004]
    del before[others["checkpoint-500000"] / MANIFEST]
    assert {path: path.read_text() for path in before} == before
    assert (tmp_path / "checkpoint-000009").is_symlink()


def test_a_checkpoint_takes_a_number_that_no_other_program_took(tmp_path):
    (tmp_path / "checkpoint-000001").mkdir()
    (tmp_path / ".checkpoint-000002.saving").mkdir()
    assert one_more(tmp_path, keep=5).name == "checkpoint-000003"
    assert names(tmp_path) == [".checkpoint-000002.saving", "checkpoint-000001", "checkpoint-000003"]


def test_what_a_person_put_into_a_checkpoint_stays_when_the_checkpoint_goes(tmp_path):
    first = one_more(tmp_path)
    (first / "notes.txt").write_text("mine")
    (first / "inner").mkdir()
    one_more(tmp_path, keep=1)
    assert names(first) == ["inner", "notes.txt"]
    shutil.copytree(tmp_path / "checkpoint-000002", tmp_path / "checkpoint-0000009")  # a number as it is not written
    assert sorted(checkpoints(tmp_path)) == [2]
    assert one_more(tmp_path, keep=1).name == "checkpoint-000003"


def test_a_link_to_a_checkpoint_elsewhere_is_loaded_and_never_emptied(tmp_path):
    (folder := tmp_path / "folder").mkdir()
    elsewhere = one_more(tmp_path / "elsewhere")
    (folder / "checkpoint-000001").symlink_to(elsewhere)
    assert newest(folder) == folder / "checkpoint-000001"
    assert one_more(folder, keep=1).name == "checkpoint-000002"
    assert one_more(folder, keep=1).name == "checkpoint-000003"
    assert names(folder) == ["checkpoint-000001", "checkpoint-000003"]
    assert MANIFEST in names(elsewhere)


def test_a_damaged_checkpoint_is_not_removed_and_is_the_one_that_is_loaded(tmp_path):
    damaged = one_more(tmp_path)
    (damaged / MANIFEST).unlink()  # its parts say that it was one
    assert newest(tmp_path) == damaged
    one_more(tmp_path, keep=1)
    one_more(tmp_path, keep=1)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000003"]


def test_what_was_not_completed_is_never_loaded_and_goes_with_the_next(tmp_path):
    left = begin(tmp_path)
    (left / "model.safetensors").write_text("half")
    with pytest.raises(
        RuntimeStateError, match=r"no checkpoint to load in .*: one was begun, and never completed; give"
    ):
        newest(tmp_path)
    made = one_more(tmp_path)
    assert not left.exists()
    begin(tmp_path)
    assert newest(tmp_path) == made
    other = begin(tmp_path)
    drop(other)
    drop(other)
    assert not other.exists()


def test_an_unfinished_folder_takes_the_place_of_its_like_only(tmp_path):
    path = make_unfinished(tmp_path / ".partway.saving")
    (path / "half").write_text("")
    assert names(make_unfinished(path)) == [MANIFEST]
    (path / MANIFEST).write_text("mine")
    with pytest.raises(RuntimeStateError, match=r"\.partway\.saving already exists, and Partway did not write it; rem"):
        make_unfinished(path)
    assert (path / MANIFEST).read_text() == "mine"


def test_what_came_to_an_error_is_removed_and_nobody_else_saves_meanwhile(tmp_path):
    begin_twice = ExitStack()
    begin_twice.enter_context(begun(tmp_path))
    with pytest.raises(RuntimeStateError, match=r"^another process is saving a checkpoint in .*; give each job its"):
        begin_twice.enter_context(begun(tmp_path))
    with pytest.raises(OSError, match="full"), begin_twice:
        raise OSError("full")
    assert not list(tmp_path.iterdir())
    assert one_more(tmp_path).name == "checkpoint-000001"


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            RuntimeStateError, match=r"no checkpoint to load in .*: there is none; give the folder that"
        ):
            newest(path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert newest(tmp_path) == tmp_path
    with pytest.raises(RuntimeStateError, match=r"no checkpoint to load in .*model\.safetensors: it is a file; give"):
        newest(tmp_path / "model.safetensors")


@pytest.mark.parametrize("path", ["", "a\0b", b"folder", 3, None])
def test_what_names_no_folder_is_refused(path):
    with pytest.raises(
        RuntimeStateError, match=r"^path is .*(, which names no folder; write '\.'|; write the path of a)"
    ):
        check_path(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    text = r"file/inner cannot be made a folder for checkpoints: Not a directory"
    with pytest.raises(RuntimeStateError, match=text), begun(tmp_path / "file" / "inner"):
        pass
