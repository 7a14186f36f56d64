"""What the environment asks to be saved of each planned call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from partway.strategy.errors import ContextError

_PREFIXES = ("PARTWAY_SAVE_GRAPHS", "MS_DEV_SAVE_GRAPHS")  # the second is the reference's
RANKS = "PARTWAY_SAVE_GRAPHS_RANKS"
_FOLDER = "partway_graphs"


class Level(IntEnum):
    """How much is saved."""

    STAGES = 1  # the main stages
    PASSES = 2  # what every pass made
    PICTURES = 3  # with a picture of each


@dataclass(frozen=True)
class Asked:
    """What is to be saved, in which folder, and whether of every rank or of rank 0 alone."""

    level: Level
    folder: Path
    every_rank: bool = False


def asked(environment: Mapping[str, str] | None = None) -> Asked | None:
    """What the environment asks for; None if it asks for nothing. Raises ContextError for a value that means nothing,
    and for two variables that contradict each other."""
    env = os.environ if environment is None else environment
    level = _either("", env)
    if level in ("", "0"):
        return None
    if level not in ("1", "2", "3"):
        name = next(name for name in _PREFIXES if env.get(name))
        raise ContextError(
            f"{name} is {level!r:.80}; write 1 for the graphs of the main stages, 2 for those of every pass, 3 for "
            "these with pictures, or 0 for none"
        )
    ranks = env.get(RANKS, "")
    if ranks not in ("", "all"):
        raise ContextError(f"{RANKS} is {ranks!r:.80}; write all, or unset it to save the graphs of rank 0")
    return Asked(Level(int(level)), Path(os.path.abspath(_either("_PATH", env) or _FOLDER)), ranks == "all")


def _either(suffix: str, env: Mapping[str, str]) -> str:
    """The value of a variable that has two names; "" if neither is set."""
    values = {name + suffix: env[name + suffix] for name in _PREFIXES if env.get(name + suffix)}
    if len(set(values.values())) > 1:
        text = " and ".join(f"{name}={value!r:.80}" for name, value in values.items())
        raise ContextError(f"{text} mean the same and differ; unset one of them")
    return next(iter(values.values()), "")
