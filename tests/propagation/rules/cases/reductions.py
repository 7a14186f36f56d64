"""Cases of `propagation/rules/tensors/reductions.py`."""

import torch

from cases import case, fixed, index, like_others, mask, real

aten = torch.ops.aten

CASES = [
    case(aten.amax.default, "f0 f1", lambda x: x.detach().amax(1) * x.sum(1), real(4, 4)),
    case(aten.amax.default, "f0 f1 f2", lambda x: x.detach().amax((0, -1), keepdim=True) * x, real(4, 4, 4)),
    case(aten.amax.default, "f0 f1", lambda x, i: i.amax() * x, real(4), index(9, 4, 4)),
    case(aten.amax.default, "f0 f1", lambda x, m: m.amax(0) * x, real(4), mask(4, 4)),
    case(aten.amax.default, "f0 f1", lambda x: x.amax(1), real(4, 4)),
    case(aten.sum.default, "f0 f1", lambda x: x.sum(), real(4, 4), linear=1),
    case(aten.sum.dim_IntList, "f0 f1", lambda x: x.sum(-1), real(4, 4), linear=1),
    case(aten.sum.dim_IntList, "f0 f1 f2", lambda x: x.sum((0, 2), keepdim=True), real(4, 4, 4), linear=1),
    case(aten.sum.default, "f0 f1", torch.trace, real(4, 2), linear=1),
    case(aten.amin.default, "f0 f2", lambda x: x.amin(1), real(4, 3, 4)),
    case(aten.histc.default, "f0 f1", lambda x, y: x.histc(3, -1.0, 1.0) * y, fixed(4, 4), real(3)),
    case(aten.histc.default, "", lambda x, y: x.histc(3) * y, fixed(4, 4), real(3)),
    case(aten.linalg_vector_norm.default, "f0", lambda x: torch.linalg.vector_norm(x, 3, 1), real(4, 4)),
    case(aten.logsumexp.default, "f0", lambda x: torch.complex(x, -x).logsumexp(1).real, real(4, 4)),
    case(aten.prod.default, "", lambda x: x.prod(), real(4, 4)),
    case(aten.prod.dim_int, "f1", lambda x: x.prod(0), real(4, 4)),
    *like_others(
    case(aten.linalg_matrix_norm.default, "f0", lambda x: torch.linalg.matrix_norm(x, 2), real(4, 3, 3)),
    case(aten.linalg_matrix_norm.str_ord, "f1", lambda x: torch.linalg.matrix_norm(x, "nuc", (0, 2), keepdim=True),
         real(3, 4, 3)),
    case(aten.linalg_norm.default, "", lambda x: torch.linalg.norm(x, 2), real(4, 4)),
    case(aten.linalg_norm.default, "f1", lambda x: torch.linalg.norm(x, 3, 0), real(4, 4)),
    case(aten.linalg_norm.ord_str, "", lambda x: torch.linalg.norm(x, "nuc"), real(4, 4)),
    case(aten.sum.dim_IntList, "f0 f1 f2", lambda x: torch.linalg.norm(x, "fro", (1, 2)), real(4, 4, 4), linear=1),
    ),
]  # fmt: skip
