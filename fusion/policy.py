"""What a fusion policy is, and what it sees of a program: frozen values, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..propagation.collectives import kind_of
from ..strategy.choice import Choice
from ..strategy.errors import ContextError
from ..strategy.placement import Kind

MB = 1024 * 1024
AUTO_MB = 64

Key = tuple[tuple[str, ...], str, str, torch.dtype]
Groups = tuple[tuple[int, ...], ...]


class FusionMode(Choice):
    """How the boundaries between groups are chosen."""

    AUTO = "auto"  # groups of at most AUTO_MB
    SIZE = "size"  # groups of at most `config` MB
    INDEX = "index"  # a group ends after each count in `config`


@dataclass(frozen=True, slots=True)
class AllReduceFusion:
    """How the gradient AllReduces of a program are grouped.

    `config` belongs to the mode: None for `auto`; a whole number of MB (1024 * 1024 bytes), 1 or more, for `size`;
    for `index` the counts of AllReduces after which a group ends, ascending and 1 or more: (20, 35) makes a group
    of the first 20, one of the next 15 and one of the rest. Anything else raises ContextError.
    """

    mode: FusionMode
    config: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, FusionMode):
            raise ContextError(f"AllReduce fusion: mode must be a FusionMode, not {self.mode!r}")
        problems = _CONFIG_PROBLEMS[self.mode](self.config)
        if problems:
            raise ContextError(f"AllReduce fusion: mode {self.mode} {'; '.join(problems)}")

    @classmethod
    def from_option(cls, option: object) -> AllReduceFusion:
        """The policy that a user writes as `{"mode": ..., "config": ...}` (as `comm_fusion["allreduce"]` is), or as
        a list of indices (as `all_reduce_fusion_config` is).

        "config" may be left out for mode auto. Raises ContextError for unknown or missing keys and wrong values.
        """
        if isinstance(option, list | tuple):
            return cls(FusionMode.INDEX, tuple(option))
        if not isinstance(option, Mapping) or "mode" not in option or not set(option) <= {"mode", "config"}:
            raise ContextError(
                'AllReduce fusion takes {"mode": ..., "config": ...} with no other keys, or a list of indices, '
                f"not {option!r}"
            )
        modes = [mode.value for mode in FusionMode]
        if option["mode"] not in modes:
            raise ContextError(f"AllReduce fusion: mode {option['mode']!r} is unknown; write one of {', '.join(modes)}")
        config = option.get("config")
        return cls(FusionMode(option["mode"]), tuple(config) if isinstance(config, list) else config)


@dataclass(frozen=True, slots=True)
class Member:
    """One collective that may join a group: a conversion along `axes`, with the bytes of its local operand."""

    tag: int
    source: str
    target: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    bytes: int

    @property
    def kind(self) -> Kind:
        return kind_of(self.source, self.target)

    @property
    def key(self) -> Key:
        """Only members with equal keys can be one collective."""
        return self.axes, self.source, self.target, self.dtype


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _auto_problems(config: Any) -> list[str]:
    if config is None:
        return []
    return [f"takes no config (a group is at most {AUTO_MB} MB), not {config!r}; mode size takes a limit"]


def _size_problems(config: Any) -> list[str]:
    return [] if _is_count(config) else [f"takes a whole number of MB, 1 or more, not {config!r}"]


def _index_problems(config: Any) -> list[str]:
    if not isinstance(config, tuple):
        return [f"takes a list of indices such as [20, 35], not {config!r}"]
    if not config:
        return ["takes at least one index, such as [20, 35], not an empty list"]
    bad = [index for index in config if not _is_count(index)]
    if bad:
        return [f"takes whole numbers, 1 or more; {list(config)} has {', '.join(map(repr, bad))}"]
    repeated = sorted({index for index in config if config.count(index) > 1})
    problems = [f"takes each index once; {list(config)} repeats {', '.join(map(str, repeated))}"] if repeated else []
    if list(config) != sorted(config):
        problems.append(f"takes ascending indices; write {sorted(set(config))} for {list(config)}")
    return problems


_CONFIG_PROBLEMS = {
    FusionMode.AUTO: _auto_problems,
    FusionMode.SIZE: _size_problems,
    FusionMode.INDEX: _index_problems,
}
