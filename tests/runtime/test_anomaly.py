"""Anomaly detection: gradients are computed, and a NaN among them is an error on every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn

import partway as pw

Ranks = Callable[..., list[Any]]
ANNOTATIONS: list[dict[str, Any]] = [
    {"in_strategy": (("dp", None),)},
    {"in_strategy": (("dp", None),), "parameter_plan": {"a.weight": ("dp", None)}},
    {"parameter_plan": {"a.weight": (None, "dp"), "b.weight": ("dp", None)}},
]


class Net(nn.Module):
    def __init__(self, nan: bool) -> None:
        super().__init__()
        self.a, self.b, self.nan = nn.Linear(8, 6), nn.Linear(6, 3), nan

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        result: Tensor = self.b(hidden)
        return result + torch.sqrt(hidden * 0).sum() if self.nan else result


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model(torch.randn(7, 8)).square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


def anomalies() -> None:
    n = pw.init(simulate=2)
    torch.manual_seed(0)
    plain = Net(nan=False)
    expected = gradients(plain)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled|Error detected in")
        for annotations in ANNOTATIONS:
            for nan in (False, True):
                torch.manual_seed(0)
                model = pw.shard(Net(nan), mesh={"dp": n}, **annotations)
                with torch.autograd.detect_anomaly():
                    raised = pytest.raises(RuntimeError, match="returned nan values")
                    with raised if nan else contextlib.nullcontext():
                        assert all(map(torch.allclose, gradients(model), expected))
            torch.manual_seed(0)
            model = pw.shard(Net(nan=True), mesh={"dp": n}, **annotations)
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                assert gradients(model)[0].isnan().any()


def test_a_nan_is_found_in_one_process() -> None:
    anomalies()


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 4])
def test_a_nan_is_found_on_ranks(on_ranks: Ranks, n: int) -> None:
    on_ranks(n, anomalies)
