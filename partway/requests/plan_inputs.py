"""What a plan follows from: a graph, what was asked of it, and the options, gathered before anything is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.graph.graph import Graph
from partway.propagation.plan.plan import Plan
from partway.propagation.rules.custom import Rows
from partway.requests.request import Request
from partway.strategy import Layout


@dataclass(frozen=True)
class PlanInputs:
    """All that the plan of one call follows from, but for the mesh.

    graph       the captured call
    fn          what was called: the names of its arguments and the sharded modules inside count
    request     the arguments of `shard` or `compile`
    context     the options in force, and `algo` those of the search
    profile     the figures of the devices
    rules       the rows that users wrote for operators of the graph
    processes   how many a launcher started; None in simulation
    parameters  the layouts that parameters have already: an earlier plan split them, or they are DTensors
    inputs      the layouts of the inputs that are DTensors
    loaded      the plan that strategy_ckpt_config loads
    replayed    the plan, of those that were given to `shard` or `compile`, that is one of this graph
    followed    a plan of the same function for other sizes, whose strategies are tried
    """

    graph: Graph
    fn: Callable[..., Any]
    request: Request
    context: ParallelContext
    algo: AlgoParameters
    profile: DeviceProfile
    rules: Rows = field(default_factory=dict)
    processes: int | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    loaded: Plan | None = None
    replayed: Plan | None = None
    followed: Plan | None = None
