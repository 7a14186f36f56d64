"""A file that is written is whole, or is as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import partway as pw
from partway.propagation.cost.profile import profile_of
from partway.propagation.program.timeline import save_chrome_trace
from partway.strategy.basics import files
from partway.strategy.basics.files import MARKS, held, is_foreign, json_of, naming, read, save, write_whole
from partway.strategy.errors import StrategyError, shown


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text("good")
    return tmp_path / "plan.json"


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def save_a_plan(path: Path) -> None:
    pw.compile(torch.relu, (torch.ones(4),), mesh={"x": 2}).plan.save(path)


SAVED: dict[str, Any] = {
    "a plan": save_a_plan,
    "a device profile": lambda path: profile_of("cpu").save(path),
    "a timeline": lambda path: save_chrome_trace(path, {}),
}


@pytest.mark.parametrize("what", SAVED)
def test_a_full_disk_leaves_the_good_file(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = "".join(MARKS[what.replace("a ", "the ", 1)])
    path.write_text(good)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StrategyError, match=r"could not write the .*plan\.json.*No space left on device"):
        SAVED[what](path)
    monkeypatch.undo()
    assert path.read_text() == good
    assert os.listdir(path.parent) == ["plan.json"]
    SAVED[what](path)
    assert path.read_text() != good


@pytest.mark.parametrize("what", SAVED)
def test_a_file_that_partway_did_not_write_stays_and_what_it_wrote_is_replaced(path: Path, what: str) -> None:
    text = (
        r"could not write the .*plan\.json': it is there already, and Partway did not write it; give another path, or"
    )
    with pytest.raises(StrategyError, match=text):
        SAVED[what](path)
    assert path.read_text() == "good"
    path.write_text("")
    SAVED[what](path)
    first = path.read_bytes()
    SAVED[what](path)
    assert path.read_bytes() == first
    assert not is_foreign(what.replace("a ", "the ", 1), path)


def test_a_file_of_a_user_that_is_named_as_an_unfinished_one_stays(path: Path) -> None:
    others = [
        path.with_name(name) for name in (".plan.json.backup.tmp", ".plan.json.old", f".plan.json.{'a' * 12}.tmp")
    ]
    left = path.with_name(f".plan.json.{'a' * 12}.partway")
    for one in (*others, left):
        one.write_text("mine")
        os.utime(one, (1, 1))
    write_whole(path, "new")
    assert all(one.read_text() == "mine" for one in others)
    assert not left.exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 100_000, "is nested too deeply"), (b"\xff\xfe{", "has no text in UTF-8 at byte 0"),
        (b"{", "is not JSON: Ex"),
        (b'{"a": 1, "b": {"x": 1, "x": 2}}', "has 'x' twice in one object"),
        (b"[NaN]", "has NaN, which is not a finite nu"),
        (b"[1e999]", "has 1e999, which is not"), (b"[-Infinity]", "has -Infinity, which is not"),
        (b"", "is not JSON: Expect"),
        (b"9" * 5000, "has a number of thousands of digits"), (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
    ],
)  # fmt: skip
def test_json_that_does_not_say_one_thing_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        json_of(data)


def test_json_is_what_json_says() -> None:
    assert json_of(b' {"a": [1, -2.5, null, true, "\\u00e9"]} ') == {"a": [1, -2.5, None, True, "é"]}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_what_is_no_file_is_written_to_and_says_what_failed() -> None:
    with pytest.raises(StrategyError, match="could not write the plan to '/dev/full': No space left on device"):
        save("the plan", "/dev/full", "x")
    write_whole("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_the_umask(path: Path) -> None:
    path.chmod(0o640)
    write_whole(path, "new")
    before = os.umask(0o027)
    try:
        write_whole(path.with_name("other"), b"new")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.with_name("other"))] == [0o640, 0o640]


def test_a_file_that_another_process_removes_meanwhile_is_written_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(0o640)

    def removed(count: int) -> str:
        path.unlink()
        return "0" * count

    monkeypatch.setattr("secrets.token_hex", removed)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_very_long_name_that_a_folder_takes_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 255), "new")
    assert (tmp_path / ("x" * 255)).read_text() == "new"


@pytest.mark.parametrize("wrong", ["\0", "", "x" * 5000, 10**30, ["a"], None, b"a", 3, "a\0b/c", {}, 1.5])
def test_what_is_no_path_is_named_and_nothing_is_opened(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call, says in (
        (lambda: read("a plan from", wrong), "could not read a plan from "),
        (lambda: save("the plan", wrong, "x"), "could not write the plan to "),
    ):
        with pytest.raises(StrategyError, match=says) as refused:
            call()
        assert len(str(refused.value)) < 400
    assert os.listdir(tmp_path) == []


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("partway.strategy.basics.files._LARGEST", 3)
    with pytest.raises(StrategyError, match="it has more than 3 bytes"):
        read("a plan from", path)


def test_long_values_are_shown_in_part() -> None:
    assert shown("ab") == "'ab'"
    assert len(shown("x" * 5000)) < 200
    assert shown(10**5000) == "a int that is too large to be shown"


def test_what_a_full_disk_answers_names_the_file() -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'x\.json'"), naming("x.json"):
        full()
    with pytest.raises(FileNotFoundError, match=r"'other'"), naming("x.json"):
        Path("other").read_bytes()


def test_the_lock_of_a_folder_is_held_once(tmp_path: Path) -> None:
    with held(tmp_path) as first, held(tmp_path) as second:
        assert (first, second) == (True, False)
    with held(tmp_path) as again:
        assert again


def test_where_there_are_no_locks_none_is_held_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", full)
    with held(tmp_path) as first, held(tmp_path) as second:
        assert first
        assert second
    monkeypatch.setattr(files, "fcntl", None)
    with held(tmp_path) as without:
        assert without
