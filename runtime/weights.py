"""The weights in the state_dict of a sharded module: DTensors that say what to use where they are taken for whole ones.

What writes memory byte by byte, such as safetensors, asks a tensor for its storage. A DTensor has none of its own, and
PyTorch's answer to that names neither cause nor cure.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..strategy.errors import RuntimeStateError
from .torch_internals import local_part_of, spec_of


class SplitWeight(DTensor):
    """A weight of which each rank has a part. What is computed of it, copied or pickled, is an ordinary DTensor."""

    __slots__ = ()

    def storage(self) -> NoReturn:
        """Raises RuntimeStateError: there is no memory that holds the tensor."""
        raise RuntimeStateError(
            f"a weight of shape {list(self.shape)} lies split over the ranks, and no memory holds all of it; save the "
            "model with partway.save or its save_pretrained, and load files with partway.load or load_state_dict"
        )

    def detach(self) -> Tensor:
        """A weight again, as nn.Parameter has to find it."""
        return split_weight(self._plain())

    def _plain(self) -> DTensor:
        return DTensor(local_part_of(self).detach(), spec_of(self), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


def split_weight(value: DTensor) -> Tensor:
    """A fresh DTensor as a weight in a state_dict."""
    value.__class__ = SplitWeight
    return value


def split_weights(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of `state_dict`: its DTensors, which it has made for this call, are weights. (With keep_vars it has the
    parameters themselves.)"""
    for name, value in state_dict.items():
        if name.startswith(prefix) and type(value) is DTensor and not isinstance(value, nn.Parameter):
            split_weight(value)
