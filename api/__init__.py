"""Partway: a semi-automatic sharding-strategy compiler for PyTorch.

Annotate a few tensors, and train as before:

    import partway as pw

    model = pw.shard(model, in_strategy=(("dp", None),), mesh={"dp": 2, "tp": 4})
"""

from __future__ import annotations

import partway.versions  # noqa: F401 - first: it warns of a PyTorch that Partway is not tested with
from partway import data
from partway.compile import Compiled, compile
from partway.context import (
    auto_parallel_context,
    get_algo_parameters,
    get_auto_parallel_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    set_algo_parameters,
    set_auto_parallel_context,
)
from partway.fusion.timeline import save_chrome_trace
from partway.propagation.plan.plan import Plan
from partway.rule import rule
from partway.runtime.process import get_group_size, get_rank, init, shutdown
from partway.runtime.record import record_collectives, record_timeline
from partway.shard import shard
from partway.strategy import (
    Broadcast,
    CaptureError,
    ContextError,
    DataError,
    Layout,
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

__all__ = [
    "Broadcast",
    "CaptureError",
    "Compiled",
    "ContextError",
    "DataError",
    "Layout",
    "Mesh",
    "OperatorError",
    "Partial",
    "PartwayError",
    "Plan",
    "Replicate",
    "RuntimeStateError",
    "Shard",
    "StrategyError",
    "UnknownOperatorWarning",
    "UntestedTorchWarning",
    "VerifyError",
    "WholeReadWarning",
    "auto_parallel_context",
    "compile",
    "data",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_group_size",
    "get_rank",
    "init",
    "record_collectives",
    "record_timeline",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "rule",
    "save_chrome_trace",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "shard",
    "shutdown",
]
