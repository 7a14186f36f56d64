"""The layers of torch.nn in three dtypes: what docs/coverage/layers.md says of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import layers
import pytest
import torch

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


@pytest.mark.gloo
def test_a_layer_is_right_in_a_dtype_on_ranks(on_ranks: Ranks) -> None:
    assert faults(on_ranks(2, examined, SLICE[1:])[0]) == []


def test_the_page_has_all_layers() -> None:
    page = layers.PAGE.read_text(encoding="utf-8")
    assert [name for name in layers.layers() if f"| {name} |" not in page] == []
    assert "| raw | 0 |" in page
    rows = [line.split("|")[1:5] for line in page.splitlines() if line.startswith("| ") and line.count("|") == 5]
    assert [row for row in rows if "wrong" in f"{row[1]} {row[2]}"] == []  # in float64 and float32
    open_ones = {row[0].strip() for row in rows if "wrong" in row[3]}  # beyond the bound for bfloat16: to be explained
    assert open_ones <= {"Transformer", "TransformerDecoder", "TransformerDecoderLayer"}


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
