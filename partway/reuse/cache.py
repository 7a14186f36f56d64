"""Plans and programs on disk, by content.

An entry's name is a digest of all inputs of a plan: the captured graph, the request, the options, the devices' profile,
the source of Partway and the version of PyTorch. A second start of a script captures its model, finds the entry, and
plans nothing. Entries never become stale.

An entry is data: reading one runs no code from it (`propagation/plan/stored.py`). It begins with its own name and a
digest of the rest, so that a damaged, edited or moved entry is made anew. Anybody with write access to the folder could
write an entry with correct digests and the numbers of another program, so a folder that others can write to is not
used.

The total size of entries is limited; the least recently used ones are removed first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import describe, module_path, source_line
from partway.propagation.graph.port import Port
from partway.propagation.plan.stored import NoFormError, WrongFormError, dump, load
from partway.requests.planning_log import taken
from partway.strategy.basics.files import remove_abandoned, write_whole
from partway.strategy.errors import ContextError

T = TypeVar("T")

_PACKAGES = ("partway", "partway.strategy", "partway.propagation", "partway.fusion", "partway.runtime")

_FORMAT = 1
_ENTRY = re.compile(r"[0-9a-f]{62}\.[a-z]+[-0-9a-f]*")
_REMEDY = "set compile_cache_path or PARTWAY_CACHE_DIR to a folder of your own, or enable_compile_cache=False"


def folder_named(path: str) -> Path:
    """The folder `path` or, if that is empty, PARTWAY_CACHE_DIR, or `partway` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(path or os.environ.get("PARTWAY_CACHE_DIR") or os.path.join(home, "partway"))


def cache_folder(path: str) -> Path | None:
    """The folder of entries: that of `path` (see `folder_named`), made if it does not exist. None with PARTWAY_CACHE=0
    in the environment, and, with a warning, if others could write to it."""
    if os.environ.get("PARTWAY_CACHE") == "0":
        return None
    folder = folder_named(path)
    try:
        folder = Path(os.path.realpath(folder))
        _make(folder)
        if wrong := _not_private(folder):
            warnings.warn(f"no plan is kept in {folder}, nor read from there: {wrong}; or {_REMEDY}", stacklevel=2)
            return None
    except (OSError, ValueError) as error:
        warnings.warn(f"a plan cannot be kept in {folder} ({error}); {_REMEDY}", stacklevel=2)
        return None
    return folder


