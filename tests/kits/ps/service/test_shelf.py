"""A server's records: all of a commit or nothing, whatever ends the process or fills the disk."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from partway.ps.service.shelf import Full, Record, Shelf, open_shelf, viewing
from partway.strategy.errors import RuntimeStateError

PACKAGES = ("partway", "partway.runtime", "partway.ps.service")


def folders_of(package: str) -> list[str]:
    spec = find_spec(package)
    assert spec is not None
    return list(spec.submodule_search_locations or [])


@pytest.fixture(params=["process", "disk", "memory"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    made = open_shelf(tmp_path / "deep" / "shelf", request.param)
    yield made
    made.close()


def all_of(shelf: Shelf, prefix: bytes = b"") -> dict[bytes, bytes]:
    with viewing(shelf) as view:
        return {key: bytes(value) for key, value in view.items(prefix)}


def put(shelf: Shelf, **records: bytes) -> None:
    shelf.commit([(key.encode(), value) for key, value in records.items()], 100)


# -- Commits


def test_a_new_shelf_is_empty(shelf: Shelf) -> None:
    assert all_of(shelf) == {}
    with viewing(shelf) as view:
        assert view.get(b"a") is None


def test_records_are_there_once_they_are_committed(shelf: Shelf) -> None:
    put(shelf, b=b"2", a=b"1", empty=b"")
    put(shelf, a=b"new")
    assert list(all_of(shelf).items()) == [(b"a", b"new"), (b"b", b"2"), (b"empty", b"")]
    with viewing(shelf) as view:
        assert bytes(view.get(b"a")) == b"new"
        assert view.get(b"c") is None


def test_buffers_and_large_records_are_kept_as_they_are(shelf: Shelf) -> None:
    large = random.Random(0).randbytes(300_000)
    shelf.commit([(b"large", memoryview(bytearray(large))), (b"small", memoryview(b"xyz"))], len(large))
    assert all_of(shelf) == {b"large": large, b"small": b"xyz"}


def test_items_are_those_of_a_prefix_in_the_order_of_their_keys(shelf: Shelf) -> None:
    put(shelf, **{"p/1/b": b"1", "p/1/a": b"2", "p/10/a": b"3", "p/0/a": b"4", "q": b"5"})
    assert list(all_of(shelf, b"p/1/").items()) == [(b"p/1/a", b"2"), (b"p/1/b", b"1")]
    assert all_of(shelf, b"z") == all_of(shelf, b"p/2") == {}


def test_prefixes_are_removed_before_records_are_written(shelf: Shelf) -> None:
    put(shelf, **{"g/1/a": b"1", "g/1/b": b"2", "g/2/a": b"3", "h": b"4"})
    shelf.commit([(b"g/1/c", b"5")], 10, [b"g/1/", b"none"])
    assert all_of(shelf) == {b"g/1/c": b"5", b"g/2/a": b"3", b"h": b"4"}
    shelf.commit([], 0, [b"g/", b"h"])
    assert all_of(shelf) == {}


def test_a_commit_that_fails_changes_nothing(shelf: Shelf) -> None:
    put(shelf, a=b"1", b=b"2")

    def records() -> Iterator[Record]:
        yield b"a", b"other"
        yield b"c", b"other"
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        shelf.commit(records(), 100, [b"b"])
    assert all_of(shelf) == {b"a": b"1", b"b": b"2"}


def test_a_record_that_cannot_be_kept_fails_the_whole_commit(tmp_path: Path) -> None:
    import lmdb

    shelf = open_shelf(tmp_path, "process")
    put(shelf, a=b"1")
    with pytest.raises(lmdb.BadValsizeError):
        shelf.commit([(b"a", b"2"), (b"k" * 600, b"3")], 100, [b"a"])
    assert all_of(shelf) == {b"a": b"1"}
    shelf.close()


# -- Views


def test_a_view_has_the_records_of_its_moment_whatever_comes_later(shelf: Shelf) -> None:
    put(shelf, a=b"1", b=b"2")
    view = shelf.view()
    put(shelf, a=b"new", c=b"3")
    shelf.commit([], 0, [b"b"])
    assert [(key, bytes(value)) for key, value in view.items(b"")] == [(b"a", b"1"), (b"b", b"2")]
    assert bytes(view.get(b"a")) == b"1"
    assert view.get(b"c") is None
    assert all_of(shelf) == {b"a": b"new", b"c": b"3"}
    view.close()


def test_several_views_have_a_moment_each(shelf: Shelf) -> None:
    views = []
    for step in range(5):
        put(shelf, step=str(step).encode() * 3000)
        views.append(shelf.view())
    for step, view in enumerate(views):
        assert bytes(view.get(b"step")) == str(step).encode() * 3000
        view.close()


# -- Folders


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_records_are_there_when_a_folder_is_opened_again(tmp_path: Path, durability: str) -> None:
    for step in range(3):
        shelf = open_shelf(tmp_path, durability)
        assert all_of(shelf) == ({} if step == 0 else {b"step": str(step - 1).encode()})
        put(shelf, step=str(step).encode())
        shelf.close()


def test_memory_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        shelf = open_shelf(None, "memory")
        assert all_of(shelf) == {}
        put(shelf, a=b"1")
        shelf.close()


def test_a_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    open_shelf(tmp_path / "shelf", "process").close()
    assert (tmp_path / "shelf").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RuntimeStateError) as error:
        open_shelf(tmp_path / "file", "process")
    assert str(error.value).startswith(f"the shard folder {tmp_path / 'file'} cannot be used: ")
    assert "File exists" in str(error.value)


def test_a_folder_with_other_contents_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(RuntimeStateError) as error:
        open_shelf(tmp_path, "process")
    assert str(error.value).startswith(f"the shard folder {tmp_path} cannot be used: ")


def test_a_folder_that_may_not_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = Path("/proc/none")  # nobody may, not even root
    with pytest.raises(RuntimeStateError) as error:
        open_shelf(folder, "process")
    assert str(error.value).startswith("the shard folder /proc/none cannot be used: ")


# -- Full disks


def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small disk, where this process may mount one."""
    if os.geteuid() != 0:
        pytest.skip("a disk that fills up is mounted by root alone")
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "8m")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "50m")


