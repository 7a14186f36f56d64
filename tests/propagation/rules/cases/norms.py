"""Cases of `propagation/rules/layers/norms.py`."""

import torch
import torch.nn.functional as F

from cases import case, real

aten = torch.ops.aten

CASES = [
    case(aten.group_norm.default, "f0", lambda x, w, b: F.group_norm(x, 2, w, b), real(4, 4), real(4), real(4)),
    case(aten.group_norm.default, "f0", lambda x: F.group_norm(x, 1), real(4, 4, 1, 1)),
    case(aten.layer_norm.default, "f0 f1",
         lambda x, w, b: F.layer_norm(x, (4,), w, b), real(4, 4, 4), real(4), real(4)),
    case(aten.rms_norm.default, "f0 f1", lambda x, w: F.rms_norm(x, (4,), w), real(4, 4, 4), real(4)),
    case(aten.native_group_norm.default, "f0",
         lambda x, w, b: torch.native_group_norm(x, w, b, 4, 4, 1, 2, 0.1), real(4, 4), real(4), real(4)),
    case(aten.native_layer_norm.default, "f0",
         lambda x, w: torch.native_layer_norm(x, (3, 2), w, None, 0.1), real(4, 3, 2), real(3, 2)),
]  # fmt: skip
