"""Entries of the cache: data that runs nothing, in a folder that is this user's alone, and no more than its limit."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.graph.graph import Graph
from partway.propagation.plan.stored import NoFormError, WrongFormError, dump, load
from partway.propagation.program.program import Program
from partway.reuse import cache
from partway.strategy.basics import files
from partway.strategy.basics.files import write_whole

X = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)


def f(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).tanh().sum()


def step(fn: Callable[..., Any] = f) -> None:
    """One step of the function, which gives what it gives on one device."""
    x, y = (X.clone().requires_grad_() for _ in range(2))
    found = pw.shard(fn, in_strategy=((2, 1),), mesh={"x": 2})(x)
    found.backward()
    expected = fn(y)
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)


def entries(folder: Path) -> dict[str, Path]:
    return {path.name.partition(".")[2]: path for path in folder.glob("*/*")}


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit an entry, and make its digest right again."""
    head, _, data = path.read_bytes().partition(b"\n")
    tree = json.loads(data)
    made = json.dumps(change(tree) or tree).encode()
    fixed, _, _ = head.decode().rpartition(" ")
    path.write_bytes(f"{fixed} {hashlib.sha256(made).hexdigest()}\n".encode() + made)


# -- Entries -----------------------------------------------------------------------------------------------------------


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("keeps_head", [False, True])
def test_a_pickle_in_place_of_an_entry_runs_nothing(folder: Path, keeps_head: bool, tmp_path: Path) -> None:
    step()
    for path in entries(folder).values():
        head = path.read_bytes().partition(b"\n")[0].decode().rpartition(" ")[0]
        hostile = pickle.dumps(Canary(tmp_path / "ran"))
        path.write_bytes(
            f"{head} {hashlib.sha256(hostile).hexdigest()}\n".encode() + hostile if keeps_head else hostile
        )
    with pytest.warns(UserWarning, match="cannot be read .*, and is made anew"):
        step()
    assert not (tmp_path / "ran").exists()
    step()  # without a warning: the entries are new


def swapped(folder: Path) -> None:
    one, two, *_ = entries(folder).values()
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def moved(folder: Path) -> None:
    """The entries of another function under the names of these."""
    names = entries(folder)
    step(lambda x: (x * 4).tanh().sum())
    for name, path in names.items():
        others = [p for p in folder.glob("*/*") if p.name.endswith(name) and p not in names.values()]
        path.write_bytes(others[0].read_bytes())


@pytest.mark.parametrize("edit", [swapped, moved])
def test_an_entry_under_the_name_of_another_is_made_anew(folder: Path, edit: Callable[[Path], None]) -> None:
    step()
    edit(folder)
    with pytest.warns(UserWarning, match="it is not what was written there"):
        step()
    step()


def test_an_entry_with_another_byte_is_made_anew(folder: Path) -> None:
    step()
    for path in entries(folder).values():
        path.write_bytes(path.read_bytes() + b" ")  # which JSON does not mind
    with pytest.warns(UserWarning, match="it is not what was written there"):
        step()
    step()


def test_the_text_of_partway_and_the_version_of_pytorch_are_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("package")
    package.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "package", package)
    monkeypatch.setattr(cache, "_PACKAGES", ("package",))
    said = []
    for text, version in (("one", "2"), ("two", "2"), ("two", "3")):
        (tmp_path / "__init__.py").write_text(text)
        monkeypatch.setattr(torch, "__version__", version)
        said.append(cache.software.__wrapped__())
    assert len(set(said)) == 3


