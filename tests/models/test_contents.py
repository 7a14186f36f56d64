"""What a sharded function reads of objects of Python's own types is as on one device at every call."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import ctypes
import functools
import io
import multiprocessing
import operator
import queue
import random
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import partway as pw
from partway.reuse.kinds import MOST_BYTES, kind_of, unwatched

X = torch.linspace(-1, 2, 32, dtype=torch.float64).view(4, 8)
SCALE = 1.0

Case = tuple[Callable[[Tensor], Tensor], Callable[[], object]]  # a function, and what changes what it reads


def of_lru_cache() -> Case:
    holder = SimpleNamespace(k=1.0)

    @functools.lru_cache
    def scale() -> float:
        return float(holder.k)

    def change() -> None:
        holder.k = 3.0
        scale.cache_clear()

    return lambda x: x * scale(), change


def of_context() -> Case:
    variable = contextvars.ContextVar("variable", default=1.0)
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


class Mine(threading.local):
    k = 1.0

    @property
    def scale(self) -> float:
        return self.k * SCALE


def of_users_type() -> Case:
    mine = Mine()
    return of_globals(lambda: mine.scale)


class Held:
    def __init__(self) -> None:
        self.k, self.get = 1.0, lambda: self.k


def of_weakref() -> Case:
    one = Held()
    reference = weakref.ref(one)

    def fn(x: Tensor, _keep: Any = one) -> Tensor:
        return x * reference().k  # type: ignore[union-attr]

    return fn, lambda: setattr(one, "k", 3.0)


def of_items(kind: Any) -> Case:
    items = kind()
    items["k"] = 1.0
    return lambda x: x * items["k"], lambda: operator.setitem(items, "k", 3.0)


def of_elements(elements: Any) -> Case:
    return lambda x: x * float(elements[0]), lambda: operator.setitem(elements, 0, type(elements[0])(3))


def of_proxy() -> Case:
    items = {"k": 1.0}
    proxy = MappingProxyType(items)
    return lambda x: x * proxy["k"], lambda: items.update(k=3.0)


def of_getter(getter: Callable[[Any], float]) -> Case:
    one = Held()
    return lambda x: x * getter(one), lambda: setattr(one, "k", 3.0)


class Counted(type):
    k = 1.0

    @property
    def scale(cls) -> float:
        return cls.k


def of_metaclass() -> Case:
    kind = type("Counted", (Counted,), {})
    one: Any = kind("One", (), {})
    return lambda x: x * one.scale, lambda: setattr(kind, "k", 3.0)


def of_methods(how: str) -> Case:
    class Methods:
        k = 1.0

        def scaled(self, times: float, x: Tensor) -> Tensor:
            return x * self.k * times

        partial = functools.partialmethod(scaled, 1.0)

        @functools.singledispatchmethod
        def dispatched(self, x: Tensor) -> Tensor:
            return x * self.k

    one: Any = Methods()
    fn = one.partial if how == "partial" else one.dispatched
    return lambda x: fn(x) + 0, lambda: setattr(one, "k", 3.0)


def of_function() -> Case:
    def fn(x: Tensor) -> Tensor:
        return x * fn.k  # type: ignore[attr-defined, no-any-return]

    fn.k = 1.0  # type: ignore[attr-defined]
    return fn, lambda: setattr(fn, "k", 3.0)


def of_code() -> Case:
    """Code that is edited while it runs, as IPython's autoreload does it."""

    def fn(x: Tensor) -> Tensor:
        return x * 1.0

    def edited(x: Tensor) -> Tensor:
        return x * 3.0

    def helped(x: Tensor) -> Tensor:
        return fn(x)

    assert isinstance(fn, FunctionType)
    return helped, lambda: setattr(fn, "__code__", edited.__code__)


def of_default() -> Case:
    def fn(x: Tensor, k: float = 1.0) -> Tensor:
        return x * k

    return lambda x: fn(x) + 0, lambda: setattr(fn, "__defaults__", (3.0,))


def of_default_tensor() -> Case:
    def fn(x: Tensor, k: Tensor = torch.ones(2, dtype=torch.float64)) -> Tensor:  # noqa: B008 - what is tested
        return x * k[0]

    return lambda x: fn(x) + 0, lambda: setattr(fn, "__defaults__", (torch.full((2,), 3.0, dtype=torch.float64),))


