"""Sequences that are split: over `tp` between the layers of tensor parallelism, over `cp` in attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import partway as pw
from partway import ops
from programs_by_hand.cases import Case, random, right, wrong

# -- A norm on a part of a sequence, before a layer that is split


def normed_step(x, scale, up, down, y):
    loss = F.mse_loss(torch.relu(F.layer_norm(x, (4,), scale) @ up) @ down, y)
    return loss, *torch.autograd.grad(loss, (scale, up, down))


NORMED = Case(
    normed_step, (random(8, 4), random(4), random(4, 8), random(8, 4), random(8, 4)),
    (("tp", None), None, (None, "tp"), ("tp", None), ("tp", None)), (None, None, (None, "tp"), ("tp", None)),
    {"tp": 2},
)  # fmt: skip


@right(NORMED)
def normed_by_rank(x, scale, up, down, y):
    h = ops.all_gather(F.layer_norm(x, (4,), scale), 0, group="tp")
    h = ops.reduce_scatter(torch.relu(h @ up) @ down, "sum", 0, group="tp")
    share = F.mse_loss(h, y) / pw.axis_size("tp")
    dscale, dup, ddown = torch.autograd.grad(share, (scale, up, down))
    return ops.all_reduce(share, group="tp"), ops.all_reduce(dscale, group="tp"), dup, ddown


@wrong(NORMED)
def normed_without_the_sum_of_its_scale(x, scale, up, down, y):
    h = F.layer_norm(x, (4,), scale)  # wrong: GRADIENT
    h = ops.all_gather(h, 0, group="tp")
    h = ops.reduce_scatter(torch.relu(h @ up) @ down, "sum", 0, group="tp")
    share = F.mse_loss(h, y) / pw.axis_size("tp")
    return ops.all_reduce(share, group="tp"), *torch.autograd.grad(share, (scale, up, down))


@wrong(NORMED)
def normed_with_an_averaged_scale(x, scale, up, down, y):
    h = ops.all_gather(F.layer_norm(x, (4,), scale), 0, group="tp")
    h = ops.reduce_scatter(torch.relu(h @ up) @ down, "sum", 0, group="tp")
    share = F.mse_loss(h, y) / pw.axis_size("tp")
    dscale, dup, ddown = torch.autograd.grad(share, (scale, up, down))
    dscale = ops.all_reduce(dscale, "mean", group="tp")  # wrong: MEAN_OF_PARTS
    return ops.all_reduce(share, group="tp"), dscale, dup, ddown


# -- Attention of a part of the queries


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


SIZES = (2, 4, 8, 4)  # batch, heads, positions, channels
SPLIT = ((None, None, "cp", None),) * 3
ATTENTION = Case(attention, tuple(random(*SIZES) for _ in range(3)), SPLIT, SPLIT[:1], {"cp": 4})


@right(ATTENTION)
def attention_to_all_keys(q, k, v):
    k, v = (ops.all_gather(x, 2, group="cp") for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


@right(ATTENTION)
def attention_in_a_ring(q, k, v):
    size = pw.axis_size("cp")
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    total, top, weights = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf), torch.zeros(q.shape[:-1])
    for _ in range(size):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        now = torch.maximum(top, scores.amax(-1))
        scores, before = (scores - now[..., None]).exp(), (top - now).exp()
        total = total * before[..., None] + scores @ v
        weights, top = weights * before + scores.sum(-1), now
        k, v = ops.permute(k, ring, group="cp"), ops.permute(v, ring, group="cp")
    return total / weights[..., None]


@right(ATTENTION)
def attention_by_heads(q, k, v):
    q, k, v = (ops.all_to_all(x, 1, 2, group="cp") for x in (q, k, v))
    return ops.all_to_all(F.scaled_dot_product_attention(q, k, v), 2, 1, group="cp")


@wrong(ATTENTION)
def attention_to_its_own_keys(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # wrong: OF_A_SLICE
    return torch.softmax(scores, -1) @ v


@wrong(ATTENTION, told=False)
def attention_to_all_keys_and_its_own_values(q, k, v):
    k = ops.all_gather(k, 2, group="cp")
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    v = v.repeat(1, 1, pw.axis_size("cp"), 1)
    return torch.softmax(scores, -1) @ v


@wrong(ATTENTION, told=False)
def attention_in_a_ring_that_misses_a_block(q, k, v):
    size = pw.axis_size("cp")
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    total, weights = torch.zeros_like(q), torch.zeros(q.shape[:-1])
    for _ in range(max(1, size - 1)):
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).exp()
        total, weights = total + scores @ v, weights + scores.sum(-1)
        k, v = ops.permute(k, ring, group="cp"), ops.permute(v, ring, group="cp")
    return total / weights[..., None]


@wrong(ATTENTION, told=False)
def attention_in_a_ring_without_the_common_maximum(q, k, v):
    size = pw.axis_size("cp")
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    total, weights = torch.zeros_like(q), torch.zeros(q.shape[:-1])
    for _ in range(size):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        total, weights = total + scores @ v, weights + scores.sum(-1)
        k, v = ops.permute(k, ring, group="cp"), ops.permute(v, ring, group="cp")
    return total / weights[..., None]


# -- Positions


def turned(x):
    angles = torch.arange(x.shape[0])[:, None] / 10.0
    return x * angles.cos() + x.roll(1, -1) * angles.sin()


TURNED = Case(turned, (random(8, 4),), (("cp", None),), (("cp", None),), {"cp": 4})


@right(TURNED)
def turned_from_where_it_starts(x):
    first = pw.axis_index("cp") * x.shape[0]
    angles = (torch.arange(x.shape[0]) + first)[:, None] / 10.0
    return x * angles.cos() + x.roll(1, -1) * angles.sin()


@right(TURNED)
def turned_by_its_slice(x):
    angles = torch.arange(x.shape[0] * pw.axis_size("cp"))[:, None] / 10.0
    angles = angles.chunk(pw.axis_size("cp"))[pw.axis_index("cp")]
    return x * angles.cos() + x.roll(1, -1) * angles.sin()


@wrong(TURNED)
def turned_from_zero(x):
    angles = torch.arange(x.shape[0])[:, None] / 10.0  # wrong: LOCAL_SIZE
    return x * angles.cos() + x.roll(1, -1) * angles.sin()


# -- A causal mask


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


CAUSAL = Case(causal, ATTENTION.args, SPLIT, SPLIT[:1], {"cp": 4})


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the queries of a rank, and of all keys."""
    own = x.shape[2]
    every = torch.arange(own * pw.axis_size("cp"))
    return every[own * pw.axis_index("cp") :][:own], every


