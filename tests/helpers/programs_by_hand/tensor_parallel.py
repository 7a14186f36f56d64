"""Weights that are split over `tp`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import partway as pw
from partway import ops
from programs_by_hand.cases import Case, integers, random, right, wrong

# -- A Megatron block, forward


def mlp(x, up, down, bias):
    return F.gelu(x @ up) @ down + bias


MLP = Case(
    mlp, (random(8, 6), random(6, 8), random(8, 6), random(6)), (None, (None, "tp"), ("tp", None), None), None,
    {"tp": 4},
)  # fmt: skip


@right(MLP)
def mlp_by_rank(x, up, down, bias):
    return ops.all_reduce(F.gelu(x @ up) @ down, group="tp") + bias


@right(MLP)
def mlp_with_a_share_of_the_bias(x, up, down, bias):
    return ops.all_reduce(F.gelu(x @ up) @ down + bias / pw.axis_size("tp"), group="tp")


@right(MLP)
def mlp_with_the_bias_on_one_rank(x, up, down, bias):
    y = F.gelu(x @ up) @ down
    if pw.axis_index("tp") == 0:
        y = y + bias
    return ops.all_reduce(y, group="tp")


@right(MLP)
def mlp_scattered_and_gathered(x, up, down, bias):
    y = ops.reduce_scatter(F.gelu(x @ up) @ down, "sum", 0, group="tp")
    return ops.all_gather(y + bias, 0, group="tp")


@wrong(MLP)
def mlp_without_its_sum(x, up, down, bias):
    y = F.gelu(x @ up) @ down
    return y + bias  # wrong: ON_EVERY_RANK


@wrong(MLP)
def mlp_with_the_bias_on_every_rank(x, up, down, bias):
    y = F.gelu(x @ up) @ down + bias  # wrong: ON_EVERY_RANK
    return ops.all_reduce(y, group="tp")


@wrong(MLP)
def mlp_summed_twice(x, up, down, bias):
    y = ops.all_reduce(F.gelu(x @ up) @ down, group="tp")
    y = ops.all_reduce(y, group="tp")  # wrong: TWICE
    return y + bias


@wrong(MLP)
def mlp_averaged(x, up, down, bias):
    y = ops.all_reduce(F.gelu(x @ up) @ down, "mean", group="tp")  # wrong: MEAN_OF_PARTS
    return y + bias


MLP_OF_TWO = Case(lambda x, up, down: F.gelu(F.gelu(x @ up) @ down), MLP.args[:3], MLP.in_strategy[:3], None, {"tp": 4})


@wrong(MLP_OF_TWO)
def mlp_summed_too_late(x, up, down):
    y = F.gelu(x @ up) @ down
    return ops.all_reduce(F.gelu(y), group="tp")  # wrong: MISSING_SUM


# -- The same with gradients: of one objective, which every rank has


def mlp_step(x, up, down, y):
    loss = F.mse_loss(torch.relu(x @ up) @ down, y)
    return loss, *torch.autograd.grad(loss, (x, up, down))


STEP = Case(
    mlp_step, (random(8, 6), random(6, 8), random(8, 6), random(8, 6)),
    (None, (None, "tp"), ("tp", None), None), (None, None, (None, "tp"), ("tp", None)), {"tp": 4},
)  # fmt: skip


@right(STEP)
def step_by_rank(x, up, down, y):
    loss = F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y)
    dx, dup, ddown = torch.autograd.grad(loss / pw.axis_size("tp"), (x, up, down))
    return loss, ops.all_reduce(dx, group="tp"), dup, ddown


@right(STEP)
def step_with_an_averaged_loss(x, up, down, y):
    loss = ops.all_reduce(F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y), "mean", group="tp")
    dx, dup, ddown = torch.autograd.grad(loss / pw.axis_size("tp"), (x, up, down))
    return loss, ops.all_reduce(dx, group="tp"), dup, ddown


class Enter(torch.autograd.Function):
    """Megatron's f: nothing forward, a sum backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return ops.all_reduce(dx, group="tp")


