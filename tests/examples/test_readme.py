"""The README's code runs as it stands there, and the README stays short."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"

Runner = Callable[..., subprocess.CompletedProcess[str]]


def test_it_is_read_in_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_its_code_runs(python: Runner, tmp_path: Path) -> None:
    (code,) = re.findall(r"```(?:python|py)\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    (tmp_path / "readme.py").write_text(code, encoding="utf-8")
    done = python("-W", "error", "readme.py")
    assert done.returncode == 0, done.stderr
    assert "plan on dp=2, tp=4" in done.stdout
    assert "because parameter 0.weight" in done.stdout
    assert "tp (4) cuts dim 0" in done.stdout
