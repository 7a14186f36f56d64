"""Every row of the rule table, proven: each option of each operator gives PyTorch's value and gradients."""

import math
import random
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strided import strided
from torch import fx

from partway.propagation.capture.capture import capture
from partway.propagation.capture.tracing import capturing
from partway.propagation.graph.nodes import shape
from partway.propagation.ops.batch_norm import moments, normalise, part_norm, sample_moments, statistics
from partway.propagation.ops.collectives import constrain
from partway.propagation.ops.cross_entropy import class_terms
from partway.propagation.ops.ctc import ctc
from partway.propagation.ops.hooked import HOOKS
from partway.propagation.ops.padded_convolution import padded_convolution
from partway.propagation.ops.random_numbers import draw
from partway.propagation.program.lower import lower
from partway.propagation.rules.rule import axis_options
from partway.propagation.rules.table import ROWS, rule_of
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.formulate import formulate
from partway.strategy import Layout, Mesh, Partial, Replicate, Shard

aten = torch.ops.aten


def real(*shape):
    return ("real", shape)


def positive(*shape):
    return ("positive", shape)


def unit(*shape):
    return ("unit", shape)


def fixed(*shape):
    return ("fixed", shape)


def definite(*shape):
    return ("definite", (*shape, shape[-1]))


def constant(*shape):
    return ("constant", (*shape, shape[-1]))


def fixed_unit(*shape):
    return ("fixed unit", shape)


def index(high, *shape):
    return ("index", shape, high)


def mask(*shape):
    return ("mask", shape)


def make(spec, generator):
    kind, shape = spec[:2]
    if kind == "index":
        return torch.randint(0, spec[2], shape, generator=generator)
    if kind == "mask":
        return torch.rand(shape, generator=generator) > 0.4
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind in ("definite", "constant"):
        return (x @ x.mT + torch.eye(shape[-1])).requires_grad_(kind == "definite")
    x = {"real": 2 * x - 1, "positive": x + 0.5, "unit": 0.1 + 0.8 * x, "fixed": x + 0.5, "fixed unit": x}[kind]
    return x.requires_grad_("fixed" not in kind)


@dataclass(frozen=True)
class Case:
    """A call of `target` that `fn` makes, and the factors that one axis may split in it."""

    target: object
    splits: str
    fn: object
    args: tuple
    linear: int = field(default=0)  # how many options let Partial pass
    like_others: bool = field(default=False)  # by a rule that other cases try too, so that this one is slow


def case(target, splits, fn, *args, linear=0):
    return Case(target, splits, fn, args, linear)


def like_others(*cases):
    return [replace(one, like_others=True) for one in cases]


