"""What the benchmarks share as scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def start(main: Callable[..., Any]) -> None:
    """Call `main` with the options of the command line."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()


def save(drawing: Any, path: Path) -> None:
    """Write a figure of matplotlib as a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=130)
