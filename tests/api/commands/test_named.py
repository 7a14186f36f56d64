"""What is named as module:function: found where a person is, and what it raises is shown with their own lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from partway.commands.named import call, find, kind_of
from partway.strategy import RuntimeStateError

MADE = """
import json

def build(): return json.loads("1")
def fails(): return json.loads("{")
class Built: pass
constant = 1
"""


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "made_here.py").write_text(MADE, encoding="utf-8")
    (tmp_path / "wrong_here.py").write_text("import made_here\n\nmade_here.fails()\n", encoding="utf-8")
    (tmp_path / "needy_here.py").write_text("import no_such_library\n", encoding="utf-8")
    (tmp_path / "script_here.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    (tmp_path / "torn_here.py").write_text("def build(:\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "torch.py").write_text(MADE, encoding="utf-8")
    return tmp_path


def said(name: str) -> str:
    with pytest.raises(RuntimeStateError) as error:
        find(name)
    return str(error.value)


@pytest.mark.parametrize("name", ["made_here:build", "made_here.py:build", "folder/torch.py:build"])
def test_a_function_is_found_in_a_module_and_in_a_file(name: str) -> None:
    assert find(name)() == 1


def test_a_file_may_have_the_name_of_a_library(made: Path) -> None:
    library = sys.modules["torch"]
    assert find(f"{made}/folder/torch.py:Built").__name__ == "Built"
    assert sys.modules["torch"] is library


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("made_here", "'made_here' is not module:function; write one such as train:build or train.py:build"),
        (":build", "':build' is not module:function; write one such as train:build or train.py:build"),
        ("none:x", "cannot import the module of model 'none:x': No module named 'none'"),
        ("made_here.x:x", "cannot import the module of model 'made_here.x:x': No module named 'made_here.x'"),
        (
            ".made_here:x",
            "cannot import the module of model '.made_here:x': it begins with a dot; write it in full, as in "
            "package.module:function",
        ),
        ("made_here:constant", "module 'made_here' has no function 'constant' for model 'made_here:constant'"),
        (
            "made_here.py:bulid",
            "file 'made_here.py' has no function 'bulid' for model 'made_here.py:bulid'; did you mean 'build'?",
        ),
        (
            "script_here:x",
            "model 'script_here:x': script_here ends the process (exit status 3) where it is only to be read; put what "
            'it does as a script under `if __name__ == "__main__":`',
        ),
    ],
)
def test_what_is_not_there_is_an_error(name: str, says: str) -> None:
    assert said(name).replace("made_here.x'; 'made_here' is not a package", "made_here.x'") == says


def test_a_file_that_is_not_there_is_an_error(made: Path) -> None:
    assert said("gone.py:x") == f"there is no file 'gone.py' for model 'gone.py:x'; this is {made}"


def test_what_a_module_raises_is_shown_with_its_own_lines(made: Path) -> None:
    text = said("wrong_here:x")
    assert text.startswith(
        "model 'wrong_here:x': wrong_here raised JSONDecodeError:\nTraceback (most recent call last):\n"
    )
    assert re.findall(r'File "(.*)", line (\d+), in (.*)', text) == [
        (f"{made}/wrong_here.py", "3", "<module>"), (f"{made}/made_here.py", "5", "fails")
    ]  # fmt: skip
    assert text.splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_a_library_that_a_module_lacks_is_shown_with_the_line_that_imports_it(made: Path) -> None:
    assert said("needy_here:x") == (
        "model 'needy_here:x': needy_here raised ModuleNotFoundError:\nTraceback (most recent call last):\n"
        f'  File "{made}/needy_here.py", line 1, in <module>\n    import no_such_library\n'
        "ModuleNotFoundError: No module named 'no_such_library'"
    )


def test_a_file_that_is_no_python_is_shown_where_it_stops_being_that(made: Path) -> None:
    text = said("torn_here.py:x")
    assert text.startswith("model 'torn_here.py:x': torn_here.py raised SyntaxError:\n")
    assert f'File "{made}/torn_here.py", line 1\n' in text


def test_what_a_call_raises_begins_with_what_was_called() -> None:
    function = find("made_here:fails")
    with pytest.raises(RuntimeStateError, match=r"^made_here:fails\(\) raised JSONDecodeError:\n"):
        call(function, "made_here:fails()")
    assert call(find("made_here:build"), "x") == 1


def test_kinds_are_the_names_of_types() -> None:
    assert (kind_of(1), kind_of((1, "a"))) == ("int", "(int, str)")
