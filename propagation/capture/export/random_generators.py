"""Random generators while a function is captured: torch's is restored, Python's and NumPy's may not be used."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ....strategy.basics.afterwards import afterwards
from ....strategy.errors import CaptureError
from ...graph.structure import name_of
from .questions import Answering


@contextlib.contextmanager
def drawing_nothing(answering: Answering | None) -> Iterator[None]:
    """Restore torch's generator if answers drew from it, so that a call draws the same numbers whether or not it is
    planned. Otherwise leave it alone, since other threads draw from it too."""
    before = torch.get_rng_state()
    with afterwards(lambda: torch.set_rng_state(before) if answering is not None and answering.drew else None):
        yield


@contextlib.contextmanager
def without_pythons_random_numbers(fn: Callable[..., Any]) -> Iterator[None]:
    """Raise CaptureError if the function draws from Python's or NumPy's generator: every call would reuse the number of
    the first. Where another thread may have drawn, warn."""
    before = _pythons_generators()
    yield
    drawn = [name for name, state in _pythons_generators().items() if name in before and before[name] != state]
    if not drawn:
        return
    message = (
        f"random numbers of Python's module {' and '.join(drawn)} are drawn in {name_of(fn)}, and would be the same in "
        "every call; draw them with torch (torch.rand([]) may decide a branch), or outside the sharded function"
    )
    if not any(map(_may_draw, threading.enumerate())):
        raise CaptureError(message)
    warnings.warn(f"if not by another thread, {message}", stacklevel=2)


def _may_draw(thread: threading.Thread) -> bool:
    """Whether another thread may draw random numbers: Partway's own and those of progress bars do not."""
    ours = thread is threading.current_thread() or thread.name.startswith("partway ")
    return not ours and type(thread).__module__.partition(".")[0] != "tqdm"


def _pythons_generators() -> dict[str, Any]:
    """The states of the global generators of Python and NumPy."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        _, words, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = words.tobytes(), *rest
    return states
