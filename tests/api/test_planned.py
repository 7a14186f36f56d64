"""The planned calls of a function are kept up to a bound, and what goes frees its memory."""

from __future__ import annotations

import gc
import linecache
import weakref

import pytest
import torch
from torch import nn

import partway as pw
from partway.attached import engine_of
from partway.reuse import courses


def test_the_plan_that_was_called_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courses, "MOST_PLANS", 2)
    model = pw.shard(nn.Linear(4, 4), mesh={"x": 2})

    def call(rows: int) -> None:
        model(torch.ones(rows, 4)).sum().backward()

    def texts_of_programs() -> set[str]:
        return {file for file in linecache.cache if file.startswith("<partway ")}

    before = texts_of_programs()
    call(2)
    first, texts = weakref.ref(engine_of(model).latest()), texts_of_programs() - before
    assert texts
    for rows in (4, 6):
        call(rows)
    gc.collect()
    assert first() is None
    assert not texts & texts_of_programs()
