"""Cases of `propagation/rules/layers/resampling.py`."""

import math

import torch
import torch.nn.functional as F

from cases import case, index, real, unit

aten = torch.ops.aten

CASES = [
    case(aten.constant_pad_nd.default, "f0 f1", lambda x: aten.constant_pad_nd(x, [1, 2]), real(4, 4), linear=1),
    case(aten.constant_pad_nd.default, "f0 f1", lambda x: aten.constant_pad_nd(x, [1, 2], 3.0), real(4, 4)),
    case(aten.constant_pad_nd.default, "f0",
         lambda x, i: aten.constant_pad_nd(i, [1, 2], 2**53 + 1) % 7 * x.sum(), real(2), index(3, 4, 4)),
    case(aten.grid_sampler_2d.default, "n c h w", lambda x, g: F.grid_sample(x, 2 * g - 1, align_corners=False),
         real(4, 4, 3, 3), unit(4, 4, 4, 2), linear=1),
    case(aten.grid_sampler_3d.default, "n c d h w", lambda x, g: F.grid_sample(x, 2 * g - 1, align_corners=True),
         real(4, 4, 2, 3, 2), unit(4, 4, 4, 4, 3), linear=1),
    case(aten.pad.default, "f0 f1", lambda x: F.pad(x, (1, 2)), real(4, 4), linear=1),
    case(aten.pad.default, "f0 f1", lambda x: F.pad(x, (1, 1), mode="reflect"), real(4, 4), linear=1),
    case(aten.pad.default, "f0", lambda x: F.pad(x, (1, 1), value=math.nan), real(4, 4)),
    case(aten.pad.default, "f0 f1 f2", lambda x: F.pad(x, (0, 0, 2, 1), value=1.0), real(4, 4, 3, 1)),
    case(aten.slice.Tensor, "f0 f1", lambda x: x[:, 1:3] * 2, real(4, 4), linear=1),
    case(aten.slice.Tensor, "f0 f1", lambda x: x[::2] * 2, real(4, 4), linear=1),
    case(aten._upsample_bicubic2d_aa.default, "f0 f1",
         lambda x: aten._upsample_bicubic2d_aa(x, [4, 4], False), real(4, 4, 2, 2)),
    case(aten._upsample_bilinear2d_aa.default, "f0 f1",
         lambda x: aten._upsample_bilinear2d_aa(x, [4, 4], False), real(4, 4, 2, 2)),
    case(aten._upsample_bicubic2d_aa.vec, "f0 f1",
         lambda x: F.interpolate(x, (2, 3), mode="bicubic", antialias=True), real(4, 4, 4, 4)),
    case(aten._upsample_bilinear2d_aa.vec, "f0 f1",
         lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True), real(4, 4, 4, 4)),
    case(aten._upsample_nearest_exact1d.vec, "f0 f1 f2",
         lambda x: F.interpolate(x, 6, mode="nearest-exact"), real(2, 2, 4), linear=1),
    case(aten._upsample_nearest_exact2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), real(2, 2, 4, 3), linear=1),
    case(aten._upsample_nearest_exact3d.vec, "f0 f1 f2 f3 f4",
         lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), real(2, 2, 2, 2, 2), linear=1),
    case(aten.roll.default, "f0 f1", lambda x: x.roll((1, -3), (0, 1)) * 2, real(4, 4), linear=1),
    case(aten.roll.default, "", lambda x: x.roll(5) * 2, real(4, 4), linear=1),
    case(aten.upsample_bicubic2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, (3, 8), mode="bicubic"), real(2, 2, 4, 4), linear=1),
    case(aten.upsample_bilinear2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), real(2, 2, 4, 4), linear=1),
    case(aten.upsample_linear1d.vec, "f0 f1 f2", lambda x: F.interpolate(x, 5, mode="linear"), real(2, 2, 4), linear=1),
    case(aten.upsample_nearest1d.vec, "f0 f1 f2", lambda x: F.interpolate(x, 6), real(2, 2, 4), linear=1),
    case(aten.upsample_nearest2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, scale_factor=2), real(2, 2, 4, 3), linear=1),
    case(aten.upsample_nearest3d.vec, "f0 f1 f2 f3 f4",
         lambda x: F.interpolate(x, scale_factor=2), real(2, 2, 2, 2, 2), linear=1),
    case(aten.upsample_trilinear3d.vec, "f0 f1 f2 f3 f4",
         lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"), real(2, 2, 4, 3, 2), linear=1),
    case(aten.roll.default, "f0 f1", lambda x: torch.fft.fftshift(x) + torch.fft.ifftshift(x, 1), real(4, 5), linear=1),
]  # fmt: skip
