"""`set_param_ps`: which parameters the servers hold, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import partway as pw
from partway.ps.marks import Mark, close, forget, marked
from partway.strategy import RuntimeStateError


@pytest.fixture(autouse=True)
def _nothing_named() -> Iterator[None]:
    yield
    forget()


def mark_of(parameter: nn.Parameter) -> Mark | None:
    return next((mark for own, mark in marked() if own is parameter), None)


def test_what_is_named_is_not_kept_by_it() -> None:
    model = nn.Linear(2, 2)
    pw.set_param_ps(model)
    del model
    assert marked() == []


def test_parameters_are_named_by_their_paths_and_tables_where_they_are_sparse() -> None:
    model = nn.ModuleDict(
        {"users": nn.Embedding(10, 4, sparse=True), "goods": nn.Embedding(10, 4), "net": nn.Linear(4, 1)}
    )
    pw.set_param_ps(model)
    found = {
        mark.name: mark.table for parameter, mark in marked() if any(parameter is own for own in model.parameters())
    }
    assert found == {"users.weight": model["users"], "goods.weight": None, "net.weight": None, "net.bias": None}


def test_one_parameter_and_a_module_inside_may_be_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pw.set_param_ps(model[1])
    pw.set_param_ps(model[0].weight)
    assert mark_of(model[1].weight) is not None
    assert mark_of(model[0].weight) is not None
    assert mark_of(model[0].bias) is None


def test_rows_says_whether_embeddings_are_tables() -> None:
    dense, bag = nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4)
    pw.set_param_ps(dense, rows=False)
    pw.set_param_ps(bag, rows=True)
    assert mark_of(dense.weight).table is None  # type: ignore[union-attr]
    assert mark_of(bag.weight).table is bag  # type: ignore[union-attr]


def test_a_tied_parameter_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    pw.set_param_ps(model)
    assert mark_of(model[0].weight).name == "0.weight"  # type: ignore[union-attr]


def test_what_is_named_twice_is_an_error() -> None:
    model = nn.Linear(4, 4)
    pw.set_param_ps(model)
    with pytest.raises(RuntimeStateError, match=r"^set_param_ps was called for weight, bias already; name each once$"):
        pw.set_param_ps(model)


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(
        RuntimeStateError, match=r"^set_param_ps: 'model' is neither an nn\.Module nor an nn\.Parameter$"
    ):
        pw.set_param_ps("model")  # type: ignore[arg-type]
    with pytest.raises(RuntimeStateError, match=r"^set_param_ps: ReLU has no parameters$"):
        pw.set_param_ps(nn.ReLU())


def test_rows_of_what_is_no_embedding_are_an_error() -> None:
    text = r"^set_param_ps: rows=True is for nn\.Embedding and nn\.EmbeddingBag, and there is none$"
    with pytest.raises(RuntimeStateError, match=text):
        pw.set_param_ps(nn.Linear(4, 4), rows=True)
    with pytest.raises(RuntimeStateError, match=text):
        pw.set_param_ps(nn.Parameter(torch.ones(3)), rows=True)


def test_a_table_with_max_norm_is_an_error() -> None:
    text = (
        r"^set_param_ps: weight has max_norm, by which each look-up changes its rows; leave it out, or give rows=False$"
    )
    with pytest.raises(RuntimeStateError, match=text):
        pw.set_param_ps(nn.Embedding(10, 4, max_norm=1.0, sparse=True))


def test_it_comes_before_the_optimizer() -> None:
    close()
    with pytest.raises(RuntimeStateError, match=r"^set_param_ps comes before pw\.ps\.optimizer\(\.\.\.\): "):
        pw.set_param_ps(nn.Linear(4, 4))
