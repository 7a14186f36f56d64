"""The modes of `comm_fusion`: one row of `POLICIES` each, and the options that users write with them.

A new policy is a file like by_size.py, a member of `FusionMode` and a row of `POLICIES`. No other code depends on the
mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..strategy.basics.choice import Choice
from ..strategy.errors import ContextError
from .by_index import INDEX
from .by_overlap import OVERLAP
from .by_size import AUTO, SIZE
from .policy import Policy


class FusionMode(Choice):
    """How the boundaries between groups are chosen.

    auto       groups of at most 64 MB, as in MindSpore and in DistributedDataParallel; no config
    size       groups of at most `config` MB
    index      a group ends after each count of gradients in `config`, such as [20, 35]; of allreduce only
    overlap    ours: the groups that the cost model says hide most; no config
    """

    AUTO = "auto"
    SIZE = "size"
    INDEX = "index"
    OVERLAP = "overlap"


POLICIES: Mapping[FusionMode, Policy] = {
    FusionMode.AUTO: AUTO,
    FusionMode.SIZE: SIZE,
    FusionMode.INDEX: INDEX,
    FusionMode.OVERLAP: OVERLAP,
}


def modes_of(collective: str) -> tuple[FusionMode, ...]:
    """The modes that a collective of `comm_fusion` may have."""
    return tuple(mode for mode, policy in POLICIES.items() if collective in policy.collectives)


@dataclass(frozen=True, slots=True)
class Fusion:
    """How the collectives of one kind are grouped.

    `config` belongs to the mode: None for `auto` and `overlap`; a whole number of MB (1024 * 1024 bytes), 1 or more,
    for `size`; for `index` the counts of collectives after which a group ends, ascending and 1 or more: (20, 35) makes
    a group of the first 20, one of the next 15 and one of the rest. Raises ContextError for any other config.
    """

    mode: FusionMode
    config: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, FusionMode):
            raise ContextError(f"the mode of a Fusion must be a FusionMode, not {self.mode!r}")
        if isinstance(self.config, list):
            object.__setattr__(self, "config", tuple(self.config))
        if problems := self.policy.problems(self.config):
            raise ContextError(f"mode {self.mode} {'; '.join(problems)}")

    @classmethod
    def from_option(cls, option: object, collective: str = "allreduce") -> Fusion:
        """The policy that a user writes as `{"mode": ..., "config": ...}` (as `comm_fusion["allreduce"]` is); for
        allreduce also as a list of indices (as `all_reduce_fusion_config` is).

        "config" may be left out for the modes auto and overlap. Raises ContextError for unknown or missing keys, wrong
        values, and a mode that `collective` does not have.
        """
        modes = modes_of(collective)
        shorthands = {mode: POLICIES[mode].shorthand for mode in modes if POLICIES[mode].shorthand}
        if isinstance(option, list | tuple) and shorthands:
            return cls(next(iter(shorthands)), tuple(option))
        if not isinstance(option, Mapping) or "mode" not in option or not set(option) <= {"mode", "config"}:
            lists = "".join(f", or {text}" for text in shorthands.values())
            raise ContextError(f'takes {{"mode": ..., "config": ...}} with no other keys{lists}, not {option!r}')
        if option["mode"] not in list(FusionMode):
            raise ContextError(f"mode {option['mode']!r} is unknown; write one of {', '.join(modes)}")
        mode, config = FusionMode(option["mode"]), option.get("config")
        if mode not in modes:
            raise ContextError(_not_a_mode(mode, collective))
        return cls(mode, config)

    @property
    def policy(self) -> Policy:
        """The row of its mode."""
        return POLICIES[self.mode]

    @property
    def option(self) -> dict[str, Any]:
        """The policy as a user writes it."""
        config = list(self.config) if isinstance(self.config, tuple) else self.config
        return {"mode": self.mode.value, "config": config}


@dataclass(frozen=True, slots=True)
class FusionPolicies:
    """The policy for each kind of collective; None leaves those collectives as they are.

    Only allreduce has the mode index. Raises ContextError for a mode that a collective does not have.
    """

    allreduce: Fusion | None = None
    allgather: Fusion | None = None
    reducescatter: Fusion | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            fusion = getattr(self, field.name)
            if fusion is not None and fusion.mode not in modes_of(field.name):
                raise ContextError(f"{field.name}: {_not_a_mode(fusion.mode, field.name)}")

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))


def _not_a_mode(mode: FusionMode, collective: str) -> str:
    of = " and ".join(POLICIES[mode].collectives)
    return f"mode {mode} is one of {of} only; write one of {', '.join(modes_of(collective))}"
