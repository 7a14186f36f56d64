"""Fusion: groups of collectives of a program's parameters, each sent as one message.

in       a Step: the forward and the backward that every rank runs, with one `convert` for each tensor (program room)
out      a Program: the same graphs with one `convert_group` for each group, issued early enough to be hidden

program   start here: make_program, and the Program with its figures
modes     the table of policies, and the options that users write (`Fusion`, `FusionPolicies`)
policy    the interface of a policy; by_size, by_index and by_overlap are the policies
members   the collectives that policies group; cycles keeps groups from waiting for themselves
fuse      the pass: groups nodes and decides when they are issued; updates does the same for buffer updates
schedule  the predicted schedule; timeline writes it, or a measured one, as a file for Perfetto
events    a backward for by_overlap, with gradient_overlap and weight_overlap for its two searches
"""

from __future__ import annotations

from .fuse import fuse, gradient_collectives, group, member, weight_gathers
from .members import Member
from .modes import Fusion, FusionMode, FusionPolicies
from .program import Program
from .schedule import Meter, Schedule, predict, with_values
from .timeline import COMMUNICATION, COMPUTE, Span, save_chrome_trace

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "Fusion",
    "FusionMode",
    "FusionPolicies",
    "Member",
    "Meter",
    "Program",
    "Schedule",
    "Span",
    "fuse",
    "gradient_collectives",
    "group",
    "member",
    "predict",
    "save_chrome_trace",
    "weight_gathers",
    "with_values",
]
