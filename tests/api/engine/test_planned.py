"""The planned calls of a function are kept up to a bound, and what goes frees its memory."""

from __future__ import annotations

import gc
import linecache
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import partway as pw
from partway.requests.request import engine_of
from partway.reuse import courses, replanning
from partway.reuse.replanning import Signature, _differences


@pytest.mark.parametrize("most", ["MOST_PLANS", "MOST_NODES"])
def test_the_plan_that_was_called_longest_ago_goes(monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    monkeypatch.setattr(courses, most, 2)  # nodes: fewer than one plan has, and the last one stays
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


def test_the_fourth_plan_says_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(replanning._log, "warning", lambda text, *given: said.append(text % given))
    model = pw.shard(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), mesh={"x": 2}, dynamic=False)
    for rows in (2, 4, 6, 6, 4):
        model(torch.ones(rows, 4))
    assert not said
    for rows in (8, 10, 12, 14):
        model(torch.ones(rows, 4))
    model.eval()(torch.ones(14, 4))
    assert said == [
        "Sequential is planned for the 4th time: dim 0 of 'input' is 8, and was 4. Every new call is captured and "
        "planned, which takes seconds; pad to a few sizes, or leave out the last batch",
        "Sequential is planned for the 8th time: the training mode of a module has changed. Every new call is captured "
        "and planned, which takes seconds; keep it as it was",
    ]


def test_a_change_of_what_a_function_reads_is_not_said_to_be_one_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(replanning._log, "warning", lambda text, *given: said.append(text % given))
    model = pw.shard(nn.Linear(4, 4), mesh={"x": 2})
    for rows in (2, 4, 6):
        model(torch.ones(rows, 4))
    model.register_forward_hook(lambda module, args, result: 2 * result)
    model(torch.ones(6, 4))
    assert not said


def test_of_many_differences_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(replanning._log, "warning", lambda text, *given: said.append(text % given))
    model = pw.shard(lambda *tensors: sum(tensors), mesh={"x": 2}, dynamic=False)
    for rows in (2, 4, 6, 8):
        model(*[torch.ones(rows, 4)] * 9)
    (text,) = said
    assert text.count(" is 8, and was 6") == 4
    assert "; 5 differences more. Every new call" in text


def test_what_differs_of_two_calls_is_named() -> None:
    def now(*tensors: tuple[Any, ...], **others: Any) -> Signature:
        given: dict[str, Any] = {
            "structure": (), "answers": (None, None), "training": (), "parameters": (), "inference": False, "modes": (),
            "options": (),
        }  # fmt: skip
        return Signature(tensors=tensors, **(given | others))

    one = (2, 4), torch.float32, "cpu", False, (), {}
    other = (2, 4, 1), torch.float64, "cpu", True, (), {}
    assert list(_differences(["x"], now(one), now(other))) == [
        "'x' has 2 dims, and had 3", "the dtype of 'x' has changed", "requires_grad of 'x' has changed",
    ]  # fmt: skip
    assert list(_differences(["x"], now(one), now(one, one, inference=True))) == [
        "whether a gradient is taken has changed", "1 tensors are given in place of 2",
    ]  # fmt: skip
    assert list(_differences(["x"], now(one), now(one, answers=((4, 1), (True, False))))) == [
        "the memory order of a tensor has changed", "no_grad or inference_mode, for which the code asks, has changed",
    ]  # fmt: skip
    assert list(_differences(["x"], now(one), now(one, modes=(1,), structure=(1,)))) == [
        "a plain argument, or which arguments are given has changed",
        "a mode of torch, as autocast or the default dtype has changed",
    ]
