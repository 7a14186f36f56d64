"""Fusion: groups of collectives of a program's parameters, each sent as one message.

in       a Program with one `convert` for each tensor (propagation/program)
out      a Program with one `convert_group` for each group, issued early enough to be hidden

fuse      start here: the pass groups nodes and decides when they are issued
modes     the table of policies, and the options that users write (`Fusion`, `FusionPolicies`)
policy    the interface of a policy; by_size, by_index and by_overlap are the policies
members   the collectives that policies group; cycles keeps groups from waiting for themselves
exchanges the order of operators around exchanges of rows
events    a backward for by_overlap, with gradient_overlap and weight_overlap for its two searches
"""

from __future__ import annotations

from .fuse import fuse, fuse_program, gradient_collectives, group, member, weight_gathers
from .members import Member
from .modes import Fusion, FusionMode, FusionPolicies

__all__ = [
    "Fusion",
    "FusionMode",
    "FusionPolicies",
    "Member",
    "fuse",
    "fuse_program",
    "gradient_collectives",
    "group",
    "member",
    "weight_gathers",
]
