"""Operators that are captured as those which PyTorch itself writes them with, and which have rules."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .torch_internals import tree_map

aten = torch.ops.aten

WRITTEN_OUT = frozenset([
    aten.argsort.default,
    aten.argsort.stable,
    aten.atleast_1d.Sequence,
    aten.atleast_2d.Sequence,
    aten.atleast_3d.Sequence,
    aten.block_diag.default,
    aten.chalf.default,
    aten.column_stack.default,
    aten.cosine_embedding_loss.default,
    aten.cosine_similarity.default,
    aten.cumulative_trapezoid.dx,
    aten.cumulative_trapezoid.x,
    aten.diag.default,
    aten.diagflat.default,
    aten.diff.default,
    aten.dstack.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.fliplr.default,
    aten.flipud.default,
    aten.gradient.array,
    aten.gradient.scalararray,
    aten.gradient.scalarint,
    aten.gradient.scalarrayarray,
    aten.gradient.scalarrayint,
    aten.gradient.tensorarray,
    aten.gradient.tensorarrayint,
    aten.grid_sampler.default,
    aten.hinge_embedding_loss.default,
    aten.hstack.default,
    aten.isclose.default,
    aten.isreal.default,
    aten.margin_ranking_loss.default,
    aten.masked_fill.Tensor,
    aten.meshgrid.indexing,
    aten.msort.default,
    aten.nanmean.default,
    aten.nansum.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
    aten.outer.default,
    aten.pairwise_distance.default,
    aten.poisson_nll_loss.default,
    aten.prelu.default,
    aten.renorm.default,
    aten.rot90.default,
    aten.rsub.Tensor,
    aten.sum_to_size.default,
    aten.tile.default,
    aten.trapezoid.dx,
    aten.trapezoid.x,
    aten.trapz.dx,
    aten.trapz.x,
    aten.triplet_margin_loss.default,
    aten.vstack.default,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.zero.default,
])  # fmt: skip


# Views that have a twin which copies.
_COPIED = (
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.diagonal.default,
    aten.expand.default,
    aten.narrow.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unfold.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view.dtype,
    aten.view_as_complex.default,
    aten.view_as_real.default,
)

# Their results share the memory of the operand, and their schemas do not say so.
_SAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def _copy(view: Any) -> tuple[Any, Any]:
    """The twin of a view, and what it is."""
    name, overload = view._schema.name.removeprefix("aten::"), view._overloadname
    return getattr(getattr(aten, f"{name}_copy"), overload), lambda *args, **kwargs: tree_map(
        torch.clone, view(*args, **kwargs)
    )


def _repeat(x: torch.Tensor, repeats: list[int]) -> torch.Tensor:
    size = [1] * (len(repeats) - x.dim()) + list(x.shape)
    apart = x.reshape([n for extent in size for n in (1, extent)])
    spread = apart.expand([n for both in zip(repeats, size, strict=True) for n in both])
    merged = spread.reshape([times * extent for times, extent in zip(repeats, size, strict=True)])
    return merged.contiguous()  # as views of it expect


def _distance(x: torch.Tensor, y: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(x - y, p)
    return found


@cache
def written_out() -> dict[Any, Any]:
    """The decomposition of each of them, for `run_decompositions`."""
    every = torch.export.default_decompositions()
    known = {target: every[target] for target in WRITTEN_OUT if target in every}
    return {**known, aten.dist.default: _distance, aten.repeat.default: _repeat, **_SAFE, **dict(map(_copy, _COPIED))}