CASES = [
    # pointwise, by rows of their own
    case(aten._to_copy.default, "f0 f1", lambda x: x.float().double(), real(4, 4), linear=1),
    case(aten._to_copy.default, "f0 f1", lambda x, i: x * i.double(), real(4, 4), index(3, 4, 4), linear=1),
    case(aten._to_copy.default, "f0", lambda x, w: F.embedding((3 * x).long(), w), unit(4), real(3, 2)),
    case(aten.add.Tensor, "f0 f1", lambda x, y: x + y, real(4, 4), real(4, 4), linear=1),
    case(aten.add.Tensor, "f0 f1", lambda x, y: x + 2 * y, real(4, 4), real(4), linear=1),
    case(aten.add.Tensor, "f0 f1", lambda x: x + 2.5, real(4, 4)),
    case(aten.add.Tensor, "f0 f1", lambda x, y: x + y, real(4, 1), real(1, 4), linear=1),
    case(aten.alias.default, "f0 f1", lambda x: aten.alias(x) * 2, real(4, 4), linear=1),
    case(aten.clone.default, "f0 f1", lambda x: x.clone() * x, real(4, 4), linear=1),
    case(aten.conj_physical.default, "f0 f1",
         lambda x: (torch.complex(x, x * x).conj() * x).imag, real(4, 4), linear=1),
    case(aten.detach.default, "f0 f1", lambda x: x.detach() * x, real(4, 4), linear=1),
    case(aten.div.Scalar, "f0", lambda x: x.mean(1), real(4, 4), linear=1),
    case(aten.div.Tensor, "f0 f1", lambda x, y: x / y, real(4, 4), positive(4, 4), linear=1),
    case(aten.div.Tensor, "f0 f1", lambda x, y: x / y, real(4, 4), positive(4, 1), linear=1),
    case(aten.div.Tensor, "f0 f1", lambda x: x / 3, real(4, 4), linear=1),
    case(aten.hardswish.default, "f0 f1", F.hardswish, real(4, 4)),
    case(aten.leaky_relu.default, "f0 f1", F.leaky_relu, real(4, 4)),
    case(aten.masked_fill.Scalar, "f0 f1", lambda x, m: x.masked_fill(m, 2.0), real(4, 4), mask(4, 4)),
    case(aten.mul.Scalar, "f0 f1", lambda x: aten.mul.Scalar(x, 3.0), real(4, 4), linear=1),
    case(aten.mul.Tensor, "f0 f1", lambda x, y: x * y, real(4, 4), real(4, 4), linear=2),
    case(aten.mul.Tensor, "f0 f1", lambda x, y: x * y, real(4, 1), real(4), linear=2),
    case(aten.mul.Tensor, "f0 f1", lambda x: x * x, real(4, 4), linear=2),
    case(aten.mul.Tensor, "f0 f1", lambda x: x * 3.0, real(4, 4), linear=1),
    case(aten.neg.default, "f0 f1", lambda x: -x, real(4, 4), linear=1),
    case(aten.rsub.Scalar, "f0 f1", lambda x: 1 - x, real(4, 4)),
    case(aten.special_ndtr.default, "f0 f1", torch.special.ndtr, real(4, 4)),
    case(aten.special_polygamma.default, "f0 f1", lambda x: torch.special.polygamma(1, x), positive(4, 4)),
    case(aten.sub.Tensor, "f0 f1", lambda x, y: x - y, real(4, 4), real(1, 4), linear=1),
    case(aten.sub.Tensor, "f0 f1", lambda x: x - 1.5, real(4, 4)),
    case(aten.where.self, "f0 f1", torch.where, mask(4, 4), real(4, 4), real(4), linear=1),
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
    case(constrain, "f0 f1", lambda x: (constrain(x, "", "x") if capturing() else x) * x, real(4, 4), linear=1),
    # the rest, alphabetically
    case(aten._safe_softmax.default, "f0", lambda x: aten._safe_softmax(x, 1), real(4, 4)),
    case(aten._softmax.default, "f0", lambda x: aten._softmax(x, 1, False), real(4, 4)),
    case(aten.adaptive_max_pool1d.default, "f0 f1", lambda x: F.adaptive_max_pool1d(x, 3), real(4, 4, 5)),
    case(aten.adaptive_max_pool2d.default, "f0 f1",
         lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), real(4, 4, 4, 4)),
    case(aten.adaptive_max_pool2d.default, "f0", lambda x: F.adaptive_max_pool2d(x, 1), real(4, 4, 4)),
    case(aten.adaptive_max_pool3d.default, "f0 f1",
         lambda x: F.adaptive_max_pool3d(x, (3, None, 1)), real(2, 4, 4, 2, 2)),
    case(aten.addmm.default, "m k n", torch.addmm, real(4), real(4, 4), real(4, 4), linear=2),
    case(aten.addmm.default, "m k n", lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3),
         real(4), real(4, 4), real(4, 4), linear=2),
    case(aten.addmm.default, "m k n", torch.addmm,
         real(4, 4), real(4, 4), real(4, 4), linear=2),
    case(aten.addmm.default, "m k n", torch.addmm,
         real(4, 1), real(4, 4), real(4, 4), linear=2),
    case(aten.amax.default, "f0 f1", lambda x: x.detach().amax(1) * x.sum(1), real(4, 4)),
    case(aten.amax.default, "f0 f1 f2", lambda x: x.detach().amax((0, -1), keepdim=True) * x, real(4, 4, 4)),
    case(aten.amax.default, "f0 f1", lambda x, i: i.amax() * x, real(4), index(9, 4, 4)),
    case(aten.amax.default, "f0 f1", lambda x, m: m.amax(0) * x, real(4), mask(4, 4)),
    case(aten.amax.default, "f0 f1", lambda x: x.amax(1), real(4, 4)),
    case(aten.argmax.default, "f0 f2", lambda x, y: x.argmax(1) * y, real(4, 3, 4), real(4, 4)),
    case(aten.argmin.default, "f0 f1", lambda x, y: x.argmin(-1, keepdim=True) * y, real(4, 4, 3), real(4, 4, 1)),
    case(aten.avg_pool1d.default, "f0 f1 f2",
         lambda x: F.avg_pool1d(x, 2, 1, 1, ceil_mode=True), real(4, 4, 5), linear=1),
    case(aten.avg_pool2d.default, "f0 f1 f2 f3", lambda x: F.avg_pool2d(x, 3, 2, 1), real(4, 4, 5, 5), linear=1),
    case(aten.avg_pool2d.default, "f0 f1 f2", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
         real(4, 5, 5), linear=1),
    case(aten.avg_pool3d.default, "f0 f1 f2 f3 f4", lambda x: F.avg_pool3d(x, 2, 1, divisor_override=3),
         real(2, 2, 3, 3, 3), linear=1),
    case(aten.binary_cross_entropy.default, "f0 f1", F.binary_cross_entropy, unit(4, 4), unit(4, 4)),
    case(aten.binary_cross_entropy.default, "f0 f1",
         lambda x, t: F.binary_cross_entropy(x, t, reduction="none"), unit(4, 4), unit(4, 4)),
    case(aten.binary_cross_entropy_with_logits.default, "f0 f1",
         lambda x, t, p: F.binary_cross_entropy_with_logits(x, t, pos_weight=p, reduction="sum"),
         real(4, 4), unit(4, 4), fixed(4)),
    case(aten.bmm.default, "b m k n", torch.bmm, real(4, 4, 4), real(4, 4, 4), linear=2),
    case(aten.cat.default, "f0", lambda x, y: torch.cat([x, y, x], 1), real(4, 2), real(4, 4), linear=1),
    case(aten.constant_pad_nd.default, "f0 f1", lambda x: aten.constant_pad_nd(x, [1, 2]), real(4, 4), linear=1),
    case(aten.constant_pad_nd.default, "f0 f1", lambda x: aten.constant_pad_nd(x, [1, 2], 3.0), real(4, 4)),
    case(aten.constant_pad_nd.default, "f0",
         lambda x, i: aten.constant_pad_nd(i, [1, 2], 2**53 + 1) % 7 * x.sum(), real(2), index(3, 4, 4)),
    case(aten.conv1d.default, "b o i s0", lambda x, w, b: F.conv1d(x, w, b, padding=1),
         real(4, 4, 5), real(4, 4, 3), real(4), linear=2),
    case(aten.conv1d.padding, "b o i s0", lambda x, w: F.conv1d(x, w, padding="same"),
         real(2, 4, 5), real(4, 4, 3), linear=2),
    case(aten.conv2d.padding, "b g s0 s1", lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=2),
         real(2, 4, 5, 5), real(4, 2, 3, 3), real(4), linear=2),
    case(aten.conv3d.padding, "b o i s0 s1 s2", lambda x, w, b: F.conv3d(x, w, b, padding="valid"),
         real(2, 4, 3, 3, 3), real(4, 4, 2, 2, 2), real(4), linear=2),
    case(aten.conv2d.default, "b o i s0 s1", lambda x, w: F.conv2d(x, w, stride=2),
         real(4, 4, 5, 5), real(4, 4, 3, 3), linear=2),
    case(aten.conv2d.default, "b g s0 s1", lambda x, w, b: F.conv2d(x, w, b, groups=4),
         real(4, 8, 4, 4), real(8, 2, 3, 3), real(8), linear=2),
    case(aten.conv2d.default, "b g s0 s1", lambda x, w: F.conv2d(x, w, groups=2),
         real(2, 4, 4, 4), real(8, 2, 3, 3), linear=2),
    case(aten.conv2d.default, "o i s0 s1", F.conv2d, real(4, 4, 4), real(4, 4, 3, 3), real(4), linear=2),
    case(aten.conv3d.default, "b o i s0 s1 s2", F.conv3d,
         real(2, 4, 3, 3, 3), real(4, 4, 2, 2, 2), real(4), linear=2),
    case(aten.cross_entropy_loss.default, "f0 f2",
         lambda x, t, w: F.cross_entropy(x, t, w, reduction="sum", ignore_index=1),
         real(4, 3, 4), index(3, 4, 4), fixed(3)),
    case(aten.cross_entropy_loss.default, "f0 f2", lambda x, t: F.cross_entropy(x, t.softmax(1)),
         real(4, 3, 4), real(4, 3, 4)),
    case(aten.cross_entropy_loss.default, "", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
         real(4), index(4)),
    case(aten.cumsum.default, "f0", lambda x: x.cumsum(1), real(4, 4), linear=1),
    case(aten.einsum.default, "b i j k", lambda x, y: torch.einsum("bij,bjk->bki", x, y),
         real(4, 4, 4), real(4, 4, 4), linear=2),
    case(aten.einsum.default, "i j k", lambda x, y, z: torch.einsum("ij,j,jk->k", x, y, z),
         real(4, 4), real(4), real(4, 4), linear=3),
    case(aten.embedding.default, "v d _1 _2", F.embedding, index(5, 4, 4), real(5, 4), linear=1),
    case(aten.embedding.default, "v d _1 _2", F.embedding, index(8, 4, 4), real(8, 4), linear=1),
    case(aten.embedding.default, "v d _1", lambda i, w: F.embedding(i, w, padding_idx=5),
         index(8, 16), real(8, 4), linear=1),
    case(aten.embedding.default, "v d _1", lambda i, w: F.embedding(i, w, padding_idx=-8),
         index(8, 16), real(8, 4), linear=1),
    case(aten.embedding.default, "d", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
         index(8, 4, 4), real(8, 4), linear=1),
    case(aten.expand.default, "f0 f1 f2", lambda x: x.expand(4, 4, 4) * 2, real(4, 1), linear=1),
    case(aten.gather.default, "f0 v f2", lambda x, i: x.gather(1, i), real(4, 3, 4), index(3, 4, 1, 4), linear=1),
    case(aten.gather.default, "f0 f1 v i", lambda x, i: x.gather(-1, i), real(6, 4, 4), index(4, 4, 4, 4), linear=1),
    case(aten.grid_sampler_2d.default, "n c h w", lambda x, g: F.grid_sample(x, 2 * g - 1, align_corners=False),
         real(4, 4, 3, 3), unit(4, 4, 4, 2), linear=1),
    case(aten.grid_sampler_3d.default, "n c d h w", lambda x, g: F.grid_sample(x, 2 * g - 1, align_corners=True),
         real(4, 4, 2, 3, 2), unit(4, 4, 4, 4, 3), linear=1),
    case(aten.group_norm.default, "f0", lambda x, w, b: F.group_norm(x, 2, w, b), real(4, 4), real(4), real(4)),
    case(aten.group_norm.default, "f0", lambda x: F.group_norm(x, 1), real(4, 4, 1, 1)),
    case(aten.huber_loss.default, "f0 f1", F.huber_loss, real(4, 4), real(4, 4)),
    case(aten.kl_div.default, "f0 f1", lambda x, t: F.kl_div(x, t, reduction="batchmean"), real(4, 4), unit(4, 4)),
    case(aten.l1_loss.default, "f0 f1", F.l1_loss, real(4, 4), real(4, 4)),
    case(aten.layer_norm.default, "f0 f1",
         lambda x, w, b: F.layer_norm(x, (4,), w, b), real(4, 4, 4), real(4), real(4)),
    case(aten.rms_norm.default, "f0 f1", lambda x, w: F.rms_norm(x, (4,), w), real(4, 4, 4), real(4)),
    case(aten.linear.default, "_2 _1 k n", F.linear, real(4, 4, 4), real(4, 4), real(4), linear=2),
    case(aten.linear.default, "k n", F.linear, real(4), real(4, 4), linear=2),
    case(aten.log_softmax.int, "f1", lambda x: x.log_softmax(0), real(4, 4)),
    case(aten.matmul.default, "_1 m k n", lambda x, y: x @ y, real(4, 4, 4), real(4, 4, 4), linear=2),
    case(aten.matmul.default, "_1 _2 m k n", lambda x, y: x @ y, real(4, 1, 4, 4), real(4, 4, 4), linear=2),
    case(aten.matmul.default, "m k n", lambda x, y: x @ y, real(4, 4), real(4, 4), linear=2),
    case(aten.max.dim, "f0 f2", lambda x: x.max(1), real(4, 3, 4)),
    case(aten.max.dim, "f0 f2", lambda x: x.max(1, keepdim=True)[0], real(4, 3, 4)),
    case(aten.max_pool1d.default, "f0 f1 f2", lambda x: F.max_pool1d(x, 2), real(4, 4, 4)),
    case(aten.max_pool2d.default, "f0 f1 f2 f3", lambda x: F.max_pool2d(x, 2), real(4, 4, 4, 4)),
    case(aten.max_pool2d_with_indices.default, "f0 f1 f2 f3",
         lambda x: F.max_pool2d(x, 2, return_indices=True), real(4, 4, 4, 4)),
    case(aten.max_pool3d.default, "f0 f1 f2 f3 f4", lambda x: F.max_pool3d(x, 2), real(4, 4, 4, 4, 4)),
    case(aten.min.dim, "f1", lambda x: x.min(0), real(4, 4)),
    case(aten.mm.default, "m k n", torch.mm, real(4, 4), real(4, 4), linear=2),
    case(aten.mse_loss.default, "f0 f1", F.mse_loss, real(4, 4), real(4, 4)),
    case(aten.nll_loss_nd.default, "f0", F.nll_loss, real(4, 4), index(4, 4)),
    case(aten.pad.default, "f0 f1", lambda x: F.pad(x, (1, 2)), real(4, 4), linear=1),
    case(aten.pad.default, "f0 f1", lambda x: F.pad(x, (1, 1), mode="reflect"), real(4, 4), linear=1),
    case(aten.pad.default, "f0", lambda x: F.pad(x, (1, 1), value=math.nan), real(4, 4)),
    case(aten.pad.default, "f0 f1 f2", lambda x: F.pad(x, (0, 0, 2, 1), value=1.0), real(4, 4, 3, 1)),
    case(aten.permute.default, "f0 f1 f2", lambda x: x.permute(2, 0, -2) * 2, real(4, 4, 4), linear=1),
    case(aten.reshape.default, "f0", lambda x: x.reshape(16) * 2, real(4, 4), linear=1),
    case(aten.scaled_dot_product_attention.default, "_1 h s", F.scaled_dot_product_attention,
         real(4, 4, 4, 3), real(4, 4, 4, 3), real(4, 4, 4, 3)),
    case(aten.scaled_dot_product_attention.default, "h s", F.scaled_dot_product_attention,
         real(4, 4, 3), real(4, 5, 3), real(1, 5, 2)),
    case(aten.scaled_dot_product_attention.default, "s", F.scaled_dot_product_attention,
         real(4, 3), real(4, 3), real(4, 3)),
    case(aten.scaled_dot_product_attention.default, "_1 h s",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
         real(4, 4, 4, 3), real(4, 4, 6, 3), real(4, 4, 6, 3)),
    case(aten.scaled_dot_product_attention.default, "_1 h s",
         lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3),
         real(4, 2, 4, 3), real(4, 2, 4, 3), real(4, 2, 4, 3), real(2, 4, 4)),
    case(aten.scaled_dot_product_attention.default, "_1 h s",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
         real(4, 8, 4, 3), real(4, 4, 4, 3), real(4, 4, 4, 3)),
    case(aten.scaled_dot_product_attention.default, "_1 g s",
         lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
         real(2, 4, 4, 3), real(2, 1, 4, 3), real(2, 1, 4, 3), real(2, 4, 1, 4)),
    case(aten.scaled_dot_product_attention.default, "_1 s",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
         real(2, 4, 4, 3), real(2, 2, 4, 3), real(2, 1, 4, 3)),
    case(aten.select.int, "f0 v", lambda x: x[:, 1] * 2, real(4, 4), linear=1),
    case(aten.slice.Tensor, "f0 f1", lambda x: x[:, 1:3] * 2, real(4, 4), linear=1),
    case(aten.slice.Tensor, "f0 f1", lambda x: x[::2] * 2, real(4, 4), linear=1),
    case(aten.smooth_l1_loss.default, "f0 f1", F.smooth_l1_loss, real(4, 4), real(4, 4)),
    case(aten.soft_margin_loss.default, "f0 f1", F.soft_margin_loss, real(4, 4), fixed(4, 4)),
    case(aten.softmax.int, "f0 f1", lambda x: x.softmax(-1), real(4, 4, 3)),
    case(aten.split.Tensor, "f0", lambda x: [p * 2 for p in x.split(3, -1)], real(4, 8), linear=1),
    case(aten.split_with_sizes.default, "f1", lambda x: x.split([1, 3])[1] * 2, real(4, 4), linear=1),
    case(aten.squeeze.dims, "f0 f2", lambda x: x.squeeze() * 2, real(4, 1, 4), linear=1),
    case(aten.squeeze.dims, "f0 f2", lambda x: x.squeeze(1) * 2, real(4, 1, 4), linear=1),
    case(aten.squeeze.dims, "f0", lambda x: x.squeeze((1, 2)) * 2, real(4, 1, 1), linear=1),
    case(aten.stack.default, "f0 f1", lambda x, y: torch.stack([x, y], 1), real(4, 4), real(4, 4), linear=1),
    case(aten.sum.default, "f0 f1", lambda x: x.sum(), real(4, 4), linear=1),
    case(aten.sum.dim_IntList, "f0 f1", lambda x: x.sum(-1), real(4, 4), linear=1),
    case(aten.sum.dim_IntList, "f0 f1 f2", lambda x: x.sum((0, 2), keepdim=True), real(4, 4, 4), linear=1),
    case(aten.t.default, "f0 f1", lambda x: x.t() * 2, real(4, 4), linear=1),
    case(aten.transpose.int, "f0 f1 f2", lambda x: x.transpose(-1, 0) * 2, real(4, 4, 4), linear=1),
    case(aten.unbind.int, "f1", lambda x: [p * 2 for p in x], real(2, 4), linear=1),
    case(aten.unfold.default, "", lambda x: x.unfold(0, 1, 1) * 2, real(), linear=1),
    case(aten.unsqueeze.default, "f0 f1", lambda x: x.unsqueeze(-1) * 2, real(4, 4), linear=1),
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
    case(aten._softmax_backward_data.default, "f0",
         lambda g, y: aten._softmax_backward_data(g, y, 1, torch.float64), fixed(4, 4), fixed(4, 4)),
    case(aten._upsample_bicubic2d_aa.default, "f0 f1",
         lambda x: aten._upsample_bicubic2d_aa(x, [4, 4], False), real(4, 4, 2, 2)),
    case(aten._upsample_bilinear2d_aa.default, "f0 f1",
         lambda x: aten._upsample_bilinear2d_aa(x, [4, 4], False), real(4, 4, 2, 2)),
    case(aten._upsample_bicubic2d_aa.vec, "f0 f1",
         lambda x: F.interpolate(x, (2, 3), mode="bicubic", antialias=True), real(4, 4, 4, 4)),
    case(aten._upsample_bilinear2d_aa.vec, "f0 f1",
         lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True), real(4, 4, 4, 4)),
    case(aten._upsample_nearest_exact1d.vec, "f0 f1 f2",
         lambda x: F.interpolate(x, 6, mode="nearest-exact"), real(2, 2, 4), linear=1),
    case(aten._upsample_nearest_exact2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), real(2, 2, 4, 3), linear=1),
    case(aten._upsample_nearest_exact3d.vec, "f0 f1 f2 f3 f4",
         lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), real(2, 2, 2, 2, 2), linear=1),
    case(aten.channel_shuffle.default, "f0 f2 f3", lambda x: F.channel_shuffle(x, 2) * 2, real(2, 4, 4, 3), linear=1),
    case(aten.col2im.default, "b c s0", lambda x: F.fold(x, (4, 4), 2), real(2, 8, 9), linear=1),
    case(aten.col2im.default, "b c s1", lambda x: F.fold(x, (2, 5), 2), real(2, 8, 4), linear=1),
    case(aten.conv_transpose1d.default, "b i o s0", lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1),
         real(2, 2, 4), real(2, 2, 3), real(2), linear=2),
    case(aten.conv_transpose2d.input, "b g s0 s1", lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1, 2),
         real(2, 4, 4, 3), real(4, 1, 3, 3), linear=2),
    case(aten.conv_transpose3d.input, "b i o s0 s1 s2", lambda x, w: F.conv_transpose3d(x, w, dilation=2),
         real(2, 2, 2, 2, 2), real(2, 2, 2, 2, 2), linear=2),
    case(aten.flip.default, "f1", lambda x: x.flip(0) * 2, real(4, 4), linear=1),
    case(aten.im2col.default, "b c s0", lambda x: F.unfold(x, 3, padding=1), real(2, 2, 4, 4), linear=1),
    case(aten.im2col.default, "b c s1", lambda x: F.unfold(x, (2, 1)), real(2, 2, 2, 4), linear=1),
    case(aten.max_pool1d_with_indices.default, "f0 f1 f2",
         lambda x: F.max_pool1d(x, 3, 1, 1, return_indices=True), real(4, 4, 4)),
    case(aten.max_pool3d_with_indices.default, "f0 f1 f2 f3 f4",
         lambda x: F.max_pool3d(x, 2, 1, return_indices=True), real(2, 2, 3, 3, 3)),
    case(aten.max_pool2d_with_indices_backward.default, "f0 f1",
         lambda g, x: aten.max_pool2d_with_indices_backward(
             g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, F.max_pool2d(x, 2, return_indices=True)[1]),
         fixed(4, 4, 2, 2), fixed(4, 4, 4, 4)),
    case(aten.max_unpool2d.default, "f0 f1",
         lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), real(4, 4, 4, 4)),
    case(aten.max_unpool3d.default, "f0 f1",
         lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), real(2, 2, 4, 4, 4)),
    case(aten.pixel_shuffle.default, "_1 c h w", lambda x: F.pixel_shuffle(x, 2) * 2, real(2, 8, 2, 4), linear=1),
    case(aten.pixel_unshuffle.default, "_1 c h w", lambda x: F.pixel_unshuffle(x, 2) * 2, real(2, 2, 4, 8), linear=1),
    case(aten.roll.default, "f0 f1", lambda x: x.roll((1, -3), (0, 1)) * 2, real(4, 4), linear=1),
    case(aten.roll.default, "", lambda x: x.roll(5) * 2, real(4, 4), linear=1),
    case(aten.unfold.default, "f0 f1", lambda x: x.unfold(1, 2, 1) * 2, real(4, 4), linear=1),
    case(aten.upsample_bicubic2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, (3, 8), mode="bicubic"), real(2, 2, 4, 4), linear=1),
    case(aten.upsample_bilinear2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), real(2, 2, 4, 4), linear=1),
    case(aten.upsample_linear1d.vec, "f0 f1 f2", lambda x: F.interpolate(x, 5, mode="linear"), real(2, 2, 4), linear=1),
    case(aten.upsample_nearest1d.vec, "f0 f1 f2", lambda x: F.interpolate(x, 6), real(2, 2, 4), linear=1),
    case(aten.upsample_nearest2d.vec, "f0 f1 f2 f3",
         lambda x: F.interpolate(x, scale_factor=2), real(2, 2, 4, 3), linear=1),
    case(aten.upsample_nearest3d.vec, "f0 f1 f2 f3 f4",
         lambda x: F.interpolate(x, scale_factor=2), real(2, 2, 2, 2, 2), linear=1),
    case(aten.upsample_trilinear3d.vec, "f0 f1 f2 f3 f4",
         lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"), real(2, 2, 4, 3, 2), linear=1),
    case(padded_convolution, "b i o s0 s1",
         lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), w, b), real(2, 2, 4, 4), real(2, 2, 3, 3),
         real(2), linear=2),
    case(padded_convolution, "b g s0", lambda x, w: F.conv1d(F.pad(x, (0, 2), value=1.5), w, groups=2),
         real(2, 4, 4), real(4, 2, 3), linear=1),
    case(statistics, "f1", lambda m: statistics(m, None, 1, torch.float64), positive(2, 4)),
    case(statistics, "f1", lambda m, s: statistics(m, s, 2, torch.float64), positive(2, 4), fixed(4)),
    # indices
    case(aten._unsafe_index.Tensor, "f0 v1 b0", lambda x, i: aten._unsafe_index(x, [None, i]),
         real(4, 4), index(4, 6), linear=1),
    case(aten._unsafe_index_put.default, "f0 v1 b0", lambda x, i, v: aten._unsafe_index_put(x, [None, i], v, True),
         real(4, 4), index(4, 6), real(4, 6), linear=1),
    case(aten.gather.default, "f0 v i", lambda x, i: torch.take_along_dim(x, i, 1),
         real(4, 4), index(4, 1, 2), linear=1),
    case(aten.gather.default, "v i", torch.take_along_dim, real(2, 4), index(8, 2, 2), linear=1),
    case(aten.index.Tensor, "v0 f1 b0", lambda x, i: x[i - 2], real(4, 4), index(4, 6), linear=1),
    case(aten.index.Tensor, "f0 v1 v2 f3 b0 b1", lambda x, i, j: x[:, i, j],
         real(2, 4, 4, 2), index(4, 2, 2), index(4, 2), linear=1),
    case(aten.index.Tensor, "f0 v1 f2 v3 b0 b1", lambda x, i, j: x[:, i, :, j - 2],
         real(2, 4, 2, 4), index(4, 2, 1), index(4, 4), linear=1),
    case(aten.index.Tensor, "v0 b0", lambda x, i: x.take(i - 4), real(2, 4), index(8, 6), linear=1),
    case(aten.index.Tensor, "v0 b0", torch.masked_scatter, real(2, 4), mask(2, 4), real(8), linear=1),
    case(aten.index_add.default, "v f1 i", lambda x, i, y: x.index_add(0, i, y, alpha=2),
         real(4, 4), index(4, 6), real(6, 4), linear=1),
    case(aten.index_copy.default, "f0 v", lambda x, i, y: x.index_copy(-1, i + i, y),
         real(4, 4), index(1, 1), real(4, 1), linear=1),
    case(aten.index_fill.int_Scalar, "v f1", lambda x, i: x.index_fill(0, i - 1, 2.0), real(4, 4), index(4, 2)),
    case(aten.index_fill.int_Scalar, "v", lambda x, i, y: x.index_fill(1, i, y), real(4, 4), index(4, 2), real()),
    case(aten.index_put.default, "v0 f1 b0", lambda x, i, y: x.index_put((i - 1,), y, True),
         real(4, 4), index(4, 6), real(6, 4), linear=1),
    case(aten.index_put.default, "f0 v1 f2 v3 b0 b1", lambda x, i, j, y: aten.index_put(x, [None, i, None, j], y, True),
         real(2, 4, 2, 4), index(4, 2, 1), index(4, 4), real(4, 1, 2), linear=1),
    case(aten.index_put.default, "v0 v1", lambda x, i, j, y: x.index_put((i, j), y),
         real(4, 4), index(4, 1), index(4, 1), real(), linear=1),
    case(aten.index.Tensor, "f0 v1 b0", lambda x, m, i: aten._unsafe_masked_index(x, m, [None, i - 2], 3.0),
         real(4, 4), mask(6), index(8, 6), linear=1),
    case(aten.index_put.default, "f0 v1 b0",
         lambda x, m, i, y: aten._unsafe_masked_index_put_accumulate(x, m, [None, i - 2], y),
         real(4, 4), mask(6), index(8, 6), real(4, 6), linear=1),
    case(aten.where.self, "f0 f1 f2", lambda x, m, y: aten.index_put(x, [None, m], y, True),
         real(4, 2, 4), mask(2, 4), real(4, 1), linear=1),
    case(aten.where.self, "f0 f1", lambda x, y: aten.index_put(x, [torch.tensor([True, False, True, False])], y),
         real(4, 4), real(2, 4), linear=1),
    case(aten.index_put.default, "v0", lambda x, i, y: x.put(2 * i - 4, y),
         real(2, 4), index(1, 2, 1), real(2), linear=1),
    case(aten.index_reduce.default, "v f1", lambda x, i, y: x.index_reduce(0, i, y, "mean"),
         real(4, 4), index(4, 6), real(6, 4)),
    case(aten.index_reduce.default, "v f1", lambda x, i, y: x.index_reduce(0, i, y, "prod", include_self=False),
         real(4, 4), index(4, 6), real(6, 4)),
    case(aten.index_select.default, "f0 v i", lambda x, i: x.index_select(1, i), real(4, 4), index(4, 6), linear=1),
    case(aten.nonzero_static.default, "", lambda m, x: torch.nonzero_static(m, size=4) * x, mask(4, 4), real(2)),
    case(aten.scatter.reduce, "f0 v", lambda x, i, y: x.detach().scatter(1, i, y.detach(), reduce="multiply") * x,
         real(4, 4), index(4, 4, 2), real(4, 2)),
    case(aten.scatter.src, "f0 v", lambda x, i, y: x.scatter(1, i, y),
         real(4, 4), index(4, 4, 1), real(4, 1), linear=1),
    case(aten.scatter.src, "v", lambda x, i, y: x.scatter(1, i, y), real(4, 4), index(4, 2, 1), fixed(4, 2), linear=1),
    *like_others(
    case(aten.scatter.value, "f0 v", lambda x, i: x.scatter(1, i, 2.0), real(4, 4), index(4, 4, 2)),
    case(aten.scatter.value_reduce, "f0 v",
         lambda x, i: x.detach().scatter(1, i, 2.0, reduce="multiply") * x, real(4, 4), index(4, 4, 2)),
    ),
    case(aten.scatter_add.default, "f0 v i", lambda x, i, y: x.scatter_add(1, i, y),
         real(4, 4), index(4, 4, 2), real(4, 2), linear=1),
    case(aten.scatter_reduce.two, "f0 v i", lambda x, i, y: x.scatter_reduce(1, i, y, "sum"),
         real(4, 4), index(4, 4, 2), real(4, 2), linear=1),
    case(aten.scatter_reduce.two, "f0 v", lambda x, i, y: x.scatter_reduce(1, i, y, "amax"),
         real(4, 4), index(4, 4, 4), real(4, 4)),
    *like_others(
    case(aten.scatter_reduce.two, "f0 v", lambda x, i, y: x.scatter_reduce(1, i, y, "prod", include_self=False),
         real(4, 4), index(4, 4, 4), real(4, 4)),
    case(aten.scatter_reduce.two, "f0 v", lambda x, i, y: x.scatter_reduce(1, i, y, "mean"),
         real(4, 4), index(4, 4, 4), real(4, 4)),
    ),
    # bags, recurrent layers, Fourier transforms
    case(aten.embedding.default, "v d _1", F.embedding_bag, index(8, 4, 2), real(8, 4), linear=1),
    case(aten.embedding.default, "v d _1", lambda i, w: F.embedding_bag(i, w, mode="max"),
         index(8, 4, 2), real(8, 4), linear=1),
    case(aten.embedding.default, "v d _1",
         lambda i, w, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p, padding_idx=-5),
         index(8, 4, 2), real(8, 4), real(4, 2), linear=1),
    case(aten.embedding.default, "v d _1",
         lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 0, 3, 8]), padding_idx=1),
         index(4, 8), real(4, 4), linear=1),
    case(aten.index_add.default, "v f1 i", lambda i, w, p: F.embedding_bag(
         i, w, torch.tensor([0, 3, 3, 7, 8]), mode="sum", per_sample_weights=p, include_last_offset=True),
         index(4, 8), real(4, 4), real(8), linear=1),
    case(aten.embedding_bag.default, "", lambda i, o, w: aten.embedding_bag(w, i, o + o, True)[0],
         index(4, 4), index(1, 1), real(4, 4)),
    case(aten.embedding_bag.padding_idx, "", lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 1]), mode="max"),
         index(4, 4), real(4, 4)),
    case(ctc, "n", lambda x, t, n, m: F.ctc_loss(x.log_softmax(2), t + 1, n + 3, m, zero_infinity=True),
         real(6, 4, 5), index(4, 4, 3), index(4, 4), index(4, 4)),
    case(ctc, "", lambda x, t: torch.ctc_loss(x.log_softmax(2), t, [6, 5, 4, 6], [3, 2, 1, 2], 4, 0),
         real(6, 4, 5), index(4, 8)),
    case(aten.lstm_cell.default, "b", lambda x, h, w, u: torch.lstm_cell(x, (h, 2 * h), w, u),
         real(4, 3), real(4, 2), real(8, 3), real(8, 2)),
    *like_others(
    case(aten.gru_cell.default, "b", lambda x, h, w, u, b: torch.gru_cell(x, h, w, u, b, b),
         real(4, 3), real(4, 2), real(6, 3), real(6, 2), real(6)),
    case(aten.rnn_relu_cell.default, "b", torch.rnn_relu_cell, real(4, 3), real(4, 2), real(2, 3), real(2, 2)),
    case(aten.rnn_tanh_cell.default, "b", torch.rnn_tanh_cell, real(4, 3), real(4, 2), real(2, 3), real(2, 2)),
    ),
    case(aten.gru.input, "b", lambda x, h, w, u, b: torch.gru(x, h, [w, u, b, b], True, 1, 0.0, True, False, True),
         real(4, 3, 3), real(1, 4, 2), real(6, 3), real(6, 2), real(6)),
    case(aten.lstm.input, "b",
         lambda x, h, w, u: torch.lstm(x, [h, h * h], [w, u, w, u], False, 1, 0.0, True, True, False),
         real(3, 4, 3), real(2, 4, 2), real(8, 3), real(8, 2)),
    *like_others(
    case(aten.rnn_relu.input, "b", lambda x, h, w, u: torch.rnn_relu(x, h, [w, u], False, 1, 0.0, True, False, False),
         real(3, 4, 3), real(1, 4, 2), real(2, 3), real(2, 2)),
    case(aten.rnn_tanh.input, "b", lambda x, h, w: torch.rnn_tanh(x, h, [w] * 4, False, 2, 0.0, True, False, True),
         real(4, 3, 2), real(2, 4, 2), real(2, 2)),
    ),
    case(aten.col2im.default, "b s1",
         lambda x: torch.istft(torch.fft.rfft(x, dim=1), 4, window=torch.ones(4).double()), real(4, 4, 8), linear=1),
    case(aten.col2im.default, "s1",
         lambda x, w: torch.istft(torch.fft.rfft(x, dim=0), 8, 4, 6, w, normalized=True, length=15),
         real(8, 4), positive(6), linear=1),
    case(aten.stft.default, "b",
         lambda x: torch.stft(x, 4, window=torch.ones(4).double(), return_complex=True), real(4, 16), linear=1),
    case(aten.stft.center, "", lambda x: aten.stft.center(x, 4, center=False, return_complex=True), real(16), linear=1),
    case(aten.roll.default, "f0 f1", lambda x: torch.fft.fftshift(x) + torch.fft.ifftshift(x, 1), real(4, 5), linear=1),
    *like_others(*(case(getattr(aten, f"fft_{kind}{many}").default, splits, getattr(torch.fft, f"{kind}{many}"),
                        real(4, 2, 4), linear=1)
      for kind in ("fft", "hfft", "ifft", "ihfft", "irfft", "rfft")
      for many, splits in (("", "f0 f1"), ("2", "f0"), ("n", "")))),
    case(aten.fft_fftn.default, "f0 f1", lambda x: torch.fft.fftn(x, (3,)), real(4, 2, 4), linear=1),
    case(aten.fft_rfft.default, "f1 f2", lambda x: torch.fft.rfft(x, 6, 0, "ortho"), real(4, 2, 4), linear=1),
    # matrices
    case(aten.addbmm.default, "b m k n", lambda a, x, y: torch.addbmm(a, x, y, beta=2, alpha=3),
         real(1, 4), real(4, 4, 4), real(4, 4, 4), linear=2),
    case(aten.addmv.default, "m k", torch.addmv, real(4), real(4, 4), real(4), linear=2),
    case(aten.addr.default, "m n", torch.addr, real(4), real(4), real(4), linear=2),
    case(aten.baddbmm.default, "b m k n", torch.baddbmm, real(4, 1, 4), real(4, 4, 4), real(4, 4, 4), linear=2),
    case(aten.cdist.default, "_1 m n", torch.cdist, real(2, 4, 3), real(2, 4, 3)),
    case(aten.cdist.default, "_1 _2 m n", lambda x, y: torch.cdist(x, y, 1.0), real(2, 1, 4, 3), real(2, 4, 3)),
    case(aten.linalg_cross.default, "f1", torch.cross, real(3, 4), real(3, 4), linear=2),
    case(aten.dot.default, "k", torch.dot, real(4), real(4), linear=2),
    case(aten.einsum.default, "i j k a", lambda x, y: torch.einsum("...ij,jk...", x, y),
         real(2, 4, 4), real(4, 4, 2), linear=2),
    case(aten.einsum.default, "a i j", lambda x, y: torch.einsum("i...j,j->i...", x, y),
         real(4, 2, 4), real(4), linear=2),
    case(aten.einsum.default, "a b c", lambda x, y: torch.tensordot(x, y, ([0], [-1])),
         real(4, 4), real(4, 4), linear=2),
    case(aten.einsum.default, "a b c", torch.inner, real(4, 4), real(4, 4), linear=2),
    case(aten.einsum.default, "a i j o", F.bilinear, real(2, 4), real(2, 2), real(4, 4, 2), real(4), linear=3),
    case(aten.linalg_cross.default, "f0 f1", torch.linalg.cross, real(4, 4, 3), real(1, 4, 3), linear=2),
    case(aten.linalg_vander.default, "_1 _2", torch.linalg.vander, real(4, 4)),
    case(aten.matmul.default, "k n", torch.matmul, real(4), real(4, 4), linear=2),
    case(aten.matmul.default, "m k _1", torch.matmul, real(4, 4, 4), real(4), linear=2),
    case(aten.matmul.default, "k", torch.matmul, real(4), real(4), linear=2),
    case(aten.matmul.default, "m k n", torch.chain_matmul, real(4, 4), real(4, 2), real(2, 4), linear=2),
    case(aten.matmul.default, "k n", lambda *t: torch.linalg.multi_dot(t),
         real(4), real(4, 2), real(2, 4), real(4), linear=2),
    case(aten.mul.Tensor, "f0 f1", torch.outer, real(4), real(4), linear=2),
    case(aten.mul.Tensor, "f0 f2 f3", torch.kron, real(2, 2), real(4), linear=2),
    case(aten.mul.Tensor, "f0 f1", torch.linalg.vecdot, real(4, 4), real(4), linear=2),
    case(aten.mv.default, "m k", torch.mv, real(4, 4), real(4), linear=2),
    case(aten.pdist.default, "", F.pdist, real(4, 3)),
    case(aten.sum.default, "f0 f1", torch.trace, real(4, 2), linear=1),
    case(aten.vdot.default, "k", torch.vdot, real(4), real(4), linear=2),
    *like_others(
    case(aten.cholesky_solve.default, "_1 n", torch.cholesky_solve, real(2, 3, 4), definite(2, 3), linear=1),
    case(aten.linalg_ldl_solve.default, "_1 n", lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a), b),
         constant(2, 3), fixed(2, 3, 4), linear=1),
    case(aten.linalg_lu_solve.default, "_1 n", lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
         definite(2, 3), real(2, 3, 4), linear=1),
    case(aten.linalg_lu_solve.default, "_1 n",
         lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b, left=False),
         definite(2, 3), real(2, 4, 3), linear=1),
    case(aten.linalg_matrix_norm.default, "f0", lambda x: torch.linalg.matrix_norm(x, 2), real(4, 3, 3)),
    case(aten.linalg_matrix_norm.str_ord, "f1", lambda x: torch.linalg.matrix_norm(x, "nuc", (0, 2), keepdim=True),
         real(3, 4, 3)),
    case(aten.linalg_norm.default, "", lambda x: torch.linalg.norm(x, 2), real(4, 4)),
    case(aten.linalg_norm.default, "f1", lambda x: torch.linalg.norm(x, 3, 0), real(4, 4)),
    case(aten.linalg_norm.ord_str, "", lambda x: torch.linalg.norm(x, "nuc"), real(4, 4)),
    case(aten.sum.dim_IntList, "f0 f1 f2", lambda x: torch.linalg.norm(x, "fro", (1, 2)), real(4, 4, 4), linear=1),
    case(aten.linalg_solve.default, "_1 n", torch.linalg.solve, definite(2, 3), real(2, 3, 4), linear=1),
    case(aten.linalg_solve.default, "n", lambda a, b: torch.linalg.solve(a, b, left=False),
         definite(3), real(4, 3), linear=1),
    case(aten.linalg_solve.default, "_1", torch.linalg.solve, definite(2, 3), real(2, 3), linear=1),
    case(aten.linalg_solve_ex.default, "_1", lambda a, b: torch.linalg.solve_ex(a, b)[0], definite(2, 3), real(3, 4)),
    case(aten.linalg_solve_triangular.default, "_1 n", lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
         definite(2, 3), real(2, 3, 4), linear=1),
    case(aten.linalg_tensorinv.default, "", lambda a: torch.linalg.tensorinv(a, 1), real(4, 2, 2)),
    case(aten.linalg_tensorsolve.default, "", torch.linalg.tensorsolve, real(4, 2, 2), real(4)),
    case(aten.lu_solve.default, "_1 n", lambda a, b: torch.lu_solve(b, *torch.linalg.lu_factor(a)),
         definite(2, 3), real(2, 3, 4), linear=1),
    case(aten.lu_unpack.default, "_1", lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a))[1:], definite(4, 3)),
    case(aten.lu_unpack.default, "", lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a), unpack_pivots=False)[1:],
         definite(4, 3)),
    case(aten.ormqr.default, "_1 n", torch.ormqr, fixed(2, 3, 3), fixed(2, 3), real(2, 3, 4), linear=1),
    ),
    *like_others(*(case(target, "_1", fn, definite(4, 3)) for target, fn in (
        *((getattr(aten, name).default, getattr(torch, name)) for name in ("cholesky", "qr") if hasattr(aten, name)),
        (aten._lu_with_info.default, torch.lu),
        (aten.cholesky_inverse.default, torch.cholesky_inverse),
        (aten.det.default, torch.det),
        (aten.inverse.default, torch.inverse),
        (aten.linalg_cholesky.default, torch.linalg.cholesky),
        (aten.linalg_cholesky_ex.default, torch.linalg.cholesky_ex),
        (aten.linalg_cond.default, torch.linalg.cond),
        (aten.linalg_det.default, torch.linalg.det),
        (aten.linalg_eig.default, lambda a: torch.linalg.eig(a)[0]),
        (aten.linalg_eigh.default, torch.linalg.eigh),
        (aten.linalg_eigvals.default, torch.linalg.eigvals),
        (aten.linalg_eigvalsh.default, torch.linalg.eigvalsh),
        (aten.linalg_inv.default, torch.linalg.inv),
        (aten.linalg_inv_ex.default, torch.linalg.inv_ex),
        (aten.linalg_lu.default, lambda a: torch.linalg.lu(a)[1:]),
        (aten.linalg_lu_factor.default, torch.linalg.lu_factor),
        (aten.linalg_lu_factor_ex.default, torch.linalg.lu_factor_ex),
        (aten.linalg_matrix_exp.default, torch.linalg.matrix_exp),
        (aten.linalg_matrix_power.default, lambda a: torch.linalg.matrix_power(a, -2)),
        (aten.linalg_pinv.atol_rtol_tensor, torch.linalg.pinv),
        (aten.linalg_pinv.atol_rtol_float, lambda a: torch.linalg.pinv(a, atol=1e-9, rtol=1e-9)),
        (aten.linalg_pinv.default, lambda a: torch.linalg.pinv(a, 1e-9)),
        (aten.linalg_qr.default, torch.linalg.qr),
        (aten.linalg_slogdet.default, torch.linalg.slogdet),
        (aten.linalg_svd.default, torch.linalg.svd),
        (aten.linalg_svdvals.default, torch.linalg.svdvals),
        (aten.logdet.default, torch.logdet),
        (aten.matrix_exp.default, torch.matrix_exp),
        (aten.matrix_power.default, lambda a: torch.matrix_power(a, 3)),
        (aten.pinverse.default, torch.pinverse),
        (aten.slogdet.default, torch.slogdet),
        (aten.svd.default, torch.svd),
        (aten.triangular_solve.default, lambda a: torch.triangular_solve(a, a)[0]),
    ))),
    *like_others(*(case(target, "_1", fn, constant(4, 3)) for target, fn in (
        (aten.geqrf.default, torch.geqrf),
        (aten.linalg_cond.p_str, lambda a: torch.linalg.cond(a, "fro")),
        (aten.linalg_ldl_factor.default, torch.linalg.ldl_factor),
        (aten.linalg_ldl_factor_ex.default, torch.linalg.ldl_factor_ex),
        (aten.linalg_matrix_rank.atol_rtol_float, lambda a: torch.linalg.matrix_rank(a, atol=0.5)),
        (aten.linalg_matrix_rank.atol_rtol_tensor, torch.linalg.matrix_rank),
        (aten.linalg_matrix_rank.default, lambda a: torch.linalg.matrix_rank(a, 0.5)),
        (aten.linalg_matrix_rank.tol_tensor, lambda a: torch.linalg.matrix_rank(a, a[:, 0, 0])),
        (aten.linalg_pinv.rcond_tensor, lambda a: torch.linalg.pinv(a, a[:, 0, 0] / 1e9)),
        (aten.linalg_qr.default, lambda a: torch.linalg.qr(a, "r")[1]),
    ))),
    *like_others(
    case(aten.linalg_householder_product.default, "_1", torch.linalg.householder_product, real(4, 3, 3), real(4, 3)),
    case(aten.orgqr.default, "_1", torch.orgqr, real(4, 3, 3), real(4, 3)),
    ),
    # along dims that stay whole
    case(aten.amin.default, "f0 f2", lambda x: x.amin(1), real(4, 3, 4)),
    case(aten.aminmax.default, "f1", lambda x: x.aminmax(dim=0, keepdim=True), real(4, 4)),
    case(aten.aminmax.default, "", lambda x: x.aminmax(), real(4, 4)),
    case(aten.argmax.default, "", lambda x, y: x.argmax() * y, real(4, 4), real(4)),
    case(aten.bucketize.Tensor, "f0 f1",
         lambda x, s, y: torch.bucketize(x.detach(), s) * y, real(4, 4), fixed(3), real(4, 1)),
    case(aten.cummax.default, "f0", lambda x: x.cummax(1), real(4, 4)),
    case(aten.cummin.default, "f1", lambda x: x.cummin(0), real(4, 4)),
    case(aten.cumprod.default, "f0", lambda x: x.cumprod(-1), real(4, 4)),
    case(aten.diag_embed.default, "f0 f1", lambda x: torch.diag_embed(x, 1, 0, -2) * 2, real(4, 4, 3), linear=1),
    case(aten.diagonal.default, "f1", lambda x: x.diagonal(1, 0, 2) * 2, real(3, 4, 4), linear=1),
    case(aten.diagonal_scatter.default, "f0",
         lambda x, y: x.diagonal_scatter(y, 0, 1, 2), real(4, 3, 3), real(4, 3), linear=1),
    case(aten.glu.default, "f1", lambda x: F.glu(x, 0), real(4, 4)),
    case(aten.histc.default, "f0 f1", lambda x, y: x.histc(3, -1.0, 1.0) * y, fixed(4, 4), real(3)),
    case(aten.histc.default, "", lambda x, y: x.histc(3) * y, fixed(4, 4), real(3)),
    case(aten.isin.Tensor_Tensor, "f0 f1",
         lambda i, t, x: torch.isin(i, t) * x, index(5, 4, 4), index(5, 2), real(4, 4)),
    case(aten.isin.Tensor_Scalar, "f0", lambda i, x: torch.isin(i, 2) * x, index(5, 4), real(4)),
    case(aten.kthvalue.default, "f0", lambda x: x.kthvalue(2, 1), real(4, 3)),
    case(aten.linalg_vector_norm.default, "f0", lambda x: torch.linalg.vector_norm(x, 3, 1), real(4, 4)),
    case(aten.logcumsumexp.default, "f0", lambda x: x.logcumsumexp(1), real(4, 4)),
    case(aten.logsumexp.default, "f0", lambda x: torch.complex(x, -x).logsumexp(1).real, real(4, 4)),
    case(aten.median.default, "", lambda x: x.median(), real(4, 4)),
    case(aten.median.dim, "f0", lambda x: x.median(1), real(4, 3)),
    case(aten.mode.default, "f1", lambda x: x.mode(0, True), real(3, 4)),
    case(aten.multilabel_margin_loss.default, "f0",
         lambda x, t: F.multilabel_margin_loss(x, t, reduction="none"), real(4, 4), index(4, 4, 4)),
    case(aten.multilabel_margin_loss.default, "f0", F.multilabel_margin_loss, real(4, 4), index(4, 4, 4)),
    case(aten.multilabel_margin_loss.default, "",
         lambda x, t: F.multilabel_margin_loss(x, t, reduction="sum"), real(4), index(4, 4)),
    case(aten.nanmedian.default, "", lambda x: x.nanmedian(), real(4, 4)),
    case(aten.nanmedian.dim, "f0", lambda x: x.nanmedian(-1, True), real(4, 3)),
    case(aten.nanquantile.default, "f0", lambda x, q: x.nanquantile(q, 1), real(4, 3), fixed_unit(2)),
    case(aten.nanquantile.scalar, "f0", lambda x: x.nanquantile(0.3, 1, True), real(4, 3)),
    case(aten.native_group_norm.default, "f0",
         lambda x, w, b: torch.native_group_norm(x, w, b, 4, 4, 1, 2, 0.1), real(4, 4), real(4), real(4)),
    case(aten.native_layer_norm.default, "f0",
         lambda x, w: torch.native_layer_norm(x, (3, 2), w, None, 0.1), real(4, 3, 2), real(3, 2)),
    case(aten.prod.default, "", lambda x: x.prod(), real(4, 4)),
    case(aten.prod.dim_int, "f1", lambda x: x.prod(0), real(4, 4)),
    case(aten.quantile.default, "f1", lambda x, q: x.quantile(q, 0, keepdim=True), real(3, 4), fixed_unit(2)),
    case(aten.quantile.scalar, "", lambda x: x.quantile(0.3), real(4, 4)),
    case(aten.searchsorted.Tensor, "f0 f1",
         lambda x, y: torch.searchsorted(x.sort()[0], x) * y, fixed(4, 4), real(4, 4)),
    case(aten.searchsorted.Tensor, "f0 f1",
         lambda s, x, y: torch.searchsorted(s, x) * y, fixed(3), fixed(4, 4), real(4, 1)),
    case(aten.select_scatter.default, "f0", lambda x, y: x.select_scatter(y, 1, 2), real(4, 4), real(4), linear=1),
    case(aten.slice_scatter.default, "f1",
         lambda x, y: x.slice_scatter(y, 0, 1, 3), real(4, 4), real(2, 4), linear=1),
    case(aten.sort.default, "f0", lambda x: x.sort(1), real(4, 3)),
    case(aten.sort.stable, "f1", lambda x: x.sort(dim=0, stable=True, descending=True), real(3, 4)),
    case(aten.topk.default, "f0", lambda x: x.topk(2), real(4, 3)),
    case(aten.tril.default, "f0", lambda x: x.tril(1) * 2, real(4, 3, 3), linear=1),
    case(aten.triu.default, "f0", lambda x: x.triu(-1) * 2, real(4, 3, 3), linear=1),
    # complex numbers, and pairs
    case(aten.complex.default, "f0 f1", lambda x, y: torch.complex(x, y).abs(), positive(4, 4), real(4, 4), linear=1),
    case(aten.frexp.Tensor, "f0 f1", torch.frexp, real(4, 4)),
    case(aten.polar.default, "f0 f1", lambda x, y: torch.view_as_real(torch.polar(x, y)), positive(4, 4), real(4, 4),
         linear=1),
    case(aten.view_as_complex.default, "f0 f1",
         lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), real(4, 4, 2), linear=1),
    case(aten.view_as_real.default, "f0", lambda x, y: torch.view_as_real(torch.complex(x, y)) * 2, real(4), real(4),
         linear=1),
    # elementwise without the tag
    case(aten._prelu_kernel.default, "f0 f1 f2", F.prelu, real(4, 4, 4), real(4)),
    case(aten.floor_divide.default, "f0 f1",
         lambda x, y: torch.floor_divide(x.detach(), y.detach()) * x, real(4, 4), positive(4)),
    case(aten.log_sigmoid.default, "f0 f1", F.logsigmoid, real(4, 4)),
]  # fmt: skip

