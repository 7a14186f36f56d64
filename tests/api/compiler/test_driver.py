"""`pw.compile`: a plan and a program without running anything, of meta tensors, without a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.propagation.memory.held import Purpose

MESH = {"dp": 2, "tp": 4}
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo"}
MEGATRON = {
    "blocks.*.qkv.weight": ("tp", None),
    "blocks.*.out.weight": (None, "tp"),
    "blocks.*.up.weight": ("tp", None),
    "blocks.*.down.weight": (None, "tp"),
}


class Block(nn.Module):
    """One block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """GPT-2, with its tied head and its loss."""

    def __init__(self, vocabulary: int = 128, width: int = 64, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt(**sizes: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and its arguments on the meta device: they have shapes and no data, so nothing can run."""
    with torch.device("meta"):
        return Gpt(**sizes), (torch.zeros(8, 32, dtype=torch.long), torch.zeros(8, 32, dtype=torch.long))


@pytest.fixture(scope="module")
def compiled() -> pw.Compiled:
    model, ids = gpt()
    return pw.compile(model, ids, mesh=MESH, in_strategy={"ids": ("dp", None)}, parameter_plan=MEGATRON)


def test_meta_tensors_are_planned_and_stay_as_they_are() -> None:
    model, ids = gpt()
    before = {name: (id(p), p.device.type, p.requires_grad) for name, p in model.named_parameters()}
    compiled = pw.compile(model, ids, mesh=MESH)
    assert isinstance(compiled.plan, pw.Plan)
    assert compiled.mesh == pw.Mesh(MESH)
    assert type(model) is Gpt
    assert before == {name: (id(p), "meta", p.requires_grad) for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert not torch.distributed.is_initialized()


def test_the_plan_says_where_every_parameter_is(compiled: pw.Compiled) -> None:
    parameters = compiled.plan.parameters
    with torch.device("meta"):
        assert set(parameters) == {name for name, _ in Gpt().named_parameters()}
    assert str(parameters["blocks.0.qkv.weight"]) == "[dp:R tp:S0]"
    assert str(parameters["blocks.1.down.weight"]) == "[dp:R tp:S1]"


def test_each_collective_has_these_fields(compiled: pw.Compiled) -> None:
    collectives = compiled.plan.collectives
    assert {c.phase for c in collectives} == {"forward", "backward"}
    sizes = {("dp",): 2, ("tp",): 4}
    for c in collectives:
        assert c.kind in KINDS
        assert str(c.kind) == c.kind
        assert c.group_size == sizes[c.axes]
        assert isinstance(c.payload_bytes, int)
        assert c.payload_bytes > 0
        rounds = {"all_reduce": 2.0}.get(c.kind, 1.0)
        share = rounds * (c.group_size - 1) * c.payload_bytes
        assert c.wire_bytes == pytest.approx(share / c.group_size)
        assert c.predicted_time > 0
        assert c.tensor
        assert c.producer
        assert c.consumer


def wide(**annotations: Any) -> pw.Compiled:
    """Two layers on so many rows that splitting them pays."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        return pw.compile(model, (torch.empty(65536, 64),), **annotations)


def test_a_split_contraction_is_summed_at_the_users_line() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    class Product(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return product(x, w)

    arguments = (torch.empty(512, 1024, device="meta"), torch.empty(1024, 256, device="meta"))
    strategies = ((None, "tp"), ("tp", None))
    (found,) = pw.compile(Product(), arguments, mesh={"tp": 4}, in_strategy=strategies).plan.collectives
    assert (found.kind, found.axes, found.group_size, found.phase) == ("all_reduce", ("tp",), 4, "forward")
    assert (found.payload_bytes, found.wire_bytes) == (512 * 256 * 4, 2 * 3 / 4 * 512 * 256 * 4)
    assert "test_driver.py" in found.source
    assert "return product(x, w)" in found.source


def test_a_gradient_sum_over_a_data_parallel_axis_has_its_parameters_bytes() -> None:
    plan = wide(mesh={"dp": 4}, in_strategy=(("dp", None),), out_strategy=(("dp", None),)).plan
    found = {c.tensor: c for c in plan.collectives}
    assert {(c.kind, c.phase, c.group_size) for c in plan.collectives} == {("all_reduce", "backward", 4)}
    assert {name: c.payload_bytes for name, c in found.items()} == {
        "0.weight": 64 * 128 * 4,
        "0.bias": 128 * 4,
        "2.weight": 64 * 128 * 4,
        "2.bias": 64 * 4,
    }


def test_the_program_lists_the_same_collectives_in_groups(compiled: pw.Compiled) -> None:
    def carried(collectives: Any) -> list[tuple[str, str, tuple[str, ...], str]]:
        return sorted((c.phase, str(c.kind), c.axes, name) for c in collectives for name in c.members)

    program, plan = compiled.program.collectives, compiled.plan.collectives
    assert carried(program) == carried(plan)
    assert sum(c.payload_bytes for c in program) == sum(c.payload_bytes for c in plan)
    assert len(program) < len(plan)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(None, [1, 1, 1, 1]), ({"mode": "auto", "config": None}, [4]), ({"mode": "index", "config": [3]}, [3, 1])],
)
def test_the_programs_collectives_name_their_members(config: dict[str, object] | None, sizes: list[int]) -> None:
    with pw.auto_parallel_context(comm_fusion={"allreduce": config}):
        found = wide(mesh={"dp": 4}, in_strategy=(("dp", None),), out_strategy=(("dp", None),))
    payloads = {c.tensor: c.payload_bytes for c in found.plan.collectives}
    collectives = found.program.collectives
    assert [len(c.members) for c in collectives] == sizes
    assert sorted(name for c in collectives for name in c.members) == sorted(payloads)
    assert all(c.payload_bytes == sum(payloads[name] for name in c.members) for c in collectives)


def test_times_and_memory_are_positive_and_add_up(compiled: pw.Compiled) -> None:
    plan = compiled.plan
    assert 0 < plan.predicted_time < 1
    assert plan.predicted_time >= sum(c.predicted_time for c in plan.collectives)
    assert plan.wire_bytes == sum(c.wire_bytes for c in plan.collectives)
    with torch.device("meta"):
        whole = sum(p.numel() * p.element_size() for p in Gpt().parameters())
    assert whole / 8 <= plan.memory.parameters < whole
    assert plan.memory.optimizer == 2 * plan.memory.parameters
    assert 0 < plan.memory.inputs <= 2 * 8 * 32 * 8
    assert plan.memory.activations > 0
    held = compiled.solution.held
    assert held is not None
    assert plan.memory.total == pytest.approx(held.peak)
    assert plan.memory.gradients == round(held.at_peak[Purpose.GRADIENTS]) <= plan.memory.parameters


@pytest.mark.parametrize("width", [40, 180, 400])
def test_the_table_can_be_read_at_any_width(compiled: pw.Compiled, width: int) -> None:
    lines = compiled.plan.table(width=width).splitlines()
    assert lines[0].startswith("plan on dp=2, tp=4")
    totals = compiled.plan.summary().splitlines()
    table = [line for line in lines if line not in totals]
    assert max(map(len, table)) <= width
    assert len(compiled.plan.table(every=True).splitlines()) > len(compiled.plan.table().splitlines())
    assert str(compiled.plan) == compiled.plan.table()
    assert repr(compiled.plan).startswith("<Plan on dp=2, tp=4: ")


def test_plans_of_one_operator_and_of_large_tensors_can_be_read() -> None:
    tiny = pw.compile(lambda x: x + 1, (torch.ones(2),), mesh={"a": 1}).plan
    assert "add" in tiny.table(every=True)
    assert "0 collectives forward, 0 backward" in tiny.summary()
    with torch.device("meta"):
        large = pw.compile(nn.Linear(65536, 65536), (torch.empty(65536, 65536),), mesh={"a": 1024}).plan
    assert "GB" in large.summary() or "MB" in large.summary()
    assert large.table()


def test_nothing_to_plan_is_a_plan_too() -> None:
    plan = pw.compile(lambda x: x, (torch.ones(2),), mesh=MESH).plan
    assert plan.collectives == ()
    assert plan.table()


def test_explain_says_why(compiled: pw.Compiled) -> None:
    plan = compiled.plan
    assert "annotated ('tp', None)" in plan.explain("blocks.0.qkv.weight")
    assert "parameter blocks.0.qkv.weight float32[192, 64]: [dp:R tp:S0]" in plan.explain("blocks.0.qkv.weight")
    inside = plan.explain("blocks.1.down")
    assert "aten.linear" in inside
    assert "test_driver.py" in inside
    assert {"blocks.0.down", "blocks.1.down"} <= set(plan.explain("blocks.*.down").split())
    assert all(operator.name in plan.explain(operator.name) for operator in plan.operators)


def test_a_plan_comes_back_from_its_file_as_it_was(compiled: pw.Compiled, tmp_path: Path) -> None:
    path = tmp_path / "plans" / "gpt.json"
    compiled.plan.save(path)
    loaded = pw.Plan.load(path)
    assert loaded == compiled.plan
    assert loaded.table() == compiled.plan.table()
    totals, _ = str(compiled.plan.summary()).split("\nwith fully_use_devices=False ")  # which needs the model
    assert str(loaded.summary()) == totals
    assert loaded.explain("blocks.0", alternatives=0) == compiled.plan.explain("blocks.0", alternatives=0)
    assert all(type(c.kind) is type(d.kind) for c, d in zip(loaded.collectives, compiled.plan.collectives, strict=True))


def test_keyword_arguments_and_functions_are_planned() -> None:
    model, (ids, labels) = gpt(layers=1)
    plan = pw.compile(model, (ids,), {"labels": labels}, mesh=MESH, in_strategy={"labels": ("dp", None)}).plan
    assert "annotated ('dp', None)" in plan.explain("labels")
    product = pw.compile(torch.matmul, (torch.ones(8, 8), torch.ones(8, 8)), mesh=MESH, out_strategy=(("dp", None),))
    assert product.plan.outputs[0].codes == ("S0", "R")


def test_the_context_is_read_when_compile_is_called() -> None:
    model, ids = gpt(layers=1)
    with pw.auto_parallel_context(device_num=4, search_mode="sharding_propagation", dataset_strategy="full_batch"):
        plan = pw.compile(model, ids).plan
    assert plan.mesh.device_num == 4
    assert "sharding_propagation" in plan.summary()
