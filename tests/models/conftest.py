"""Each test starts with the default context, and leaves it so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import partway as pw


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    torch.manual_seed(0)
    pw.reset_auto_parallel_context()
    pw.reset_algo_parameters()
    yield
    pw.reset_auto_parallel_context()
    pw.reset_algo_parameters()