POINTWISE = [
    case(aten.abs.default, "f0 f1", torch.abs, real(4, 4)),
    case(aten.addcmul.default, "f0 f1", torch.addcmul, real(4, 4), real(4), real(4, 1)),
    case(aten.atan2.default, "f0 f1", torch.atan2, real(4, 4), positive(4, 4)),
    case(aten.clamp.default, "f0 f1", lambda x: x.clamp(-0.5, 0.5), real(4, 4)),
    case(aten.clamp.Tensor, "f0 f1", lambda x, y: torch.clamp(x, min=y), real(4, 4), real(4)),
    case(aten.cos.default, "f0 f1", torch.cos, real(4, 4)),
    case(aten.div.Tensor_mode, "f0 f1", lambda x, y: x.div(y, rounding_mode="floor") * x, real(4, 4), positive(4, 4)),
    case(aten.elu.default, "f0 f1", F.elu, real(4, 4)),
    case(aten.erf.default, "f0 f1", torch.erf, real(4, 4)),
    case(aten.exp.default, "f0 f1", torch.exp, real(4, 4)),
    case(aten.gelu.default, "f0 f1", lambda x: F.gelu(x, approximate="tanh"), real(4, 4)),
    case(aten.gt.Scalar, "f0 f1", lambda x: (x > 0).double() * x, real(4, 4)),
    case(aten.hardtanh.default, "f0 f1", F.hardtanh, real(4, 4)),
    case(aten.le.Tensor, "f0 f1", lambda x, y: (x <= y).double() * x, real(4, 4), real(4, 1)),
    case(aten.lerp.Tensor, "f0 f1", torch.lerp, real(4, 4), real(4, 4), real(4)),
    case(aten.log.default, "f0 f1", torch.log, positive(4, 4)),
    case(aten.logical_not.default, "f0 f1", lambda m, x: (~m).logical_not().double() * x, mask(4, 4), real(4, 4)),
    case(aten.maximum.default, "f0 f1", torch.maximum, real(4, 4), real(4)),
    case(aten.pow.Tensor_Scalar, "f0 f1", lambda x: x**3, real(4, 4)),
    case(aten.pow.Tensor_Tensor, "f0 f1", torch.pow, positive(4, 4), real(4, 1)),
    case(aten.reciprocal.default, "f0 f1", lambda x: 1 / x, positive(4, 4)),
    case(aten.relu.default, "f0 f1", F.relu, real(4, 4)),
    case(aten.remainder.Tensor, "f0 f1", torch.remainder, real(4, 4), positive(4, 4)),
    case(aten.rsqrt.default, "f0 f1", torch.rsqrt, positive(4, 4)),
    case(aten.sigmoid.default, "f0 f1", torch.sigmoid, real(4, 4)),
    case(aten.silu.default, "f0 f1", F.silu, real(4, 4)),
    case(aten.softplus.default, "f0 f1", F.softplus, real(4, 4)),
    case(aten.sqrt.default, "f0 f1", torch.sqrt, positive(4, 4)),
    case(aten.tanh.default, "f0 f1", torch.tanh, real(4, 4)),
    case(aten.xlogy.Tensor, "f0 f1", torch.xlogy, positive(4, 4), positive(4)),
]  # fmt: skip


