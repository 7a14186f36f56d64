"""Finds tensors that share memory: a write to one shows in the others, which a graph captured from separate tensors
misses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Span = tuple[int, int, int]  # a storage, and the start and end of a range in it, in bytes


def span_of(tensor: Tensor) -> Span | None:
    """The memory range of a tensor; None for a tensor without elements or without memory of its own."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    if not tensor.numel():
        return None
    size, start = tensor.element_size(), int(tensor.storage_offset())
    stop = start + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.untyped_storage().data_ptr(), start * size, stop * size


class MemoryRanges:
    """The memory ranges of named tensors, and whether they are written to. `more`: ranges of others to compare with."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor, bool]] = (), more: MemoryRanges | None = None) -> None:
        self._known: dict[int, list[tuple[str, Span, bool]]] = {}  # by storage
        self._more = more
        for name, tensor, written in tensors:
            self.take(name, tensor, written)

    def take(self, name: str, tensor: Tensor, written: bool) -> str | None:
        """Add a tensor. Returns the name of a tensor that shares memory with it, if one of the two is written to."""
        span = span_of(tensor)
        if span is None:
            return None
        storage, start, stop = span
        held = self._known.setdefault(storage, [])
        others = held if self._more is None else [*self._more._known.get(storage, ()), *held]
        meets = (name for name, (_, begins, ends), too in others if (written or too) and begins < stop and start < ends)
        other = next(meets, None)
        held.append((name, span, written))
        return other


def shared(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors that share memory; the second is later in `named`."""
    memory = MemoryRanges()
    for name, tensor in named:
        if (other := memory.take(name, tensor, True)) is not None:
            yield other, name
