"""Which operators need no comparison of strides: those that give what was traced wherever their operands do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partway.runtime.code.strides import follows, laid_out

X, COLUMNS = torch.ones(4, 6), torch.ones(6, 4).t()


def last(f: Callable[..., Any], *tensors: Tensor) -> Any:
    """The last node of what is traced of `f`."""
    return [node for node in make_fx(f, tracing_mode="fake")(*tensors).graph.nodes if node.op == "call_function"][-1]


@pytest.mark.parametrize(
    ("f", "tensors", "does"),
    [
        (torch.relu, (X,), True),
        (torch.relu, (COLUMNS,), False),  # TensorIterator chooses
        (torch.add, (X, X), True),
        (torch.add, (X, COLUMNS), False),
        (torch.add, (X, X[0]), False),
        (torch.mul, (X, torch.tensor(2.0)), True),
        (torch.t, (X,), True),
        (lambda x: x[:, 1:3], (COLUMNS,), True),
        (lambda x: x.as_strided((2, 2), (1, 1)), (X,), True),
        (lambda x: x.view(1, 24), (X,), False),  # the stride of its first dim may be any
        (torch.mm, (COLUMNS, X.mT), True),
        (lambda x: x.sum(0), (X,), True),
        (lambda x: x.sum(0, keepdim=True), (COLUMNS,), False),
        (lambda x: torch.softmax(x, 0), (X,), False),
        (lambda x: x.clone(), (COLUMNS,), False),
        (lambda x: torch.native_layer_norm(x, [6], None, None, 1e-5), (X,), False),  # a getitem
    ],
)
def test_what_follows(f: Callable[..., Any], tensors: tuple[Tensor, ...], does: bool) -> None:
    assert follows(last(f, *tensors)) is does


def test_what_is_laid_out_has_the_same_numbers() -> None:
    x = torch.randn(4, 3, 2)
    for strides in ((6, 2, 1), (1, 4, 12), (6, 1, 3)):
        found = laid_out(x, strides)
        assert found.stride() == strides
        assert torch.equal(found, x)
    assert torch.equal(laid_out(x, (0, 2, 1)), x)
    once = laid_out(x[:1], (0, 1, 3))
    assert once.stride() == (0, 1, 3)
    assert torch.equal(once, x[:1])
