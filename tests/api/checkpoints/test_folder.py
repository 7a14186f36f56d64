"""The folder of checkpoints: each is there as a whole or not at all."""

from contextlib import ExitStack

import pytest

from partway.checkpoints.folder import MANIFEST, begin, begun, drop, finish, newest, numbers
from partway.strategy import RuntimeStateError


def one_more(folder, keep=None):
    with begun(folder) as fresh:
        (fresh / MANIFEST).write_text("{}")
        return finish(fresh, keep)


def test_checkpoints_are_numbered_and_the_last_are_kept(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert one_more(folder).name == "checkpoint-000001"
    assert one_more(folder).name == "checkpoint-000002"
    assert sorted(numbers(folder)) == [1, 2]
    last = one_more(folder, keep=2)
    assert sorted(entry.name for entry in folder.iterdir()) == ["checkpoint-000002", "checkpoint-000003"]
    assert newest(folder) == last
    assert newest(folder / "checkpoint-000002").name == "checkpoint-000002"
    one_more(folder, keep=1)
    assert [entry.name for entry in folder.iterdir()] == ["checkpoint-000004"]


def test_what_was_not_completed_is_never_loaded_and_goes_with_the_next(tmp_path):
    left = begin(tmp_path)
    (left / MANIFEST).write_text("{}")
    with pytest.raises(
        RuntimeStateError, match=r"no checkpoint to load in .*: one was begun, and never completed; give"
    ):
        newest(tmp_path)
    complete = one_more(tmp_path)
    assert not left.exists()
    begin(tmp_path)
    assert newest(tmp_path) == complete
    other = begin(tmp_path)
    drop(other)
    drop(other)
    assert not other.exists()


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
