"""All options, two by two: every pair of values of any two options is in a row of a covering array, and each row trains
three models for two steps as one device does, or as the options say that they change it."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_gradients
from torch import Tensor, nn

import partway as pw
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext

Row = dict[str, Any]
PARTS = {"mesh dp=2, tp=2": 2, "mesh dp=4": 4, "number": 4}  # into which `devices` cut the batch


class Block(nn.Module):
    """A transformer block with dropout, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(self.last(x)))))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Residual(nn.Module):
    """A residual block with BatchNorm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(x + self.norm2(self.second(x)))
        return F.cross_entropy(self.head(F.max_pool2d(x, 2).mean((2, 3))), labels)


class Experts(nn.Module):
    """A perceptron, and four experts of which each row's weights are softmax's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(8, 8), nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 3), nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        shares = self.router(x).softmax(-1)
        hidden = torch.relu(torch.einsum("bi,eih->beh", x, self.up))
        return F.cross_entropy(self.head(torch.einsum("beh,eho,be->bo", hidden, self.down, shares)), labels)


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {Block: (8, 4, 8), Residual: (8, 3, 6, 6), Experts: (8, 8)}
SPLIT = {Block: "up.weight", Residual: "second.weight", Experts: "up"}  # what a second axis splits

# "": as if it had not been named. `devices`, `level` are arguments of shard.
CONTEXT: Mapping[str, Sequence[Any]] = {
    "devices": tuple(PARTS),
    "level": (0, 1, 2),
    "parallel_mode": ("", "semi_auto_parallel", "auto_parallel", "data_parallel", "stand_alone"),
    "search_mode": ("dynamic_programming", "recursive_programming", "sharding_propagation"),
    "dataset_strategy": ("", "data_parallel", "full_batch", "tuple"),
    "full_batch": ("", False, True),
    "gradients_mean": (True, False),
    "batch_norm_parts": (1, 2),
    "gradient_fp32_sync": (True, False),
    "parameter_broadcast": (False, True),
    "all_reduce_fusion_config": (None, (1,)),
    "comm_fusion": (
        "",
        {"openstate": False},
        {"allreduce": {"mode": "overlap"}},
        {"allgather": {"mode": "size", "config": 1}, "reducescatter": None},
    ),
    "strategy_ckpt_config": ("", "saved"),
    "enable_parallel_optimizer": (False, True),
    "parallel_optimizer_config": ("", {"parallel_optimizer_threshold": 0}),
    "reshard_after_forward": (None, True, False),
    "enable_compile_cache": (False, True),
    "compile_cache_path": ("", "folder"),
    "compare_replicas": (True, False, 1),
    "random_numbers": ("counter", "torch", "rank"),
    "whole_results": (False, True),
    "on_unknown_op": ("warn", "error"),
    "device_profile": (None, "h100", "cpu"),
    "backend": ("eager",),  # tests/models/test_inductor.py has the other
}
ALGO: Mapping[str, Sequence[Any]] = {
    "fully_use_devices": (True, False),
    "elementwise_op_strategy_follow": (False, True),
    "enable_algo_approxi": (False, True),
    "algo_approxi_epsilon": (0.1, 0.5),
    "tensor_slice_align_enable": (False, True),
    "tensor_slice_align_size": (16, 2),
    "memory_limit": (None, 1e9, float("inf")),
    "recompute": ("auto", "none", "all"),
    "optimizer_states": (2.0, 0.0),
    "expert_load": (None, 2.0),
}
CHOICES = {**CONTEXT, **ALGO}


def contradictory(row: Mapping[str, Any]) -> bool:
    """What the context refuses: data sets that are split where nothing or only the batch is, and two that differ."""
    dataset, full, mode = (row.get(n, "") for n in ("dataset_strategy", "full_batch", "parallel_mode"))
    if mode == "stand_alone" and (dataset in ("full_batch", "tuple") or full is True):
        return True
    if mode == "data_parallel" and dataset == "tuple":
        return True
    fusion = row.get("comm_fusion") or {}
    if row.get("all_reduce_fusion_config") and ("allreduce" in fusion):
        return True
    return full != "" and dataset != "" and full != (dataset == "full_batch")


