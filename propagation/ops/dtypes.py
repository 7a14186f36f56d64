"""The dtypes in which operators accumulate."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
