"""Meshes of numbers of devices that are no powers of two: an MLP planned and run on them is one device's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, assert_sends_as_planned, gradients
from torch import Tensor, nn

import partway as pw
from partway.strategy import meshes_of


class Layers(nn.Module):
    """Widths and a batch that 3, 6, 7 and 12 ranks can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(84, 168), nn.LayerNorm(168), nn.Linear(168, 84)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.norm(self.up(x)))), target)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(84, 84, dtype=torch.float64) for name in ("x", "target")}


def check(model: Any, plain: nn.Module) -> None:
    """Loss and gradients are those of one device, and the plan lists what ran."""
    loss, found = gradients(model, batch())
    expected_loss, expected = gradients(plain, batch())
    assert_same_loss(loss, expected_loss, 1e-10)
    assert_same_gradients(found, expected, 1e-10)
    assert_sends_as_planned(model, batch())


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


SIZES = [
    {"a": 3}, {"a": 6}, {"a": 2, "b": 3}, {"a": 3, "b": 2}, {"a": 7}, {"a": 1, "b": 7}, {"a": 12}, {"a": 3, "b": 4},
    {"a": 2, "b": 6}, {"a": 2, "b": 3, "c": 2}, {"a": 3, "b": 2, "c": 2},
]  # fmt: skip


@pytest.mark.parametrize("batch_split", [None, "first", pytest.param("last", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_a_model_on_any_mesh_computes_what_one_device_computes(mesh: dict[str, int], batch_split: str | None) -> None:
    plain = model_of()
    annotations: dict[str, Any] = {}
    if batch_split:
        axis = list(mesh)[0 if batch_split == "first" else -1]
        annotations = {"in_strategy": {"x": (axis, None)}, "parameter_plan": {"up.weight": (axis, None)}}
    model: Any = pw.shard(copy.deepcopy(plain), mesh=mesh, **annotations)
    check(model, plain)
    assert model.plan.mesh.device_num == math.prod(mesh.values())


@pytest.mark.parametrize("devices", [3, 6, 7, 12])
def test_any_number_of_devices_is_used_whole_and_the_cheapest_mesh_is_taken(devices: int) -> None:
    plain = model_of()
    pw.set_auto_parallel_context(device_num=devices)
    model: Any = pw.shard(copy.deepcopy(plain))
    check(model, plain)
    assert model.plan.mesh.device_num == devices
    costs = [
        pw.compile(plain, kwargs=batch(), mesh=dict(zip(mesh.axes, mesh.sizes, strict=True))).solution.cost
        for mesh in meshes_of(devices, [])
    ]
    assert pw.compile(plain, kwargs=batch()).solution.cost == pytest.approx(min(costs), rel=1e-8)


@pytest.mark.parametrize(
    ("devices", "counts", "sizes"),
    [
        (6, (3, 2), {(2, 3), (3, 2)}),
        (12, (3, 4), {(3, 4), (4, 3), (2, 2, 3), (2, 3, 2), (3, 2, 2)}),
        (7, (7, 1), {(7,)}),
    ],
)
def test_split_counts_choose_a_mesh_that_can_write_them(devices: int, counts: Any, sizes: set[Any]) -> None:
    plain = model_of()
    pw.set_auto_parallel_context(device_num=devices)
    model: Any = pw.shard(copy.deepcopy(plain), in_strategy={"x": counts})
    check(model, plain)
    assert model.plan.mesh.sizes in sizes


def test_counts_that_do_not_divide_the_devices_are_refused() -> None:
    pw.set_auto_parallel_context(device_num=7)
    with pytest.raises(pw.StrategyError) as refused:
        pw.shard(model_of(), in_strategy={"x": (2, 1)})(**batch())
    assert str(refused.value) == (
        "1 problem with strategies on the mesh d0=7:\n"
        "  - input 'x': (2, 1) takes 2 devices, which does not divide the 7 available; "
        "use split counts whose product is 7 or 1"
    )
