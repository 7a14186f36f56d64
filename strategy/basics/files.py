"""Atomic writes: a new file is written under a temporary name, and renamed when it is complete. The old file stays
until then, so it survives a full disk and a killed process, and readers never see half a file. Files of other programs
are not overwritten, and JSON is read strictly."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from pydantic import ValidationError

from ..errors import StrategyError, shown

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: temporary files of killed processes stay
    fcntl = None

_ASIDE = re.compile(r"\..*\.[0-9a-f]{12}\.partway", re.DOTALL)  # no file of another program has such a name
FOREIGN = "it is there already, and Partway did not write it; give another path, or remove it"
MARKS = {  # text in every file of this kind; a file without it belongs to another program and is not overwritten
    "the plan": ('"axes"', '"operators"', '"certificate"'),
    "the device profile": ('"peak"', '"memory_bandwidth"', '"levels"'),
    "the figures": ('"contenders"', '"ratio_to_ddp"'),
    "the mark": ("partway ",),
    "the job": ('"port"', '"process"', '"began"'),
    "the timeline": ('"otherData": {"program": "Partway"}',),
    "the page": ('<meta name="generator" content="Partway">',),
    "the picture": ("<!-- made by Partway -->",),
    "the plot": ("Partway",),
}
_FRESH = 1.0  # seconds in which a new file may have no lock yet
_LARGEST = 2**30  # bytes: larger files are not read


def read(what: str, path: Any) -> bytes:
    """The content of a file. Raises StrategyError, saying that `what` (such as "a plan from") could not be read."""
    try:
        with open(_path(path), "rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, ValueError, TypeError) as error:
        raise StrategyError(f"could not read {what} {_shown(path)}: {reason(error)}") from error
    if len(data) > _LARGEST:
        raise StrategyError(f"could not read {what} {_shown(path)}: it has more than {_LARGEST:,} bytes")
    return data


def save(what: str, path: Any, text: str | bytes) -> None:
    """Write a file atomically, and make the folders above it. Raises StrategyError, saying that `what`, a key of MARKS,
    could not be written, for example because `path` is another program's file."""
    try:
        file = _path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if is_foreign(what, file):
            raise ValueError(FOREIGN)
        write_whole(file, text)
    except (OSError, ValueError, TypeError) as error:
        raise StrategyError(f"could not write {what} to {_shown(path)}: {reason(error)}") from error


def is_foreign(what: str, path: str | PathLike[str]) -> bool:
    """Whether `path` is a non-empty file that lacks the marks of `what`, a key of MARKS. Raises OSError."""
    if not os.path.isfile(path) or not (content := Path(path).read_bytes()):
        return False
    return not all(mark.encode() in content for mark in MARKS[what])


def json_of(data: bytes) -> Any:
    """The value of JSON in UTF-8. Raises ValueError, such as "is nested too deeply", for any other data, for an object
    with a repeated name, and for numbers that are not finite or too long."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"has no text in UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError("has a number of thousands of digits") if "digits" in str(error) else error from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def first_problem(error: ValidationError) -> str:
    """The first problem with the data of a file: the field, and why it is wrong."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg'].removeprefix('Value error, ')}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"has {shown(twice, 60)} twice in one object")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"has {text[:20]}, which is not a finite number")
    return number


def _path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise TypeError(f"it is a {type(path).__name__}; write the path of a file as a str or a Path")
    if path == "":
        raise ValueError("it is empty; write the path of a file")
    return Path(path)


def _shown(path: Any) -> str:
    return shown(os.fspath(path) if isinstance(path, PathLike) else path)


def reason(error: Exception) -> str:
    """Why a file cannot be read or written: the message of an OSError without its number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_whole(path: str | PathLike[str], data: str | bytes, mode: int = 0o666) -> None:
    """Write `data` to the file `path` atomically; text is written in UTF-8. Raises OSError.

    A new file has `mode`, less the umask; an existing one keeps its own. Anything but a regular file, such as a pipe,
    is written to directly.
    """
    content = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))  # the file that a link points to
    there = _mode(target)
    if there is not None and not stat.S_ISREG(there):
        target.write_bytes(content)
        return
    with replacing(target, mode) as (file, _):
        file.write(content)


@contextmanager
def replacing(target: Path, mode: int = 0o666) -> Iterator[tuple[IO[bytes], Path]]:
    """A new file and its temporary path, in the folder of `target`; it replaces `target` when the block ends without an
    exception (see write_whole). Raises OSError."""
    prefix = f".{target.name[:100]}."
    remove_abandoned(target.parent, prefix)
    there = _mode(target)
    aside = target.with_name(f"{prefix}{secrets.token_hex(6)}.partway")
    try:
        with naming(target), open(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            _lock(file.fileno())
            yield file, aside
        if there is not None:
            os.chmod(aside, stat.S_IMODE(there))
        os.replace(aside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def _mode(target: Path) -> int | None:
    # looked up once: another process may remove the file at any time
    try:
        return target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_abandoned(folder: str | PathLike[str], prefix: str = ".") -> None:
    """Remove the unfinished files in `folder` whose names begin with `prefix` and whose writers have ended."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _ASIDE.fullmatch(entry.name) and _is_abandoned(entry.path):
                with suppress(OSError):
                    os.unlink(entry.path)


def _is_abandoned(path: str) -> bool:
    """Whether no process holds the lock of a file. Its writer holds it until the file is complete."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        status = os.fstat(number)
        fresh = time.time() - status.st_mtime < _FRESH
        return stat.S_ISREG(status.st_mode) and not fresh and bool(_lock(number))
    finally:
        os.close(number)


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Add the file's path to an OSError that lacks one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


@contextmanager
def held(folder: str | PathLike[str]) -> Iterator[bool]:
    """Hold the lock of a folder. Yields False if another process holds it, and True on a file system without locks."""
    if fcntl is None:
        yield True
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(number) is not None
    finally:
        os.close(number)


def _lock(number: int) -> bool | None:
    """Lock an open file until it is closed. None: another process has locked it; False: this system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True
