"""The engine that `shard` attaches to a module: the one place that knows where it is kept.

It is an attribute of the object alone, in its `__dict__`, so that it travels with what pickles and copies modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:  # it imports those who look for it
    from partway.engine import Engine

ATTRIBUTE = "_partway"


def engine_of(value: Any) -> Engine | None:
    """The engine of `value` if that is a module that was sharded; else None."""
    return value.__dict__.get(ATTRIBUTE) if isinstance(value, nn.Module) else None


def attached_engine(module: Any) -> Engine:
    """The engine of a module that is known to be sharded: every call asks for it."""
    engine: Engine = module.__dict__[ATTRIBUTE]
    return engine


def set_engine(module: nn.Module, engine: Engine) -> None:
    """From now on `engine` runs the calls of `module`."""
    module.__dict__[ATTRIBUTE] = engine
