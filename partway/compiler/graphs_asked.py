"""The environment variables that select the graphs to save of each planned call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partway.strategy.errors import ContextError

_PREFIXES = ("PARTWAY_SAVE_GRAPHS", "MS_DEV_SAVE_GRAPHS")  # the second is MindSpore's


@dataclass(frozen=True)
class Asked:
    """The graphs to save: those of the main stages (level 1) or of every pass (2), in `folder`, of every rank or only
    of rank 0."""

    level: int
    folder: Path
    every_rank: bool = False


def asked(environment: Mapping[str, str] | None = None) -> Asked | None:
    """The graphs that the environment asks to save; None for none. Raises ContextError for an invalid value, and for
    two variables that contradict each other."""
    env = os.environ if environment is None else environment
    level = _either("", env)
    if level in ("", "0"):
        return None
    if level not in ("1", "2"):
        name = next(name for name in _PREFIXES if env.get(name))
        raise ContextError(
            f"{name} is {level!r:.80}; write 1 for the graphs of the main stages, 2 for those of every pass, or 0 for "
            "none (`partway show` makes pictures of a plan)"
        )
    if (ranks := env.get("PARTWAY_SAVE_GRAPHS_RANKS", "")) not in ("", "all"):
        raise ContextError(
            f"PARTWAY_SAVE_GRAPHS_RANKS is {ranks!r:.80}; write all, or unset it to save those of rank 0"
        )
    return Asked(int(level), Path(os.path.abspath(_either("_PATH", env) or "partway_graphs")), ranks == "all")


def _either(suffix: str, env: Mapping[str, str]) -> str:
    """The value of a variable that has two names; "" if neither is set."""
    values = {name + suffix: env[name + suffix] for name in _PREFIXES if env.get(name + suffix)}
    if len(set(values.values())) > 1:
        text = " and ".join(f"{name}={value!r:.80}" for name, value in values.items())
        raise ContextError(f"{text} mean the same and differ; unset one of them")
    return next(iter(values.values()), "")