def name_of(one):
    shapes = "-".join("x".join(map(str, spec[1])) for spec in one.args)
    return f"{str(one.target).removeprefix('aten.')}-{shapes}"


def tensors_of(one, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(make(spec, generator) for spec in one.args)


quiet = pytest.mark.filterwarnings(
    "ignore:index_reduce.. is in beta",
    "ignore:The reduce argument of torch.scatter",
    "ignore:torch.cholesky is deprecated",
    "ignore:torch.triangular_solve is deprecated",
    "ignore:torch.searchsorted.*non-contiguous",
)


OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
NOT_IN_OLD = {  # torch.export cannot capture the quantiles, aminmax has no derivative
    aten.aminmax.default, aten.nanquantile.default, aten.nanquantile.scalar, aten.quantile.default, aten.quantile.scalar
}  # fmt: skip


def all_cases():
    """Of each row one case by default; its others are for `make conformance`."""
    seen, cases = set(), []
    for one in [*CASES, *POINTWISE]:
        again = one.like_others or one.target in seen
        seen.add(one.target)
        marks = [pytest.mark.slow] * again
        if one.target in NOT_IN_OLD:
            marks.append(pytest.mark.skipif(OLD, reason="torch 2.11 itself cannot do it"))
        cases.append(pytest.param(one, marks=marks, id=name_of(one)))
    return cases


def strided_call(one):
    """The function and the operands of a case, which are views of stored tensors; the gradient is transposed."""
    plain = tensors_of(one)
    if one.target in VIEWED:
        return one.fn, plain
    *_, (_, fn, stored) = strided(one.fn, plain, {}, len(one.splits))
    return fn, stored


# What puts strided operands together is made of the first of these, and PyTorch takes the last ones dense only.
VIEWED = {
    aten.alias.default, aten.clone.default, aten.expand.default, aten.permute.default, aten.slice.Tensor,
    aten.native_group_norm.default, aten.view_as_complex.default,
}  # fmt: skip


@quiet
@pytest.mark.parametrize("one", all_cases())
def test_every_option_computes_the_value_and_the_gradients_of_strided_operands(one, lab):
    fn, args = strided_call(one)
    graph = capture(fn, args, {})
    vertices = lab.check_options(graph, fn, args, one.target, lab.LINE, 12, random.Random(0))
    assert vertices, "the function does not call the operator"
    options = axis_options(vertices[0].rule)
    assert {option.factor for option in options} - {None} == set(one.splits.split())
    assert sum("P" in map(str, option.results) for option in options if option.factor is None) == one.linear


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("one", all_cases())
def test_every_option_computes_the_value_and_the_gradients(one, lab):
    args = tensors_of(one)
    lab.check_options(capture(one.fn, args, {}), one.fn, args, one.target, lab.LINE, 12, random.Random(0))


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("one", all_cases())
def test_options_on_two_axes_compute_the_value_and_the_gradients(one, lab):
    args = tensors_of(one)
    lab.check_options(capture(one.fn, args, {}), one.fn, args, one.target, lab.SQUARE, 3, random.Random(0))


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1], ids=["one", "none"])
@pytest.mark.parametrize("one", all_cases())
def test_ranks_of_one_element_or_of_none_compute_the_value_and_the_gradients(one, more, lab):
    check_sizes(one, more, lab)


