"""Fusion: the collectives of a program's parameters grouped by policies, each group one coalesced collective.

A policy is a file with pure functions from members to groups of their positions (`by_size`, `by_index`,
`by_overlap`); the mechanism (`fuse`, `cycles`) knows none of them but by the table in `fuse.group` and by the one
question that mode overlap asks: when a schedule (`schedule`) is predicted to end.
"""

from __future__ import annotations

from .fuse import fuse, gradient_collectives, group, member, weight_gathers
from .policy import Fusion, FusionMode, FusionPolicies, Member
from .schedule import Schedule, predict
from .timeline import Span, save_chrome_trace

__all__ = [
    "Fusion",
    "FusionMode",
    "FusionPolicies",
    "Member",
    "Schedule",
    "Span",
    "fuse",
    "gradient_collectives",
    "group",
    "member",
    "predict",
    "save_chrome_trace",
    "weight_gathers",
]
