"""The graph of a function for all values of a number: an input of one element, and what it counts on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partway.propagation.capture.capture import capture_any_size, capture_counting
from partway.propagation.graph.port import Role
from partway.strategy import CaptureError

X = torch.linspace(0, 1, 6)


def chosen(x: Tensor, n: int) -> tuple[Tensor, int]:
    y = x * 2 if n >= 10 else x + n
    return y, n + 1


def test_a_number_is_an_input_and_what_follows_from_it_is_computed() -> None:
    graph = capture_counting(chosen, (X, 5), {}, [(1,)])
    assert [(port.role, port.name) for port in graph.inputs] == [(Role.INPUT, "x"), (Role.INPUT, "numbers[0]")]
    for number in (2, 5, 9):
        y, after = fx.Interpreter(graph.module).run(X, torch.tensor(number))
        torch.testing.assert_close(y, X + number)
        assert after.dtype is torch.int64
        assert int(after) == number + 1
    result = graph.result.build([y, after])
    assert result[1] == 10
    assert type(result[1]) is int


def test_it_counts_on_what_the_function_decided() -> None:
    few, many = (capture_counting(chosen, (X, number), {}, [(1,)]).counts for number in (5, 12))
    assert few is not None
    assert many is not None
    assert [few.hold([n]) for n in (0, 1, 2, 9, 10, 11)] == [False, False, True, True, False, False]
    assert [many.hold([n]) for n in (2, 9, 10, 1000)] == [False, False, True, True]
    assert few.count == 1


def test_what_does_not_fit_a_tensor_is_another_course() -> None:
    """Python's integers have no end."""
    counts = capture_counting(lambda x, n: x * (n**3), (X, 5), {}, [(1,)]).counts
    assert counts is not None
    assert [counts.hold([n]) for n in (2, 2**20, 2**21, 2**40)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, n: x[: n - 1], "gives a number that depends on the values of tensors"),
        (lambda x, n: x.roll(n), "gives a number that depends on the values of tensors"),
        (lambda x, n: x * list(range(9))[n], "it counts on the number 5"),
        (lambda x, n: x if isinstance(n, int) else -x, "it does something else where torch has symbols for sizes"),
        (lambda x, n: (x, f"{n}"), "it returns or keeps a str, which may hold a size"),
    ],
)
def test_what_has_no_such_graph_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        capture_counting(function, (X, 5), {}, [(1,)])


def test_a_number_less_than_two_has_no_symbol() -> None:
    with pytest.raises(CaptureError, match="a number of chosen is none, or less than 2"):
        capture_counting(chosen, (X, 1), {}, [(1,)])


def test_a_function_that_asks_for_the_type_of_a_size_is_refused() -> None:
    """torch has another type for sizes that change, and notes nothing where it is asked for."""
    with pytest.raises(CaptureError, match="it does something else where torch has symbols for sizes, as where it"):
        capture_any_size(lambda x: x if isinstance(x.shape[0], int) else -x, (X,), {}, frozenset({(0, 0)}))
