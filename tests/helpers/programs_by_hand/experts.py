"""Mixtures of experts, and meshes of two axes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import partway as pw
from partway import ops
from programs_by_hand.cases import Case, random, right, wrong

# -- Experts split over `ep`, a router that every rank has


def routed_step(x, router, experts, y):
    gates = torch.softmax(x @ router, -1)
    h = torch.einsum("ne,eio,ni->no", gates, experts, x)
    loss = F.mse_loss(h, y)
    return loss, *torch.autograd.grad(loss, (router, experts))


ROUTED = Case(
    routed_step, (random(6, 4), random(4, 4), random(4, 4, 3), random(6, 3)), (None, None, ("ep", None, None), None),
    (None, None, ("ep", None, None)), {"ep": 4},
)  # fmt: skip


def own_gates(gates: torch.Tensor) -> torch.Tensor:
    return gates.chunk(pw.axis_size("ep"), -1)[pw.axis_index("ep")]


@right(ROUTED)
def routed_by_rank(x, router, experts, y):
    gates = own_gates(torch.softmax(x @ router, -1))
    h = ops.all_reduce(torch.einsum("ne,eio,ni->no", gates, experts, x), group="ep")
    loss = F.mse_loss(h, y)
    drouter, dexperts = torch.autograd.grad(loss / pw.axis_size("ep"), (router, experts))
    return loss, ops.all_reduce(drouter, group="ep"), dexperts


@wrong(ROUTED)
def routed_with_its_gradient_summed_twice(x, router, experts, y):
    gates = own_gates(torch.softmax(x @ router, -1))
    h = ops.all_reduce(torch.einsum("ne,eio,ni->no", gates, experts, x), group="ep")
    loss = F.mse_loss(h, y)
    drouter, dexperts = torch.autograd.grad(loss / pw.axis_size("ep"), (router, experts))
    drouter = ops.all_reduce(drouter, group="ep")
    drouter = ops.all_reduce(drouter, group="ep")  # wrong: TWICE
    return loss, drouter, dexperts


@wrong(ROUTED)
def routed_without_the_sum_of_its_gradient(x, router, experts, y):
    gates = torch.softmax(x @ router, -1)
    gates = own_gates(gates)
    h = torch.einsum("ne,eio,ni->no", gates, experts, x)  # wrong: GRADIENT
    loss = F.mse_loss(ops.all_reduce(h, group="ep"), y)
    return loss, *torch.autograd.grad(loss / pw.axis_size("ep"), (router, experts))


# -- Balance of experts: the product of two means over tokens, which are split


def balanced(x, router):
    gates = torch.softmax(x @ router, -1)
    chosen = F.one_hot(gates.argmax(-1), gates.shape[-1]).double()
    return (gates.mean(0) * chosen.mean(0)).sum() * gates.shape[-1]


BALANCED = Case(balanced, (random(8, 4), random(4, 3)), (("dp", None), None), None, {"dp": 4})


@right(BALANCED)
def balanced_by_rank(x, router):
    gates = torch.softmax(x @ router, -1)
    chosen = F.one_hot(gates.argmax(-1), gates.shape[-1]).double()
    means = [ops.all_reduce(z.mean(0), "mean", group="dp") for z in (gates, chosen)]
    return (means[0] * means[1]).sum() * gates.shape[-1]


@wrong(BALANCED)
def balanced_on_each_rank(x, router):
    gates = torch.softmax(x @ router, -1)
    chosen = F.one_hot(gates.argmax(-1), gates.shape[-1]).double()
    own = (gates.mean(0) * chosen.mean(0)).sum() * gates.shape[-1]  # wrong: LOCAL_COUNT
    return ops.all_reduce(own, "mean", group="dp")


# -- A step on two axes: the batch over `dp`, the weights over `tp`


def step(x, up, down, y):
    loss = F.mse_loss(torch.relu(x @ up) @ down, y)
    return loss, *torch.autograd.grad(loss, (up, down))


TWO = Case(
    step, (random(8, 6), random(6, 8), random(8, 6), random(8, 6)),
    (("dp", None), (None, "tp"), ("tp", None), ("dp", None)), (None, (None, "tp"), ("tp", None)), {"dp": 2, "tp": 2},
)  # fmt: skip


@right(TWO)
def step_on_two_axes(x, up, down, y):
    loss = F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y)
    grads = torch.autograd.grad(loss / pw.axis_size("tp"), (up, down))
    loss, *grads = (ops.all_reduce(z, "mean", group="dp") for z in (loss, *grads))
    return loss, *grads


@right(TWO)
def step_with_scattered_rows(x, up, down, y):
    h = ops.reduce_scatter(torch.relu(x @ up) @ down, "mean", 1, group="tp") * pw.axis_size("tp")
    h = ops.all_gather(h, 1, group="tp")
    share = F.mse_loss(h, y) / pw.axis_size(("tp", "dp"))
    loss = ops.all_reduce(share, group=("dp", "tp"))
    return loss, *(ops.all_reduce(d, group="dp") for d in torch.autograd.grad(share, (up, down)))


@wrong(TWO)
def step_reduced_over_the_wrong_axis(x, up, down, y):
    loss = F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y)
    grads = torch.autograd.grad(loss / pw.axis_size("tp"), (up, down))
    dup, ddown = (ops.all_reduce(d, "mean", group="tp") for d in grads)  # wrong: SLICES
    return ops.all_reduce(loss, "mean", group="dp"), dup, ddown


@wrong(TWO)
def step_reduced_over_all_ranks(x, up, down, y):
    loss = F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y)
    grads = torch.autograd.grad(loss / pw.axis_size("tp"), (up, down))
    dup, ddown = (ops.all_reduce(d, "mean") for d in grads)  # wrong: SLICES
    return ops.all_reduce(loss, "mean", group="dp"), dup, ddown


@wrong(TWO)
def step_with_the_loss_summed_over_all_ranks(x, up, down, y):
    loss = F.mse_loss(ops.all_reduce(torch.relu(x @ up) @ down, group="tp"), y)
    grads = torch.autograd.grad(loss / pw.axis_size("tp"), (up, down))
    dup, ddown = (ops.all_reduce(d, "mean", group="dp") for d in grads)
    share = loss / pw.axis_size("dp")
    return ops.all_reduce(share), dup, ddown  # wrong: TWICE


@wrong(TWO)
def step_with_two_mistakes(x, up, down, y):
    h = torch.relu(x @ up)
    h = ops.all_reduce(h @ down, group="tp")  # wrong: GRADIENT
    loss = F.mse_loss(h, y)  # wrong: LOCAL_COUNT
    dup, ddown = torch.autograd.grad(loss / pw.axis_size("tp"), (up, down))
    return loss, ops.all_reduce(dup, "mean", group="dp"), ddown
