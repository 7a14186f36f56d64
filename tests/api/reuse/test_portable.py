"""Values are told apart by what they contain, the same in each process."""

from __future__ import annotations

import contextvars
import enum
import functools
import logging
import operator
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from partway.reuse.portable import NotPortableError, digest


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Holds:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Named(float):
    def __repr__(self) -> str:
        return "a number"


def adds(value: int) -> Callable[[int], int]:
    return lambda x, y=value: x + y


def waits(value: int) -> Any:
    yield value


def cycle(value: Any) -> list[Any]:
    made: list[Any] = [value]
    made.append(made)
    return made


# Makers of a value of 1 or 2: two of the same are alike, and others are not.
MAKERS: dict[str, Callable[[int], Any]] = {
    "number": lambda n: n,
    "float": lambda n: n / 3,
    "float that writes itself otherwise": Named,
    "text": lambda n: "a" * n,
    "bytes": lambda n: b"a" * n,
    "member": Kind,
    "dtype": lambda n: (torch.float32, torch.float64)[n - 1],
    "type": lambda n: (int, float)[n - 1],
    "list": lambda n: [1, [n]],
    "tuple": lambda n: (1, (n,)),
    "dict": lambda n: {"a": {"b": n}},
    "key of a dict": lambda n: {n: 0},
    "set": lambda n: {"a", "b", "c", n},
    "deque": lambda n: deque([n]),
    "list that contains itself": cycle,
    "object": Holds,
    "object with slots": Slotted,
    "object in an object": lambda n: Holds(Slotted([n])),
    "method of an object": lambda n: Holds(n).method,
    "function": adds,
    "function's code": lambda n: (lambda x: x + 1, lambda x: x - 1)[n - 1],
    "function inside": lambda n: (lambda: lambda x: x + 1, lambda: lambda x: x - 1)[n - 1],
    "function of a library": lambda n: (torch.add, torch.sub)[n - 1],
    "function of Python": lambda n: (len, max)[n - 1],
    "method of a list": lambda n: [n].append,
    "partial": lambda n: functools.partial(max, n),
    "partial's keyword": lambda n: functools.partial(max, key=adds(n)),
    "cached function": lambda n: functools.cache(adds(n)),
    "property": lambda n: property(adds(n)),
    "class method": lambda n: classmethod(adds(n)),
    "itemgetter": operator.itemgetter,
    "attrgetter": lambda n: operator.attrgetter("a" * n),
    "pattern": lambda n: re.compile("a" * n),
    "union": lambda n: (int | None, float | None)[n - 1],
    "tensor": lambda n: torch.full((3,), float(n)),
    "tensor's dtype": lambda n: torch.zeros(3, dtype=(torch.float32, torch.int32)[n - 1]),
    "tensor's strides": lambda n: torch.arange(4).view(2, 2) if n == 1 else torch.arange(4).view(2, 2).t(),
    "parameter": lambda n: nn.Parameter(torch.zeros(n)),
    "array": lambda n: np.full(3, n),
    "variable of a context": lambda n: contextvars.ContextVar("v", default=n).get(),
    "logger": lambda n: logging.getLogger(f"a.{n}"),
    "module's type": lambda n: (nn.Tanh(), nn.ReLU())[n - 1],
    "distribution": lambda n: torch.distributions.Normal(float(n), 1.0),
    "generator that waits": waits,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_values_are_told_apart_by_what_they_contain(name: str) -> None:
    make = MAKERS[name]
    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


def test_what_holds_no_number_is_alike() -> None:
    for make in (threading.Lock, threading.RLock, object):
        assert digest(make()) == digest(make())
    assert digest(nn.Linear(2, 2)) == digest(nn.Linear(3, 3))  # what is in a module is compared by itself


def under_way() -> Any:
    made = (n for n in (1, 2))
    next(made)
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (under_way, "a generator under way, under_way.<locals>.<genexpr>"),
        (lambda: iter([1]), "a builtins.list_iterator"),
        (torch.Generator, "a torch._C.Generator"),
        (lambda: torch.ones(2, device="meta"), "a Tensor on meta"),
        (lambda: torch.ones(2).to_sparse(), "a Tensor on cpu"),
        (lambda: torch.ones(2**22 + 1), "a tensor of 16777220 bytes"),
        (lambda: list(range(1_000_001)), "there is too much to compare"),
    ],
    ids=["generator", "iterator", "random numbers", "meta", "sparse", "large", "long"],
)
def test_what_cannot_be_told_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(NotPortableError, match=re.escape(why)):
        digest(Holds(make()))


def test_a_digest_is_that_of_other_processes() -> None:
    """Hashes of texts are salted by each, and ids are others."""
    script = "import runpy, sys; found = runpy.run_path(sys.argv[1]); print(found['all_digests']())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", script, __file__], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]


def all_digests() -> dict[str, str]:
    return {name: digest(make(1)) for name, make in MAKERS.items()}