def check_sizes(one, more, lab):
    """Each factor of each call of the operator, split over as many ranks as it has elements, and `more`."""
    args = tensors_of(one)
    expected = lab.value_and_gradients(lab.as_tuple(one.fn(*args)), [t for t in args if t.requires_grad])
    graph = capture(one.fn, args, {})
    tried = 0
    for size in sorted({n for node in calls_of(graph, one.target) for n in rule_of(node).sizes.values() if n > 1}):
        mesh = Mesh({"x": size + more})
        free = {port.name: (layouts_of(mesh, shape(port.node), size), "any") for port in graph.inputs}
        problem = formulate(graph, lab.settings_of(mesh, on_unknown_op="error"), free)
        for vertex in lab.vertices_of(problem, one.target):
            for i, option in enumerate(problem.vertices[vertex].options):
                if option.factors[0] is not None:
                    chosen = lab.choose(problem, vertex, [i])
                    text = f"{one.target} split along {option.factors[0]} on {mesh}"
                    lab.check_choice(chosen, dynamic_programming(chosen).choice, one.fn, args, expected, text)
                    tried += 1
    return tried


def calls_of(graph, target):
    return [node for node in graph.nodes if node.target is target]


def layouts_of(mesh, size, least):
    """Whole, or split along any dim of at least so many elements."""
    placements = [Replicate(), *(Shard(dim) for dim, n in enumerate(size) if n >= least)]
    return tuple(Layout(mesh, (placement,)) for placement in placements)


