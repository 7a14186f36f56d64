"""What the benchmarks share as scripts."""

from __future__ import annotations

import socket
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


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port: int = place.getsockname()[1]
        return port
