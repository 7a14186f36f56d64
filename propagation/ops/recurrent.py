"""oneDNN's LSTM layer, as an operator of its own.

PyTorch's kernel keeps what its backward reads (the workspace) only where gradients are recorded, whatever `train` says;
a program runs where they are not, since its backward is a graph of its own. There it would give None for it.

    partway::rnn_layer(...)     as aten::mkldnn_rnn_layer, always with the workspace

How large the workspace is only oneDNN knows: its fake form has no elements, as PyTorch's has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registration import define

aten = torch.ops.aten
_TENSORS = 7  # arguments that are tensors come first


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
