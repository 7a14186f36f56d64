"""The same random numbers on any layout: a block with dropout in its attention and its MLP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_gradients, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partway as pw

HEADS = 4
Ranks = Callable[..., list[Any]]


class Block(nn.Module):
    """Also returns the masks: of the attention's weights, which are all alike, and of the hidden layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.2)
        hidden = F.dropout(F.gelu(self.up(self.norms[1](x))), 0.1)
        mask = F.scaled_dot_product_attention(
            torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v), dropout_p=0.3
        )
        return x + F.dropout(self.down(hidden), 0.2), mask, hidden != 0


class Saving(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = checkpoint(self.block, x, use_reentrant=False)
        return found


def example() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block().double(), torch.randn(8, 6, 16, dtype=torch.float64)


def step(model: nn.Module, x: Tensor, seed: int = 3) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """What a model gives, and its gradients."""
    torch.manual_seed(seed)
    y, *masks = model(x)
    y.square().mean().backward()
    gradients = {name.removeprefix("block."): whole(p.grad) for name, p in model.named_parameters()}
    return [whole(t.detach()) for t in (y, *masks)], gradients


def on_one() -> tuple[list[Tensor], dict[str, Tensor | None]]:
    block, x = example()
    return step(pw.shard(block, mesh={"dp": 1}), x)


def assert_same(found: Any, expected: Any) -> None:
    (y, weights, mask), gradients = found
    (true_y, true_weights, true_mask), true_gradients = expected
    assert torch.equal(mask, true_mask)
    torch.testing.assert_close(y, true_y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(weights, true_weights, rtol=1e-12, atol=1e-13)
    assert_same_gradients(gradients, true_gradients, 1e-11)


HIDDEN = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
LAYOUTS: dict[str, tuple[dict[str, int], tuple[Any, ...], dict[str, Any]]] = {
    "batch-2": ({"dp": 2}, ("dp", None, None), {}),
    "batch-8": ({"dp": 8}, ("dp", None, None), {}),
    "uneven-batch": ({"dp": 3}, ("dp", None, None), {}),
    "sequence": ({"sp": 4}, (None, "sp", None), {}),
    "hidden": ({"tp": 4}, (None, None, None), HIDDEN),
    "both": ({"dp": 2, "tp": 4}, ("dp", None, None), HIDDEN),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_drops_the_same_elements_on_any_layout(layout: str) -> None:
    mesh, split, plan = LAYOUTS[layout]
    block, x = example()
    model = pw.shard(block, mesh=mesh, in_strategy=(split,), parameter_plan=plan)
    found = step(model, x)
    assert_same(found, on_one())
    draws = [op for op in model.plan.operators if op.operator == "partway.draw.default"]
    assert len(draws) == 5
    assert any(any(op.factors) for op in draws)  # no rank draws all of them whole


def test_heads_that_are_split_drop_the_same_weights() -> None:
    block, x = example()
    plan = {"qkv.weight": (None, "tp"), **HIDDEN}
    model = pw.shard(block, mesh={"tp": 2}, in_strategy=((None, None, None),), parameter_plan=plan)
    assert_same(step(model, x), on_one())


def test_a_checkpointed_block_drops_the_same_elements_and_computes_masks_again() -> None:
    block, x = example()
    model = pw.shard(Saving(block), mesh={"dp": 2}, in_strategy=(("dp", None, None),))
    assert_same(step(model, x), on_one())
    targets = [str(node.target) for node in model.program.backward.graph.nodes]
    assert targets.count("partway.draw.default") >= 3


def test_calls_of_an_accumulated_gradient_draw_numbers_of_their_own() -> None:
    found = []
    for mesh in ({"dp": 1}, {"dp": 4}):
        block, x = example()
        model = pw.shard(block, mesh=mesh, in_strategy=(("dp", None, None),))
        torch.manual_seed(1)
        with model.no_sync():
            first = model(x)
            first[0].square().mean().backward()
        second = model(x)
        second[0].square().mean().backward()
        assert not torch.equal(first[2], second[2])
        masks = first[2], second[2]
        found.append((masks, {name: p.grad for name, p in model.named_parameters()}))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert_same_gradients(found[1][1], found[0][1], 1e-11)


def test_ranks_that_hold_the_same_part_have_the_same_stream() -> None:
    with pw.auto_parallel_context(random_numbers="rank"):
        results = []
        for mesh in ({"dp": 2}, {"dp": 2, "tp": 2}):
            block, x = example()
            model = pw.shard(block, mesh=mesh, in_strategy=(("dp", None, None),))
            results.append(step(model, x))
            draws = [op.factors for op in model.plan.operators if op.operator == "partway.draw.default"]
        if not any(factor for factors in draws for factor in factors[1:]):
            assert_same(results[1], results[0])
        block, x = example()
        one = step(pw.shard(block, mesh={"dp": 1}), x)
    assert not torch.equal(one[0][2], results[0][0][2])
    assert one[0][2].double().mean() == pytest.approx(0.9, abs=0.03)


def on_processes(n: int) -> Any:
    block, x = example()
    mesh = {"dp": 2, "tp": n // 2} if n > 2 else {"dp": 2}
    plan = HIDDEN if n > 2 else {}
    return step(pw.shard(block, mesh=mesh, in_strategy=(("dp", None, None),), parameter_plan=plan), x)


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_drop_the_same_elements_as_one_device(on_ranks: Ranks, n: int) -> None:
    for found in on_ranks(n, on_processes, n):
        assert_same(found, on_one())


@pytest.mark.slow
def test_compiled_stretches_drop_the_same_elements() -> None:
    block, x = example()
    with pw.auto_parallel_context(backend="inductor"):
        model = pw.shard(copy.deepcopy(block), mesh={"dp": 2}, in_strategy=(("dp", None, None),))
        assert_same(step(model, x), on_one())