def covering(choices: Mapping[str, Sequence[Any]], tries: int = 8) -> list[Row]:
    """Rows in which every pair of values that may stand together does."""
    generator = random.Random(0)
    numbers = {(n, repr(v)): i for i, (n, v) in enumerate((n, v) for n, values in choices.items() for v in values)}

    def pair(a: str, x: Any, b: str, y: Any) -> tuple[int, int]:
        i, j = numbers[a, repr(x)], numbers[b, repr(y)]
        return (i, j) if i < j else (j, i)

    left = {
        pair(a, x, b, y): {a: x, b: y}
        for a, b in itertools.combinations(choices, 2)
        for x, y in itertools.product(choices[a], choices[b])
        if not contradictory({a: x, b: y})
    }
    found: list[Row] = []
    while left:
        best: tuple[int, Row] = (0, {})
        starts = list(left.values())
        for _ in range(tries):
            row = dict(generator.choice(starts))
            for name in generator.sample(list(choices), len(choices)):
                if name not in row:
                    able = [v for v in choices[name] if not contradictory({**row, name: v})]
                    news = [sum(pair(name, v, n, o) in left for n, o in row.items()) for v in able]
                    row[name] = able[generator.choice([i for i, new in enumerate(news) if new == max(news)])]
            covered = sum(pair(a, row[a], b, row[b]) in left for a, b in itertools.combinations(choices, 2))
            best = max(best, (covered, row), key=lambda one: one[0])
        found.append(best[1])
        for a, b in itertools.combinations(choices, 2):
            left.pop(pair(a, best[1][a], b, best[1][b]), None)
    return found


@functools.cache
def rows() -> list[Row]:
    return covering(CHOICES)


COUNT = 32  # at most so many


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def parts_of(row: Row) -> int:
    """Into how many parts the batch is split: a dataset_strategy has to use every device."""
    return 4 if row["dataset_strategy"] == "tuple" or row["parallel_mode"] == "data_parallel" else PARTS[row["devices"]]


def options_of(row: Row, shape: tuple[int, ...], folder: Path) -> Row:
    """The options of the context as a user would set them."""
    given = {name: row[name] for name in CONTEXT if name not in ("devices", "level") and row[name] != ""}
    parts = parts_of(row)
    if given.get("dataset_strategy") == "tuple":
        given["dataset_strategy"] = ((parts, *[1] * (len(shape) - 1)), (parts,))
    if "strategy_ckpt_config" in given:
        given["strategy_ckpt_config"] = {"save_file": str(folder / "plan.json")}
    if "compile_cache_path" in given:
        given["compile_cache_path"] = str(folder / "cache")
    if given["all_reduce_fusion_config"]:
        given["all_reduce_fusion_config"] = list(given["all_reduce_fusion_config"])
    return given


def sharded(kind: type[nn.Module], row: Row, model: nn.Module) -> Any:
    """`model` with its batch split, and where there is a second axis a weight."""
    annotations: Row = {"level": row["level"]}
    if row["devices"] != "number":
        annotations["mesh"] = {"dp": 2, "tp": 2} if PARTS[row["devices"]] == 2 else {"dp": 4}
    if row["parallel_mode"] == "data_parallel":
        annotations.pop("mesh", None)
        return pw.shard(model, **annotations)
    if row["dataset_strategy"] != "tuple":
        batch = 4 if row["devices"] == "number" else "dp"
        rest = 1 if row["devices"] == "number" else None
        annotations["in_strategy"] = ((batch, *[rest] * (len(SHAPES[kind]) - 1)), (batch,))
    if row["devices"] == "mesh dp=2, tp=2":
        dims = dict(model.named_parameters())[SPLIT[kind]].ndim
        annotations["parameter_plan"] = {SPLIT[kind]: ("tp", *[None] * (dims - 1))}
    return pw.shard(model, **annotations)