# calls that mean something else where a dim has one element, or as many as another one
AMBIGUOUS = [
    case(aten.linalg_cross.default, "", torch.cross, real(6, 3), real(6, 3)),
    case(aten.linalg_solve.default, "", torch.linalg.solve, definite(6, 3), real(3, 3)),
    case(aten.linalg_solve.default, "", torch.linalg.solve, definite(3, 3), real(3, 6)),
    case(aten.linalg_solve.default, "", torch.linalg.solve, definite(2, 3), real(3)),
    case(aten.linalg_solve_ex.default, "", lambda a, b: torch.linalg.solve_ex(a, b)[0], definite(6, 3), real(3, 3)),
    case(aten.squeeze.dims, "", lambda x: x.squeeze() * 2, real(2, 1, 4)),
    case(aten.squeeze.dims, "", lambda x: x.squeeze(0) * 2, real(2, 4)),
    case(aten.squeeze.dims, "", lambda x: x.squeeze((-1, 0)) * 2, real(2, 4, 1)),
    case(aten.squeeze.dims, "", lambda x: aten.squeeze_copy(x) * 2, real(2, 2)),
]


@quiet
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("one", [pytest.param(one, id=name_of(one)) for one in AMBIGUOUS])
def test_the_sizes_of_the_whole_say_what_a_call_means(one, lab):
    args = tensors_of(one)
    assert lab.check_options(capture(one.fn, args, {}), one.fn, args, one.target, lab.LINE, 12, random.Random(0))
    assert check_sizes(one, 0, lab)


