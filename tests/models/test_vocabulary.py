"""GPT-2 with its vocabulary split: the rows of the tied embedding, and so the classes of the loss. Also a vocabulary of
which one device has less than the others, as 8 devices have of GPT-2's 50257."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, assert_sends_as_planned, gradients, whole
from torch import Tensor, nn
from zoo import BATCH, CASES, SEQUENCE, gpt2

import partway as pw

EVEN, UNEVEN = 4096, 4099


def build(vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    return gpt2(n_layer=2, vocab_size=vocabulary).double()


def tokens(vocabulary: int) -> dict[str, Tensor]:
    """Sequences of which the first has hardly a valid target: the ranks of a split batch count different numbers."""
    torch.manual_seed(1)
    ids = torch.randint(0, vocabulary, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, :-1] = labels[3, ::2] = -100
    return {"input_ids": ids, "labels": labels}


def check(mesh: dict[str, int], vocabulary: int) -> None:
    batch = tokens(vocabulary)
    expected_loss, expected = gradients(build(vocabulary), batch)
    strategies = {"in_strategy": CASES["gpt2"].batch_split("dp"), "parameter_plan": {"*wte.weight": ("tp", None)}}
    model: Any = pw.shard(build(vocabulary), mesh=pw.Mesh(mesh), **strategies)
    loss, found = gradients(model, batch)
    assert_same_loss(loss, expected_loss, 1e-10)
    assert_same_gradients(whole(found), expected, 1e-10)
    assert_sends_as_planned(model, batch)

    embedding, *_ = (o for o in model.plan.operators if o.operator == "aten.embedding.default")
    terms, *_ = (o for o in model.plan.operators if o.operator == "partway.class_terms.default")
    assert "tp:v" in embedding.strategy
    assert "tp:f1" in terms.strategy
    # What one rank has of the logits is the least that a collective of them could carry.
    part = BATCH * (SEQUENCE - 1) * vocabulary * 8 // (mesh["dp"] * mesh["tp"])
    parameters = {name for name, _ in model.named_parameters()}
    large = [c for c in model.plan.collectives if c.tensor not in parameters and c.payload_bytes >= part]
    assert not large, f"collectives of the size of the logits: {', '.join(map(str, large))}"


@pytest.mark.parametrize("vocabulary", [EVEN, UNEVEN])
def test_a_split_vocabulary_is_never_gathered(vocabulary: int) -> None:
    check({"dp": 2, "tp": 4}, vocabulary)


class Head(nn.Module):
    """A tied embedding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(UNEVEN, 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, self.weight)
        return nn.functional.cross_entropy(rows @ self.weight.T, labels)


def test_the_search_finds_an_uneven_split_of_a_vocabulary_by_itself() -> None:
    ids = torch.randint(0, UNEVEN, (4,))
    model: Any = pw.shard(Head(), mesh={"tp": 8})
    model(ids, ids).backward()
    assert model.plan.parameters["weight"].splits(2) == (8, 1)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "vocabulary"),
    [({"dp": 1, "tp": 2}, UNEVEN), pytest.param({"dp": 2, "tp": 2}, EVEN, marks=pytest.mark.slow)],
)
def test_a_split_vocabulary_over_processes(on_ranks: Any, mesh: dict[str, int], vocabulary: int) -> None:
    on_ranks(mesh["dp"] * mesh["tp"], _check_on_a_rank, mesh, vocabulary)


def _check_on_a_rank(mesh: dict[str, int], vocabulary: int) -> None:
    check(mesh, vocabulary)