def of_globals(read: Callable[[], float]) -> Case:
    def change() -> None:
        global SCALE  # noqa: PLW0603 - what is tested
        SCALE = 3.0

    return lambda x: x * read(), change


def of_decorated() -> Case:
    one = Held()

    @torch.no_grad()
    def scaled(x: Tensor) -> Tensor:
        return x * one.k

    return lambda x: scaled(x) + 0, lambda: setattr(one, "k", 3.0)


def of_partial(change: Callable[[Any], None]) -> Case:
    def scaled(given: list[float], x: Tensor, k: float) -> Tensor:
        return x * given[0] * k

    partial = functools.partial(scaled, [1.0], k=1.0)
    return lambda x: partial(x) + 0, lambda: change(partial)


class Sets:
    """Has an attribute that is set by code which reads another one."""

    def __init__(self) -> None:
        self.factor, self.held = 1.0, 0.0

    @property
    def k(self) -> float:
        return self.held

    @k.setter
    def k(self, k: float) -> None:
        self.held = k * self.factor


def of_setter() -> Case:
    one = Sets()

    def fn(x: Tensor) -> Tensor:
        one.k = 1.0
        return x * one.k

    return fn, lambda: setattr(one, "factor", 3.0)


def of_tensor(number: Callable[[Tensor], float]) -> Case:
    outside = torch.ones(3, dtype=torch.float64)
    return lambda x: x * number(outside), lambda: outside.fill_(3.0)


CASES: dict[str, Callable[[], Case]] = {
    "lru_cache": of_lru_cache,
    "ContextVar": of_context,
    "a subclass of threading.local": of_users_type,
    "weakref.ref": of_weakref,
    "UserDict": lambda: of_items(collections.UserDict),
    "ChainMap": lambda: of_items(collections.ChainMap),
    "defaultdict": lambda: of_items(lambda: collections.defaultdict(float)),
    "MappingProxyType": of_proxy,
    "UserList": lambda: of_elements(collections.UserList([1.0])),
    "ndarray": lambda: of_elements(np.ones(3)),
    "attrgetter": lambda: of_getter(operator.attrgetter("k")),
    "methodcaller": lambda: of_getter(operator.methodcaller("get")),
    "metaclass": of_metaclass,
    "partialmethod": lambda: of_methods("partial"),
    "singledispatchmethod": lambda: of_methods("dispatched"),
    "property that is set": of_setter,
    "list in a partial": lambda: of_partial(lambda partial: operator.setitem(partial.args[0], 0, 3.0)),
    "keyword of a partial": lambda: of_partial(lambda partial: partial.keywords.update(k=3.0)),
    "attribute of a function": of_function,
    "code of a function": of_code,
    "default of a function": of_default,
    "tensor that is a default": of_default_tensor,
    "globals()": lambda: of_globals(lambda: float(globals()["SCALE"])),
    "eval": lambda: of_globals(lambda: float(eval("SCALE"))),
    "decorated by torch": of_decorated,
    "tensor.item()": lambda: of_tensor(lambda outside: outside.mean().item()),
    "tensor.tolist()": lambda: of_tensor(lambda outside: outside.tolist()[0]),
    "len(str(tensor))": lambda: of_tensor(lambda outside: float(repr(outside)[8])),
}


@pytest.fixture(autouse=True)
def _own_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global SCALE  # noqa: PLW0603 - what is tested
    yield
    SCALE = 1.0


def stale(names: Any) -> list[str]:
    """The cases in which a call that follows a change does not see it."""
    found = []
    for name in names:
        fn, change = CASES[name]()
        model = pw.shard(fn, mesh={"x": 2})
        before = model(X)
        change()
        if not torch.equal(before, X) or not torch.equal(model(X), X * 3):
            found.append(name)
    return found


@pytest.mark.filterwarnings("ignore:.*whose changes are not noticed")  # eval may read any global: a clock
@pytest.mark.parametrize("name", CASES)
def test_what_an_object_holds_may_change(name: str) -> None:
    assert stale([name]) == []


@pytest.mark.gloo
def test_what_an_object_holds_may_change_on_processes(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, stale, ["ContextVar", "weakref.ref", "ndarray", "metaclass", "tensor.item()"]) == [[], []]


