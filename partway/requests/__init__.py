"""The checked requests of users: the arguments of `shard` and `compile`, DTensors, rules of operators.

request.py          the arguments of one `shard` or `compile`
shardable.py        checks that functions, modules and arguments can be split at all
attached.py         the engine that `shard` attaches to a module
dtensors.py         DTensors as annotations
user_rules.py       `partway.rule`
plan_inputs.py      all inputs of a plan
planning_log.py     the log and the live line of planning
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.requests.attached import engine_of
    from partway.requests.dtensors import is_dtensor, layout_now, whole
    from partway.requests.planning_log import level_asked
    from partway.requests.request import Request, given_mesh
    from partway.requests.shardable import check_target
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "attached": "engine_of",
            "dtensors": "is_dtensor layout_now whole",
            "planning_log": "level_asked",
            "request": "Request given_mesh",
            "shardable": "check_target",
        },
    )

__all__ = [
    "Request",
    "check_target",
    "engine_of",
    "given_mesh",
    "is_dtensor",
    "layout_now",
    "level_asked",
    "whole",
]
