"""Decomposes operators without rules into PyTorch operators that have rules."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from ...torch_internals import (
    OpOverload,
    decompose,
    is_composite,
    overload_name_of,
    schema_of,
    split_decompositions,
    tree_map,
)
from .one_by_one import written_one_by_one

aten = torch.ops.aten

WRITTEN_OUT = frozenset(
    [
        aten.affine_grid_generator.default,
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
    ]
)


# Views with a copying twin.
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

# Their results share the memory of the operand, though their schemas do not say so.
_SAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def _copy(view: Any) -> tuple[Any, Any]:
    """The copying twin of a view, and its decomposition."""
    name, overload = schema_of(view).name.removeprefix("aten::"), overload_name_of(view)
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
    distance: torch.Tensor = torch.linalg.vector_norm(x - y, p)
    return distance


# Composite and written-out operators that become only views, casts, copies and kernels.
_SIMPLE = frozenset(
    [
        aten.batch_norm.default,
        aten.broadcast_to.default,
        aten.chunk.default,
        aten.contiguous.default,
        aten.diff.default,
        aten.dropout.default,
        aten.expand_as.default,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.flatten.using_ints,
        aten.mT.default,
        aten.masked_fill.Tensor,
        aten.meshgrid.indexing,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.narrow.default,
        aten.numpy_T.default,
        aten.ravel.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.reshape_as.default,
        aten.rsub.Tensor,
        aten.split.sizes,
        aten.swapaxes.default,
        aten.swapdims.default,
        aten.to.device,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.other,
        aten.unflatten.int,
        aten.view_as.default,
        aten.where.Scalar,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.zero.default,
    ]
)


def write_out(exported: ExportedProgram) -> tuple[fx.GraphModule, ExportGraphSignature]:
    """`exported.run_decompositions(written_out())`, but faster.

    That call overrides all of PyTorch's 500 composite operators each time, under 20 keys each, so that only the chosen
    ones are decomposed, which takes some 0.2 s for any program. If the operators of the program do not decompose into
    composite ones that it does not call, overriding those that it calls is enough.
    """
    called = {
        node.target
        for module in exported.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, OpOverload)
    }
    if not all(map(_becomes_no_composite, called)):
        return _parts(exported.run_decompositions(written_out()))
    composite, others = _tables()
    kept = {op: composite[op] for op in called if op in composite}
    return written_one_by_one(exported, kept, others) or _parts(decompose(exported, kept, others))


def _parts(exported: ExportedProgram) -> tuple[fx.GraphModule, ExportGraphSignature]:
    return exported.graph_module, exported.graph_signature


def _becomes_no_composite(operator: OpOverload) -> bool:
    """Whether an operator stays, or decomposes into operators that are not composite."""
    if operator in _SIMPLE:
        return True
    schema = schema_of(operator)
    if operator in written_out() or (schema.is_mutable and schema.name.removesuffix("_") in _names()):
        return False
    return operator in _tables()[0] or not is_composite(operator)


@lru_cache(maxsize=1)
def _tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The decompositions of composite operators, and those of others."""
    composite, others = split_decompositions(dict(written_out()))
    return composite, others


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    """The names of the written-out operators that are not simple: a write in place becomes one of them and a copy."""
    return frozenset(schema_of(operator).name for operator in written_out() if operator not in _SIMPLE)


@lru_cache(maxsize=1)
def written_out() -> dict[Any, Any]:
    """The decomposition of each written-out operator, for `run_decompositions`."""
    every = torch.export.default_decompositions()
    known = {target: every[target] for target in WRITTEN_OUT if target in every}
    return {**known, aten.dist.default: _distance, aten.repeat.default: _repeat, **_SAFE, **dict(map(_copy, _COPIED))}
