"""Fusion: the collectives of a program grouped by a policy, each group one coalesced collective.

A policy is a file with a pure `group` function from members to groups of their positions (`by_size`, `by_index`); the
mechanism (`fuse`, `cycles`) knows none of them but by the table in `fuse.group`.
"""

from __future__ import annotations

from .fuse import fuse, gradient_all_reduces, group, member
from .policy import AllReduceFusion, FusionMode, Member

__all__ = ["AllReduceFusion", "FusionMode", "Member", "fuse", "gradient_all_reduces", "group", "member"]