Found = list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]


def train(model: nn.Module, shape: tuple[int, ...], times: int = 1) -> Found:
    """Losses, gradients, and what the state then is, of two steps; the plain model's gradients come so many times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    found: Found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(shape, generator=generator)
        labels = torch.randint(4, shape[:1], generator=generator)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(x, labels)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= times
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found.append((loss.detach(), gradients, {n: t.clone() for n, t in model.state_dict().items()}))
    return found


def on_one_device(kind: type[nn.Module], row: Row) -> Found:
    """Plain PyTorch; with the random numbers and the parts of BatchNorm of a mesh of one, where those are ours."""
    model, alone = made(kind), row["parallel_mode"] == "stand_alone"
    parts = parts_of(row)
    ours = (kind is Block and row["random_numbers"] == "counter") or (kind is Residual and row["batch_norm_parts"] > 1)
    if not alone and ours:
        numbers = {n: row[n] for n in ("random_numbers", "batch_norm_parts")}
        with pw.auto_parallel_context(**numbers):
            return train(pw.shard(model, mesh={"one": 1}), SHAPES[kind], 1 if row["gradients_mean"] else parts)
    return train(model, SHAPES[kind], 1 if alone or row["gradients_mean"] else parts)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return kind()


def test_every_option_is_in_the_rows_and_every_pair_of_values() -> None:
    named = set(CONTEXT) - {"devices", "level"} | {"device_num"}
    assert named == set(ParallelContext.model_fields)
    assert set(ALGO) == set(AlgoParameters.model_fields)
    for a, b in itertools.combinations(CHOICES, 2):
        for x, y in itertools.product(CHOICES[a], CHOICES[b]):
            if not contradictory({a: x, b: y}):
                assert any(row[a] == x and row[b] == y for row in rows()), (a, x, b, y)
    assert not any(map(contradictory, rows()))
    assert len(rows()) <= COUNT


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("number", range(COUNT))
def test_a_row_of_options_trains_as_one_device(
    kind: type[nn.Module], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number >= len(rows()):
        pytest.skip("every pair is in a row before")
    row = rows()[number]
    expected = on_one_device(kind, row)
    monkeypatch.delenv("PARTWAY_CACHE", raising=False)
    monkeypatch.setenv("PARTWAY_CACHE_DIR", str(tmp_path / "default"))
    if row["enable_compile_cache"]:
        monkeypatch.delenv("PARTWAY_VERIFY", raising=False)  # what verifies plans anew, and keeps nothing
    pw.set_auto_parallel_context(device_num=4, **options_of(row, SHAPES[kind], tmp_path))
    pw.set_algo_parameters(**{name: row[name] for name in ALGO})
    comparable = kind is not Block or row["random_numbers"] != "rank" or row["parallel_mode"] == "stand_alone"
    for _ in range(1 + row["enable_compile_cache"]):  # the second finds the plan of the first
        found = train(sharded(kind, row, made(kind)), SHAPES[kind])
        assert all(loss.isfinite() for loss, _, _ in found)
        if comparable:
            assert_same(found, expected)
    planned = row["parallel_mode"] != "stand_alone"
    assert (tmp_path / "plan.json").exists() == (planned and bool(row["strategy_ckpt_config"]))
    for folder, named in (("cache", True), ("default", False)):
        kept = any(path.is_file() for path in (tmp_path / folder).rglob("*"))
        used = named == bool(row["compile_cache_path"])
        assert kept == (planned and row["enable_compile_cache"] and used)


def assert_same(found: Found, expected: Found) -> None:
    for (loss, gradients, state), (true_loss, true_gradients, true_state) in zip(found, expected, strict=True):
        torch.testing.assert_close(loss, true_loss, rtol=1e-10, atol=0)
        assert_same_gradients(gradients, true_gradients, 1e-9)
        assert list(state) == list(true_state)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, true_state[name], rtol=1e-9, atol=1e-11, msg=name)
