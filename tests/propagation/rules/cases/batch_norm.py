"""Cases of `propagation/rules/layers/batch_norm.py`."""

import torch
import torch.nn.functional as F

from cases import case, fixed, positive, real
from partway.propagation.ops.batch_norm import moments, normalise, part_norm, sample_moments, statistics

aten = torch.ops.aten

CASES = [
    case(moments, "f0 f1", lambda x: moments(x, None), real(4, 4)),
    case(moments, "f0 f1 f2 f3", moments, real(4, 4, 4, 4), fixed(4)),
    case(normalise, "f0 f1", lambda x, m, v: normalise(x, m, v, None, None, 0.1), real(4, 4), real(4), positive(4),
         linear=1),
    case(normalise, "f0 f1 f2", lambda x, m, v, w: normalise(x, m, v, w, None, 0.1),
         real(4, 4, 4), real(4), positive(4), real(4), linear=1),
    case(normalise, "f0 f1 f2 f3", lambda x, m, v, w, b: normalise(x, m, v, w, b, 0.1),
         real(4, 4, 4, 4), real(4), positive(4), real(4), real(4), linear=1),
    case(normalise, "f0 f1", lambda x, m, v, b: normalise(x, m, v, None, b, 0.1),
         real(4, 4), real(4), positive(4), real(4), linear=1),
    case(normalise, "f0 f1 f2", lambda x, m, v: normalise(x, m, v, None, None, 0.1),
         real(4, 4, 4), real(4, 4), positive(4, 4), linear=1),
    case(normalise, "f0 f1 f2 f3", lambda x, m, v, w, b: normalise(x, m, v, w, b, 0.1),
         real(4, 4, 4, 4), real(4, 4), positive(4, 4), real(4), real(4), linear=1),
    case(normalise, "f0 f1 f2", lambda x, w, b: F.group_norm(x, 2, w, b), real(4, 4, 4), real(4), real(4), linear=1),
    case(part_norm, "f0 f2", lambda x: part_norm(x, None, None, 4, 0.1)[:2], real(4, 2, 4)),
    case(part_norm, "f0 f2", lambda x, w: part_norm(x, w, None, 4, 0.1)[:2], real(4, 2, 4), real(4)),
    case(part_norm, "f0 f2", lambda x, w, b: part_norm(x, w, b, 4, 0.1)[:2], real(4, 2, 4, 2, 2), real(4), real(4)),
    case(sample_moments, "f0 f1 f2", lambda x: sample_moments(x, None), real(4, 4, 4)),
    case(sample_moments, "f0 f1 f2 f3", sample_moments, real(4, 4, 4, 4), fixed(4, 4)),
    case(statistics, "f1 f2", lambda m, s: statistics(m, s, 2, torch.float64), positive(2, 4, 4), fixed(4, 4)),
    case(statistics, "f1", lambda m: statistics(m, None, 1, torch.float64), positive(2, 4)),
    case(statistics, "f1", lambda m, s: statistics(m, s, 2, torch.float64), positive(2, 4), fixed(4)),
]  # fmt: skip
