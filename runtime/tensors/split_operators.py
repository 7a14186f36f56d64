"""Operators on split tensors: on parts if that gives the numbers of one device, else on the whole.

PyTorch's tags and schemas of an operator decide, and not a list of operators:

    tagged `pointwise`, a copy, a fill, a fused or foreach step    each rank computes its part
    a norm, a sum, an extreme of all elements                      each rank computes its part's, then of these
    a view                                                         a `SplitView`: it is computed when it is used
    anything else                                                  on the whole; written tensors are split again
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...propagation.torch_internals import OpOverloadPacket, schema_of, tree_leaves, tree_map
from ...strategy.cut import Cut
from ...strategy.errors import RuntimeStateError
from ..ranks.replicas import ledger_of, ranks_of
from ..ranks.watch import comparing
from ..torch_internals import in_backward, is_documented, local_part_of, spec_of
from .gather import exchange, gather

if TYPE_CHECKING:
    from .split_tensor import SplitTensor, SplitView

aten = torch.ops.aten
_LARGE = 2**28  # bytes: gathering so many for an operator deserves a warning

_BY_ELEMENT = frozenset({  # untagged ones
    "_to_copy", "clone", "copy_", "empty_like", "fill_", "full_like", "masked_fill", "masked_fill_", "ones_like",
    "zero_", "zeros_like",
})  # fmt: skip
WRITES_STATISTICS = frozenset({  # their schemas do not say so
    "batch_norm", "cudnn_batch_norm", "instance_norm", "miopen_batch_norm", "native_batch_norm",
})  # fmt: skip
_NEW = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
_REDUCED = frozenset({
    "all", "amax", "amin", "any", "is_all_true", "is_any_true", "linalg_vector_norm", "max", "mean", "min", "norm",
    "sum",
})  # fmt: skip
_ADDS = ("linalg_vector_norm", "mean", "sum")

Operands = tuple[Any, ...]


def run(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """The result of the ATen operator `op` for arguments of which some are split."""
    if _writes(op):
        tell_of_write(_name(op), _written(op, args, kwargs), args, kwargs)
    return _how(op)(op, args, kwargs)


def tell_of_write(
    op: str, written: Sequence[Any], args: Operands, kwargs: Mapping[str, Any], always: bool = False
) -> None:
    """Report to the ledger that `op` writes to the tensors, or lists of them, `written`, and with which numbers, if one
    of them lies in parts: if only one rank writes, or writes other numbers, no collective tells. (A whole tensor is
    compared among the ranks that hold it alike, and one may have a copy of its own.) Writes in a backward are reported
    only with `always`: whether it copies a gradient depends on other references to it at that moment."""
    if comparing() is None or (in_backward() and not always):
        return
    first = written[0] if written else ()
    each = first if isinstance(first, list | tuple) else [first]
    split = next((spec_of(one) for one in each if is_split(one) and _has_parts(spec_of(one))), None)
    if split is not None:
        shape = tuple(first.shape) if isinstance(first, Tensor) else (len(first),)
        numbers = (_number(value) for value in (*args, *kwargs.values()))
        ledger_of(ranks_of(split.mesh)).writes((op, shape, *(number for number in numbers if number is not None)))


def _has_parts(spec: Any) -> bool:
    """Whether ranks have parts of a tensor with this spec, and not all of them the whole."""
    return any(isinstance(placement, Shard) for placement in spec.placements)


def _number(value: Any) -> Any:
    """The number in a Python number or a CPU scalar, such as the factor of `mul_`; None for anything else."""
    if isinstance(value, int | float):
        return value
    return value.item() if type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu" else None


def is_split(value: Any) -> bool:
    """Whether `value` is a SplitTensor (split_tensor.py, which imports this)."""
    return hasattr(type(value), "placed")


def is_view(value: Any) -> bool:
    """Whether `value` is a view of a SplitTensor."""
    return hasattr(type(value), "looked_at")


# -- On parts ---------------------------------------------------------------------------------------------------------


def aligned(value: Tensor, spec: Any, what: str) -> Tensor:
    """This rank's part, under `spec`, of a tensor of its shape, or of one that broadcasts to it; a scalar stays one."""
    if isinstance(value, DTensor):
        if _lies_as(value, spec):
            return local_part_of(value)
        value = gather(value, what)
    elif is_view(value):
        value = looked_at(value, what)[2]
    if value.dim() == 0 and spec.shape:
        return value
    if value.shape != spec.shape:
        value = value.expand(spec.shape)
    return value[slices_of(spec)]


