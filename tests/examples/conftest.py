"""Examples run as a user runs them: as processes, from the folder that has examples/ and README.md in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Runner:
    """Run `python ARGUMENTS` in an empty folder, on one thread; `env` adds variables."""

    def run(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "FORCE_COLOR")}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **(env or {})},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    return run