@pytest.mark.parametrize(
    "draw", [random.Random(0).random, np.random.default_rng(0).random, np.random.RandomState(0).random_sample]
)
def test_a_generator_of_ones_own_is_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(
        pw.CaptureError,
        match=r"<lambda> draws random numbers of draw of .*, and they would be the same in every call; draw them with "
        r"torch \(torch\.rand\(\[\]\) may decide a branch\), or outside the sharded function",
    ):
        pw.shard(lambda x: x * draw(), mesh={"x": 2})(X)


def test_what_a_function_changes_where_nobody_can_do_it_again_is_refused() -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def counts(x: Tensor) -> Tensor:
        variable.set(variable.get() + 1)
        return x

    with pytest.raises(
        pw.CaptureError,
        match=r"counts changes variable of .*counts, which later calls would not do; change it outside the sharded "
        r"function, or keep what changes in an attribute or a buffer",
    ):
        pw.shard(counts, mesh={"x": 2})(X)


def test_what_courses_took_of_tensors_is_compared_for_each() -> None:
    outside = torch.ones(1, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        return x * outside.sum().item() if (x > 0).all() else x

    model = pw.shard(fn, mesh={"x": 2})
    for given in (X + 2, X, X + 2, X):
        assert torch.equal(model(given), fn(given))
        outside.add_(1)


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (random.SystemRandom().random, "a SystemRandom"),
        (uuid.uuid4, "a source of random bytes"),
        (time.perf_counter, "a clock"),
    ],
)
def test_what_gives_another_value_at_each_call_is_said(draw: Callable[[], Any], what: str) -> None:
    with pytest.warns(UserWarning, match=f"reads .*, {what}, whose changes are not noticed: the values are taken once"):
        pw.shard(lambda x: x * (hash(draw()) % 2), mesh={"x": 2})(X)


def with_a_number(kind: Any, key: Any = "k") -> Any:
    """An object of a kind that is filled like a dict."""
    made = kind()
    made[key] = 1.0
    return made


def a_parser() -> Any:
    parser = configparser.ConfigParser()
    parser["a"] = {"k": "1.0"}
    return parser


ONE = Held()
RARE: dict[str, Callable[[], Any]] = {
    "a Mine": Mine,
    "a WeakKeyDictionary": lambda: with_a_number(weakref.WeakKeyDictionary, ONE),
    "a WeakValueDictionary": weakref.WeakValueDictionary,
    "a array": lambda: array.array("d", [1.0]),
    "a bytearray": lambda: bytearray([1]),
    "a memoryview": lambda: memoryview(bytearray([1])),
    "a c_double": lambda: ctypes.c_double(1.0),
    "a Synchronized": lambda: multiprocessing.Value("d", 1.0),
    "a ConfigParser": a_parser,
    "a Queue": queue.Queue,
    "a SimpleQueue": queue.SimpleQueue,
    "a StringIO": lambda: io.StringIO("1"),
    "a SystemRandom": random.SystemRandom,
}


@pytest.mark.parametrize("what", RARE)
def test_what_is_rare_is_said_in_one_text_and_not_watched(what: str, recwarn: pytest.WarningsRecorder) -> None:
    rare = RARE[what]()
    model = pw.shard(lambda x, k: x * k if rare is not None else x, mesh={"x": 2})
    for k in (1.0, 3.0):  # each is planned; Python shows a text once
        assert torch.equal(model(X, k), X * k)
    (text,) = {str(each.message) for each in recwarn}
    said = (
        r"<lambda> reads rare of .*<lambda>, {}, whose changes are not noticed: the values are taken once, when a call"
    )
    assert re.search(said.format(what), text)


@pytest.mark.filterwarnings("ignore:.*whose changes are not noticed")
def test_what_is_closed_or_released_may_lie_around() -> None:
    text, view = io.StringIO("1"), memoryview(bytearray(3))
    text.close()
    view.release()
    model = pw.shard(lambda x: x * (2 if text.closed or view is None else 3), mesh={"x": 2})
    assert torch.equal(model(X), X * 2)


def test_large_arrays_are_not_compared() -> None:
    small, large = np.ones(MOST_BYTES // 8), np.ones(MOST_BYTES // 8 + 1)
    assert kind_of(small) is not None
    assert not unwatched(small)
    assert kind_of(large) is None
    assert unwatched(large) == "ndarray"
    assert not unwatched(np.float32(1.0))
    assert unwatched(iter([1])) == "list_iterator"
