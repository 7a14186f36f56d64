"""Records like those of PyTorch's flight recorder for NCCL's collectives."""

from __future__ import annotations

import time
from typing import Any


def entry(number: int, over: bool, **other: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ["3", "partway: dp"], "collective_seq_id": number,
        "p2p_seq_id": 0, "is_p2p": False, "op_id": number, "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "state": "completed" if over else "scheduled",
        "retired": over, "time_created_ns": 1e9 * (time.time() - 5), "timeout_ms": 600000, **other,
    }  # fmt: skip


def record(*entries: dict[str, Any], done: int = 0) -> dict[str, Any]:
    return {
        "pg_config": {"3": {"name": "3", "desc": "partway: dp", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": str(len(entries)), "last_completed_collective": str(done)}},
        "entries": list(entries),
    }
