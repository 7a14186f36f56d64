"""Cases of `propagation/rules/layers/embedding_bag.py`."""

import torch
import torch.nn.functional as F

from cases import case, index, real

aten = torch.ops.aten

CASES = [
    case(aten.embedding_bag.default, "", lambda i, o, w: aten.embedding_bag(w, i, o + o, True)[0],
         index(4, 4), index(1, 1), real(4, 4)),
    case(aten.embedding_bag.padding_idx, "", lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 1]), mode="max"),
         index(4, 4), real(4, 4)),
]  # fmt: skip