def test_entries_of_another_version_are_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step()
    before = set(folder.glob("*/*"))
    monkeypatch.setattr(cache, "software", lambda: "another version")  # (captures look it up elsewhere)
    step()
    assert {path.name.partition(".")[2].partition("-")[0] for path in set(folder.glob("*/*")) - before} >= {"plan"}


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a field of another type": (
        lambda tree: tree["rows"][-1].__setitem__(2, [3] * len(tree["rows"][-1][2])), r"\w+ is a int"
    ),
    "a kind that is none": (lambda tree: tree["rows"].insert(0, ["os.system", "true"]), "os.system"),
    "an operator that reads files": (
        lambda tree: tree["rows"].insert(0, ["operator", "aten::from_file", ""]), "from_file is not an operator"
    ),
    "an operator that writes": (
        lambda tree: tree["rows"].insert(0, ["operator", "aten::add_", "Tensor"]), "add_ is not an operator"
    ),
    "an operator of another library": (
        lambda tree: tree["rows"].insert(0, ["operator", "os::system", ""]), "os"
    ),
    "a place that is not there": (lambda tree: {"rows": [], "value": {"r": 7}}, "list index out of range"),
    "a function of torch": (lambda tree: tree["rows"].insert(0, ["torch", "load"]), "torch.load is not a dtype"),
    "a keyword that is code": (
        lambda tree: next(row for row in tree["rows"] if row[0] == "graph")[2][1][4].update({"x=print(1), y": 1}),
        "is not a name",
    ),
    "an input that is code": (
        lambda tree: next(row for row in tree["rows"] if row[0] == "graph")[2][0].__setitem__(2, "x=print(1)"),
        "is not a name",
    ),
    "a call of a method": (
        lambda tree: next(row for row in tree["rows"] if row[0] == "graph")[2][1].__setitem__(0, "call_method"),
        "none of placeholder",
    ),
    "a call of a text": (
        lambda tree: next(row for row in tree["rows"] if row[0] == "graph")[2][1].__setitem__(2, "print"),
        "'print' is not an operator",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def program() -> tuple[Graph, bytes]:
    """A graph, and a program of it as data."""
    compiled = pw.compile(f, (X.clone().requires_grad_(),), in_strategy=((2, 1),), mesh={"x": 2})
    return compiled.graph, dump(compiled.program, compiled.graph, (Program,))


@pytest.mark.parametrize("forged", FORGED)
def test_data_that_no_program_has_is_refused(program: tuple[Graph, bytes], forged: str) -> None:
    change, says = FORGED[forged]
    graph, data = program
    tree = json.loads(data)
    changed = json.dumps(change(tree) or tree).encode()
    with pytest.raises((WrongFormError, LookupError, AttributeError), match=says):
        load(changed, graph, (Program,))


def test_an_entry_with_a_right_digest_and_another_type_is_made_anew(folder: Path) -> None:
    step()
    for path in entries(folder).values():
        forge(path, lambda tree: {"rows": [["device", "cpu"]], "value": {"r": 0}})
    with pytest.warns(UserWarning, match=r"cannot be read \(it holds a device\), and is made anew"):
        step()
    step()


def test_constants_keep_values_and_strides() -> None:
    graph = capture(f, (X,), {})
    for constant in (
        X, X.t(), X[::2, 1:], X[0].expand(3, 4), torch.tensor(3), torch.empty(0, 2), X > 3, (X + 1j * X).conj(),
        X.to(torch.bfloat16), torch.zeros((), dtype=torch.complex64), X.reshape(1, 2, 2, 4).permute(0, 3, 1, 2),
    ):  # fmt: skip
        found = load(dump(constant, graph), graph)
        assert torch.equal(found, constant)
        assert (found.stride(), found.dtype) == (constant.resolve_conj().stride(), constant.dtype)


def test_plain_values_come_back_as_they_are() -> None:
    graph = capture(f, (X,), {})
    value = (None, True, 3, -0.0, float("inf"), "a", (1, [2, (3,)]), {"k": (1,)}, slice(1, None), 1 + 2j, torch.float32)
    found = load(dump(value, graph), graph)
    assert repr(found) == repr(value)


@pytest.mark.parametrize("value", [f, object(), {1, 2}, os, b"bytes", torch.nn.Linear(1, 1), torch.Generator()])
def test_what_is_not_listed_has_no_form(value: Any) -> None:
    graph = capture(f, (X,), {})
    with pytest.raises(NoFormError, match="has no form as data"):
        dump(value, graph)


def test_what_is_no_json_is_refused_without_running_anything() -> None:
    graph = capture(f, (X,), {})
    with pytest.raises(WrongFormError, match="'x' is not a form of a value"):
        load(b'{"rows": [], "value": {"x": 1}}', graph)
    with pytest.raises((RecursionError, ValueError)):
        load(b'{"rows": [], "value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", graph)


# -- The folder --------------------------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_made_for_this_user_alone_whatever_the_umask(folder: Path) -> None:
    pw.set_auto_parallel_context(compile_cache_path=str(folder / "a" / "b"))
    before = os.umask(0)
    try:
        step()
    finally:
        os.umask(before)
    assert {mode(path) for path in (folder / "a", folder / "a" / "b", *(folder / "a" / "b").glob("*"))} == {0o700}
    assert {mode(path) for path in (folder / "a" / "b").glob("*/*")} == {0o600}


@pytest.mark.parametrize("others", [0o777, 0o770, 0o755, 0o701])
def test_a_folder_that_others_may_use_is_not_used(folder: Path, others: int) -> None:
    folder.chmod(others)
    with pytest.warns(UserWarning, match=rf"its mode is {others:o}.*run chmod 700 '.*'; or set compile_cache_path"):
        step()
    assert not entries(folder)


def test_a_folder_below_one_that_others_may_write_to_is_not_used(folder: Path) -> None:
    (folder / "inner").mkdir(mode=0o700)
    folder.chmod(0o777)
    pw.set_auto_parallel_context(compile_cache_path=str(folder / "inner"))
    with pytest.warns(UserWarning, match=r"has mode 777, so that others may put another in its place; run chmod go-w"):
        step()
    assert not entries(folder / "inner")
    folder.chmod(0o1777)  # as /tmp: only the owner of a folder may replace it
    step()
    assert entries(folder / "inner")


def test_a_link_to_a_folder_that_others_may_use_is_not_used(folder: Path) -> None:
    (folder / "theirs").mkdir()
    (folder / "theirs").chmod(0o777)
    (folder / "link").symlink_to(folder / "theirs")
    pw.set_auto_parallel_context(compile_cache_path=str(folder / "link"))
    with pytest.warns(UserWarning, match="theirs.*its mode is 777"):
        step()
    assert not entries(folder / "theirs")


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(UserWarning, match=f"it belongs to user {me}, and this is user {me + 1}"):
        step()
    assert not entries(folder)


def test_an_entry_that_others_may_write_is_made_anew(folder: Path) -> None:
    step()
    for path in entries(folder).values():
        path.chmod(0o666)
    with pytest.warns(UserWarning, match=r"cannot be read \(others could write it\), and is made anew"):
        step()


@pytest.mark.parametrize("path", ["\0", "x" * 5000, "/dev/null/x"])
def test_a_path_that_no_folder_can_have_is_named_with_what_to_do(folder: Path, path: str) -> None:
    pw.set_auto_parallel_context(compile_cache_path=path)
    with pytest.warns(UserWarning, match="a plan cannot be kept in .*; set compile_cache_path"):
        step()


# -- Its size ----------------------------------------------------------------------------------------------------------


def test_entries_take_no_more_than_the_limit_and_the_longest_unused_go_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step()
    size = sum(path.stat().st_size for path in entries(folder).values())
    first = set(entries(folder).values())
    monkeypatch.setattr("partway.reuse.cache.cache_limit", lambda: int(2.5 * size))
    old, new = (lambda x: (x * 5).tanh().sum()), (lambda x: (x * 7).tanh().sum())
    step(old)
    everything = set(folder.glob("*/*"))
    for path in everything:
        os.utime(path, (1, 1))
    step()  # used now
    step(new)
    left = set(folder.glob("*/*"))
    assert first <= left
    assert everything - left
    assert everything - left <= everything - first
    assert sum(path.stat().st_size for path in left) <= 2.5 * size


def test_the_limit_leaves_other_files_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [folder / "notes.txt", folder / "ab" / "notes.txt", folder / "data" / f"{'0' * 62}.plan"]
    for path in others:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text("mine")
    monkeypatch.setenv("PARTWAY_CACHE_MB", "0")
    step()
    assert all(path.read_text() == "mine" for path in others)
    assert [path for path in folder.glob("*/*") if path not in others] == []


@pytest.mark.parametrize("text", ["-1", "1 GB", "1e3", "٣", "9" * 40])
def test_a_limit_that_is_no_number_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PARTWAY_CACHE_MB", text)
    with pytest.raises(pw.ContextError, match=r"PARTWAY_CACHE_MB is .*; write how many megabytes"):
        step()


# -- Writers that are killed, that run out of disk, and several at once ------------------------------------------------


def aside(folder: Path) -> list[Path]:
    return list(folder.glob("**/.*.partway"))


def forked(work: Callable[[], object]) -> multiprocessing.Process:
    """A copy of this process that does `work`, and ends."""
    with warnings.catch_warnings(action="ignore"):  # this process has threads
        process: Any = multiprocessing.get_context("fork").Process(target=work)
        process.start()
    found: multiprocessing.Process = process
    return found


def test_what_a_killed_writer_left_is_removed_by_the_next(folder: Path) -> None:
    step()
    plan = entries(folder)["plan"]

    def die_writing() -> None:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_whole(plan, "x")

    writer = forked(die_writing)
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    (left,) = aside(folder)
    os.utime(left, (1, 1))
    step(lambda x: (x * 9).tanh().sum())
    assert not aside(folder)
    step()  # the old entry is whole


def test_what_another_process_writes_now_is_left(folder: Path) -> None:
    step()
    plan = entries(folder)["plan"]
    writing, goes_on = multiprocessing.Event(), multiprocessing.Event()
    lock = files._lock

    def slow(number: int) -> bool:
        found = lock(number)
        os.utime(number, (1, 1))
        writing.set()
        goes_on.wait()
        return found

    def write_slowly() -> None:
        files._lock = slow
        write_whole(plan, "x")

    writer = forked(write_slowly)
    try:
        assert writing.wait(60)
        step(lambda x: (x * 11).tanh().sum())
        assert len(aside(folder)) == 1
    finally:
        goes_on.set()
        writer.join()
    assert plan.read_text() == "x"
    assert not aside(folder)


def test_a_full_disk_leaves_nothing_and_the_call_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"a plan cannot be kept in .*No space left on device.*PARTWAY_CACHE_DIR"):
        step()
    assert list(folder.glob("*/*")) == []


def test_three_writers_at_once_get_right_numbers_and_no_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_CACHE_MB", "0")  # each removes what the others wrote

    def plan_often() -> None:
        with warnings.catch_warnings(action="error"):
            for _ in range(4):  # without gradients: a backward does not survive a fork on builds of PyTorch for CUDA
                torch.testing.assert_close(pw.shard(f, in_strategy=((2, 1),), mesh={"x": 2})(X), f(X))

    writers = [forked(plan_often) for _ in range(3)]
    for writer in writers:
        writer.join(200)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert not aside(folder)
