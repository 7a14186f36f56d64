"""Scripts as processes that start at once: forks of a server that has already imported partway.

Importing torch and partway takes each process some seconds. Scripts that must not share the start of an interpreter,
such as ranks that have to agree for any hash seed, start with `subprocess` instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["partway.sharding", "torch.optim"])  # `import partway` alone leaves what plans for later


def free_port() -> int:
    """A free port of this host, outside the range for outgoing connections, one of which could take it a moment later,
    and outside Ray's range for workers (10002 to 19999)."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports of 20000 to 31999, and something listens at each")


def run_script(
    arguments: Sequence[str], folder: Path, environment: dict[str, str], seconds: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in `folder`: `[-W error] SCRIPT ...`. It computes on one thread."""
    with tempfile.TemporaryDirectory() as place:
        said = [Path(place, name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_run, args=(list(arguments), folder, environment, said))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            texts = [path.read_text() if path.exists() else "" for path in said]
            raise AssertionError(f"{arguments} still runs after {seconds:g} s; its output:\n" + "\n".join(texts))
        return subprocess.CompletedProcess(list(arguments), process.exitcode, *(path.read_text() for path in said))


def run_ranks(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({}), seconds: float = 280
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script as both ranks of two, as torchrun does; see `run_script`."""
    shared = {name: value for name, value in os.environ.items() if name != "PARTWAY_VERIFY"}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda own: run_script(arguments, folder, own, seconds), each))


def _run(arguments: list[str], folder: Path, environment: dict[str, str], said: Sequence[Path]) -> None:
    for descriptor, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    import torch

    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(folder, arguments[0]).parent))
    sys.modules["__main__"] = types.ModuleType("__main__")  # not that of the tests
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception:  # as Python itself ends a script
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:  # multiprocessing omits this
        atexit._run_exitfuncs()
