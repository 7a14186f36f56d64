"""Losses: over a vocabulary that is split, and over tokens of which some do not count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import partway as pw
from partway import ops
from programs_by_hand.cases import Case, integers, random, right, wrong

# -- Cross entropy, its classes split over `tp`


def entropy(logits, targets):
    return F.cross_entropy(logits, targets)


ENTROPY = Case(entropy, (random(6, 16), integers(16, 6)), ((None, "tp"), None), None, {"tp": 4})


def own_classes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    classes = logits.shape[-1]
    own = targets - pw.axis_index("tp") * classes
    return own.clamp(0, classes - 1), (own >= 0) & (own < classes)


@right(ENTROPY)
def entropy_by_rank(logits, targets):
    top = ops.all_reduce(logits.detach().amax(-1), "max", group="tp")
    total = ops.all_reduce((logits - top[:, None]).exp().sum(-1), group="tp")
    own, mine = own_classes(logits, targets)
    chosen = ops.all_reduce(logits.gather(1, own[:, None])[:, 0] * mine, group="tp")
    return (top + total.log() - chosen).mean()


@right(ENTROPY)
def entropy_of_logarithms(logits, targets):
    pieces = ops.all_gather(torch.logsumexp(logits, -1, keepdim=True), 1, group="tp")
    own, mine = own_classes(logits, targets)
    chosen = ops.all_reduce(torch.where(mine, logits.gather(1, own[:, None])[:, 0], 0.0), group="tp")
    return (torch.logsumexp(pieces, -1) - chosen).mean()


@wrong(ENTROPY)
def entropy_without_the_sum_of_what_is_chosen(logits, targets):
    top = ops.all_reduce(logits.detach().amax(-1), "max", group="tp")
    total = ops.all_reduce((logits - top[:, None]).exp().sum(-1), group="tp")
    own, mine = own_classes(logits, targets)
    chosen = logits.gather(1, own[:, None])[:, 0] * mine
    return (top + total.log() - chosen).mean()  # wrong: ON_EVERY_RANK


@wrong(ENTROPY)
def entropy_with_logarithms_of_addends(logits, targets):
    top = ops.all_reduce(logits.detach().amax(-1), "max", group="tp")
    total = (logits - top[:, None]).exp().sum(-1)
    total = ops.all_reduce(total.log(), group="tp")  # wrong: MISSING_SUM
    own, mine = own_classes(logits, targets)
    chosen = ops.all_reduce(logits.gather(1, own[:, None])[:, 0] * mine, group="tp")
    return (top + total - chosen).mean()


@wrong(ENTROPY)
def entropy_of_a_slice(logits, targets):
    own, _ = own_classes(logits, targets)
    scores = torch.log_softmax(logits, -1)  # wrong: OF_A_SLICE
    return ops.all_reduce(-scores.gather(1, own[:, None]).mean(), "mean", group="tp")


# -- With smoothed labels


def smoothed(logits, targets):
    return F.cross_entropy(logits, targets, label_smoothing=0.1)


SMOOTHED = Case(smoothed, ENTROPY.args, ENTROPY.in_strategy, None, {"tp": 4})


@right(SMOOTHED)
def smoothed_by_rank(logits, targets):
    top = ops.all_reduce(logits.detach().amax(-1), "max", group="tp")
    total = top + ops.all_reduce((logits - top[:, None]).exp().sum(-1), group="tp").log()
    own, mine = own_classes(logits, targets)
    chosen = ops.all_reduce(logits.gather(1, own[:, None])[:, 0] * mine, group="tp")
    average = ops.all_reduce(logits.mean(-1), "mean", group="tp")
    return (total - 0.9 * chosen - 0.1 * average).mean()


@wrong(SMOOTHED)
def smoothed_by_its_own_classes(logits, targets):
    top = ops.all_reduce(logits.detach().amax(-1), "max", group="tp")
    total = top + ops.all_reduce((logits - top[:, None]).exp().sum(-1), group="tp").log()
    own, mine = own_classes(logits, targets)
    chosen = ops.all_reduce(logits.gather(1, own[:, None])[:, 0] * mine, group="tp")
    average = logits.mean(-1)  # wrong: LOCAL_COUNT
    return (total - 0.9 * chosen - 0.1 * average).mean()


# -- A mean over the tokens that count, which ranks have in different numbers


def masked(losses, mask):
    return (losses * mask).sum() / mask.sum()


COUNTS = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
MASKED = Case(masked, (random(4, 4), COUNTS), (("dp", None), ("dp", None)), None, {"dp": 4})


@right(MASKED)
def masked_by_rank(losses, mask):
    total, count = (ops.all_reduce(x, group="dp") for x in ((losses * mask).sum(), mask.sum()))
    return total / count


@right(MASKED)
def masked_by_shares(losses, mask):
    count = ops.all_reduce(mask.sum(), "sum", group="dp")
    return ops.all_reduce((losses * mask).sum() / count, group="dp")


@right(MASKED)
def masked_in_one_message(losses, mask):
    both = ops.all_reduce(torch.stack([(losses * mask).sum(), mask.sum()]), group="dp")
    return both[0] / both[1]


@wrong(MASKED)
def masked_by_local_counts(losses, mask):
    mean = (losses * mask).sum() / mask.sum()  # wrong: LOCAL_COUNT
    return ops.all_reduce(mean, "mean", group="dp")


@wrong(MASKED)
def masked_by_a_local_count(losses, mask):
    total = ops.all_reduce((losses * mask).sum(), group="dp")
    return total / mask.sum()  # wrong: LOCAL_COUNT


@wrong(MASKED)
def masked_with_a_mean_of_counts(losses, mask):
    total = ops.all_reduce((losses * mask).sum(), group="dp")
    count = ops.all_reduce(mask.double().sum(), "mean", group="dp")  # wrong: MEAN_OF_PARTS
    return total / count


# -- Accuracy of a classifier


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).double().mean()


ACCURACY = Case(accuracy, (random(8, 3), integers(3, 8)), (("dp", None), ("dp",)), None, {"dp": 4})


@right(ACCURACY)
def accuracy_by_rank(logits, targets):
    return ops.all_reduce((logits.argmax(-1) == targets).double().mean(), "mean", group="dp")


@wrong(ACCURACY)
def accuracy_of_its_own(logits, targets):
    return (logits.argmax(-1) == targets).double().mean()  # wrong: LOCAL_COUNT