def test_every_row_has_a_case():
    covered = {one.target for one in CASES} | {aten._grouped_mm.default, draw, *HOOKS}  # which have tests of their own
    missing = [str(target) for target in ROWS if target not in covered]
    assert not missing, f"no case calls {', '.join(missing)}"


def test_a_row_that_nothing_reaches_is_not_kept():
    def f(x):
        return (
            aten.contiguous(x) + aten.chunk(x.to(torch.float32).double(), 2)[0].repeat(2, 1) + F.dropout(x, 0.5, False)
        )

    targets = {str(node.target) for node in capture(f, (torch.ones(4, 4),), {}).nodes}
    assert targets.isdisjoint(
        {"aten.contiguous.default", "aten.chunk.default", "aten.to.dtype", "aten.dropout.default"}
    )


@pytest.mark.parametrize("axis", [Mesh({"x": 2}), Mesh({"dp": 2, "tp": 2})], ids=str)
def test_groups_of_rows_split_by_rows_by_matrices_and_within(axis, lab):
    """In bfloat16, the one dtype that the operator takes."""
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, 16, requires_grad=True)
    ends = torch.tensor([3, 3, 5, 7], dtype=torch.int32)

    def f(x, w, ends):
        behind = torch.arange(8).unsqueeze(1) >= ends[-1]  # what is there PyTorch leaves open, also of the gradient
        x = x.bfloat16().masked_fill(behind, 0.0)
        return torch._grouped_mm(x, w.bfloat16(), offs=ends).masked_fill(behind, 0.0)

    problem = lab.problem_of(f, (x, w, ends), axis)
    expected = lab.value_and_gradients([f(x, w, ends)], [x, w])
    (vertex,) = lab.vertices_of(problem, aten._grouped_mm.default)
    options = problem.vertices[vertex].options
    assert {option.factors[0] for option in options} == {None, "t", "k", "e", "n"}
    for i in range(0, len(options), len(axis.axes)):
        chosen = lab.choose(problem, vertex, [i])
        step = lab.compiled(chosen, dynamic_programming(chosen).choice)
        tensors = lab.call_tensors(problem, f, (x, w, ends))
        found = lab.value_and_gradients(step(tensors), [x, w])
        lab.assert_same(found, expected, str(options[i]), 0.05)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_linear_cross_entropy_in_chunks_splits_like_any(reduction, lab):
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options")
    chunks = options.LinearCrossEntropyOptions(batch_chunk_size=2)

    def f(x, w, b, t):
        return F.linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, options=chunks)

    args = tensors_of(case(None, "", f, real(4, 4), real(4, 4), real(4), index(4, 4)))
    assert lab.check_options(capture(f, args, {}), f, args, class_terms, lab.LINE, 12, random.Random(0))


