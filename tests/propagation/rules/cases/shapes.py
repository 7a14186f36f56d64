"""Cases of `propagation/rules/tensors/shapes.py`."""

import torch
import torch.nn.functional as F

from cases import case, real

aten = torch.ops.aten

CASES = [
    case(aten.cat.default, "f0", lambda x, y: torch.cat([x, y, x], 1), real(4, 2), real(4, 4), linear=1),
    case(aten.expand.default, "f0 f1 f2", lambda x: x.expand(4, 4, 4) * 2, real(4, 1), linear=1),
    case(aten.permute.default, "f0 f1 f2", lambda x: x.permute(2, 0, -2) * 2, real(4, 4, 4), linear=1),
    case(aten.reshape.default, "f0", lambda x: x.reshape(16) * 2, real(4, 4), linear=1),
    case(aten.split.Tensor, "f0", lambda x: [p * 2 for p in x.split(3, -1)], real(4, 8), linear=1),
    case(aten.split_with_sizes.default, "f1", lambda x: x.split([1, 3])[1] * 2, real(4, 4), linear=1),
    case(aten.squeeze.dims, "f0 f2", lambda x: x.squeeze() * 2, real(4, 1, 4), linear=1),
    case(aten.squeeze.dims, "f0 f2", lambda x: x.squeeze(1) * 2, real(4, 1, 4), linear=1),
    case(aten.squeeze.dims, "f0", lambda x: x.squeeze((1, 2)) * 2, real(4, 1, 1), linear=1),
    case(aten.stack.default, "f0 f1", lambda x, y: torch.stack([x, y], 1), real(4, 4), real(4, 4), linear=1),
    case(aten.t.default, "f0 f1", lambda x: x.t() * 2, real(4, 4), linear=1),
    case(aten.transpose.int, "f0 f1 f2", lambda x: x.transpose(-1, 0) * 2, real(4, 4, 4), linear=1),
    case(aten.unbind.int, "f1", lambda x: [p * 2 for p in x], real(2, 4), linear=1),
    case(aten.unsqueeze.default, "f0 f1", lambda x: x.unsqueeze(-1) * 2, real(4, 4), linear=1),
    case(aten.channel_shuffle.default, "f0 f2 f3", lambda x: F.channel_shuffle(x, 2) * 2, real(2, 4, 4, 3), linear=1),
    case(aten.pixel_shuffle.default, "_1 c h w", lambda x: F.pixel_shuffle(x, 2) * 2, real(2, 8, 2, 4), linear=1),
    case(aten.pixel_unshuffle.default, "_1 c h w", lambda x: F.pixel_unshuffle(x, 2) * 2, real(2, 2, 4, 8), linear=1),
    case(aten.diag_embed.default, "f0 f1", lambda x: torch.diag_embed(x, 1, 0, -2) * 2, real(4, 4, 3), linear=1),
    case(aten.view_as_complex.default, "f0 f1",
         lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), real(4, 4, 2), linear=1),
    case(aten.view_as_real.default, "f0", lambda x, y: torch.view_as_real(torch.complex(x, y)) * 2, real(4), real(4),
         linear=1),
]  # fmt: skip
