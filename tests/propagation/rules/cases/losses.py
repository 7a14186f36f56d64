"""Cases of `propagation/rules/layers/losses.py`."""

import torch
import torch.nn.functional as F

from cases import case, fixed, index, real, unit
from partway.propagation.ops.cross_entropy import class_terms
from partway.propagation.ops.ctc import ctc

aten = torch.ops.aten

CASES = [
    case(class_terms, "f0 f1", F.cross_entropy, real(4, 8), index(8, 4)),
    case(class_terms, "f0 f1", lambda x, t: F.cross_entropy(x, t, ignore_index=1), real(8, 4), index(4, 8)),
    case(class_terms, "f0 f1 f2",
         lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=3), real(4, 4, 4), index(4, 4, 4)),
    case(class_terms, "f0 f1 f2 f3", lambda x, t: F.cross_entropy(x, t, reduction="none"),
         real(2, 4, 4, 2), index(4, 2, 4, 2)),
    case(class_terms, "f1", F.cross_entropy, real(4), index(4)),
    case(class_terms, "f0", F.cross_entropy, real(4, 1), index(1, 4)),
    case(class_terms, "f0 f1", lambda x, t: F.nll_loss(x.log_softmax(-1), t), real(4, 4), index(4, 4)),
    case(class_terms, "f0 f1", lambda x, t: F.cross_entropy(1e4 * x, t), real(4, 4), index(4, 4)),
    case(aten.binary_cross_entropy.default, "f0 f1", F.binary_cross_entropy, unit(4, 4), unit(4, 4)),
    case(aten.binary_cross_entropy.default, "f0 f1",
         lambda x, t: F.binary_cross_entropy(x, t, reduction="none"), unit(4, 4), unit(4, 4)),
    case(aten.binary_cross_entropy_with_logits.default, "f0 f1",
         lambda x, t, p: F.binary_cross_entropy_with_logits(x, t, pos_weight=p, reduction="sum"),
         real(4, 4), unit(4, 4), fixed(4)),
    case(aten.cross_entropy_loss.default, "f0 f2",
         lambda x, t, w: F.cross_entropy(x, t, w, reduction="sum", ignore_index=1),
         real(4, 3, 4), index(3, 4, 4), fixed(3)),
    case(aten.cross_entropy_loss.default, "f0 f2", lambda x, t: F.cross_entropy(x, t.softmax(1)),
         real(4, 3, 4), real(4, 3, 4)),
    case(aten.cross_entropy_loss.default, "", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
         real(4), index(4)),
    case(aten.huber_loss.default, "f0 f1", F.huber_loss, real(4, 4), real(4, 4)),
    case(aten.kl_div.default, "f0 f1", lambda x, t: F.kl_div(x, t, reduction="batchmean"), real(4, 4), unit(4, 4)),
    case(aten.l1_loss.default, "f0 f1", F.l1_loss, real(4, 4), real(4, 4)),
    case(aten.mse_loss.default, "f0 f1", F.mse_loss, real(4, 4), real(4, 4)),
    case(aten.nll_loss_nd.default, "f0", F.nll_loss, real(4, 4), index(4, 4)),
    case(aten.smooth_l1_loss.default, "f0 f1", F.smooth_l1_loss, real(4, 4), real(4, 4)),
    case(aten.soft_margin_loss.default, "f0 f1", F.soft_margin_loss, real(4, 4), fixed(4, 4)),
    case(ctc, "n", lambda x, t, n, m: F.ctc_loss(x.log_softmax(2), t + 1, n + 3, m, zero_infinity=True),
         real(6, 4, 5), index(4, 4, 3), index(4, 4), index(4, 4)),
    case(ctc, "", lambda x, t: torch.ctc_loss(x.log_softmax(2), t, [6, 5, 4, 6], [3, 2, 1, 2], 4, 0),
         real(6, 4, 5), index(4, 8)),
    case(aten.multilabel_margin_loss.default, "f0",
         lambda x, t: F.multilabel_margin_loss(x, t, reduction="none"), real(4, 4), index(4, 4, 4)),
    case(aten.multilabel_margin_loss.default, "f0", F.multilabel_margin_loss, real(4, 4), index(4, 4, 4)),
    case(aten.multilabel_margin_loss.default, "",
         lambda x, t: F.multilabel_margin_loss(x, t, reduction="sum"), real(4), index(4, 4)),
]  # fmt: skip
