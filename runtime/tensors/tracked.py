"""Facts about users' tensors, modules and optimizers, kept for as long as they live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class Tracked:
    """The objects of users that this process knows.

    modules     those whose parameters Partway lays out
    changes     how often parameters were replaced or laid out
    optimizers  the facts about each that has stepped (optimizers.py)
    listening   whether PyTorch was asked to report their steps
    replaced    parameters that were replaced by others, as a set (replaced.py)
    left        tensors that simulated ranks left split, with their layouts and shapes (partway/dtensors.py)
    captured    modules, with the attributes that their last capture could read, and a digest (reuse/captures.py)
    """

    modules: WeakSet[nn.Module] = field(default_factory=WeakSet)
    changes: int = 0
    optimizers: WeakKeyDictionary[Optimizer, Any] = field(default_factory=WeakKeyDictionary)
    listening: bool = False
    replaced: Any = field(default_factory=WeakTensorKeyDictionary)
    left: Any = field(default_factory=WeakTensorKeyDictionary)
    captured: WeakKeyDictionary[nn.Module, Any] = field(default_factory=WeakKeyDictionary)


TRACKED = Tracked()
