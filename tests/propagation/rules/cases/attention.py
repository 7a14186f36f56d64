"""Cases of `propagation/rules/layers/attention.py`."""

import torch
import torch.nn.functional as F

from cases import case, real

aten = torch.ops.aten

CASES = [
    case(aten.scaled_dot_product_attention.default, "_1 h s", F.scaled_dot_product_attention,
         real(4, 4, 4, 3), real(4, 4, 4, 3), real(4, 4, 4, 3)),
    case(aten.scaled_dot_product_attention.default, "h s", F.scaled_dot_product_attention,
         real(4, 4, 3), real(4, 5, 3), real(1, 5, 2)),
    case(aten.scaled_dot_product_attention.default, "s", F.scaled_dot_product_attention,
         real(4, 3), real(4, 3), real(4, 3)),
    case(aten.scaled_dot_product_attention.default, "_1 h s",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
         real(4, 4, 4, 3), real(4, 4, 6, 3), real(4, 4, 6, 3)),
    case(aten.scaled_dot_product_attention.default, "_1 h s",
         lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3),
         real(4, 2, 4, 3), real(4, 2, 4, 3), real(4, 2, 4, 3), real(2, 4, 4)),
    case(aten.scaled_dot_product_attention.default, "_1 h s",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
         real(4, 8, 4, 3), real(4, 4, 4, 3), real(4, 4, 4, 3)),
    case(aten.scaled_dot_product_attention.default, "_1 g s",
         lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
         real(2, 4, 4, 3), real(2, 1, 4, 3), real(2, 1, 4, 3), real(2, 4, 1, 4)),
    case(aten.scaled_dot_product_attention.default, "_1 s",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
         real(2, 4, 4, 3), real(2, 2, 4, 3), real(2, 1, 4, 3)),
]  # fmt: skip