def slices_of(spec: Any) -> tuple[slice, ...]:
    """The slices of a tensor that this rank has under `spec`."""
    return _slices(tuple(spec.shape), spec.placements, tuple(spec.mesh.shape), tuple(spec.mesh.get_coordinate()))


@lru_cache(maxsize=4096)
def _slices(
    shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[int, ...], position: tuple[int, ...]
) -> tuple[slice, ...]:
    spans = [(0, size) for size in shape]
    for placement, count, place in zip(placements, sizes, position, strict=True):
        if isinstance(placement, Shard):
            start, stop = spans[placement.dim]
            first, last = Cut(stop - start, (count,)).chunks[place]
            spans[placement.dim] = start + first, start + last
    return tuple(slice(*span) for span in spans)


def has_slices(spec: Any) -> bool:
    """Whether parts are slices, so that an elementwise operator can run on them."""
    known: bool | None = getattr(spec, _HAS_SLICES, None)
    if known is None:
        known = is_documented(spec) and not any(isinstance(p, Partial) for p in spec.placements)
        setattr(spec, _HAS_SLICES, known)
    return known


_HAS_SLICES = "_partway_has_slices"  # an attribute of specs: hashing one takes longer than reading it


def _lies_as(value: Any, spec: Any) -> bool:
    """Whether this rank holds its part of `value` under `spec`."""
    own = spec_of(value)
    return own is spec or (own.placements == spec.placements and own.shape == spec.shape and own.mesh == spec.mesh)


