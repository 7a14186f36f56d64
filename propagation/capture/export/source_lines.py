"""Places in the caller's code: the names and lines of its frames."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import fx, nn

from ...graph.nodes import is_persons


def callers_line(frames: traceback.StackSummary, fn: Callable[..., Any]) -> str:
    """The line of the caller's code where something happened, as the end of a message: the innermost of `frames` that
    is neither PyTorch's nor Partway's."""
    for frame in reversed(frames):
        if is_persons(frame.filename):
            name = frame_name(fn, frame.filename, frame.lineno or 0, frame.name)
            return f"\n  at {frame.filename}:{frame.lineno}, in {name}: {frame.line}"
    return ""


def layer_of(fn: Callable[..., Any], error: Exception) -> str:
    """The innermost module of `fn` that was running when `error` was raised, as the end of a message, if it is one of
    PyTorch's: then the caller's line does not tell which."""
    names = {id(module): name for name, module in fn.named_modules()} if isinstance(fn, nn.Module) else {}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layer = next((module for module in reversed(running) if names.get(id(module))), None)
    if layer is None or not type(layer).__module__.startswith("torch."):
        return ""
    return f"\n  in module {names[id(layer)]} ({type(layer).__name__})"


def with_source_lines(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, or for a plain function a twin whose frames are called "forward": torch.export keeps the source lines of
    only such frames. `name_frames` restores the name."""
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
    """Restore the name of `fn` in the stack traces of the nodes of a graph (in place)."""

    def named(frame: re.Match[str]) -> str:
        return frame[1] + frame_name(fn, frame[2], int(frame[3]), "forward")

    for node in module.graph.nodes:
        if "stack_trace" in node.meta:
            trace = node.meta["stack_trace"] or ""
            node.meta["stack_trace"] = re.sub(r'(File "(.+?)", line (\d+), in )forward\b', named, trace)
