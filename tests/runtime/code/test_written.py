"""What a call writes into is written where it lies, where that is all that happens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.requests.request import engine_of
from partway.runtime.executors.peak import held_by

SIZE = 4, 6, 8


class Calls(nn.Module):
    """A function of a cache, a row to be put into it, and a place."""

    def __init__(self, of: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, cache: Tensor, row: Tensor, place: Tensor) -> Any:
        return self.of(cache, row, place)


def by_index(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
    cache.index_copy_(1, place, row.unsqueeze(1))
    return cache.sum(1)


def twice(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
    cache.index_copy_(1, place, row.unsqueeze(1))
    cache.index_copy_(1, place + 1, row.unsqueeze(1) * 2)
    return cache.sum(1)


def a_slice(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
    cache.copy_(torch.slice_scatter(cache, row.unsqueeze(1), 1, 2, 3))
    return cache.sum(1)


def read_before(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
    before = cache.sum(1)
    cache.index_copy_(1, place, row.unsqueeze(1))
    return before + cache.mean(1)


def read_by_what_is_written(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
    cache.index_copy_(1, place, (row + cache.mean(1)).unsqueeze(1))
    return cache.sum(1)


def scaled(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
    cache.mul_(0.5)
    cache.index_copy_(1, place, row.unsqueeze(1))
    return cache.sum(1)


def returned(cache: Tensor, row: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    cache.index_copy_(1, place, row.unsqueeze(1))
    return cache[:, 1:3], cache.sum(1)


def copy_returned(cache: Tensor, row: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    before = cache.clone()
    cache.index_copy_(1, place, row.unsqueeze(1))
    return before, cache.clone()


CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "by index": (by_index, True),
    "twice": (twice, False),
    "a slice": (a_slice, True),
    "read before": (read_before, False),
    "read by what is written": (read_by_what_is_written, False),
    "scaled": (scaled, False),
    "returned": (returned, False),
    "a copy is returned": (copy_returned, False),
}


def steps(model: nn.Module) -> list[Any]:
    """The compiled steps of a sharded module."""
    engine = engine_of(model)
    assert engine is not None
    return [runner._loaded for courses in engine._planned._by_signature.values() for each in courses for runner in each]


def check(name: str, devices: int, strided: bool = False) -> nn.Module:
    """Three calls give what plain PyTorch gives, and leave the cache like it, in the memory that it had."""
    of, expected = CASES[name]
    model: Any = pw.shard(Calls(of).eval(), mesh={"tp": devices}, inference=True)
    caches = []
    for _ in range(2):
        cache = torch.arange(4.0 * 6 * 8, dtype=torch.float64).reshape(SIZE)
        caches.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if strided else cache)
    where = caches[0].data_ptr()
    with torch.no_grad():
        for call in range(3):
            row, place = torch.full((4, 8), call + 0.25, dtype=torch.float64), torch.tensor([call])
            found, plain = model(caches[0], row, place), of(caches[1], row, place)
            for one, two in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, plain)), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-14, atol=1e-14)
                one.zero_()  # which is the caller's own
            assert torch.equal(*caches)
            if isinstance(plain, tuple):
                assert caches[0].data_ptr() == where
            caches[1].copy_(caches[0])
    assert [bool(step.written) for step in steps(model)] == [expected]
    return model


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_device(name: str, devices: int, strided: bool) -> None:
    check(name, devices, strided)


def in_processes(devices: int) -> None:
    for name in CASES:
        check(name, devices)
        check(name, devices, strided=True)


@pytest.mark.gloo
def test_in_processes(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, in_processes, 2)


def test_what_is_written_in_place_takes_no_memory() -> None:
    cache = 4 * 6 * 8 * 8
    written, copied = (held_by(check(name, 2).program).peak for name in ("by index", "read before"))
    assert written < cache <= copied


def test_a_write_counts_as_one_for_autograd() -> None:
    """A graph of before, which reads the cache, may not run its backward any more."""
    model: Any = pw.shard(Calls(by_index).eval(), mesh={"tp": 2}, inference=True)
    cache, weight = torch.ones(SIZE), torch.ones(SIZE, requires_grad=True)
    loss = (cache * weight).sum()
    with torch.no_grad():
        model(cache, torch.ones(4, 8), torch.tensor([0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_call_that_asks_for_a_value_writes_when_it_is_known() -> None:
    """The course of a call may turn out to be another one when it has run: it must have written nothing then."""

    def asks(cache: Tensor, row: Tensor, place: Tensor) -> Tensor:
        cache.index_copy_(1, place, row.unsqueeze(1))
        product = cache[:, 1] @ torch.eye(8, dtype=torch.float64)
        return cache.sum(1) if product.sum() > 0 else cache.sum(1) * 2

    model: Any = pw.shard(Calls(asks).eval(), mesh={"tp": 2}, inference=True)
    caches = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        for value in (1.0, -9.0, 2.0, 99.0):
            row, place = torch.full((4, 8), value, dtype=torch.float64), torch.tensor([1])
            found, plain = model(caches[0], row, place), asks(caches[1], row, place)
            assert torch.equal(found, plain)
            assert torch.equal(*caches)
    assert all(not step.written for step in steps(model))