def test_a_full_disk_is_an_error_that_changes_nothing_and_it_goes_on_when_there_is_room(small_disk: Path) -> None:
    shelf = open_shelf(small_disk / "shelf", "process")
    put(shelf, step=b"0")
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * 4096 - 100_000)
    value = b"x" * 4_000_000
    for _ in range(2):
        with pytest.raises(Full) as error:
            shelf.commit([(b"step", b"1"), (b"value", value)], len(value), [b"step"])
        begin, end = str(error.value).split(" has no room for ")
        assert begin == f"the disk of the shard folder {small_disk / 'shelf'}"
        assert end.endswith(" bytes more; free some: the step is not lost, and waits for it")
        with pytest.raises(Full):
            shelf.reserve(len(value))
        assert all_of(shelf) == {b"step": b"0"}
    put(shelf, small=b"1")  # for which there is room still
    ballast.unlink()
    shelf.commit([(b"step", b"1"), (b"value", value)], len(value), [b"step"])
    assert all_of(shelf) == {b"small": b"1", b"step": b"1", b"value": value}
    shelf.close()


def test_a_disk_with_room_for_what_is_written_is_not_full_for_want_of_more(small_disk: Path) -> None:
    shelf = open_shelf(small_disk, "process")
    shelf.commit([(b"value", b"x" * 3_000_000)], 3_000_000)
    shelf.close()
    again = open_shelf(small_disk, "process")
    assert len(all_of(again)[b"value"]) == 3_000_000
    again.close()


# A child process has the modules of the shelf alone: torch takes seconds.
ALONE = f"""
import sys, types
for name, folder in {[(name, folders_of(name)) for name in PACKAGES]}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = folder
"""


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", ALONE + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FILLS = """
from pathlib import Path
from random import Random
from partway.ps.service.shelf import Full, open_shelf

shelf, random, views = open_shelf(Path(sys.argv[1]), "process"), Random(0), []
rows = [b"r/%06d" % i for i in range(30_000)]
shelf.commit([(b"last", b"999"), *((key, b"a" * 256) for key in rows)], 256 * len(rows))
step = 0
try:
    while True:
        views.append(shelf.view())
        some = sorted(random.sample(rows, 3000))
        shelf.commit([(b"last", b"%03d" % step), *((key, b"%03d" % step * 80) for key in some)], 256 * len(some))
        step += 1
except Full:
    print(step)
"""


def test_scattered_rows_fill_a_disk_without_ending_the_process(disk: Path) -> None:
    """Of each row that changes a whole page is written, and what a view shows is not written over."""
    (disk / "other").write_bytes(b"x" * 2_000_000)
    steps = int(output_of(FILLS, str(disk / "shelf")))
    assert steps > 1
    shelf = open_shelf(disk / "shelf", "process")
    found = all_of(shelf)
    assert found.pop(b"last") == b"%03d" % (steps - 1)
    assert len(found) == 30_000
    assert sum(value == b"%03d" % (steps - 1) * 80 for value in found.values()) == 3000
    shelf.close()


# -- Kills

KILLS = """
import os, random, signal, time
from pathlib import Path
from partway.ps.service.shelf import open_shelf, viewing

def write(told):
    shelf = open_shelf(Path(sys.argv[1]), sys.argv[2])
    with viewing(shelf) as view:
        step = int(bytes(view.get(b"step") or b"0"))
    drawn = random.Random(step)
    while True:
        step += 1
        text = b"%08d" % step
        records = [(b"step", text), (b"big", text * 20_000)]
        records += [(b"s/%02d/%08d" % (i, step), text * drawn.randint(1, 900)) for i in range(20)]
        shelf.commit(sorted(records), 400_000, [b"s/"])
        os.write(told, text)

drawn = random.Random(0)
for _ in range(8):
    told, ours = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        write(ours)
    os.close(ours)
    first = last = os.read(told, 8)
    time.sleep(drawn.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while text := os.read(told, 8):
        last = text
    os.close(told)
    shelf = open_shelf(Path(sys.argv[1]), sys.argv[2])
    with viewing(shelf) as view:
        found = {key: bytes(value) for key, value in view.items(b"")}
    shelf.close()
    text = found[b"step"]
    assert found[b"big"] == text * 20_000
    assert list(found)[1:-1] == [b"s/%02d/%08d" % (i, int(text)) for i in range(20)]
    assert all(value == text * (len(value) // 8) for value in found.values())
    print(int(first), int(last), int(text))
"""


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_process_that_is_killed_in_a_commit_leaves_all_of_it_or_nothing(tmp_path: Path, durability: str) -> None:
    before = 0
    for line in output_of(KILLS, str(tmp_path), durability).splitlines():
        first, last, kept = (int(number) for number in line.split())
        assert first == before + 1
        assert kept in (last, last + 1)  # what was told is there, and at most what was about to be told
        before = kept
    assert before > 8
