"""Partway: a semi-automatic sharding-strategy compiler for PyTorch.

Annotate a few tensors, and train as before:

    import partway as pw

    model = pw.shard(model, in_strategy=(("dp", None),), mesh={"dp": 2, "tp": 4})
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

import partway.versions  # noqa: F401 - first: it warns of a PyTorch that Partway is not tested with
from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway import data, ops, ps
    from partway.checking.checker import check_manual
    from partway.checking.report import ManualReport, Mistake
    from partway.checkpoints.loading import load
    from partway.checkpoints.per_rank import (
        WeightLayout,
        infer_predict_layout,
        load_distributed_checkpoint,
        rank_list_for_transform,
        save_checkpoint,
        transform_checkpoint_by_rank,
        transform_checkpoints,
    )
    from partway.checkpoints.resume import Resume
    from partway.checkpoints.saving import save
    from partway.compiler.compiled import Compiled
    from partway.integrations.loss_monitor import LossMonitor
    from partway.ops.groups import (
        GlobalComm,
        create_group,
        destroy_group,
        get_group_rank_from_world_rank,
        get_group_size,
        get_local_rank,
        get_rank,
        get_world_rank_from_group_rank,
    )
    from partway.ops.manual import manual
    from partway.ops.where import axis_index, axis_size, set_mesh
    from partway.options.context import (
        auto_parallel_context,
        get_algo_parameters,
        get_auto_parallel_context,
        reset_algo_parameters,
        reset_auto_parallel_context,
        set_algo_parameters,
        set_auto_parallel_context,
    )
    from partway.propagation.plan.load import ExpertLoad
    from partway.propagation.plan.plan import Plan
    from partway.propagation.program.timeline import save_chrome_trace
    from partway.ps.context import set_ps_context
    from partway.ps.marks import set_param_ps
    from partway.requests.user_rules import rule
    from partway.runtime.code.recorders import record_collectives
    from partway.runtime.launching.process import init, shutdown
    from partway.runtime.ranks.expert_load import record_expert_load
    from partway.sharding import compile, shard
    from partway.show.sharding import ShardingPicture, visualize_sharding
    from partway.show.timeline import record_timeline
    from partway.strategy import (
        Broadcast,
        CaptureError,
        ContextError,
        DataError,
        ExpertLoadWarning,
        Layout,
        LossError,
        Mesh,
        OperatorError,
        Partial,
        PartwayError,
        Replicate,
        RuntimeStateError,
        Shard,
        StrategyError,
        UnknownOperatorWarning,
        UntestedTorchWarning,
        VerifyError,
        WholeReadWarning,
    )

# The modules of the public names. A module is imported when one of its names is first used: importing all of them takes
# longer than importing torch, since capturing a graph needs many modules of torch that `import torch` leaves out.
_HOMES = {
    "checking.checker": "check_manual",
    "checking.report": "ManualReport Mistake",
    "checkpoints.loading": "load",
    "checkpoints.per_rank": """WeightLayout infer_predict_layout load_distributed_checkpoint rank_list_for_transform
        save_checkpoint transform_checkpoint_by_rank transform_checkpoints""",
    "checkpoints.saving": "save",
    "compiler.compiled": "Compiled",
    "options.context": """auto_parallel_context get_algo_parameters get_auto_parallel_context reset_algo_parameters
        reset_auto_parallel_context set_algo_parameters set_auto_parallel_context""",
    "propagation.program.timeline": "save_chrome_trace",
    "integrations.loss_monitor": "LossMonitor",
    "ops.manual": "manual",
    "ops.groups": """GlobalComm create_group destroy_group get_group_rank_from_world_rank get_group_size get_local_rank
        get_rank get_world_rank_from_group_rank""",
    "ops.where": "axis_index axis_size set_mesh",
    "propagation.plan.load": "ExpertLoad",
    "propagation.plan.plan": "Plan",
    "data": "",
    "ops": "",
    "ps": "",
    "ps.marks": "set_param_ps",
    "checkpoints.resume": "Resume",
    "runtime.launching.process": "init shutdown",
    "runtime.code.recorders": "record_collectives",
    "runtime.ranks.expert_load": "record_expert_load",
    "ps.context": "set_ps_context",
    "sharding": "compile shard",
    "show.sharding": "ShardingPicture visualize_sharding",
    "show.timeline": "record_timeline",
    "strategy": """Broadcast CaptureError ContextError DataError ExpertLoadWarning Layout LossError Mesh OperatorError
        Partial PartwayError Replicate RuntimeStateError Shard StrategyError UnknownOperatorWarning UntestedTorchWarning
        VerifyError WholeReadWarning""",
    "requests.user_rules": "rule",
}

__all__ = [
    "Broadcast",
    "CaptureError",
    "Compiled",
    "ContextError",
    "DataError",
    "ExpertLoad",
    "ExpertLoadWarning",
    "GlobalComm",
    "Layout",
    "LossError",
    "LossMonitor",
    "ManualReport",
    "Mesh",
    "Mistake",
    "OperatorError",
    "Partial",
    "PartwayError",
    "Plan",
    "Replicate",
    "Resume",
    "RuntimeStateError",
    "Shard",
    "ShardingPicture",
    "StrategyError",
    "UnknownOperatorWarning",
    "UntestedTorchWarning",
    "VerifyError",
    "WeightLayout",
    "WholeReadWarning",
    "auto_parallel_context",
    "axis_index",
    "axis_size",
    "check_manual",
    "compile",
    "create_group",
    "data",
    "destroy_group",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_group_rank_from_world_rank",
    "get_group_size",
    "get_local_rank",
    "get_rank",
    "get_world_rank_from_group_rank",
    "infer_predict_layout",
    "init",
    "load",
    "load_distributed_checkpoint",
    "manual",
    "ops",
    "ps",
    "rank_list_for_transform",
    "record_collectives",
    "record_expert_load",
    "record_timeline",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "rule",
    "save",
    "save_checkpoint",
    "save_chrome_trace",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_mesh",
    "set_param_ps",
    "set_ps_context",
    "shard",
    "shutdown",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "visualize_sharding",
]


if os.environ.get("PARTWAY_LOG"):
    importlib.import_module("partway.requests.planning_log").log_to_stderr()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # with it, a type checker would accept any name
    __getattr__ = at_first_use(__name__, _HOMES)
