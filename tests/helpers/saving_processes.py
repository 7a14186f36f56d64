"""A script in two processes that save their graphs."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import graph_model
from scripts import free_port, run_script


def in_processes(folder: Path, script: str, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in two processes that meet, as torchrun starts them. The graphs are in `folder`."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    helpers = str(Path(graph_model.__file__).parent)
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = {**os.environ, **meet, "PYTHONPATH": helpers, "PARTWAY_SAVE_GRAPHS": "3",
             "PARTWAY_SAVE_GRAPHS_PATH": str(folder), **more}  # fmt: skip
    every = [{**given, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda environment: run_script(["script.py"], folder, environment), every))
