"""How many bytes of tensors live while something runs: what operators make, until nobody holds it any more."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered, follows the storages that operators of this thread make, those of the backward included.

    live    bytes of these storages that are still there; tensors that were there before are not counted
    peak    the most since it was entered, or since `restart`

    It sees what each operator gives, not the workspace that it needs meanwhile, and not the buffers of gloo.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}  # by address: a new storage there means that the old one is gone

    def restart(self) -> None:
        """From now on `peak` is the most from here on."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if id(storage) not in given and id(storage) not in self._known:
                self._follow(storage)
        self.peak = max(self.peak, self.live)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is gone."""
        size, key = storage.nbytes(), id(storage)

        def gone(_: object) -> None:
            self.live -= size
            self._known.pop(key, None)

        self.live += size
        self._known[key] = weakref.ref(storage, gone)


def storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages on the CPU of all tensors in a tree: of a DTensor that of its part."""
    for value in tree_leaves(values):
        tensor = value._local_tensor if isinstance(value, DTensor) else value
        dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if dense and type(tensor) in (Tensor, torch.nn.Parameter):
            yield tensor.untyped_storage()
