"""The engine that `shard` attaches to a module: the one place that knows where it is kept.

It is an attribute of the object alone, in its `__dict__`, so that it travels with what pickles and copies modules.
Engines are made in `engine.py`, which imports those who look for them here.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

ATTRIBUTE = "_partway"


class Attached(Protocol):
    """What may be asked of an engine by those it is made of: its Request, and which parameters were DTensors before."""

    @property
    def request(self) -> Any:
        """What a person asked of the module, a Request."""
        ...

    @property
    def own_dtensors(self) -> frozenset[str]:
        """The names of its parameters that were DTensors before."""
        ...


def engine_of(value: Any) -> Attached | None:
    """The engine of `value` if that is a module that was sharded; else None."""
    return value.__dict__.get(ATTRIBUTE) if isinstance(value, nn.Module) else None


def set_engine(module: nn.Module, engine: Attached) -> None:
    """From now on `engine` runs the calls of `module`."""
    module.__dict__[ATTRIBUTE] = engine
