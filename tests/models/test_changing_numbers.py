"""Numbers that change from call to call: one plan for all for which a function takes the same course, and the results
of one device. (A sliding window of transformers counts its tokens so: test_generation.py.)"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

import partway as pw
from partway.requests.request import engine_of
from partway.strategy import RuntimeStateError

X = torch.linspace(-1, 1, 8, dtype=torch.float64)

# What a function may do with a number. One plan serves all numbers here, and further down one for each course.
ONE: dict[str, Callable[[Tensor, int], Any]] = {
    "sum": lambda x, n: x + n,
    "product": lambda x, n: x * n,
    "half": lambda x, n: x * (n / 2),
    "third": lambda x, n: x * (n / 3),
    "negative": lambda x, n: x * -n,
    "products of it": lambda x, n: x + (n * n - n) / 2,
    "large": lambda x, n: x * (n * 10**12 + 1),
    "with a range": lambda x, n: torch.arange(8) + n + x,
    "returned": lambda x, n: (x * 2, n),
    "returned as others": lambda x, n: {"x": x, "next": n + 1, "half": n / 2},
    "whole numbers": lambda x, n: x.int() + n,
    "bytes": lambda x, n: x.to(torch.int8) * n,
    "flags": lambda x, n: (x > 0) * n,
    "float16": lambda x, n: x.half() * n,
    "bfloat16": lambda x, n: x.bfloat16() + n,
    "one element": lambda x, n: x.sum().float() * n,
}
SEVERAL: dict[str, Callable[[Tensor, int], Any]] = {
    "difference": lambda x, n: n - x,
    "quotient": lambda x, n: x / n,
    "power": lambda x, n: x.abs() ** n,
    "base": lambda x, n: n**x,
    "root": lambda x, n: x * n**0.5,
    "mathematics": lambda x, n: x * math.sqrt(n),
    "whole half": lambda x, n: x * (n // 2),
    "rest": lambda x, n: x * (n % 3),
    "bits": lambda x, n: x * (n & 3),
    "branch": lambda x, n: x * 2 if n > 9 else x * 3,
    "branches": lambda x, n: x if n < 6 else x * 2 if n < 10 else x * 3,
    "parity": lambda x, n: x * 2 if n % 2 else x * 3,
    "equality": lambda x, n: x * 2 if n == 7 else x,
    "membership": lambda x, n: x * 2 if n in (6, 8) else x,
    "most": lambda x, n: x * max(n, 8),
    "loop": lambda x, n: sum(x * i for i in range(n)),
    "slice": lambda x, n: x[:n],
    "element": lambda x, n: x[n % 4],
    "element of a list": lambda x, n: x * list(range(30))[n],
    "tensor of it": lambda x, n: torch.tensor(n) * x,
    "size": lambda x, n: torch.full((n,), 2.0).sum() * x,
    "text": lambda x, n: (x, f"{n}"),
    "length of a text": lambda x, n: x * len(str(n)),
    "key": lambda x, n: {n: x},
    "value of a dict": lambda x, n: x * {5: 2, 6: 3}.get(n, 9),
    "type": lambda x, n: x * 2 if isinstance(n, int) else x * 3,
    "flag": lambda x, n: (x * bool(n), n > 8),
    "factor of an operator": lambda x, n: torch.add(x, x, alpha=n),
    "bound": lambda x, n: x.clamp(max=n),
    "comparison": lambda x, n: (x * 10 >= n).double() * x,
    "filling": lambda x, n: x.masked_fill(x > 0, n),
    "rotation": lambda x, n: x.roll(n),
    "temperature": lambda x, n: F.softmax(x / n, 0),
    "triangle": lambda x, n: torch.ones(8, 8, dtype=x.dtype).tril(n - 8) @ x,
}


def assert_alike(found: Any, expected: Any) -> None:
    (values, spec), (rights, wanted) = tree_flatten(found), tree_flatten(expected)
    assert spec == wanted
    for one, other in zip(values, rights, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert one == other


@pytest.mark.filterwarnings("ignore:.*was planned for the 8th time")
@pytest.mark.parametrize("name", [*ONE, *SEVERAL])
def test_each_number_gives_what_it_does_on_one_device(name: str) -> None:
    function = ONE.get(name) or SEVERAL[name]
    sharded = pw.shard(function, mesh={"dp": 2})
    for number in (5, 6, 7, 12, 9, 6, 20, 2, 1, 0, -3):
        try:
            expected = function(X, number)
        except (RuntimeError, IndexError, ValueError):  # where there are not as many, or no root
            continue
        assert_alike(sharded(X, number), expected)


@pytest.mark.parametrize("name", ONE)
def test_one_plan_serves_all_numbers(name: str, plans: list[Any]) -> None:
    sharded = pw.shard(ONE[name], mesh={"dp": 2})
    for number in range(5, 25):
        sharded(X, number)
    assert len(plans) == 2  # the first number alone, and then all


def test_each_course_has_a_plan(plans: list[Any]) -> None:
    sharded = pw.shard(SEVERAL["branches"], mesh={"dp": 2})
    for number in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 3, 8, 12):
        sharded(X, number)
    assert len(plans) == 4


def test_a_number_that_nothing_can_be_said_of_is_planned_by_itself(plans: list[Any]) -> None:
    sharded = pw.shard(SEVERAL["length of a text"], mesh={"dp": 2})
    for number in (5, 6, 7, 5, 6, 7):
        sharded(X, number)
    assert len(plans) == 3


class Box:
    def __init__(self, count: int, tensor: Tensor) -> None:
        self.count, self.tensor = count, tensor


class Counts(torch.nn.Module):
    """Counts in an object that it is given, as a cache does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8).double()

    def forward(self, x: Tensor, box: Box) -> tuple[Tensor, Box]:
        place = box.count
        box.count += 2
        box.tensor.add_(1)
        return self.linear(x) * place + box.tensor, box


