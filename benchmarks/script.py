"""What the benchmarks share as scripts."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import figures
import typer

WRITE = typer.Option(help="the section of RESULTS.md that reports this run: writes its figures into figures.json")


def start(main: Callable[..., Any]) -> None:
    """Call `main` with the options of the command line."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()


def write_figures(section: str, values: Mapping[str, str]) -> None:
    """Put the figures of a run that pages quote into figures.json, unless no section was given."""
    if section:
        script, *options = sys.argv
        command = shlex.join(["python", f"benchmarks/{Path(script).name}", *options]).partition(" --write")[0]
        print(f"wrote {', '.join(figures.write(section, command, values)) or 'no figure'}")


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
