"""Fusion: the collectives of a program's parameters in groups, each group one message.

in       a Step: the forward and the backward that every rank runs, with one `convert` for each tensor (program room)
out      a Program: the same graphs, in which each group is one `convert_group` that is issued early enough to be hidden

program   start here: make_program, and what a Program says of itself
modes     the table of policies, and the options that users write (`Fusion`, `FusionPolicies`)
policy    what a policy is, and what it may ask; by_size, by_index and by_overlap are the policies
members   what policies group; cycles keeps groups from waiting for themselves
fuse      the pass: which nodes run as one and when they are issued; updates does it for buffer updates
schedule  what is predicted to run when; timeline writes that, or what was measured, as a file for Perfetto
events    a backward for by_overlap, with gradient_overlap and weight_overlap for its two searches
"""

from __future__ import annotations

from .fuse import fuse, gradient_collectives, group, member, weight_gathers
from .members import Member
from .modes import Fusion, FusionMode, FusionPolicies
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
