"""What a fusion policy is, and what it sees of a program: frozen values, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..propagation.ops.collectives import kind_of
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
    OVERLAP = "overlap"  # the groups that the cost model says hide most


@dataclass(frozen=True, slots=True)
class Fusion:
    """How the collectives of one kind are grouped.

    `config` belongs to the mode: None for `auto` and `overlap`; a whole number of MB (1024 * 1024 bytes), 1 or more,
    for `size`; for `index` the counts of collectives after which a group ends, ascending and 1 or more: (20, 35) makes
    a group of the first 20, one of the next 15 and one of the rest. Anything else raises ContextError.
    """

    mode: FusionMode
    config: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, FusionMode):
            raise ContextError(f"the mode of a Fusion must be a FusionMode, not {self.mode!r}")
        if isinstance(self.config, list):
            object.__setattr__(self, "config", tuple(self.config))
        problems = _CONFIG_PROBLEMS[self.mode](self.config)
        if problems:
            raise ContextError(f"mode {self.mode} {'; '.join(problems)}")

    @classmethod
    def from_option(cls, option: object, collective: str = "allreduce") -> Fusion:
        """The policy that a user writes as `{"mode": ..., "config": ...}` (as `comm_fusion["allreduce"]` is); for
        allreduce also as a list of indices (as `all_reduce_fusion_config` is).

        "config" may be left out for the modes auto and overlap. Raises ContextError for unknown or missing keys, wrong
        values, and a mode that `collective` does not have.
        """
        modes = MODES[collective]
        if isinstance(option, list | tuple) and FusionMode.INDEX in modes:
            return cls(FusionMode.INDEX, tuple(option))
        if not isinstance(option, Mapping) or "mode" not in option or not set(option) <= {"mode", "config"}:
            lists = ", or a list of indices" if FusionMode.INDEX in modes else ""
            raise ContextError(f'takes {{"mode": ..., "config": ...}} with no other keys{lists}, not {option!r}')
        if option["mode"] not in list(FusionMode):
            raise ContextError(f"mode {option['mode']!r} is unknown; write one of {', '.join(modes)}")
        mode, config = FusionMode(option["mode"]), option.get("config")
        if mode not in modes:
            raise ContextError(_not_a_mode(mode, collective))
        return cls(mode, config)

    @property
    def option(self) -> dict[str, Any]:
        """The policy as a user writes it."""
        config = list(self.config) if isinstance(self.config, tuple) else self.config
        return {"mode": self.mode.value, "config": config}


@dataclass(frozen=True, slots=True)
class FusionPolicies:
    """The policy for each kind of collective; None: those collectives stay as they are.

    Only allreduce has the mode index. Raises ContextError for a mode that a collective does not have.
    """

    allreduce: Fusion | None = None
    allgather: Fusion | None = None
    reducescatter: Fusion | None = None

    def __post_init__(self) -> None:
        for collective, modes in MODES.items():
            policy = getattr(self, collective)
            if policy is not None and policy.mode not in modes:
                raise ContextError(f"{collective}: {_not_a_mode(policy.mode, collective)}")

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))


# Indices count gradients, in the order in which the backward produces them.
MODES: Mapping[str, tuple[FusionMode, ...]] = {
    "allreduce": tuple(FusionMode),
    "allgather": (FusionMode.AUTO, FusionMode.SIZE, FusionMode.OVERLAP),
    "reducescatter": (FusionMode.AUTO, FusionMode.SIZE, FusionMode.OVERLAP),
}


def _not_a_mode(mode: FusionMode, collective: str) -> str:
    return f"mode {mode} is one of allreduce only; write one of {', '.join(MODES[collective])}"


@dataclass(frozen=True, slots=True)
class Member:
    """One collective that may join a group: a conversion along `axes`, with the bytes of its payload (of the whole
    value: what an all_gather makes, what the others are given)."""

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


def _overlap_problems(config: Any) -> list[str]:
    if config is None:
        return []
    return [f"takes no config (the cost model chooses the groups), not {config!r}; mode size takes a limit"]


def _size_problems(config: Any) -> list[str]:
    return [] if _is_count(config) else [f"takes a whole number of MB, 1 or more, not {config!r}"]


def index_problems(config: Any) -> list[str]:
    """What is wrong with the indices of mode index, in words that follow its name."""
    if not isinstance(config, list | tuple):
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
    FusionMode.INDEX: index_problems,
    FusionMode.OVERLAP: _overlap_problems,
}
