"""Why a capture failed, in words that say what to write instead."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dis import opmap
from typing import Any

import torch

from ...graph.structure import name_of
from ...torch_internals import UnsupportedOperatorException, data_dependent
from .source_lines import callers_line, layer_of


class Undecided(Exception):
    """A capture depends on more values than were answered. Its text is that of a CaptureError."""


def is_raised_on_purpose(error: Exception) -> bool:
    """Whether a `raise` or `assert` of the caller, or of a module or loss of PyTorch, raised `error`, rather than the
    tracer."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    folder = os.path.dirname(torch.__file__) + os.sep
    place = code.co_filename.removeprefix(folder) if code.co_filename.startswith(folder) else ""
    return code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"] and not place.startswith(("_", "fx", "export"))


def reason_of(fn: Callable[..., Any], error: Exception, unanswered: str | None = None) -> str:
    """Why a capture failed: by a limit of torch.export, or because the caller's own code raised."""
    at = callers_line(traceback.extract_tb(error.__traceback__), fn) + layer_of(fn, error)
    if isinstance(error, data_dependent):
        why = f"\n  These values {unanswered}" if unanswered else ""
        return (
            f"could not capture {name_of(fn)} as one static graph: its course depends on the values of tensors{at}; "
            "write it without branches on them, with torch.where for example (x.item() may be computed with and "
            f"returned, float(x) may not), or do this part outside the sharded function{why}\n"
            f"  torch.export: {_first_line(error)}"
        )
    if isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in str(error):
        operator = re.search(r"CustomOpDef\(([\w:.]+)\)", str(error)) or re.search(r"([\w:.]+)", str(error))
        return (
            f"could not capture {name_of(fn)}: operator {operator and operator[1]} has no implementation that "
            f"tells the shapes of its results{at}\n"
            "Give it one with register_fake: a function of its arguments that returns empty tensors (torch.library)"
        )
    return (
        f"could not capture {name_of(fn)} as one static graph: {type(error).__name__}: {error}{at}\n"
        "If the same call works without shard, torch.export cannot trace this line: do it outside the sharded "
        "function"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
