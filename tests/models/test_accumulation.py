"""Gradients of micro-batches with one reduction at the end, and sums of 16-bit gradients in float32."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import whole
from torch import nn

import partway as pw
from partway.propagation.program.accumulate import accumulation
from partway.requests.request import engine_of
from partway.strategy import Kind

BATCHES = [torch.linspace(-1, 1, rows * 16, dtype=torch.float64).view(rows, 16) for rows in (1024, 1024, 1024, 512)]
Ranks = Callable[..., Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def sharded(module: nn.Module, **plan: Any) -> Any:
    return pw.shard(module, mesh={"dp": 2}, in_strategy=(("dp", None),), out_strategy=(("dp", None),), **plan)


def loss(output: Any) -> torch.Tensor:
    return whole(output).pow(2).mean()


def assert_like(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-12, atol=1e-14, msg=name)


def steps_of(order: tuple[int, ...], model: Any) -> list[list[str]]:
    """Train on micro-batches with one reduction; the kinds of the backward's collectives of each."""
    said = []
    for number, i in enumerate(order):
        with pw.record_collectives() as events:
            if number < len(order) - 1:
                with model.no_sync():
                    loss(model(BATCHES[i])).backward()
            else:
                loss(model(BATCHES[i])).backward()
        said.append([str(event.kind) for event in events if event.phase == "backward"])
    return said


PLANS = {"replicated": {"*": None}, "split": {"*.weight": ("dp", None)}}


def accumulates(plan: str, order: tuple[int, ...]) -> list[list[str]]:
    plain = network()
    patterns = {pattern: strategy for pattern, strategy in PLANS[plan].items() if strategy}
    model = sharded(copy.deepcopy(plain), parameter_plan=patterns or None)
    for _ in range(2):  # planned, then only run
        said = steps_of(order, model)
        for i in order:
            loss(plain(BATCHES[i])).backward()
        assert_like(model, plain)  # the second time on top of the first
    return said


@pytest.mark.parametrize("plan", PLANS)
def test_micro_batches_are_reduced_once_and_their_gradient_is_that_of_their_sum(plan: str) -> None:
    said = accumulates(plan, (0, 1, 2))
    reduces = {str(Kind.ALL_REDUCE), str(Kind.REDUCE_SCATTER)}
    assert not reduces & {*said[0], *said[1]}
    assert reduces & set(said[2])
    alone = sharded(network(), parameter_plan=None if plan == "replicated" else PLANS[plan])
    assert sorted(steps_of((0,), alone)[0]) == sorted(said[2])


def test_micro_batches_of_other_shapes_are_reduced_with_the_last() -> None:
    for order in ((0, 1, 3), (3, 0), (3, 3, 0)):
        accumulates("replicated", order)


def test_the_collectives_of_the_last_micro_batch_are_grouped_like_any() -> None:
    model = sharded(network())
    said = steps_of((0, 1, 3), model)
    assert said == [[], [], [str(Kind.ALL_REDUCE)] * 2]  # those of its own, and those of the shape that waited


def test_what_waited_is_kept_when_a_block_ends_with_an_error() -> None:
    model, plain = sharded(network()), network()

    def fails() -> None:
        with model.no_sync():
            loss(model(BATCHES[0])).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    loss(model(BATCHES[1])).backward()
    for i in (0, 1):
        loss(plain(BATCHES[i])).backward()
    assert_like(model, plain)


def test_a_step_without_a_reduction_has_nothing_that_could_wait() -> None:
    model = pw.shard(network(), mesh={"one": 1})
    loss(model(BATCHES[0])).backward()
    compiled = engine_of(model).latest()
    assert accumulation(compiled.program) is None
    plain = network()
    with model.no_sync():
        loss(model(BATCHES[1])).backward()
    for i in (0, 1):
        loss(plain(BATCHES[i])).backward()
    assert_like(model, plain)


def test_zero_grad_drops_what_waits() -> None:
    for set_to_none in (True, False):
        model, plain = sharded(network()), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # without and with gradients that are there before
            with model.no_sync():
                loss(model(BATCHES[0])).backward()
            optimizer.zero_grad(set_to_none)
            loss(model(BATCHES[1])).backward()
            plain.zero_grad()
            loss(plain(BATCHES[1])).backward()
            assert_like(model, plain)


def test_what_is_dropped_of_one_parameter_waits_of_the_others() -> None:
    model, plain = sharded(network()), network()
    with model.no_sync():
        loss(model(BATCHES[0])).backward()
    model[0].weight.grad = None
    loss(model(BATCHES[1])).backward()
    loss(plain(BATCHES[0])).backward()
    plain.get_submodule("0").weight.grad = None
    loss(plain(BATCHES[1])).backward()
    assert_like(model, plain)


# -- A block of GPT in every layout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


