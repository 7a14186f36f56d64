"""The layers of torch.nn in three dtypes have the results on docs/coverage/layers.md."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import layers
import pytest
import torch
from torch import nn

Ranks = Callable[..., list[Any]]
SLICE = [("LSTM", torch.float32), ("BatchNorm2d", torch.bfloat16), ("MultiheadAttention", torch.float32)]


def faults(cells: list[layers.Cell]) -> list[str]:
    assert sum((Counter(cell.counts) for cell in cells), Counter())["right"]
    return [f"{cell.layer}, {cell.dtype}: {why}" for cell in cells for why in cell.reasons if why[:3] in ("raw", "wro")]


def examined(names: list[tuple[str, torch.dtype]]) -> list[layers.Cell]:
    return [layers.examine(*each) for each in names]


@pytest.mark.parametrize("each", SLICE, ids=lambda each: each[0])
def test_a_layer_is_right_in_a_dtype(each: tuple[str, torch.dtype]) -> None:
    assert faults(examined([each])) == []


def test_only_what_the_last_digits_of_operands_explain_is_left_out() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).bfloat16(), torch.randn(4, 8, dtype=torch.bfloat16)
    call = layers.Call(lambda: layer, (x,))
    expected = layers.run(copy.deepcopy(layer), call)
    near = layers.run(copy.deepcopy(layer), layers.Call(lambda: layer, (layers.nudged(x),)))
    assert any(layers.distance(near[name], expected[name]) for name in near)
    kept = layers.without_last_digits(near, expected, layer, call)
    assert all(kept[name] is expected[name] for name in near)
    half = {name: None if value is None else value / 2 for name, value in expected.items()}
    kept = layers.without_last_digits(half, expected, layer, call)
    assert all(kept[name] is half[name] for name in half)
    missing = {**expected, "gradient of 0.bias": None}
    assert layers.without_last_digits(missing, expected, layer, call)["gradient of 0.bias"] is None


@pytest.mark.gloo
def test_a_layer_is_right_in_a_dtype_on_ranks(on_ranks: Ranks) -> None:
    assert faults(on_ranks(2, examined, SLICE[1:])[0]) == []


def test_the_page_has_all_layers() -> None:
    page = layers.PAGE.read_text(encoding="utf-8")
    assert [name for name in layers.layers() if f"| {name} |" not in page] == []
    assert "| raw | 0 |" in page
    assert "| wrong | 0 |" in page


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_every_layer_is_right_or_refused_in_each_dtype() -> None:
    every = [(name, dtype) for name in layers.layers() for dtype in layers.TOLERANCES]
    assert faults(examined(every)) == []


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(3 * 3600)
def test_every_layer_is_right_or_refused_in_each_dtype_on_ranks(on_ranks: Ranks) -> None:
    found = []
    for name in layers.layers():
        found += on_ranks(2, examined, [(name, dtype) for dtype in layers.TOLERANCES])[0]
    assert faults(found) == []
