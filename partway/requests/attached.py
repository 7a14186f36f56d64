"""The engine that `shard` attaches to a module: the only place that knows where it is kept.

It is an instance attribute, in the module's `__dict__`, so that pickling and copying a module takes it along. Engines
are made in `engine.py`, which imports modules that look for engines here.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

ATTRIBUTE = "_partway"


class Attached(Protocol):
    """The interface of an engine for modules below it: its Request, and the parameters that were DTensors before."""

    @property
    def request(self) -> Any:
        """The Request of the module."""
        ...

    @property
    def own_dtensors(self) -> frozenset[str]:
        """The names of its parameters that were DTensors before it was sharded."""
        ...


def engine_of(value: Any) -> Attached | None:
    """The engine of `value` if it is a sharded module; else None."""
    return value.__dict__.get(ATTRIBUTE) if isinstance(value, nn.Module) else None


def set_engine(module: nn.Module, engine: Attached) -> None:
    """Let `engine` run the calls of `module`."""
    module.__dict__[ATTRIBUTE] = engine
