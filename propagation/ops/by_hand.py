from __future__ import annotations

from .registration import define


def _like(x, *a): return x.new_empty(x.shape)
def _gather(x, dim, axes, sizes):
    s=list(x.shape); s[dim]=sum(sizes); return x.new_empty(s)
def _rs(x, op, dim, axes, sizes, own):
    s=list(x.shape); s[dim]=own; return x.new_empty(s)
def _a2a(x, sd, cd, axes, sends, receives, own):
    s=list(x.shape); s[sd]=own; s[cd]=sum(receives); return x.new_empty(s)
all_reduce = define("all_reduce(Tensor x, str op, str[] axes, int size) -> Tensor", fake=_like)
all_gather = define("all_gather(Tensor x, int dim, str[] axes, int[] sizes) -> Tensor", fake=_gather)
reduce_scatter = define("reduce_scatter(Tensor x, str op, int dim, str[] axes, int[] sizes, int own) -> Tensor", fake=_rs)
broadcast = define("broadcast(Tensor x, int root, str[] axes, int size) -> Tensor", fake=_like)
all_to_all = define("all_to_all(Tensor x, int split_dim, int concat_dim, str[] axes, int[] sends, int[] receives, int own) -> Tensor", fake=_a2a)
permute = define("permute(Tensor x, int[] pairs, str[] axes, int size) -> Tensor", fake=_like)
send_receive = define("send_receive(Tensor[] xs, int[] targets, int[] sources, int[] sizes, int[] ndims, ScalarType dtype, Device device, str[] axes, int size) -> Tensor[]")
from torch import fx

COLLECTIVES = frozenset({all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, permute, send_receive})
for _op in COLLECTIVES:
    fx.node.has_side_effect(_op)