def _by_element(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """Compute each rank's part, with the layout of the written tensor, or of the first split tensor of the result's
    shape."""
    like: Any = None
    shape = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            shape = value.shape if shape is None or shape == value.shape else torch.broadcast_shapes(shape, value.shape)
            if like is None or (is_split(value) and value.shape == shape != like.shape):
                like = value if is_split(value) else None
        elif isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            return on_whole(op, args, kwargs)
    target = next(iter(_written(op, args, kwargs)), None)
    like = like if target is None else target if is_split(target) else None
    if like is None or like.shape != shape or not has_slices(spec_of(like)):
        return on_whole(op, args, kwargs)
    spec, what = spec_of(like), str(op)
    result = op(
        *[aligned(v, spec, what) if isinstance(v, Tensor) else v for v in args],
        **{name: aligned(v, spec, what) if isinstance(v, Tensor) else v for name, v in kwargs.items()},
    )
    if target is not None:
        _count_write(local_part_of(target))
        return target
    return tuple(map(like.placed, result)) if isinstance(result, tuple) else like.placed(result)


def _by_position(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists, such as a foreach or fused step of an optimizer; the tensors at one position have one
    layout. A fused kernel walks through the memory of all tensors of a position at once, so parts are contiguous."""
    likes = _first_split([*args, *kwargs.values()])
    ours = {id(like): spec_of(like) for like in likes if like is not None}
    written = [
        is_split(one) and _lies_as(one, ours[id(like)]) and local_part_of(one).is_contiguous()
        for values in _written(op, args, kwargs, lists=True)
        for like, one in zip(likes, values, strict=False)
        if like is not None
    ]
    if not all(written) or not all(map(has_slices, ours.values())):
        return on_whole(op, args, kwargs)

    def part(value: Any, like: Any) -> Any:
        if like is not None and value.shape == like.shape:
            return aligned(value, ours[id(like)], str(op)).contiguous()
        return _plain(value, str(op))

    def parts(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [part(v, like) if isinstance(v, Tensor) else v for v, like in zip(value, likes, strict=False)]
        return _plain(value, str(op))

    result = op(*map(parts, args), **{name: parts(v) for name, v in kwargs.items()})
    _count_writes(op, args, kwargs)
    if not isinstance(result, list | tuple):
        return result
    return [own if like is None else like.placed(own) for own, like in zip(result, likes, strict=True)]


def _first_split(values: Sequence[Any]) -> list[Any]:
    """For each position of the lists among `values` the first split tensor there; None if there is none."""
    lists = [v for v in values if isinstance(v, list | tuple) and v and isinstance(v[0], Tensor)]
    likes: list[Any] = [None] * max(map(len, lists))
    for every in lists:
        for i, value in enumerate(every):
            if likes[i] is None and is_split(value):
                likes[i] = value
    return likes


def _itself(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """A new tensor object with the same part, so that writes through either are counted."""
    tensor = args[0]
    return tensor.viewed(op, (), {}) if is_view(tensor) else tensor.placed(local_part_of(tensor))


# -- Numbers of all elements ------------------------------------------------------------------------------------------


def _reduced(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """One number of all elements: of each part, then of these. Short floats are added up as float32, as in a kernel."""
    value = args[0]
    if not _is_of_all(op, args, kwargs) or not _parts_are_all(value):
        return on_whole(op, args, kwargs)
    part, name = local_part_of(value), _name(op)
    dtype = kwargs.get("dtype") or part.dtype
    wide = dict(kwargs)
    if name in _ADDS and dtype in (torch.float16, torch.bfloat16):
        wide["dtype"] = torch.float32
    if name == "mean":
        if not dtype.is_floating_point and not dtype.is_complex:
            return on_whole(op, args, kwargs)  # an error
        total = _combined([part.sum(**wide)], [value], Tensor.sum, str(op))[0]
        return (total / value.numel()).to(dtype)
    number = op(part, *args[1:], **wide)
    found = _combined([number], [value], lambda parts: op(parts, *args[1:], **wide), str(op))[0]
    return found.to(dtype) if "dtype" in wide and found.is_floating_point() else found


def _reduced_lists(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """Like `_reduced` for a list of tensors, in one exchange."""
    values = args[0]
    meshes = {id(spec_of(v).mesh) for v in values if is_split(v)}
    finite = "norm" not in _name(op) or _is_finite_norm(args[1:], kwargs)
    if len(meshes) != 1 or not finite or not all(is_split(v) and _parts_are_all(v) for v in values):
        return on_whole(op, args, kwargs)
    numbers = op([local_part_of(v) for v in values], *args[1:], **kwargs)
    return _combined(numbers, values, lambda parts: op([parts], *args[1:], **kwargs)[0], str(op))


def _combined(
    numbers: Sequence[Tensor], values: Sequence[Any], combine: Callable[[Tensor], Tensor], what: str
) -> list[Tensor]:
    """For each of `values` the result of `combine` for the `numbers` of its parts."""
    if all(isinstance(p, Replicate) for v in values for p in spec_of(v).placements):
        return list(numbers)
    own = torch.stack([number.reshape(()) for number in numbers])
    sent = own.view(torch.uint8) if own.dtype == torch.bool else own
    every = exchange(spec_of(values[0]).mesh, sent, what).view(own.dtype)
    return [
        combine(every[list(_distinct(spec_of(v))), i].to(number.dtype))
        for i, (v, number) in enumerate(zip(values, numbers, strict=True))
    ]


def _distinct(spec: Any) -> tuple[int, ...]:
    """The positions, in the order of its mesh, of ranks that together have each element once."""
    return _distinct_positions(tuple(spec.mesh.shape), tuple(isinstance(p, Shard) for p in spec.placements))


@lru_cache(maxsize=4096)
def _distinct_positions(sizes: tuple[int, ...], cuts: tuple[bool, ...]) -> tuple[int, ...]:
    positions = [0]
    for size, cut in zip(sizes, cuts, strict=True):
        positions = [p * size + i for p in positions for i in range(size if cut else 1)]
    return tuple(positions)


def _parts_are_all(value: Any) -> bool:
    """Whether each element is in a slice, and no rank has an empty one, for which some operators have no result."""
    spec = spec_of(value)
    if not has_slices(spec):
        return False
    sizes: dict[int, list[int]] = {}
    for placement, count in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            sizes.setdefault(placement.dim, []).append(count)
    return all(all(a < b for a, b in Cut(spec.shape[dim], tuple(counts)).chunks) for dim, counts in sizes.items())


def _is_of_all(op: Any, args: Operands, kwargs: dict[str, Any]) -> bool:
    """Whether the result is one number of all elements."""
    if not is_split(args[0]):
        return False
    if "norm" in _name(op):
        named = dict(zip([a.name for a in schema_of(op).arguments], args, strict=False)) | kwargs
        return named.get("dim") in (None, []) and not named.get("keepdim") and _is_finite_norm(args[1:2], kwargs)
    return len(args) == 1 and set(kwargs) <= {"dtype"}


def _is_finite_norm(args: Operands, kwargs: dict[str, Any]) -> bool:
    """Whether the norm of norms is the norm."""
    order = kwargs.get("ord", kwargs.get("p", args[0] if args else 2))
    return isinstance(order, int | float) and 0 < order < float("inf")


def _unscaled(op: Any, args: Operands, kwargs: dict[str, Any]) -> None:
    """Run torch.amp.GradScaler's operator: scale gradients by parts; one that is not finite counts on any rank."""
    gradients, found, _ = args
    _by_position(op, args, kwargs)
    meshes = {id(spec_of(g).mesh): spec_of(g).mesh for g in gradients if is_split(g)}
    for mesh in meshes.values():
        found.copy_(exchange(mesh, found.reshape(1), "gradients that are not finite").amax().reshape(found.shape))


# -- On the whole -----------------------------------------------------------------------------------------------------


def on_whole(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """Run the operator on whole tensors; written tensors are split again."""
    seen: dict[int, tuple[Any, Any, Tensor, Tensor]] = {}  # the argument, its split tensor, the whole of that, the view

    def whole(value: Any) -> Any:
        if not is_view(value) and not isinstance(value, DTensor):
            return value
        if id(value) not in seen:
            _warn_if_large(op, value)
            seen[id(value)] = value, *looked_at(value, str(op))
        return seen[id(value)][-1]

    result = op(*tree_map(whole, args), **tree_map(whole, kwargs))
    for written in tree_leaves(_written(op, args, kwargs)):
        if id(written) in seen:
            _, tensor, gathered, _ = seen[id(written)]
            write_whole(tensor, gathered)
    _count_writes(op, args, kwargs)
    returned = {id(view): value for value, _, _, view in seen.values()}
    return tree_map(lambda v: returned.get(id(v), v), result)


def _count_writes(op: Any, args: Operands, kwargs: dict[str, Any]) -> None:
    """Count the writes into lists: autograd counts those into tensors only, and none into parts."""
    for values in _written(op, args, kwargs, lists=True):
        for value in values:
            _count_write(value)
            if is_split(value):
                _count_write(local_part_of(value))


def _count_write(tensor: Tensor) -> None:
    if not tensor.is_inference():
        increment_version(tensor)


def looked_at(value: Any, what: str) -> tuple[Any, Tensor, Tensor]:
    """The split tensor of `value`, which is one or a view of one; its whole; and the view of the whole."""
    if is_view(value):
        found: tuple[Any, Tensor, Tensor] = value.looked_at(what)
        return found
    whole = gather(value, what)
    return value, whole, whole


def write_whole(tensor: Any, whole: Tensor) -> None:
    """Give `tensor` the values of `whole`, from which each rank takes its part; as addends, the first rank has all."""
    if whole.shape != tensor.shape or whole.dtype != tensor.dtype:
        tensor.assign(whole)
        return
    spec = spec_of(tensor)
    if not is_documented(spec):
        raise RuntimeStateError(
            f"a tensor of shape {list(tensor.shape)} placed as {spec.placements} cannot be written in place; write "
            "its full_tensor(), or redistribute it"
        )
    part, value = local_part_of(tensor), whole[slices_of(spec)]
    _count_write(part)
    if adds_nothing(spec):
        part.zero_()
    elif part.data_ptr() != value.data_ptr() or part.stride() != value.stride():
        part.copy_(value)


def adds_nothing(spec: Any) -> bool:
    """Whether this rank's addend of a value that another rank has whole is zero."""
    added = [isinstance(p, Partial) and p.reduce_op == "sum" for p in spec.placements]
    return any(adds and place for adds, place in zip(added, spec.mesh.get_coordinate(), strict=True))


def _plain(value: Any, what: str) -> Any:
    return looked_at(value, what)[2] if is_view(value) or isinstance(value, DTensor) else value


def _viewed(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """A view of a split tensor."""
    base: SplitTensor | SplitView = args[0]
    if isinstance(base, DTensor) and all(isinstance(p, Replicate) for p in spec_of(base).placements):
        return op(local_part_of(base), *args[1:], **kwargs)  # each rank has all of the memory
    return base.viewed(op, args[1:], kwargs)


def _new(op: Any, args: Operands, kwargs: dict[str, Any]) -> Any:
    """New tensors take only dtype and device of another; but one of its shape with given strides has its layout, since
    autograd makes such a copy of a gradient with other references."""
    like, *rest = args
    if not is_split(like):
        return on_whole(op, args, kwargs)
    part = local_part_of(like)
    if _name(op) == "new_empty_strided" and tuple(rest[0]) == tuple(like.shape) and has_slices(spec_of(like)):
        dims = sorted(range(like.dim()), key=lambda dim: -rest[1][dim])
        made = part.new_empty([part.shape[dim] for dim in dims], **kwargs)
        return like.placed(made.permute([dims.index(dim) for dim in range(like.dim())]))
    return op(part, *rest, **kwargs)


def _warn_if_large(op: Any, value: Any) -> None:
    size = value.numel() * value.element_size()
    if size >= _LARGE:
        warnings.warn(
            f"{op} gathers a tensor of shape {list(value.shape)}, {size / 2**20:.0f} MiB on every rank; an operator "
            "inside of the sharded module works on parts",
            stacklevel=8,
        )


# -- The function for each operator -----------------------------------------------------------------------------------

How = Callable[[Any, Operands, dict[str, Any]], Any]


def _name(op: Any) -> str:
    return str(schema_of(op).name).partition("::")[2]


@lru_cache(maxsize=4096)
def _how(op: Any) -> How:
    name = _name(op)
    how: How = on_whole
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        how = _unscaled
    elif name in ("_foreach_norm", "_foreach_max"):
        how = _reduced_lists
    elif name.startswith(("_foreach_", "_fused_")) and _takes_lists(op):
        how = _by_position
    elif name in _NEW:
        how = _new
    elif name.lstrip("_") in _REDUCED:
        how = _reduced
    elif name in ("alias", "detach"):
        how = _itself
    elif torch.Tag.nondeterministic_seeded in op.tags:
        how = on_whole
    elif _is_by_element(op):
        how = _by_element
    elif _shares_memory(op):
        how = _viewed
    return how


def _takes_lists(op: Any) -> bool:
    """Whether the first argument of an operator is a list of tensors, as in an optimizer's step, and not one tensor, as
    in a norm."""
    return str(schema_of(op).arguments[0].type).startswith("List")


@lru_cache(maxsize=4096)
def _writes(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes into, by place and by name."""
    unsaid = {"running_mean", "running_var"} if _name(op) in WRITES_STATISTICS else frozenset()
    arguments = enumerate(schema_of(op).arguments)
    return tuple(
        (i, a.name) for i, a in arguments if a.name in unsaid or (a.alias_info is not None and a.alias_info.is_write)
    )


def _written(op: Any, args: Operands, kwargs: dict[str, Any], lists: bool = False) -> list[Any]:
    """The tensors, or lists of tensors, that a call writes into."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(op)]
    return [v for v in found if isinstance(v, list | tuple if lists else Tensor | list | tuple)]


def _is_by_element(op: Any) -> bool:
    """Whether each element of the results depends only on the elements at its place. (`aten.equal` is tagged so,
    wrongly.)"""
    tensors = all(str(result.type) == "Tensor" for result in schema_of(op).returns)
    fixed = torch.Tag.nondeterministic_seeded not in op.tags
    return fixed and ((torch.Tag.pointwise in op.tags and tensors) or _name(op) in _BY_ELEMENT)


def is_by_element(name: str) -> bool:
    """Whether the operators with this name are elementwise, and give one tensor. (Some overloads are for numbers, and
    have no tags.)"""
    packet = getattr(aten, name, None)
    if name in _REDUCED or name == "where" or not isinstance(packet, OpOverloadPacket):  # where(condition) gives places
        return False
    known = [op for overload in packet.overloads() if _is_by_element(op := getattr(packet, overload))]
    return bool(known) and all(len(schema_of(op).returns) == 1 for op in known)


def _shares_memory(op: Any) -> bool:
    """Whether the first argument and the results share memory."""
    schema = schema_of(op)
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and not first.is_write and any(r.alias_info is not None for r in schema.returns)
