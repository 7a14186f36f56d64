"""Captures on disk, so that a second start of a script does not trace its functions again.

The key of a capture is everything it depends on: the code that the function reaches and the values it reads
(`state.py`, by content: `portable.py`), the signature of the call, the options, and the installed packages. A function
for which there is no such key is captured in each process; the log says why.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from partway.propagation.capture.export.dispatch_modes import attributes_of
from partway.propagation.capture.export.preparation import warn_of_updates
from partway.propagation.graph.structure import Call, name_of, state_of
from partway.propagation.plan.stored import NoFormError
from partway.propagation.plan.stored_graph import dump_graph, load_graph
from partway.propagation.torch_internals import storage_key
from partway.requests.request import engine_of
from partway.reuse.cache import Files, software
from partway.reuse.changing import Captured
from partway.reuse.code_names import names_in
from partway.reuse.effects import Effects
from partway.reuse.guard import modes
from partway.reuse.kinds import fact
from partway.reuse.libraries import is_installed
from partway.reuse.portable import NotPortableError, digest
from partway.reuse.state import State
from partway.runtime.launching.process import get_group_size, get_rank
from partway.runtime.tensors.tracked import TRACKED

_SALTED = "._original_object_hash"  # of transformers' GenerationConfig: a hash that each process salts
# Names by which code reads values that may differ in another process.
_OUTSIDE = frozenset({
    "check_output", "cpu_count", "fromfile", "genfromtxt", "gethostname", "getpid", "imread", "input", "load",
    "loadtxt", "memmap", "open", "popen", "read_bytes", "read_text", "urlopen",
})  # fmt: skip
_log = logging.getLogger(__name__)


def fetch_capture(
    folder: Path, fn: Callable[..., Any], call: Call, options: Sequence[object], capture: Callable[[], Captured]
) -> Captured:
    """The capture of a call of `fn`: from `folder`, if there is one with the same key, else by `capture`. `options`:
    further parts of the key, compared as text."""
    try:
        state, content = _content(fn, call)
    except NotPortableError as error:
        _log.info("%s is captured in each process: it reads what cannot be compared, %s", name_of(fn), error)
        return capture()
    kinds = [*call.structure.kinds(), *_types(state)]

    def dumped(captured: Captured) -> bytes | None:
        try:
            if captured.effects.writes:
                raise NoFormError(f"it leaves a value in {captured.effects.writes[0].label}")
            return dump_graph(captured.graph, kinds)
        except NoFormError as error:
            _log.info("%s is captured in each process: %s", name_of(fn), error)
            return None

    def loaded(data: bytes) -> Captured:
        graph = load_graph(data, kinds)
        warn_of_updates(graph)
        return Captured(graph, state, Effects(fn, state))

    files = Files(
        folder, software(), installed(), content, f"rank {get_rank()} of {get_group_size()}", *map(str, options)
    )
    return files.fetch("capture", capture, dumped, loaded)


@functools.lru_cache(maxsize=1)
def installed() -> str:
    """The installed packages, and the devices: a library may query either."""
    packages = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    return f"{packages} {torch.version.cuda} {torch.cuda.device_count()}"


def _content(fn: Callable[..., Any], call: Call) -> tuple[State, str]:
    """The state that `fn` can read, and a digest of everything a capture of `call` depends on. Raises
    NotPortableError."""
    state, reads = _state(fn)
    tensors = [
        (tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, fact(attributes_of(t))) for t in call.tensors
    ]
    gradients = torch.is_grad_enabled() if state.reached.asks.gradients else None
    own = type(fn) if isinstance(fn, nn.Module) else fn
    return state, digest(
        own, reads, call.structure.key(), call.names, tensors, gradients, list(_parameters(fn)), modes()
    )


def _state(fn: Callable[..., Any]) -> tuple[State, str]:
    """The current state that `fn` can read, and a digest of it."""
    known: tuple[State, str] | None = TRACKED.captured.get(fn) if isinstance(fn, nn.Module) else None
    if known is not None and known[0].holds():
        return known
    state = State(fn)
    for label, kind in state.reached.unwatched:
        raise NotPortableError(f"{label}, a {kind}")
    for function in state.reached.functions:
        code = function.__code__
        if not is_installed(code.co_filename):
            names = names_in(code)
            for name in sorted((names.read | names.attributes) & _OUTSIDE):
                raise NotPortableError(f"what {function.__qualname__} may get from {name}")
    by_label = defaultdict(list)  # facts of the same label may be in any order
    for label, read in state.facts.items():
        if label.endswith(_SALTED):
            continue
        by_label[label.partition(" (")[0]].append(digest(read))
    found = state, digest({label: sorted(by_label[label]) for label in sorted(by_label)})
    if isinstance(fn, nn.Module):
        TRACKED.captured[fn] = found
    return found


def _parameters(fn: Callable[..., Any]) -> Iterator[Any]:
    """The facts of the parameters and buffers, with the first tensor that shares their memory, and of the modules."""
    tied: dict[int, str] = {}
    sharing: dict[int, str] = {}
    for name, tensor in state_of(fn).items():
        yield name, tied.setdefault(id(tensor), name), type(tensor)
        yield tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        if not isinstance(tensor, DTensor):
            yield sharing.setdefault(storage_key(tensor), name), tensor.storage_offset()
    for path, module in fn.named_modules() if isinstance(fn, nn.Module) else ():
        inner = engine_of(module)
        yield path, module.training, str(replace(inner.request, plan=None)) if path and inner else ""


def _types(state: State) -> Iterator[type]:
    """The types that the function can name."""
    for _, store, key in state.reached.items:
        if isinstance(store[key], type):
            yield store[key]
