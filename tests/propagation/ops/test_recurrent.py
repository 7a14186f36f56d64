"""oneDNN's LSTM layer keeps what its backward reads, also where no gradients are recorded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway.propagation.ops.recurrent import rnn_layer

aten = torch.ops.aten
_NUMBERS = (False, [], 2, 5, 1, True, False, False, True)


def operands() -> list[Tensor]:
    layer = nn.LSTM(6, 5)
    states = torch.randn(2, 3, 5).unbind()
    return [torch.randn(4, 3, 6), *(p.detach() for p in layer.parameters()), *states]


def test_it_keeps_a_workspace_where_pytorchs_kernel_gives_none() -> None:
    given = operands()
    expected = aten.mkldnn_rnn_layer.default(*given, *_NUMBERS)
    with torch.no_grad():
        assert aten.mkldnn_rnn_layer.default(*given, *_NUMBERS)[3] is None
        found = rnn_layer(*given, *_NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    assert (found[3].shape, found[3].dtype) == (expected[3].shape, torch.uint8)
    assert not any(x.requires_grad for x in found)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_float32_are_those_of_one_device(layer: Any, backend: str) -> None:
    torch.manual_seed(0)
    plain = layer(6, 5, 2, bidirectional=True)
    x, y = (torch.randn(4, 3, 6).requires_grad_() for _ in range(2))
    y.data = x.data.clone()
    plain(x)[0].square().mean().backward()
    expected = [x.grad, *(p.grad for p in plain.parameters())]
    plain.zero_grad()
    with pw.auto_parallel_context(backend=backend):
        sharded = pw.shard(plain, mesh={"x": 2}, in_strategy=((None, "x", None),))
        sharded(y)[0].square().mean().backward()
    for found, right in zip([y.grad, *(p.grad for p in sharded.parameters())], expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7)
