"""Cases of `propagation/rules/layers/adaptive_pools.py`."""

import torch
import torch.nn.functional as F

from cases import case, real

aten = torch.ops.aten

CASES = [
    case(aten.adaptive_max_pool1d.default, "f0 f1", lambda x: F.adaptive_max_pool1d(x, 3), real(4, 4, 5)),
    case(aten.adaptive_max_pool2d.default, "f0 f1",
         lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), real(4, 4, 4, 4)),
    case(aten.adaptive_max_pool2d.default, "f0", lambda x: F.adaptive_max_pool2d(x, 1), real(4, 4, 4)),
    case(aten.adaptive_max_pool3d.default, "f0 f1",
         lambda x: F.adaptive_max_pool3d(x, (3, None, 1)), real(2, 4, 4, 2, 2)),
]  # fmt: skip