def test_layers_drop_the_same_however_the_batch_is_split(lab):
    def f(x, h, w, u):
        return torch.lstm(x, [h, h], [w, u] * 4, False, 2, 0.5, True, True, False)

    args = tensors_of(case(None, "", f, real(3, 4, 4), real(4, 4, 2), real(8, 4), real(8, 2)))
    problem = lab.problem_of(f, args, lab.LINE, on_unknown_op="warn")
    found = []
    for factor in (None, "b"):
        chosen = problem
        for vertex in lab.vertices_of(problem, aten.lstm.input):
            options = problem.vertices[vertex].options
            chosen = lab.choose(chosen, vertex, [i for i, o in enumerate(options) if o.factors == (factor,)])
        step = lab.compiled(chosen, dynamic_programming(chosen).choice)
        torch.manual_seed(3)
        found.append(lab.value_and_gradients(step(lab.call_tensors(problem, f, args)), args))
    lab.assert_same(*found)


# -- splits that a maximum and an embedding have


def placements_of(lab, fn, args, target, mesh):
    """The placements of the first result in every option of the call of `target`."""
    problem = lab.problem_of(fn, args, mesh)
    (vertex,) = lab.vertices_of(problem, target)
    return {str(option.results[0]) for option in problem.vertices[vertex].options}


def test_a_maximum_with_a_gradient_keeps_its_dim_whole(lab):
    x = torch.rand(4, 4, requires_grad=True)
    detached = placements_of(lab, lambda x: x.detach().amax(1) * x.sum(1), (x,), aten.amax.default, lab.LINE)
    assert detached == {"[x:S0]", "[x:Pmax]", "[x:R]", "[x:B]"}
    assert placements_of(lab, lambda x: x.amax(1), (x,), aten.amax.default, lab.LINE) == {"[x:S0]", "[x:R]", "[x:B]"}
    assert "[x:Pmax]" in placements_of(lab, lambda x: x.amax(1), (x.detach(),), aten.amax.default, lab.LINE)
    assert "[x:Pmax]" not in placements_of(lab, lambda x: x.amax(1), (x.detach() > 0.5,), aten.amax.default, lab.LINE)


def test_rows_are_cut_by_several_axes_in_mesh_order(lab):
    args = tensors_of(case(aten.embedding.default, "", F.embedding, index(8, 16), real(8, 4)))
    problem = lab.problem_of(F.embedding, args, lab.SQUARE)
    (vertex,) = lab.vertices_of(problem, aten.embedding.default)
    options = problem.vertices[vertex].options
    both = next(i for i, option in enumerate(options) if option.factors == ("v", "v"))
    problem = lab.choose(problem, vertex, [both])
    solution = dynamic_programming(problem)
    expected = lab.value_and_gradients([F.embedding(*args)], [args[1]])
    lab.check_choice(problem, solution.choice, F.embedding, args, expected, "rows on both axes")
    program = str(lower(problem, solution.choice))
    assert "partway.position.default([dp, tp], [2, 2])" in program
    assert "partway.part_index.default(tensors_0, position_default, [0, 2, 4, 6, 8])" in program


@pytest.mark.parametrize("wrong", [8, -1])
def test_an_index_that_no_part_has_is_an_error(lab, wrong):
    args = torch.tensor([0, wrong, 3, 5]), torch.rand(8, 4, requires_grad=True)
    problem = lab.problem_of(F.embedding, args, lab.LINE)
    (vertex,) = lab.vertices_of(problem, aten.embedding.default)
    split = [i for i, option in enumerate(problem.vertices[vertex].options) if option.factors == ("v",)]
    problem = lab.choose(problem, vertex, split)
    step = lab.compiled(problem, dynamic_programming(problem).choice)
    with pytest.raises(IndexError, match=f"index {wrong} is out of range of a dim of size 8"):
        step(lab.call_tensors(problem, F.embedding, args))


# -- views


def reshape_node(before, after):
    """A call of reshape that was never captured: the rule needs only shapes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(before, device="meta")
    node = graph.call_function(aten.reshape.default, (x, list(after)))
    node.meta["val"] = torch.empty(after, device="meta")
    return node


def grouped(draw, factors):
    """Dims whose sizes are products of neighbouring `factors`, and some of size 1."""
    dims, current = [], 1
    for factor in factors:
        current *= factor
        if draw(st.booleans()):
            dims.append(current)
            current = 1
    dims.append(current)
    for _ in range(draw(st.integers(0, 2))):
        dims.insert(draw(st.integers(0, len(dims))), 1)
    return tuple(dims)


@st.composite
def reshapes(draw):
    """Two shapes of as many elements: of common factors, or of any."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3, 4, 6]), min_size=1, max_size=4))
    other = factors if draw(st.booleans()) else draw(st.permutations(factors))
    return grouped(draw, factors), grouped(draw, other)


@given(reshapes(), st.sampled_from([(2,), (3,), (2, 2), (2, 3), (4,)]))
def test_a_view_of_a_part_is_the_part_of_the_view(shapes, sizes):
    before, after = shapes
    mesh = Mesh.of_sizes(sizes)
    rule = rule_of(reshape_node(before, after))
    x = torch.arange(prod(before)).reshape(before)
    y = x.reshape(after)
    for chosen in product([o for o in axis_options(rule) if "P" not in map(str, o.results)], repeat=len(sizes)):
        parts = {}
        for option, size in zip(chosen, sizes, strict=True):
            parts[option.factor] = parts.get(option.factor, 1) * size
        if any(f is not None and f not in rule.uneven and rule.sizes[f] % n for f, n in parts.items()):
            continue
        source = Layout(mesh, tuple(o.operands[0] for o in chosen))
        target = Layout(mesh, tuple(o.results[0] for o in chosen))
        assert Partial() not in target.placements
        for rank in range(mesh.device_num):
            local, right = x[source.slices(before, rank)], y[target.slices(after, rank)]
            assert torch.equal(local.flatten(), right.flatten()), f"{before} -> {after} as {source} -> {target}"


@pytest.mark.parametrize(
    ("before", "after", "splits"),
    [
        ((4, 6), (4, 2, 3), "S0>S0 S1>S1"),
        ((4, 2, 3), (4, 6), "S0>S0 S1>S1"),
        ((8, 12), (96,), "S0>S0"),
        ((2, 3), (3, 2), ""),
        ((4, 3), (6, 2), "S0>S0"),
        ((5, 2, 3), (5, 3, 2), "S0>S0"),
        ((1, 4, 1), (4,), "S1>S0"),
        ((4,), (1, 2, 1, 2), "S0>S1"),
        ((2, 1, 4), (2, 4), "S0>S0 S2>S1"),
        ((3, 4, 8), (12, 2, 4), "S0>S0 S2>S1"),
    ],
)
def test_the_major_part_of_a_merged_dim_splits(before, after, splits):
    options = axis_options(rule_of(reshape_node(before, after)))
    assert [f"{o.operands[0]}>{o.results[0]}" for o in options if o.factor] == splits.split()


def test_a_view_of_nothing_has_nothing_to_split():
    rule = rule_of(reshape_node((0, 4), (4, 0)))
    assert (rule.operands, rule.results, rule.sizes) == ((((), ()),), (((), ()),), {})
