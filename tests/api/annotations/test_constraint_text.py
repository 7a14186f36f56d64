"""Strategies as text, as constraints inside a captured function carry them."""

from typing import Any

import pytest

from partway.annotations.constraint_text import constraint_of, constraint_text
from partway.strategy import Layout, Mesh, Partial, Replicate, Shard, StrategyError

MESH = Mesh({"dp": 2, "tp": 4})


@pytest.mark.parametrize(
    "strategy",
    [("dp", None), (("dp", "tp"), None), (2, 4), (None, 1), (Shard(0), Replicate()), (Replicate(), Partial("max"))],
)
@pytest.mark.parametrize("mesh", [None, MESH])
def test_a_strategy_is_what_it_was_before_it_was_text(strategy: Any, mesh: Mesh | None) -> None:
    assert constraint_of(constraint_text("x", strategy, mesh, 2)) == (strategy, mesh)


def test_a_layout_brings_its_own_mesh() -> None:
    placements = (Shard(1), Replicate())
    assert constraint_of(constraint_text("x", Layout(MESH, placements), None, 2)) == (placements, MESH)


def test_a_dim_counted_from_the_end_is_counted_from_the_front_afterwards() -> None:
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    strategy = (TorchShard(-1), TorchReplicate())
    assert constraint_of(constraint_text("x", strategy, MESH, 3)) == ((Shard(2), Replicate()), MESH)


def test_placements_that_the_tensor_cannot_have_are_refused_together() -> None:
    with pytest.raises(StrategyError) as error:
        constraint_text("argument 'x' of f", (Shard(2), Shard(3)), MESH, 2)
    assert [str(problem.where) for problem in error.value.problems] == ["argument 'x' of f"] * 2
    assert "Shard(dim=2) splits a dim that a tensor of 2 dims does not have" in str(error.value)
