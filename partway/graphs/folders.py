"""The folders of a run: `rank_0/000_Net.forward`, a folder for each rank and planned call.

Nothing is ever removed or written over. The first call that a process saves at a path moves the `rank_0` of an earlier
run aside, to `rank_0.1` or the next number that is free; while the process lives it holds the folder's lock, so that
another one at the same path is refused.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from partway.strategy.files import held, write_whole

CALLS = "calls.txt"
HEAD = "partway graphs 1"  # how the files begin by which a folder is known
_ASIDE = 10**6


@dataclass
class _RankFolder:
    """The folder of one rank in this run, and how many calls it has."""

    path: Path
    calls: list[str] = field(default_factory=list)
    lock: ExitStack = field(default_factory=ExitStack)


_of_this_run: dict[tuple[int, Path], _RankFolder] = {}  # by process, since a fork writes nothing into its parent's


def call_folder(root: Path, rank: int, name: str) -> Path:
    """A new folder for the next call that `rank` plans, called `name`. Raises OSError."""
    folder = _rank_folder(root / f"rank_{rank}")
    return _add(folder, f"{len(folder.calls):03d}_{file_name(name)}")


def by_hand_folder(root: Path, rank: int) -> Path:
    """The folder of the collectives that `rank` calls by hand. Raises OSError."""
    path = _rank_folder(root / f"rank_{rank}").path / "by_hand"
    path.mkdir(exist_ok=True)
    return path


def same_call(root: Path, rank: int, call: str) -> Path:
    """A new folder for a call that has its number from another rank of this process. Raises OSError."""
    return _add(_rank_folder(root / f"rank_{rank}"), call)


def file_name(text: str) -> str:
    """`text` as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", text)[:80]


def _add(folder: _RankFolder, call: str) -> Path:
    path = folder.path / call
    path.mkdir()
    folder.calls.append(call)
    _list_calls(folder)
    return path


def _list_calls(folder: _RankFolder) -> None:
    last = Path(folder.calls[-1] if folder.calls else "a call") / "index.txt"
    head = f"{HEAD}: the calls that were planned, in order; {last} says what is in a folder"
    write_whole(folder.path / CALLS, "\n".join([head, *folder.calls]) + "\n")


def _rank_folder(path: Path) -> _RankFolder:
    known = _of_this_run.get((os.getpid(), path))
    if known is not None and known.path.is_dir():
        return known
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        _move_aside(path)
    path.mkdir()
    folder = _RankFolder(path)
    folder.lock.enter_context(held(path))
    _list_calls(folder)  # by which it is known
    _of_this_run[os.getpid(), path] = folder
    return folder


def _move_aside(path: Path) -> None:
    """Give the folder of an earlier run another name."""
    if not (path / CALLS).is_file() or not (path / CALLS).read_bytes().startswith(HEAD.encode()):
        raise FileExistsError(errno.EEXIST, "it is there already, and was not written by Partway", str(path))
    with held(path) as free:
        if not free:
            what = "another process that is running writes there; give each program a path of its own"
            raise FileExistsError(errno.EEXIST, what, str(path))
        number = next(i for i in range(1, _ASIDE) if not os.path.lexists(f"{path}.{i}"))
        path.rename(f"{path}.{number}")
