"""The meshes that a call may be planned on."""

from __future__ import annotations

import math
from typing import Any

from partway.annotations.annotate import dataset_applies
from partway.annotations.constraint_text import constraint_of
from partway.options.parallel import ParallelMode
from partway.propagation.ops.collectives import constrain
from partway.propagation.ops.python.manual import call_manual, manual_of
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import requests
from partway.strategy import Mesh, StrategyError, coarsest_mesh, meshes_of
from partway.strategy.notation import Form, counts_of, forms_of_entry


def meshes_to_try(inputs: PlanInputs) -> list[Mesh]:
    """The meshes that a call may be planned on: the one given (to `shard`, by a saved plan, or inside the function);
    else that of parameters that have been laid out; else every mesh of the devices on which the int strategies can be
    written, or only the coarsest one in the modes other than auto_parallel.

    Raises StrategyError if there is neither a mesh nor a number of devices, and RuntimeStateError if the mesh does not
    fit the number of processes.
    """
    request, context, processes = inputs.request, inputs.context, inputs.processes
    constraints = [constraint_of(str(node.args[1])) for node in inputs.graph.nodes if node.target is constrain]
    inside = list(requests(inputs.fn, request))
    saved = inputs.replayed or inputs.followed or inputs.loaded
    meshes = [
        request.own_mesh,
        saved.mesh if saved else None,
        *(manual_of(str(node.args[1])).mesh for node in inputs.graph.nodes if node.target is call_manual),
        *(mesh for _, mesh in constraints),
        *(inner.own_mesh for _, inner in inside),
        *(layout.mesh for layout in inputs.inputs.values()),
    ]
    if mesh := next((mesh for mesh in meshes if mesh is not None), None):
        if mesh.is_part and mesh != request.own_mesh:
            raise StrategyError(f"the mesh {mesh} is a part of the job; give it to shard: mesh={mesh!r}")
        if processes is not None and not mesh.is_part:
            from partway.strategy.torch_mesh import check_ranks

            check_ranks(mesh, processes)
        return [mesh]
    if processes is None and not context.device_num_was_set:
        raise StrategyError(
            "there is no mesh to split over; pass mesh={'dp': 2, 'tp': 4}, or set_auto_parallel_context(device_num=8)"
        )
    devices = processes or context.device_num
    earlier = [layout.mesh for layout in inputs.parameters.values() if layout.mesh.device_num == devices]
    if earlier:
        return earlier[:1]
    strategies = [strategy for _, strategy in request.given()] + [strategy for strategy, _ in constraints]
    strategies += [strategy for _, inner in inside for strategy in (inner.parameter_plan or {}).values()]
    if dataset_applies(request, context) and not isinstance(context.dataset_strategy, str):
        strategies += list(context.dataset_strategy)
    counts = [tuple(count or 1 for count in strategy) for strategy in strategies if _is_counts(strategy, devices)]
    if context.mode_was_set and context.parallel_mode != ParallelMode.AUTO_PARALLEL:
        return [coarsest_mesh(devices, counts)]
    return meshes_of(devices, counts, inputs.profile.levels[0].devices)


def _is_counts(strategy: Any, devices: int) -> bool:
    """Whether a strategy is split counts that some mesh can write; the validator rejects others."""
    if not isinstance(strategy, tuple) or not strategy:
        return False
    if not all(Form.INTS in forms_of_entry(entry) for entry in strategy):
        return False
    counts = counts_of(strategy)
    return min(counts) >= 1 and devices % math.prod(counts) == 0
