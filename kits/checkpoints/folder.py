"""A folder of checkpoints: `checkpoint-000017` is the 17th that was saved there.

A checkpoint is written under another name, and renamed when it is complete. So after a crash at any moment the last
good one is that of the highest number.

A folder is Partway's if its partway.json says so: an incomplete one has a mark there, a complete one its manifest, with
the names of its files. Nothing else is removed, overwritten or counted, whatever its name: not the checkpoint-500 of
another program, and not a file that a person put beside a checkpoint's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from partway.checkpoints.manifest import MANIFEST, PARTS, manifest_in
from partway.checkpoints.tensor_files import synchronize
from partway.strategy import RuntimeStateError, shown
from partway.strategy.basics import held, write_whole

_COMPLETE = re.compile(r"checkpoint-(\d{6,})")
_UNFINISHED = re.compile(r"\.checkpoint-\d{6,}\.saving")
_MARK = b'{"partway": "a checkpoint that is not complete"}\n'


def check_path(path: Any) -> None:
    """Raise RuntimeStateError if `path` is not the path of a folder."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise RuntimeStateError(f"path is {shown(path)}; write the path of a folder as a str or a Path")
    if os.fspath(path) == "" or "\0" in os.fspath(path):
        raise RuntimeStateError(f"path is {shown(os.fspath(path))}, which names no folder; write '.' for this one")


def make_unfinished(path: Path) -> Path:
    """Create a marked folder at `path`, in place of one that a crash left there. Raises RuntimeStateError if it is
    another program's."""
    drop(path)
    try:
        path.mkdir()
    except FileExistsError as error:
        raise RuntimeStateError(f"{path} already exists, and Partway did not write it; remove it") from error
    write_whole(path / MANIFEST, _MARK)
    return path


def begin(folder: Path) -> Path:
    """Create a folder for the next checkpoint in `folder`, under the name of an unfinished one. Leftovers of a crash
    are removed, so that only one job may save there at a time."""
    for left in [entry for entry in folder.iterdir() if _UNFINISHED.fullmatch(entry.name)]:
        drop(left)
    number = max(checkpoints(folder), default=0) + 1
    while any(os.path.lexists(folder / name) for name in (_name(number), _unfinished_name(number))):
        number += 1
    return make_unfinished(folder / _unfinished_name(number))


@contextmanager
def begun(folder: Path) -> Iterator[Path]:
    """The folder from `begin`, while nobody else may save in `folder`; it is removed on an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeStateError(f"{folder} cannot be made a folder for checkpoints: {error.strerror}") from error
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
        every = sorted(checkpoints(complete.parent).items())
        whole = [path for _, path in every if not path.is_symlink() and manifest_in(path) is not None]
        for path in whole[:-keep]:
            _remove(path)
    return complete


def drop(unfinished: Path) -> None:
    """Remove a checkpoint that was not completed."""
    with suppress(OSError):
        _clear(unfinished)


def newest(path: Path) -> Path:
    """The checkpoint at `path`, or the last in it; or a folder of safetensors files, such as Hugging Face's. Raises
    RuntimeStateError if there is none."""
    if is_checkpoint(path):
        return path
    if path.is_dir():
        if every := checkpoints(path):
            return every[max(every)]
        if any(path.glob("*.safetensors")):
            return path
    unfinished = path.is_dir() and any(map(_is_unfinished, path.iterdir()))
    why = "one was begun, and never completed" if unfinished else "there is none"
    why = "it is a file" if path.is_file() else why
    raise RuntimeStateError(f"no checkpoint to load in {path}: {why}; give the folder that was given to save")


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in `folder` by their numbers: all that Partway completed, even if files are missing now."""
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
    return {number: path for number, path in named if path.name == _name(number) and is_checkpoint(path)}


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def _unfinished_name(number: int) -> str:
    return f".{_name(number)}.saving"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest, or has lost it and has files of no other program."""
    return path.is_dir() and any(name == MANIFEST or PARTS.fullmatch(name) for name in os.listdir(path))


def _is_unfinished(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and (path / MANIFEST).read_bytes() == _MARK
    return False


def _clear(path: Path) -> None:
    """Remove a folder that is marked as unfinished: the mark last, so that leftovers of a crash are recognized, too."""
    if _is_unfinished(path):
        for entry in path.iterdir():
            if entry.name != MANIFEST:
                entry.unlink()
        (path / MANIFEST).unlink()
        path.rmdir()


def _remove(checkpoint: Path) -> None:
    """Remove the files in a checkpoint's manifest, the manifest last, and then its folder if nothing else is in it."""
    manifest = manifest_in(checkpoint)
    assert manifest is not None
    for name in (*manifest.sizes, MANIFEST):
        (checkpoint / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody put more into it
        checkpoint.rmdir()
