"""All inputs of a plan: a graph, its request and the options, gathered before planning."""

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
    """All inputs of the plan of one call except the mesh.

    graph       the captured call
    fn          the called function or module, for its argument names and its sharded modules
    request     the arguments of `shard` or `compile`
    context     the options in force, and `algo` those of the search
    profile     the figures of the devices
    rules       the rows that users wrote for operators of the graph
    processes   the number that a launcher started; None in simulation
    parameters  the layouts of parameters that an earlier plan laid out, or that are DTensors
    inputs      the layouts of the inputs that are DTensors
    loaded      the plan that strategy_ckpt_config loads
    replayed    the one of the plans given to `shard` or `compile` that was made for this graph
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
