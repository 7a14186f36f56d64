"""Cases of `propagation/rules/layers/convolution.py`."""

import torch
import torch.nn.functional as F

from cases import case, real
from partway.propagation.ops.padded_convolution import padded_convolution

aten = torch.ops.aten

CASES = [
    case(aten.conv1d.default, "b o i s0", lambda x, w, b: F.conv1d(x, w, b, padding=1),
         real(4, 4, 5), real(4, 4, 3), real(4), linear=2),
    case(aten.conv1d.padding, "b o i s0", lambda x, w: F.conv1d(x, w, padding="same"),
         real(2, 4, 5), real(4, 4, 3), linear=2),
    case(aten.conv2d.padding, "b g s0 s1", lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=2),
         real(2, 4, 5, 5), real(4, 2, 3, 3), real(4), linear=2),
    case(aten.conv3d.padding, "b o i s0 s1 s2", lambda x, w, b: F.conv3d(x, w, b, padding="valid"),
         real(2, 4, 3, 3, 3), real(4, 4, 2, 2, 2), real(4), linear=2),
    case(aten.conv2d.default, "b o i s0 s1", lambda x, w: F.conv2d(x, w, stride=2),
         real(4, 4, 5, 5), real(4, 4, 3, 3), linear=2),
    case(aten.conv2d.default, "b g s0 s1", lambda x, w, b: F.conv2d(x, w, b, groups=4),
         real(4, 8, 4, 4), real(8, 2, 3, 3), real(8), linear=2),
    case(aten.conv2d.default, "b g s0 s1", lambda x, w: F.conv2d(x, w, groups=2),
         real(2, 4, 4, 4), real(8, 2, 3, 3), linear=2),
    case(aten.conv2d.default, "o i s0 s1", F.conv2d, real(4, 4, 4), real(4, 4, 3, 3), real(4), linear=2),
    case(aten.conv3d.default, "b o i s0 s1 s2", F.conv3d,
         real(2, 4, 3, 3, 3), real(4, 4, 2, 2, 2), real(4), linear=2),
    case(aten.conv_transpose1d.default, "b i o s0", lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1),
         real(2, 2, 4), real(2, 2, 3), real(2), linear=2),
    case(aten.conv_transpose2d.input, "b g s0 s1", lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1, 2),
         real(2, 4, 4, 3), real(4, 1, 3, 3), linear=2),
    case(aten.conv_transpose3d.input, "b i o s0 s1 s2", lambda x, w: F.conv_transpose3d(x, w, dilation=2),
         real(2, 2, 2, 2, 2), real(2, 2, 2, 2, 2), linear=2),
    case(padded_convolution, "b i o s0 s1",
         lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), w, b), real(2, 2, 4, 4), real(2, 2, 3, 3),
         real(2), linear=2),
    case(padded_convolution, "b g s0", lambda x, w: F.conv1d(F.pad(x, (0, 2), value=1.5), w, groups=2),
         real(2, 4, 4), real(4, 2, 3), linear=1),
]  # fmt: skip