@right(CAUSAL)
def causal_from_where_it_starts(q, k, v):
    k, v = (ops.all_gather(x, 2, group="cp") for x in (k, v))
    own, every = positions(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=own[:, None] >= every)


@wrong(CAUSAL)
def causal_from_zero(q, k, v):
    k, v = (ops.all_gather(x, 2, group="cp") for x in (k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask.tril()  # wrong: OF_A_SLICE
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# -- A convolution of a row, which needs a neighbor's edge


def filtered(x, weight):
    return F.conv1d(x[None, None], weight[None, None], padding=1)[0, 0]


FILTERED = Case(filtered, (random(12), random(3)), (("cp",), None), (("cp",),), {"cp": 4})


@right(FILTERED)
def filtered_with_edges(x, weight):
    size = pw.axis_size("cp")
    left = ops.permute(x[-1:], [(rank, rank + 1) for rank in range(size - 1)], group="cp")
    right = ops.permute(x[:1], [(rank + 1, rank) for rank in range(size - 1)], group="cp")
    if size == 1:
        left = right = torch.zeros(1)
    return F.conv1d(torch.cat([left, x, right])[None, None], weight[None, None])[0, 0]


@wrong(FILTERED)
def filtered_without_edges(x, weight):
    return F.conv1d(x[None, None], weight[None, None], padding=1)[0, 0]  # wrong: OF_A_SLICE
