"""torch.autocast around a call and inside of it is that of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autocasting import AROUND, WAYS, Net
from checks import whole
from torch import Tensor, nn

import partway as pw

Ranks = Callable[..., list[Any]]


def values(model: nn.Module, way: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(6, 8, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=way in AROUND):
        result = model(x)
    result.float().square().mean().backward()
    return [whole(t) for t in (result.detach(), x.grad, *(p.grad for p in model.parameters()))]


def assert_as_on_one_device(ways: tuple[str, ...]) -> None:
    n = pw.init(simulate=2)
    for way in ways:
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            plain = Net(way, dtype)
            model = pw.shard(copy.deepcopy(plain), mesh={"dp": n}, in_strategy=(("dp", None),))
            for found, expected in zip(values(model, way, dtype), values(plain, way, dtype), strict=True):
                assert found.dtype == expected.dtype
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
            casts = str(model.program).count("_to_copy")
            assert casts > 2, (way, dtype)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_that_of_one_device(way: str) -> None:
    assert_as_on_one_device((way,))


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 4])
def test_it_is_that_of_one_device_on_ranks(on_ranks: Ranks, n: int) -> None:
    on_ranks(n, assert_as_on_one_device, WAYS if n == 2 else WAYS[-1:])


def test_the_expansion_of_an_operator_casts_nothing() -> None:
    pw.init(simulate=2)
    x = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def pooled(x: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(x, 3) * 2  # a product with a matrix, which autocast would cast

    with torch.autocast("cpu", torch.bfloat16):
        sharded = pw.shard(pooled, mesh={"dp": 2}, in_strategy=(("dp", None, None),))
        result = sharded(x)
        assert {dtype for each in sharded.plan.operators for dtype in each.types if "bfloat16" in dtype} == set()
        result.square().sum().backward()
        assert x.grad is not None
        found, x.grad = x.grad, None
    pooled(x).square().sum().backward()
    torch.testing.assert_close(result.detach(), pooled(x).detach())
    torch.testing.assert_close(found, x.grad)
