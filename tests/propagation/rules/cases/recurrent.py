"""Cases of `propagation/rules/layers/recurrent.py`."""

import torch

from cases import case, like_others, real

aten = torch.ops.aten

CASES = [
    case(aten.lstm_cell.default, "b", lambda x, h, w, u: torch.lstm_cell(x, (h, 2 * h), w, u),
         real(4, 3), real(4, 2), real(8, 3), real(8, 2)),
    *like_others(
    case(aten.gru_cell.default, "b", lambda x, h, w, u, b: torch.gru_cell(x, h, w, u, b, b),
         real(4, 3), real(4, 2), real(6, 3), real(6, 2), real(6)),
    case(aten.rnn_relu_cell.default, "b", torch.rnn_relu_cell, real(4, 3), real(4, 2), real(2, 3), real(2, 2)),
    case(aten.rnn_tanh_cell.default, "b", torch.rnn_tanh_cell, real(4, 3), real(4, 2), real(2, 3), real(2, 2)),
    ),
    case(aten.gru.input, "b", lambda x, h, w, u, b: torch.gru(x, h, [w, u, b, b], True, 1, 0.0, True, False, True),
         real(4, 3, 3), real(1, 4, 2), real(6, 3), real(6, 2), real(6)),
    case(aten.lstm.input, "b",
         lambda x, h, w, u: torch.lstm(x, [h, h * h], [w, u, w, u], False, 1, 0.0, True, True, False),
         real(3, 4, 3), real(2, 4, 2), real(8, 3), real(8, 2)),
    *like_others(
    case(aten.rnn_relu.input, "b", lambda x, h, w, u: torch.rnn_relu(x, h, [w, u], False, 1, 0.0, True, False, False),
         real(3, 4, 3), real(1, 4, 2), real(2, 3), real(2, 2)),
    case(aten.rnn_tanh.input, "b", lambda x, h, w: torch.rnn_tanh(x, h, [w] * 4, False, 2, 0.0, True, False, True),
         real(4, 3, 2), real(2, 4, 2), real(2, 2)),
    ),
]  # fmt: skip