def _make(folder: Path) -> None:
    """Make a folder for this user only, and its parents."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _not_private(folder: Path) -> str:
    """Why others can write to `folder`, or replace it, and what to do; "" if only this user can."""
    if not hasattr(os, "geteuid"):
        return ""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(status.st_mode):o}, so that others may use it; run chmod 700 {str(folder)!r}"
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            what = f"{parent} has mode {stat.S_IMODE(mode):o}, so that others may put another in its place"
            return f"{what}; run chmod go-w {str(parent)!r}"
    return ""


def cache_limit() -> int:
    """The most bytes of all entries together: PARTWAY_CACHE_MB in the environment, in megabytes, or 1000 MB. Raises
    ContextError unless the variable is a whole number."""
    text = os.environ.get("PARTWAY_CACHE_MB") or "1000"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ContextError(
            f"PARTWAY_CACHE_MB is {text!r:.80}; write how many megabytes of plans and programs are kept on disk, such "
            "as 1000, or PARTWAY_CACHE=0 for none"
        )
    return int(text) * 10**6


class Entry:
    """The files of one planned call, whose graph is `graph`; without a `folder` there are none."""

    def __init__(self, graph: Graph, folder: Path | None, *content: object) -> None:
        self._graph = graph
        self._files = None if folder is None else Files(folder, software(), *text_of_graph(graph), *map(repr, content))
        self._derivable = folder is not None and not any(map(_is_foreign, graph.nodes))

    def fetch(self, name: str, make: Callable[[], T], *kinds: type, derived: bool = False) -> T:
        """The result of `make`, one of `kinds`, from disk if it was made before for the same content. `derived`: it
        contains derivatives, which for operators of users do not follow from the content."""
        if self._files is None or (derived and not self._derivable):
            return make()

        def loaded(data: bytes) -> T:
            value: T = load(data, self._graph, kinds)
            if not isinstance(value, kinds):
                raise WrongFormError(f"it holds a {type(value).__name__}")
            return value

        return self._files.fetch(name, make, lambda value: dump(value, self._graph, kinds), loaded)


class Files:
    """The files in `folder` for values that depend only on `content`."""

    def __init__(self, folder: Path, *content: str) -> None:
        self._folder, self._limit = folder, cache_limit()
        self._digest = hashlib.sha256("\n".join(content).encode()).hexdigest()

    def fetch(
        self, name: str, make: Callable[[], T], dump: Callable[[T], bytes | None], load: Callable[[bytes], T]
    ) -> T:
        """The value that `load` reads from the file `name` or, if there is none, the result of `make`, which `dump`
        turns into the file's content (None: no file). Warns of a damaged file, and of a value without a stored form."""
        path, start = self._folder / self._digest[:2] / f"{self._digest[2:]}.{name}", time.perf_counter()
        try:
            value = load(self._read(path, name))
        except FileNotFoundError:
            pass
        except Exception as error:  # reading a damaged file may raise anything
            warnings.warn(f"{path} cannot be read ({_reason(error)}), and is made anew", stacklevel=2)
        else:
            with suppress(OSError):
                os.utime(path)  # for the least recently used
            taken(name.partition("-")[0], path, time.perf_counter() - start)
            return value
        value = make()
        try:
            if (data := dump(value)) is not None:
                self._write(path, name, data)
        except OSError as error:
            warnings.warn(f"a plan cannot be kept in {self._folder} ({error}); {_REMEDY}", stacklevel=2)
        except Exception as error:  # such as a constant without bytes
            warnings.warn(f"a plan has no form on disk ({_reason(error)}), and every start makes it anew", stacklevel=2)
        return value

    def _head(self, name: str, data: bytes) -> bytes:
        """The first line of a file."""
        return f"partway {_FORMAT} {self._digest} {name} {hashlib.sha256(data).hexdigest()}\n".encode()

    def _read(self, path: Path, name: str) -> bytes:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
                raise WrongFormError("others could write it")
            content = file.read()
        head, _, data = content.partition(b"\n")
        if head + b"\n" != self._head(name, data):
            raise WrongFormError("it is not what was written there")
        return data

    def _write(self, path: Path, name: str, data: bytes) -> None:
        """Write a file atomically: other processes may read and write the same one."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, self._head(name, data) + data, mode=0o600)
        _prune(self._folder, self._limit)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, WrongFormError | NoFormError) else f"{error!r:.300}"


def _prune(folder: Path, limit: int) -> None:
    """Remove leftovers of killed processes, and entries beyond `limit` bytes, least recently used first."""
    entries = []
    for inner in os.scandir(folder):
        if re.fullmatch(r"[0-9a-f]{2}", inner.name) and inner.is_dir(follow_symlinks=False):
            remove_abandoned(inner.path)
            with suppress(FileNotFoundError):  # another process may remove it first
                files = [entry for entry in os.scandir(inner.path) if _ENTRY.fullmatch(entry.name)]
                entries += [(entry.stat(follow_symlinks=False), entry.path) for entry in files]
    entries.sort(key=lambda entry: entry[0].st_mtime_ns)
    total = sum(status.st_size for status, _ in entries)
    for status, path in entries:
        if total <= limit:
            return
        with suppress(OSError):
            os.unlink(path)
        total -= status.st_size


@functools.lru_cache(maxsize=1)
def software() -> str:
    """The version of PyTorch, and a digest of Partway's source."""
    digest = hashlib.sha256()
    for package in _PACKAGES:  # an editable install has them in several folders
        for path in sorted(Path(str(sys.modules[package].__file__)).parent.glob("**/*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.read_bytes())
    return f"torch {torch.__version__}, partway {digest.hexdigest()}"


def text_of_graph(graph: Graph) -> list[str]:
    """Everything in a graph that plans and programs depend on, as text."""
    lines = [f"{graph.device} {graph.aliases}"]
    lines += [
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {_described(node.meta.get('val'))} "
        f"{module_path(node)} {source_line(node)}"
        for node in graph.module.graph.nodes
    ]
    return lines + [_port(port) for port in (*graph.inputs, *graph.outputs)]


def _is_foreign(node: fx.Node) -> bool:
    """Whether a node calls an operator that is neither PyTorch's nor ours."""
    return getattr(node.target, "namespace", "aten") not in ("aten", "partway", "prims")


def _port(port: Port) -> str:
    return f"{port.node.name} {port.role} {port.name} {port.argument} {port.requires_grad} {describe(port.node)}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return str([_described(v) for v in value]) if isinstance(value, list | tuple) else type(value).__name__
