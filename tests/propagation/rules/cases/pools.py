"""Cases of `propagation/rules/layers/pools.py`."""

import torch
import torch.nn.functional as F

from cases import case, fixed, positive, real

aten = torch.ops.aten

CASES = [
    case(aten.avg_pool1d.default, "f0 f1 f2",
         lambda x: F.avg_pool1d(x, 2, 1, 1, ceil_mode=True), real(4, 4, 5), linear=1),
    case(aten.avg_pool2d.default, "f0 f1 f2 f3", lambda x: F.avg_pool2d(x, 3, 2, 1), real(4, 4, 5, 5), linear=1),
    case(aten.avg_pool2d.default, "f0 f1 f2", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
         real(4, 5, 5), linear=1),
    case(aten.avg_pool3d.default, "f0 f1 f2 f3 f4", lambda x: F.avg_pool3d(x, 2, 1, divisor_override=3),
         real(2, 2, 3, 3, 3), linear=1),
    case(aten.max_pool1d.default, "f0 f1 f2", lambda x: F.max_pool1d(x, 2), real(4, 4, 4)),
    case(aten.max_pool2d.default, "f0 f1 f2 f3", lambda x: F.max_pool2d(x, 2), real(4, 4, 4, 4)),
    case(aten.max_pool2d_with_indices.default, "f0 f1 f2 f3",
         lambda x: F.max_pool2d(x, 2, return_indices=True), real(4, 4, 4, 4)),
    case(aten.max_pool3d.default, "f0 f1 f2 f3 f4", lambda x: F.max_pool3d(x, 2), real(4, 4, 4, 4, 4)),
    case(aten.unfold.default, "", lambda x: x.unfold(0, 1, 1) * 2, real(), linear=1),
    case(aten.col2im.default, "b c s0", lambda x: F.fold(x, (4, 4), 2), real(2, 8, 9), linear=1),
    case(aten.col2im.default, "b c s1", lambda x: F.fold(x, (2, 5), 2), real(2, 8, 4), linear=1),
    case(aten.im2col.default, "b c s0", lambda x: F.unfold(x, 3, padding=1), real(2, 2, 4, 4), linear=1),
    case(aten.im2col.default, "b c s1", lambda x: F.unfold(x, (2, 1)), real(2, 2, 2, 4), linear=1),
    case(aten.max_pool1d_with_indices.default, "f0 f1 f2",
         lambda x: F.max_pool1d(x, 3, 1, 1, return_indices=True), real(4, 4, 4)),
    case(aten.max_pool3d_with_indices.default, "f0 f1 f2 f3 f4",
         lambda x: F.max_pool3d(x, 2, 1, return_indices=True), real(2, 2, 3, 3, 3)),
    case(aten.max_pool2d_with_indices_backward.default, "f0 f1",
         lambda g, x: aten.max_pool2d_with_indices_backward(
             g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, F.max_pool2d(x, 2, return_indices=True)[1]),
         fixed(4, 4, 2, 2), fixed(4, 4, 4, 4)),
    case(aten.max_unpool2d.default, "f0 f1",
         lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), real(4, 4, 4, 4)),
    case(aten.max_unpool3d.default, "f0 f1",
         lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), real(2, 2, 4, 4, 4)),
    case(aten.unfold.default, "f0 f1", lambda x: x.unfold(1, 2, 1) * 2, real(4, 4), linear=1),
    case(aten.col2im.default, "b s1",
         lambda x: torch.istft(torch.fft.rfft(x, dim=1), 4, window=torch.ones(4).double()), real(4, 4, 8), linear=1),
    case(aten.col2im.default, "s1",
         lambda x, w: torch.istft(torch.fft.rfft(x, dim=0), 8, 4, 6, w, normalized=True, length=15),
         real(8, 4), positive(6), linear=1),
]  # fmt: skip
