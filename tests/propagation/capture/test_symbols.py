"""A function captured for all sizes of some dims: its graph at each size is that of a capture, or is refused. Captured
for all values of a number: an input of one element, and what the graph counts on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partway.propagation.capture.capture import capture, capture_any_size, capture_counting, graph_at
from partway.propagation.capture.symbols import OtherSizesError
from partway.propagation.graph.port import Role
from partway.reuse.cache import text_of_graph
from partway.strategy import CaptureError

ROWS = frozenset({(0, 0)})


def reshaped(x: Tensor) -> Tensor:
    return x.reshape(-1, 4).mean(0) + x.view(x.shape[0], 2, 4).transpose(0, 1).reshape(2, -1).sum()


def scaled(x: Tensor) -> Tensor:
    return x / x.shape[0] ** 0.5 + x.shape[0] // 2 + x.shape[0] % 2 + 1 / x.numel()


def shifted(x: Tensor) -> Tensor:
    return x[1:] - x[:-1]


def causal(x: Tensor) -> Tensor:
    return torch.tril(x @ x.T).softmax(-1) @ x + torch.arange(x.shape[0])[:, None]


def padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 32 - x.shape[0]))


def enlarged(x: Tensor) -> Tensor:
    return torch.nn.functional.interpolate(x[None, None], size=(2 * x.shape[0], 5), mode="bilinear")


def read(x: Tensor) -> Tensor:
    return x * x.shape[0] + x.sum().item()


@pytest.mark.parametrize("function", [reshaped, scaled, shifted, causal, padded, enlarged, read])
def test_the_graph_at_a_size_is_that_of_a_capture(function: Callable[[Tensor], Tensor]) -> None:
    captured = capture_any_size(function, (torch.rand(6, 8),), {}, ROWS)
    assert captured.dims == ROWS
    for size in (3, 5, 7, 16):
        x = torch.rand(size, 8, dtype=torch.float32)
        graph = graph_at(captured, (x,), {})
        assert text_of_graph(graph) == text_of_graph(capture(function, (x,), {}))
        (result,) = fx.Interpreter(graph.module).run(x, *graph.constants.values())[:1]
        torch.testing.assert_close(result, function(x))


def test_what_comes_of_sizes_is_a_number_of_the_result() -> None:
    def described(x: Tensor) -> tuple[Any, ...]:
        return x + 1, x.shape[0], x.shape[0] / 3, x.shape[0] > 4

    captured = capture_any_size(described, (torch.rand(6, 8),), {}, ROWS)
    for size in (3, 7):
        x = torch.rand(size, 8)
        graph = graph_at(captured, (x,), {})
        result = graph.result.build(list(fx.Interpreter(graph.module).run(x)))
        assert result[1:] == (size, size / 3, size > 4)
        assert [type(one) for one in result[1:]] == [int, float, bool]


def larger(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 4 else x.sin()


def test_a_size_that_takes_another_branch_is_refused() -> None:
    captured = capture_any_size(larger, (torch.rand(6, 8),), {}, ROWS)
    assert "mul" in str(graph_at(captured, (torch.rand(5, 8),), {}))
    with pytest.raises(OtherSizesError, match=r"^a size is 4, and it counts on 5 to "):
        graph_at(captured, (torch.rand(4, 8),), {})


def odd(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] % 2 else x - 1


def test_a_guard_that_does_not_hold_is_told() -> None:
    captured = capture_any_size(odd, (torch.rand(6, 8),), {}, ROWS)
    assert graph_at(captured, (torch.rand(4, 8),), {}).inputs
    with pytest.raises(OtherSizesError, match=r"^it counts on Eq\(Mod\(s\d+, 2\), 0\)$"):
        graph_at(captured, (torch.rand(5, 8),), {})


def test_a_number_that_python_cannot_compute_is_told() -> None:
    def divided(x: Tensor) -> Tensor:
        return x + 1 / (x.shape[0] - 5)

    captured = capture_any_size(divided, (torch.rand(6, 8),), {}, ROWS)
    assert graph_at(captured, (torch.rand(4, 8),), {}).inputs
    with pytest.raises(OtherSizesError, match=r"division by zero$|^it counts on "):
        graph_at(captured, (torch.rand(5, 8),), {})


@pytest.mark.parametrize("size", [0, 1])
def test_no_and_one_row_are_refused(size: int) -> None:
    captured = capture_any_size(scaled, (torch.rand(6, 8),), {}, ROWS)
    with pytest.raises(OtherSizesError, match=rf"^a size is {size}, and it counts on 2 to "):
        graph_at(captured, (torch.rand(size, 8),), {})


def test_another_size_of_another_dim_is_refused() -> None:
    captured = capture_any_size(scaled, (torch.rand(6, 8),), {}, ROWS)
    with pytest.raises(OtherSizesError, match=r"^a size is 9, and it counts on 8$"):
        graph_at(captured, (torch.rand(6, 9),), {})


def test_sizes_that_must_be_equal_are_refused_where_they_are_not() -> None:
    captured = capture_any_size(torch.add, (torch.rand(6, 8), torch.rand(6, 8)), {}, ROWS | {(1, 0)})
    assert graph_at(captured, (torch.rand(5, 8), torch.rand(5, 8)), {}).inputs
    with pytest.raises(OtherSizesError, match=r"^a size is 4, and it counts on s\d+$"):
        graph_at(captured, (torch.rand(5, 8), torch.rand(4, 8)), {})


def test_a_dim_whose_size_python_reads_is_fixed() -> None:
    def repeated(x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            x = x + i
        return x

    captured = capture_any_size(repeated, (torch.rand(6, 8),), {}, frozenset({(0, 0), (0, 1)}))
    assert captured.dims == {(0, 1)}
    assert captured.fixed == "dim 0 of 'x'"


def texts(x: Tensor) -> Any:
    return x, f"{x.shape[0]} rows"


def keys(x: Tensor) -> Any:
    return {f"rows {x.shape[0]}": x}


def slices(x: Tensor) -> Any:
    return x, slice(0, x.shape[0])


class Holder:
    """Keeps anything where nobody can look."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def holders(x: Tensor) -> Any:
    return x, Holder(x.shape[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (texts, "it returns or keeps a str, which may hold a size"),
        (keys, "it returns or keeps a dict with a size in a key"),
        (slices, "it returns or keeps a slice, which may hold a size"),
        (holders, "it returns or keeps a Holder, which may hold a size"),
    ],
)
def test_a_size_that_no_graph_has_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=f"^{message}$"):
        capture_any_size(function, (torch.rand(6, 8),), {}, ROWS)


def test_a_question_about_values_is_refused() -> None:
    def positive(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"could not capture .*positive as one static graph: its course depends on"):
        capture_any_size(positive, (torch.rand(6, 8),), {}, ROWS)


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
        (lambda x, n: x[: n - 1], "it does something else where torch has symbols for sizes"),
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
