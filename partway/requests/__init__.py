"""The checked requests of users: the arguments of `shard` and `compile`, DTensors, rules of operators.

request.py          the arguments of one `shard` or `compile`, the tensors that they name, and what can be split
dtensors.py         DTensors as annotations
user_rules.py       `partway.rule`
plan_inputs.py      all inputs of a plan
planning_log.py     the log and the live line of planning
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.requests.dtensors import is_dtensor, layout_now, whole
    from partway.requests.planning_log import level_asked
    from partway.requests.request import Request, check_target, engine_of, given_mesh
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "dtensors": "is_dtensor layout_now whole",
            "planning_log": "level_asked",
            "request": "Request check_target engine_of given_mesh",
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