INPUTS = {"free": None, "batch": ("dp", None, None), "sequence": ("dp", "tp", None), "width": ("dp", None, "tp")}
WEIGHTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "none": {},
    "up columns": {"up.weight": ("tp", None)},
    "up rows": {"up.weight": (None, "tp")},
    "down rows": {"down.weight": (None, "tp")},
    "megatron": {"up.weight": ("tp", None), "down.weight": (None, "tp")},
    "attention": {"qkv.weight": ("tp", None), "out.weight": (None, "tp")},
    "both axes": {"up.weight": (("dp", "tp"), None)},
    "two dims": {"down.weight": ("dp", "tp")},
    "norms": {"norm*.weight": ("tp",)},
    "biases": {"*.bias": ("tp",)},
    "at rest": {"[!n]*.weight": ("dp", None)},
    "everything": {"[!n]*.weight": ("tp", "dp"), "norm*.weight": ("tp",), "*.bias": ("dp",)},
}
LAYOUTS = [(inputs, weights) for inputs in INPUTS for weights in WEIGHTS]
SOME = [("batch", "none"), ("batch", "megatron"), ("free", "up columns"), ("sequence", "at rest"), ("width", "biases")]


def block_accumulates(mesh: dict[str, int], inputs: str, weights: str) -> None:
    """Two micro-batches with one reduction, one of them in a block that ends with an error."""
    torch.manual_seed(0)
    plain = Block().double()
    strategy = INPUTS[inputs]
    model = pw.shard(copy.deepcopy(plain), mesh=mesh, in_strategy=strategy and (strategy,),
                     parameter_plan=WEIGHTS[weights] or None)  # fmt: skip
    for _ in range(2):
        batches = [torch.randn(8, 4, 16, dtype=torch.float64) for _ in range(3)]
        with model.no_sync():
            loss(model(batches[0])).backward()
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            loss(model(batches[1])).backward()
            raise ZeroDivisionError
        loss(model(batches[2])).backward()
        for x in batches:
            loss(plain(x)).backward()
        assert_like(model, plain)


@pytest.mark.parametrize(("inputs", "weights"), SOME)
def test_a_block_accumulates_however_it_is_split(inputs: str, weights: str) -> None:
    block_accumulates({"dp": 2, "tp": 4}, inputs, weights)


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "weights"), [layout for layout in LAYOUTS if layout not in SOME])
def test_a_block_accumulates_in_every_layout(inputs: str, weights: str) -> None:
    block_accumulates({"dp": 2, "tp": 4}, inputs, weights)


@pytest.mark.gloo
def test_a_block_accumulates_on_processes(on_ranks: Ranks) -> None:
    on_ranks(4, block_accumulates, {"dp": 2, "tp": 2}, "batch", "megatron")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "weights"), LAYOUTS)
def test_a_block_accumulates_on_processes_in_every_layout(on_ranks: Ranks, inputs: str, weights: str) -> None:
    on_ranks(4, block_accumulates, {"dp": 2, "tp": 2}, inputs, weights)


def zeroed(set_to_none: bool) -> None:
    model, plain = sharded(network(), parameter_plan=PLANS["split"]), network()
    with model.no_sync():
        loss(model(BATCHES[0])).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none)
    for one in (model, plain):
        loss(one(BATCHES[1])).backward()
    assert_like(model, plain)


@pytest.mark.gloo
def test_zero_grad_drops_what_waits_on_processes(on_ranks: Ranks) -> None:
    for set_to_none in (True, False):
        on_ranks(2, zeroed, set_to_none)


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["replicated", pytest.param("split", marks=pytest.mark.slow)])
def test_processes_reduce_micro_batches_once(on_ranks: Ranks, plan: str) -> None:
    for said in on_ranks(2, accumulates, plan, (0, 1, 3)):
        assert str(Kind.ALL_REDUCE) not in said[0]


# -- 16-bit gradients


def sums_in(sync: bool, auto: bool) -> tuple[set[str], float]:
    """The dtypes in which gradients are added up, and the largest relative difference to one device."""
    pw.set_auto_parallel_context(gradient_fp32_sync=sync)
    plain, x = network().float(), BATCHES[0].float()
    if not auto:
        plain, x = plain.bfloat16(), x.bfloat16()
    model = sharded(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16, enabled=auto):
        loss(model(x)).backward()
        loss(plain(x)).backward()
    found = {c.dtype for c in model.program.collectives if c.phase == "backward" and c.kind is Kind.ALL_REDUCE}
    worst = max(
        float((whole(one.grad) - other.grad).abs().max() / other.grad.abs().max())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert {one.grad.dtype for one in model.parameters()} == {one.grad.dtype for one in plain.parameters()}
    return found, worst


@pytest.mark.parametrize("auto", [True, False], ids=["autocast", "bfloat16 model"])
@pytest.mark.parametrize("sync", [True, False], ids=["float32", "own dtype"])
def test_gradients_of_16_bits_are_added_up_as_asked(sync: bool, auto: bool) -> None:
    found, worst = sums_in(sync, auto)
    assert found == {"float32" if sync else "bfloat16"}
    assert worst < 2e-2  # bfloat16 has 8 bits


def test_a_sum_in_float32_is_rounded_once_and_announced_with_its_bytes() -> None:
    pw.set_auto_parallel_context(gradient_fp32_sync=True)
    model = sharded(network().bfloat16())
    with pw.record_collectives() as events:
        loss(model(BATCHES[0].bfloat16())).backward()
    ran = [(e.kind, e.payload_bytes) for e in events]
    assert ran == [(c.kind, c.payload_bytes) for c in model.program.collectives]
    assert sum(e.payload_bytes for e in events) == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.gloo
def test_processes_add_up_16_bits_in_float32(on_ranks: Ranks) -> None:
    for found, worst in on_ranks(2, sums_in, True, False):
        assert found == {"float32"}
        assert worst < 2e-2
