"""Examples run as a user runs them: as processes, from the folder that has examples/ and README.md in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).parents[2]
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Runner:
    """Run `python ARGUMENTS` in an empty folder, on one thread; `env` adds variables."""

    def run(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "FORCE_COLOR")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **(env or {})}
        command = [*map(str, arguments)]
        if "-m" not in command and not env:  # a launcher starts its own processes; `env` may say what is imported
            return run_script(command, tmp_path, environment)
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    return run