def check_counting(**mesh: Any) -> None:
    plain, model = Counts(), pw.shard(Counts(), **mesh)
    boxes = [Box(2, torch.zeros(8, dtype=torch.float64)) for _ in range(2)]
    for step in range(8):
        x = X * step + torch.ones(4, 1, dtype=torch.float64)
        with torch.inference_mode():
            found, expected = (one(x, box) for one, box in zip((model, plain), boxes, strict=True))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
        boxes = [found[1], expected[1]]
        assert type(boxes[0].count) is int
        assert boxes[0].count == boxes[1].count == 2 * step + 4
        torch.testing.assert_close(boxes[0].tensor, boxes[1].tensor)
    engine = engine_of(model)
    assert engine is not None
    assert engine.searched <= 3


def test_a_count_in_an_object_goes_on() -> None:
    check_counting(mesh={"tp": 4}, inference=True)


def in_processes(devices: int) -> None:
    check_counting(mesh={"tp": devices}, inference=True)


@pytest.mark.gloo
@pytest.mark.parametrize("devices", [2, 4])
def test_a_count_in_an_object_goes_on_in_processes(on_ranks: Callable[..., Any], devices: int) -> None:
    on_ranks(devices, in_processes, devices)


def told_another(ranks: int) -> None:
    sharded = pw.shard(lambda x, n: (x * n).sum(), mesh={"dp": ranks})
    sharded(X, 5)
    with pytest.raises(RuntimeStateError, match=r"numbers\[0\]|the arguments that are not tensors"):
        sharded(X, 6 + pw.get_rank())


@pytest.mark.gloo
def test_ranks_that_are_given_other_numbers_are_told(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, told_another, 2)


def test_gradients_are_those_of_one_device() -> None:
    sharded = pw.shard(lambda x, n: (x * n + n).square().sum(), mesh={"dp": 2})
    for number in (5, 6, 7, 9):
        x, y = (X.clone().requires_grad_() for _ in range(2))
        sharded(x, number).backward()
        (y * number + number).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)


def test_what_is_larger_than_int64_is_computed_as_python_does() -> None:
    sharded = pw.shard(lambda x, n: x * float(n**3), mesh={"dp": 2})
    for number in (5, 6, 7, 2**20, 2**21, 2**30, 2**61, 2**62, 2**70):
        torch.testing.assert_close(sharded(X, number), X * float(number**3), rtol=1e-12, atol=1e-12)


def test_two_numbers_that_change_one_after_the_other(plans: list[Any]) -> None:
    sharded = pw.shard(lambda x, n, m: x * n + m, mesh={"dp": 2})
    for n, m in ((5, 5), (6, 5), (7, 5), (7, 6), (8, 7), (9, 9), (10, 12)):
        torch.testing.assert_close(sharded(X, n, m), X * n + m, rtol=1e-12, atol=1e-12)
    assert len(plans) == 3  # the first ones alone, then n changes, and then both
