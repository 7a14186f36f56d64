"""The README's code runs as it stands there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import partway as pw

README = Path(__file__).parents[2] / "README.md"


def test_the_quick_start_runs(python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    (tmp_path / "quick_start.py").write_text(code, encoding="utf-8")
    done = python("-W", "error", "quick_start.py")
    assert done.returncode == 0, done.stderr
    assert "plan on dp=2, tp=4" in done.stdout
    assert "because parameter up.weight" in done.stdout
    assert "tensor([64., 64., 64., 64.]" in done.stdout
    assert "on tp=8" in done.stdout
    assert pw.Plan.load(tmp_path / "plan.json").mesh == pw.Mesh({"dp": 2, "tp": 4})
