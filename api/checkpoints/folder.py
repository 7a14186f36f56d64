"""A folder of checkpoints: `checkpoint-000017` is the 17th that was saved there.

One is written under another name, and renamed when it is complete: what has that name is complete. So after a crash at
any moment the last good one is that of the highest number.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from partway.checkpoints.tensor_files import synchronize
from partway.strategy import RuntimeStateError
from partway.strategy.errors import shown
from partway.strategy.files import held

MANIFEST = "partway.json"
_COMPLETE = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = re.compile(r"\.checkpoint-(\d+)\.saving")


def check_path(path: Any) -> None:
    """Raise RuntimeStateError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise RuntimeStateError(f"path is {shown(path)}; write the path of a folder as a str or a Path")


def begin(folder: Path) -> Path:
    """A new folder for the next checkpoint in `folder`, under the name of an unfinished one. What a crash left there is
    removed, so that only one job may save there at a time."""
    for left in folder.iterdir():
        if _UNFINISHED.fullmatch(left.name):
            shutil.rmtree(left)
    number = max(numbers(folder), default=0) + 1
    fresh = folder / f".checkpoint-{number:06d}.saving"
    fresh.mkdir()
    return fresh


@contextmanager
def begun(folder: Path) -> Iterator[Path]:
    """What `begin` makes, for as long as nobody else may save in `folder`; if it comes to an error, it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder) as ours:
        if not ours:
            raise RuntimeStateError(f"another process is saving a checkpoint in {folder}; give each job its own folder")
        fresh = begin(folder)
        try:
            yield fresh
        except BaseException:
            drop(fresh)
            raise


def finish(unfinished: Path, keep: int | None) -> Path:
    """Give a complete checkpoint its name, and remove all but the last `keep`."""
    complete = unfinished.with_name(unfinished.name.removeprefix(".").removesuffix(".saving"))
    os.rename(unfinished, complete)
    synchronize(complete.parent, ())
    if keep is not None:
        for number in sorted(numbers(complete.parent))[:-keep]:
            old = complete.with_name(f"checkpoint-{number:06d}")
            gone = old.with_name(f".{old.name}.saving")  # first it is none any more, then its files go
            os.rename(old, gone)
            shutil.rmtree(gone)
    return complete


def drop(unfinished: Path) -> None:
    """Remove what was not completed."""
    with suppress(OSError):
        shutil.rmtree(unfinished)


def newest(path: Path) -> Path:
    """The checkpoint at `path`, or the last in it; or a folder of safetensors files, such as Hugging Face's. Raises
    RuntimeStateError if there is none."""
    if (path / MANIFEST).is_file():
        return path
    if path.is_dir():
        if last := max(numbers(path), default=0):
            return path / f"checkpoint-{last:06d}"
        if any(path.glob("*.safetensors")):
            return path
    unfinished = path.is_dir() and any(_UNFINISHED.fullmatch(entry.name) for entry in path.iterdir())
    why = "one was begun, and never completed" if unfinished else "there is none"
    raise RuntimeStateError(f"no checkpoint to load in {path}: {why}; give the folder that was given to save")


def numbers(folder: Path) -> list[int]:
    """The numbers of the complete checkpoints in `folder`."""
    found = (_COMPLETE.fullmatch(entry.name) for entry in folder.iterdir())
    return [int(match[1]) for match in found if match]
