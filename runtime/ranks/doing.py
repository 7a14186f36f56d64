"""The current activity of a rank, in words: the answer of its watch, which errors of other ranks quote."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

ENDED = "ended"  # the mark of a rank whose process has ended
GONE = "gone"  # the mark of a rank that cannot be asked, since the store has gone
MEETS = "meets"  # the mark of a rank that waits for all others at a meeting


@dataclass(frozen=True)
class Doing:
    """The current activity of a rank.

    waits_for   it waits in a collective of these ranks; `mark` tells one wait from another
    given       over NCCL, how many collectives it has given to each group, by the group's name
    """

    text: str
    waits_for: tuple[int, ...] = ()
    mark: str = ""
    given: Mapping[str, int] = field(default_factory=dict)


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def lines_of(answers: dict[int, Doing]) -> str:
    """The activities of ranks, a line for those that do the same."""
    by_text: dict[str, list[int]] = {}
    for rank, doing in answers.items():
        by_text.setdefault(doing.text, []).append(rank)
    return "\n".join(f"  {named(ranks)}: {text}" for text, ranks in by_text.items())


def first_line(error: BaseException) -> str:
    """The message of an error, without the line of the backend's source at its start, and without its advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", line).partition(". This is typically")[0]


def last_words(failed: str | None) -> str:
    """How this process ends: with its uncaught error, if any."""
    error = getattr(sys, "last_value", None)
    if failed is not None:
        return f"{failed}, and has ended"
    if error is None:
        return "has ended"
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = place_of(traceback.tb_frame, traceback.tb_lineno) if traceback else ""
    return f"has ended with {type(error).__name__}: {first_line(error)}{where}"


@functools.lru_cache(maxsize=1)
def _not_the_users() -> tuple[str, ...]:
    """The folders whose lines are not the user's: PyTorch's, Python's and ours."""
    ours = [
        path
        for name, module in sys.modules.items()
        if name.split(".")[0] == "partway"
        for path in getattr(module, "__path__", ())
    ]
    folders = {str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), *ours}
    return ("<", *(f"{folder}{os.sep}" for folder in folders))


def place_of(frame: FrameType | None, line: int | None = None) -> str:
    """The innermost line of the user's code on the stack of `frame`: ", called at train.py:31: loss.backward()"."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_not_the_users()):
            number = line or frame.f_lineno
            text = linecache.getline(file, number).strip()
            return f", at {Path(file).name}:{number}" + (f": {text}" if text else "")
        frame, line = frame.f_back, None
    return ""


def is_alive(process: int) -> bool:
    """Whether a process with this number runs on this host."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's, or no /proc
        return True
    return state not in "ZX"
