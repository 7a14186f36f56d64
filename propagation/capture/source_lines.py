"""Where in the caller's code something stands: the names and lines of its frames."""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import fx


def callers_line(frames: traceback.StackSummary, fn: Callable[..., Any]) -> str:
    """Where in the caller's code something happened, as the end of a message: the innermost of `frames` that is neither
    PyTorch's nor ours."""
    for frame in reversed(frames):
        if is_persons(frame.filename):
            name = frame_name(fn, frame.filename, frame.lineno or 0, frame.name)
            return f"\n  at {frame.filename}:{frame.lineno}, in {name}: {frame.line}"
    return ""


def is_persons(filename: str) -> bool:
    """Whether a file of code is neither PyTorch's nor ours."""
    return not filename.startswith(_others())


@functools.cache
def _others() -> tuple[str, ...]:
    """How the names of other files begin."""
    torchs, ours = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    stages = ("api", "strategy", "propagation", "fusion", "runtime")
    installed = not os.path.exists(os.path.join(ours, "pyproject.toml"))  # a checkout has the tests and examples too
    folders = [ours] if installed else [os.path.join(ours, stage) for stage in stages]
    return ("<", *(os.path.join(folder, "") for folder in (torchs, *folders)))


def with_source_lines(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, or for a plain function a twin whose frames are called "forward": torch.export keeps the source lines of
    such frames only. `name_frames` gives them their name back."""
    if not isinstance(fn, FunctionType):
        return fn
    code = fn.__code__.replace(co_name="forward")
    twin = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__ = fn.__kwdefaults__
    return twin


def frame_name(fn: Callable[..., Any], filename: str, line: int, name: str) -> str:
    """The name of the function that a frame called `name` runs: that of `fn`, if the line is in its body."""
    if not isinstance(fn, FunctionType) or filename != fn.__code__.co_filename:
        return name
    return fn.__name__ if line in {number for *_, number in fn.__code__.co_lines()} else name


def name_frames(module: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """Give the frames of `fn` its name in the stack traces of the nodes of a graph (in place)."""

    def named(frame: re.Match[str]) -> str:
        return frame[1] + frame_name(fn, frame[2], int(frame[3]), "forward")

    for node in module.graph.nodes:
        if "stack_trace" in node.meta:
            trace = node.meta["stack_trace"] or ""
            node.meta["stack_trace"] = re.sub(r'(File "(.+?)", line (\d+), in )forward\b', named, trace)
