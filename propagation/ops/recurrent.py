"""oneDNN's LSTM layer, always with the workspace of its backward.

PyTorch's kernel returns the workspace, which its backward reads, only while autograd records, whatever `train` is. A
program runs without autograd, since its backward is a separate graph, and would get None.

    partway::rnn_layer(...)     like aten::mkldnn_rnn_layer, always with the workspace

Only oneDNN knows the size of the workspace: its fake form is empty, as in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registration import define

aten = torch.ops.aten
_TENSORS = 7  # the number of tensor arguments, which come first


def _layer(*args: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        return _given(*(x.detach() for x in args[:_TENSORS]), *args[_TENSORS:])


def _given(*args: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = aten.mkldnn_rnn_layer.default(*args)
    return results


rnn_layer = define(
    "rnn_layer(Tensor x, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx, Tensor cx, "
    "bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, "
    "bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer,
    _given,
)
