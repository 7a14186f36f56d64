"""Nets of images train on slices of an image as on one device: values, gradients and running statistics."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, assert_sends_as_planned, whole
from images import NETS
from torch import Tensor

import partway as pw
from partway.propagation.cost.profile import profile_of

Reference = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
Ranks = Callable[..., Any]
# what splits the dims of an image, and how its height and width are swapped for it
WAYS: dict[str, tuple[dict[str, int], tuple[Any, ...]]] = {
    "width": ({"w": 8}, (None, None, None, "w")),
    "height": ({"h": 8}, (None, None, "h", None)),
    "both": ({"h": 2, "w": 4}, (None, None, "h", "w")),
}


@pytest.fixture(scope="session")
def bytes_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A device profile on which only bytes cost anything, so that small images are split as large ones are."""
    return profile_of_bytes(tmp_path_factory.mktemp("profile") / "bytes.json")


def profile_of_bytes(path: Path) -> str:
    figures = profile_of("cpu").model_dump(mode="json")
    figures["name"], figures["overhead"] = "bytes", 0.0
    figures["memory_bandwidth"] = 1e18
    figures["peak"] = dict.fromkeys(figures["peak"], 1e18)
    for level in figures["levels"]:
        level["bandwidth"], level["latency"], level["launch"] = 1e6, 0.0, 0.0
    path.write_text(json.dumps(figures))
    return str(path)


@functools.cache
def one_device(name: str, size: tuple[int, int] | None = None) -> Reference:
    model, batch = NETS[name].model(), NETS[name].batch(size)
    return results(model, batch)


def results(model: Any, batch: dict[str, Tensor]) -> Reference:
    """The loss, the gradients of the image and of all parameters, and the buffers after one step."""
    loss = model(**batch)
    loss.backward()
    gradients = {"image": batch["image"].grad, **{name: p.grad for name, p in model.named_parameters()}}
    return loss.detach(), gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found: Reference, expected: Reference) -> None:
    assert_same_loss(found[0], expected[0], 1e-10)
    assert_same_gradients(found[1], expected[1], 1e-10)
    assert list(found[2]) == list(expected[2])
    for name, buffer in expected[2].items():
        torch.testing.assert_close(found[2][name], buffer, rtol=1e-10, atol=1e-12)


def even_cases() -> list[Any]:
    """Each net split one way, and both ways of the U-Net; the rest is for `make conformance`."""
    fast = {("unet", "both"), ("deeplab", "both"), ("efficientnet", "width")}
    every = [(name, way) for name in NETS for way in WAYS]
    return [pytest.param(*case, marks=[] if case in fast else [pytest.mark.slow]) for case in every]


@pytest.mark.parametrize(("name", "way"), even_cases())
def test_an_image_in_slices_gives_the_numbers_of_one_device(name: str, way: str, bytes_alone: str) -> None:
    net, (mesh, strategy) = NETS[name], WAYS[way]
    size = net.size[::-1] if way == "height" else net.size
    with pw.auto_parallel_context(device_profile=bytes_alone):
        model: Any = pw.shard(net.model(), in_strategy={"image": strategy}, mesh=mesh)
        assert_same(results(model, net.batch(size)), one_device(name, size))
        assert model.plan.unknown_operators == ()
        kinds = {str(c.kind) for c in model.plan.collectives}
        assert "exchange" in kinds
        assert_sends_as_planned(model, net.batch(size))


def short_cases() -> list[Any]:
    fast = {("unet", 8), ("deeplab", 3)}
    every = [(name, devices) for name in NETS for devices in (3, 8)]
    return [pytest.param(*case, marks=[] if case in fast else [pytest.mark.slow]) for case in every]


@pytest.mark.parametrize(("name", "devices"), short_cases())
def test_slices_that_are_short_give_the_numbers_of_one_device(name: str, devices: int, bytes_alone: str) -> None:
    net, size = NETS[name], (44, 100)
    with pw.auto_parallel_context(device_profile=bytes_alone):
        model: Any = pw.shard(net.model(), in_strategy={"image": (None, None, None, "w")}, mesh={"w": devices})
        assert_same(results(model, net.batch(size)), one_device(name, size))
        assert_sends_as_planned(model, net.batch(size))


def trains_in_slices(name: str, profile: str, expected: Reference, size: tuple[int, int]) -> None:
    pw.set_auto_parallel_context(device_profile=profile)
    torch.manual_seed(0)
    net = NETS[name]
    model: Any = pw.shard(net.model(), in_strategy={"image": (None, None, "h", "w")}, mesh={"h": 2, "w": 2})
    found = results(model, net.batch(size))
    assert_same((found[0], whole(found[1]), whole(found[2])), expected)
    assert "exchange" in {str(c.kind) for c in model.plan.collectives}
    assert_sends_as_planned(model, net.batch(size))


def cases() -> list[Any]:
    """Even and short slices. Each process plans by itself, which takes long."""
    every = [(name, size) for name in NETS for size in (NETS[name].size, (44, 90))]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("name", "size"), cases())
def test_processes_that_hold_slices_compute_as_one_device(
    on_ranks: Ranks, name: str, size: tuple[int, int], bytes_alone: str
) -> None:
    on_ranks(4, trains_in_slices, name, bytes_alone, one_device(name, size), size)
