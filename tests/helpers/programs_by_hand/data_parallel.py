"""Training loops whose batch is split over `dp`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import partway as pw
from partway import ops
from programs_by_hand.cases import Case, random, right, wrong

# -- One step of gradient descent

RATE = 0.1


def step(x, y, weight, bias):
    loss = F.mse_loss(torch.tanh(x @ weight) + bias, y)
    dw, db = torch.autograd.grad(loss, (weight, bias))
    return loss, weight - RATE * dw, bias - RATE * db


STEP = Case(
    step, (random(8, 6), random(8, 4), random(6, 4), random(4)), (("dp", None), ("dp", None), None, None), None,
    {"dp": 4},
)  # fmt: skip


@right(STEP)
def step_with_means(x, y, weight, bias):
    loss = F.mse_loss(torch.tanh(x @ weight) + bias, y)
    dw, db = (ops.all_reduce(d, "mean", group="dp") for d in torch.autograd.grad(loss, (weight, bias)))
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db


@right(STEP)
def step_with_a_share_of_the_loss(x, y, weight, bias):
    share = F.mse_loss(torch.tanh(x @ weight) + bias, y, reduction="sum") / (y.numel() * pw.axis_size("dp"))
    dw, db = (ops.all_reduce(d, group="dp") for d in torch.autograd.grad(share, (weight, bias)))
    return ops.all_reduce(share, group="dp"), weight - RATE * dw, bias - RATE * db


@right(STEP)
def step_in_one_bucket(x, y, weight, bias):
    loss = F.mse_loss(torch.tanh(x @ weight) + bias, y)
    grads = torch.autograd.grad(loss, (weight, bias))
    flat = ops.all_reduce(torch.cat([d.flatten() for d in grads]), group="dp") / pw.axis_size("dp")
    dw, db = flat[: weight.numel()].view_as(weight), flat[weight.numel() :]
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db


@right(STEP)
def step_with_scattered_gradients(x, y, weight, bias):
    loss = F.mse_loss(torch.tanh(x @ weight) + bias, y)
    dw, db = torch.autograd.grad(loss, (weight, bias))
    own = ops.reduce_scatter(torch.cat([dw, db[None], torch.zeros(1, 4)]), "mean", 0, group="dp")
    dw, db, _ = ops.all_gather(own, 0, group="dp").split([6, 1, 1])
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db[0]


@right(STEP)
def step_from_rank_0(x, y, weight, bias):
    weight, bias = (ops.broadcast(p.detach(), 0, group="dp").requires_grad_() for p in (weight, bias))
    loss = F.mse_loss(torch.tanh(x @ weight) + bias, y)
    dw, db = (ops.all_reduce(d, "mean", group="dp") for d in torch.autograd.grad(loss, (weight, bias)))
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db


@wrong(STEP)
def step_without_reductions(x, y, weight, bias):
    h = torch.tanh(x @ weight)  # wrong: GRADIENT
    loss = F.mse_loss(h + bias, y)  # wrong: GRADIENT
    dw, db = torch.autograd.grad(loss, (weight, bias))
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db


@wrong(STEP)
def step_with_sums_of_means(x, y, weight, bias):
    loss = F.mse_loss(torch.tanh(x @ weight) + bias, y)  # wrong: LOCAL_COUNT
    dw, db = (ops.all_reduce(d, group="dp") for d in torch.autograd.grad(loss, (weight, bias)))
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db


@wrong(STEP)
def step_that_forgets_one(x, y, weight, bias):
    h = torch.tanh(x @ weight) + bias  # wrong: GRADIENT
    loss = F.mse_loss(h, y)
    dw, db = torch.autograd.grad(loss, (weight, bias))
    dw = ops.all_reduce(dw, "mean", group="dp")
    return ops.all_reduce(loss, "mean", group="dp"), weight - RATE * dw, bias - RATE * db


@wrong(STEP)
def step_averaged_twice(x, y, weight, bias):
    share = F.mse_loss(torch.tanh(x @ weight) + bias, y) / pw.axis_size("dp")
    grads = torch.autograd.grad(share, (weight, bias))
    dw, db = (ops.all_reduce(d, "mean", group="dp") for d in grads)  # wrong: MEAN_OF_PARTS
    return ops.all_reduce(share, group="dp"), weight - RATE * dw, bias - RATE * db


# -- Gradients of two halves of a batch, accumulated


def accumulated(x, y, weight):
    loss = F.mse_loss(torch.tanh(x @ weight), y)
    return torch.autograd.grad(loss, weight)[0]


ACCUMULATED = Case(
    accumulated, (random(8, 6), random(8, 4), random(6, 4)), (("dp", None), ("dp", None), None), None, {"dp": 2}
)


@right(ACCUMULATED)
def accumulated_then_reduced(x, y, weight):
    total = torch.zeros_like(weight)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        total += torch.autograd.grad(F.mse_loss(torch.tanh(a @ weight), b) / 2, weight)[0]
    return ops.all_reduce(total, "mean", group="dp")


@right(ACCUMULATED)
def reduced_each_time(x, y, weight):
    total = torch.zeros_like(weight)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        grad = torch.autograd.grad(F.mse_loss(torch.tanh(a @ weight), b) / 2, weight)[0]
        total += ops.all_reduce(grad, "mean", group="dp")
    return total


@wrong(ACCUMULATED, told=False)
def reduced_what_was_reduced(x, y, weight):
    total = torch.zeros_like(weight)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        total = total + torch.autograd.grad(F.mse_loss(torch.tanh(a @ weight), b) / 2, weight)[0]
        total = ops.all_reduce(total, group="dp")
    return total / pw.axis_size("dp")


# -- Weight decay


def decayed(x, y, weight):
    loss = F.mse_loss(torch.tanh(x @ weight), y)
    return torch.autograd.grad(loss, weight)[0] + 0.01 * weight


DECAYED = Case(decayed, (random(8, 6), random(8, 4), random(6, 4)), (("dp", None), ("dp", None), None), None, {"dp": 2})


@right(DECAYED)
def decay_after_the_mean(x, y, weight):
    loss = F.mse_loss(torch.tanh(x @ weight), y)
    return ops.all_reduce(torch.autograd.grad(loss, weight)[0], "mean", group="dp") + 0.01 * weight


@right(DECAYED)
def decay_within_the_mean(x, y, weight):
    loss = F.mse_loss(torch.tanh(x @ weight), y)
    return ops.all_reduce(torch.autograd.grad(loss, weight)[0] + 0.01 * weight, "mean", group="dp")


@wrong(DECAYED)
def decay_on_every_rank(x, y, weight):
    share = F.mse_loss(torch.tanh(x @ weight), y) / pw.axis_size("dp")
    grad = torch.autograd.grad(share, weight)[0] + 0.01 * weight  # wrong: ON_EVERY_RANK
    return ops.all_reduce(grad, group="dp")


@wrong(DECAYED)
def decay_summed(x, y, weight):
    share = F.mse_loss(torch.tanh(x @ weight), y) / pw.axis_size("dp")
    decay = ops.all_reduce(0.01 * weight, group="dp")  # wrong: TWICE
    return ops.all_reduce(torch.autograd.grad(share, weight)[0], group="dp") + decay


# -- Gradients clipped to a norm: one parameter is split, one is whole


def clipped(split, whole):
    norm = (split.square().sum() + whole.square().sum()).sqrt()
    return split / norm, whole / norm


CLIPPED = Case(clipped, (random(8, 3), random(5)), (("dp", None), None), (("dp", None), None), {"dp": 4})


@right(CLIPPED)
def clipped_by_rank(split, whole):
    norm = (ops.all_reduce(split.square().sum(), group="dp") + whole.square().sum()).sqrt()
    return split / norm, whole / norm


@right(CLIPPED)
def clipped_by_shares(split, whole):
    squares = split.square().sum() + whole.square().sum() / pw.axis_size("dp")
    norm = ops.all_reduce(squares, group="dp").sqrt()
    return split / norm, whole / norm


@wrong(CLIPPED)
def clipped_to_its_own_norm(split, whole):
    norm = (split.square().sum() + whole.square().sum()).sqrt()  # wrong: ON_EVERY_RANK
    return split / norm, whole / norm


@wrong(CLIPPED)
def clipped_with_one_counted_often(split, whole):
    squares = split.square().sum() + whole.square().sum()  # wrong: ON_EVERY_RANK
    norm = ops.all_reduce(squares, group="dp").sqrt()
    return split / norm, whole / norm


@wrong(CLIPPED)
def clipped_to_a_sum_of_norms(split, whole):
    own = split.square().sum().sqrt()  # wrong: MISSING_SUM
    norm = (ops.all_reduce(own, group="dp").square() + whole.square().sum()).sqrt()
    return split / norm, whole / norm


# -- Statistics of a batch


def normalized(x, weight):
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() * weight


NORMALIZED = Case(normalized, (random(8, 3) + 2, random(3)), (("dp", None), None), (("dp", None),), {"dp": 4})


@right(NORMALIZED)
def normalized_by_moments(x, weight):
    mean = ops.all_reduce(x.mean(0), "mean", group="dp")
    squares = ops.all_reduce(x.square().mean(0), "mean", group="dp")
    return (x - mean) / (squares - mean.square() + 1e-5).sqrt() * weight


@right(NORMALIZED)
def normalized_in_two_passes(x, weight):
    mean = ops.all_reduce(x.mean(0), "mean", group="dp")
    variance = ops.all_reduce((x - mean).square().mean(0), "mean", group="dp")
    return (x - mean) / (variance + 1e-5).sqrt() * weight


@wrong(NORMALIZED)
def normalized_by_its_own(x, weight):
    mean = x.mean(0)  # wrong: LOCAL_COUNT
    variance = x.var(0, correction=0)  # wrong: OF_A_SLICE
    return (x - mean) / (variance + 1e-5).sqrt() * weight


@wrong(NORMALIZED)
def normalized_by_a_mean_of_variances(x, weight):
    mean = ops.all_reduce(x.mean(0), "mean", group="dp")
    variance = x.var(0, correction=0)  # wrong: OF_A_SLICE
    variance = ops.all_reduce(variance, "mean", group="dp")
    return (x - mean) / (variance + 1e-5).sqrt() * weight