class Leave(torch.autograd.Function):
    """Megatron's g: a sum forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        return ops.all_reduce(x, group="tp")

    @staticmethod
    def backward(ctx, dx):
        return dx.clone()


@right(STEP)
def step_of_megatron(x, up, down, y):
    loss = F.mse_loss(Leave.apply(torch.relu(Enter.apply(x) @ up) @ down), y)
    return loss, *torch.autograd.grad(loss, (x, up, down))


@wrong(STEP)
def step_of_megatron_without_f(x, up, down, y):
    h = torch.relu(x @ up)  # wrong: GRADIENT
    loss = F.mse_loss(Leave.apply(h @ down), y)
    return loss, *torch.autograd.grad(loss, (x, up, down))


@wrong(STEP)
def step_of_all_objectives(x, up, down, y):
    h = ops.all_reduce(torch.relu(x @ up) @ down, group="tp")  # wrong: TWICE
    loss = F.mse_loss(h, y)
    dx, dup, ddown = torch.autograd.grad(loss, (x, up, down))
    return loss, ops.all_reduce(dx, "mean", group="tp"), dup, ddown


@wrong(STEP)
def step_without_the_sum_of_its_input_gradient(x, up, down, y):
    h = torch.relu(x @ up)  # wrong: GRADIENT
    loss = F.mse_loss(ops.all_reduce(h @ down, group="tp"), y)
    return loss, *torch.autograd.grad(loss / pw.axis_size("tp"), (x, up, down))


@wrong(STEP)
def step_that_sums_what_is_split(x, up, down, y):
    loss = F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y)
    dx, dup, ddown = torch.autograd.grad(loss / pw.axis_size("tp"), (x, up, down))
    dup = ops.all_reduce(dup, group="tp")  # wrong: SLICES
    return loss, ops.all_reduce(dx, group="tp"), dup, ddown


# -- A low-rank adapter of a layer that is split by columns: A is whole, B is split


def adapter_step(x, weight, a, b, y):
    loss = F.mse_loss(x @ weight + (x @ a) @ b, y)
    return loss, *torch.autograd.grad(loss, (a, b))


ADAPTER = Case(
    adapter_step, (random(8, 6), random(6, 8), random(6, 2), random(2, 8), random(8, 8)),
    (None, (None, "tp"), None, (None, "tp"), (None, "tp")), (None, None, (None, "tp")), {"tp": 2},
)  # fmt: skip


@right(ADAPTER)
def adapter_by_rank(x, weight, a, b, y):
    share = F.mse_loss(x @ weight + (x @ a) @ b, y) / pw.axis_size("tp")
    da, db = torch.autograd.grad(share, (a, b))
    return ops.all_reduce(share, group="tp"), ops.all_reduce(da, group="tp"), db


@wrong(ADAPTER)
def adapter_without_a_sum(x, weight, a, b, y):
    low = x @ a
    h = x @ weight + low @ b  # wrong: GRADIENT
    share = F.mse_loss(h, y) / pw.axis_size("tp")
    da, db = torch.autograd.grad(share, (a, b))
    return ops.all_reduce(share, group="tp"), da, db


# -- An embedding split by rows


def embedded(ids, table):
    return F.embedding(ids, table)


TABLE = Case(embedded, (integers(16, 2, 5), random(16, 4)), (None, ("tp", None)), None, {"tp": 4})


def own_rows(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    ids = ids - pw.axis_index("tp") * len(table)
    mine = (ids >= 0) & (ids < len(table))
    return ids.clamp(0, len(table) - 1), mine


@right(TABLE)
def rows_by_rank(ids, table):
    ids, mine = own_rows(ids, table)
    return ops.all_reduce(F.embedding(ids, table) * mine[..., None], group="tp")


@right(TABLE)
def rows_after_all_are_there(ids, table):
    return F.embedding(ids, ops.all_gather(table, 0, group="tp"))


@wrong(TABLE)
def rows_without_a_sum(ids, table):
    ids, mine = own_rows(ids, table)
    return F.embedding(ids, table) * mine[..., None]  # wrong: MISSING_SUM


@wrong(TABLE, told=False)
def rows_without_a_mask(ids, table):
    ids, _ = own_rows(ids, table)
    return ops.all_reduce(F.embedding(ids, table), group="tp")


# -- A table that is the head as well


def tied_step(ids, table, targets):
    loss = F.mse_loss(torch.tanh(F.embedding(ids, table)) @ table.t(), targets)
    return loss, torch.autograd.grad(loss, table)[0]


TIED = Case(
    tied_step, (integers(8, 6), random(8, 4), random(6, 8)), (None, ("tp", None), (None, "tp")), (None, ("tp", None)),
    {"tp": 2},
)  # fmt: skip


@right(TIED)
def tied_by_rank(ids, table, targets):
    own, mine = own_rows(ids, table)
    h = ops.all_reduce(F.embedding(own, table) * mine[..., None], group="tp")
    share = F.mse_loss(torch.tanh(h) @ table.t(), targets) / pw.axis_size("tp")
    return ops.all_reduce(share, group="tp"), torch.autograd.grad(share, table)[0]


# -- A softmax over a dim that is split


def attention_scores(x, weight):
    return torch.softmax(x @ weight, -1)


SCORES = Case(attention_scores, (random(4, 6), random(6, 8)), (None, (None, "tp")), ((None, "tp"),), {"tp": 4})


@right(SCORES)
def softmax_by_rank(x, weight):
    scores = x @ weight
    top = ops.all_reduce(scores.amax(-1, keepdim=True), "max", group="tp")
    scores = (scores - top).exp()
    return scores / ops.all_reduce(scores.sum(-1, keepdim=True), group="tp")


@right(SCORES)
def softmax_of_all(x, weight):
    scores = torch.softmax(ops.all_gather(x @ weight, 1, group="tp"), -1)
    return scores.chunk(pw.axis_size("tp"), -1)[pw.axis_index("tp")]


@wrong(SCORES)
def softmax_of_a_slice(x, weight):
    return torch.softmax(x @ weight, -1)  # wrong: OF_A_SLICE


@wrong(SCORES)
def softmax_without_the_common_maximum(x, weight):
    scores = x @ weight
    scores = (scores - scores.amax(-1, keepdim=True)).exp()  # wrong: OF_A_SLICE
    return scores / ops.all_reduce(scores.sum(-1, keepdim=True), group="tp")


@wrong(SCORES)
def softmax_without_the_common_sum(x, weight):
    scores = x @ weight
    top = ops.all_reduce(scores.amax(-1, keepdim=True), "max", group="tp")
    scores = (scores - top).exp()
    return scores / scores.sum(-1, keepdim=True)  # wrong: MISSING_SUM


# -- What comes out has another layout than is said


COLUMNS = Case(lambda x, weight: x @ weight, (random(4, 6), random(6, 8)), (None, (None, "tp")), (None,), {"tp": 4})


@right(COLUMNS)
def columns_gathered(x, weight):
    return ops.all_gather(x @ weight, 1, group="tp")


@wrong(COLUMNS)
def columns_summed(x, weight):
    y = x @ weight
    return ops.all_reduce(y, group="tp")  # wrong: SLICES


@wrong(COLUMNS)
def columns_as_they_are(x, weight):
    return x @ weight  # wrong: LAYOUT
