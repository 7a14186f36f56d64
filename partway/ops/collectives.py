"""The collectives that all ranks of a group call with the same arguments.

Gradients are those of the sum of all ranks' objectives: with L_r the objective of rank r, the gradient of rank s's
operand x_s is the derivative of L_0 + L_1 + ... with respect to x_s.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partway.ops.where import here
from partway.propagation.ops import by_hand
from partway.strategy import OperatorError
from partway.strategy.errors import shown
from partway.strategy.place import Group, Place, manual_place


def all_reduce(x: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """The reduction of all ranks' `x`, of one shape and dtype, on every rank.

    op      "sum", "mean", "max", "min" or "prod"; or a ReduceOp, ours or that of torch.distributed
    group   a mesh axis by name, a tuple of several, or None for all ranks; on processes also a group of create_group
            by name, or a ProcessGroup

    The gradient of y = x_0 + ... + x_n-1 is, on every rank, the sum of all ranks' gradients of y: dx_s = dy_0 + ... +
    dy_n-1, which is another all_reduce. (In a manual function, y is known to be the same on all ranks, so its gradient
    is too, and nothing is sent.) So if a loss is summed over ranks and then differentiated on each of them, each counts
    n times: divide by n, or use op="mean". The gradient of a mean is the mean of the gradients; that of a max or min
    goes, in equal shares, to the elements with that value; that of a product goes to each factor times the product of
    the others. The last three keep all ranks' x if a gradient is needed.

    Raises OperatorError for operands that it does not take, StrategyError for an unknown axis, RuntimeStateError if
    there are no ranks (before `init`, or on virtual devices outside of a manual function).
    """
    place = here("all_reduce")
    axes, size = _group("all_reduce", x, place, group)
    op = _checked_reduction("all_reduce", x, op)
    if size == 1:
        return x.clone()
    if op in ("sum", "mean") or not _needs_gradient(x):
        result: Tensor = by_hand.all_reduce(x, op, axes, size)
        return result
    return by_hand.REDUCTIONS[op](by_hand.all_gather(x.unsqueeze(0), 0, axes, [1] * size))


def all_gather(x: Tensor, dim: int = 0, group: Group = None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """The tensors of all ranks put together along `dim`, on every rank.

    sizes   the number of elements of each rank along `dim`, by position; None: the same as on this rank

    The gradient of x is this rank's slice of the sum of all ranks' gradients (a reduce_scatter). Raises as `all_reduce`
    does.
    """
    place = here("all_gather")
    axes, size = _group("all_gather", x, place, group)
    dim = _dim("all_gather", x, dim)
    if size == 1:
        return x.clone()
    parts = _sizes("all_gather", sizes, size, x.shape[dim])
    if sizes is not None and parts[place.index(group)] != x.shape[dim]:
        raise OperatorError(
            f"all_gather: rank {place.index(group)} of the group has {x.shape[dim]} elements along dim {dim}, and "
            f"sizes says {parts[place.index(group)]}"
        )
    result: Tensor = by_hand.all_gather(x, dim, axes, parts)
    return result


def reduce_scatter(
    x: Tensor, op: str = "sum", dim: int = 0, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's slice along `dim` of the reduction of all ranks' x.

    sizes   the number of elements along `dim` for each rank, by position; None: all the same

    The gradient of a sum is all ranks' gradients put together (an all_gather). Raises as `all_reduce` does.
    """
    place = here("reduce_scatter")
    axes, size = _group("reduce_scatter", x, place, group)
    op = _checked_reduction("reduce_scatter", x, op)
    dim = _dim("reduce_scatter", x, dim)
    if size == 1:
        return x.clone()
    parts = _slices("reduce_scatter", x, dim, size, sizes)
    own = parts[0] if len(set(parts)) == 1 else parts[place.index(group)]
    if op in ("sum", "mean") or not _needs_gradient(x):
        result: Tensor = by_hand.reduce_scatter(x, op, dim, axes, parts, own)
        return result
    back = x.unsqueeze(0)  # its pieces are sent along dim + 1, and the received ones are stacked
    return by_hand.REDUCTIONS[op](by_hand.all_to_all(back, dim + 1, 0, axes, parts, [1] * size, own))


def broadcast(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The root's x, on every rank. `root`: a position in the group; x of the other ranks gives the shape and dtype.

    The gradient of the root's x is the sum of all ranks' gradients; that of the others is zero. Raises as `all_reduce`
    does.
    """
    place = here("broadcast")
    axes, size = _group("broadcast", x, place, group)
    check_position("broadcast", "root is", root, size)
    if size == 1:
        return x.clone()
    result: Tensor = by_hand.broadcast(x, root, axes, size)
    return result


def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int = 0,
    group: Group = None,
    *,
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> Tensor:
    """Cut x along `split_dim`, send a piece to each rank, and put the received pieces together along `concat_dim`.

    sends, receives   the numbers of elements along `split_dim` sent to each rank, and along `concat_dim` received from
                      each, by position; None: all the same

    Gradients go back by an all_to_all with the dims exchanged. Raises as `all_reduce` does.
    """
    place = here("all_to_all")
    axes, size = _group("all_to_all", x, place, group)
    split, concat = _dim("all_to_all", x, split_dim), _dim("all_to_all", x, concat_dim)
    if size == 1:
        return x.clone()
    going = _slices("all_to_all", x, split, size, sends)
    if (sends is None) != (receives is None):
        raise OperatorError("all_to_all: sends and receives belong together; give both, or neither")
    even = going if split == concat else [x.shape[concat]] * size
    coming = _sizes("all_to_all", receives, size, 0) if receives is not None else even
    own = going[0] if len(set(going)) == 1 else going[place.index(group)]
    if receives is not None and split != concat and coming[place.index(group)] != x.shape[concat]:
        raise OperatorError(
            f"all_to_all: rank {place.index(group)} of the group has {x.shape[concat]} elements along dim {concat}, "
            f"and receives says {coming[place.index(group)]}"
        )
    result: Tensor = by_hand.all_to_all(x, split, concat, axes, going, coming, own)
    return result


def permute(x: Tensor, pairs: Sequence[tuple[int, int]], group: Group = None) -> Tensor:
    """The x of another rank: for each pair (source, target) of positions in the group, the target gets the source's x.

    A rank that is no target gets zeros. The gradient goes back from the target to the source. Raises as `all_reduce`
    does.
    """
    place = here("permute")
    axes, size = _group("permute", x, place, group)
    flat: list[int] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise OperatorError(f"permute: {shown(pair)} is no pair of positions (source, target)")
        for end in pair:
            check_position("permute", "a pair has", end, size)
        flat += pair
    for what, ends in (("sends", flat[::2]), ("receives", flat[1::2])):
        if twice := sorted(end for end in set(ends) if ends.count(end) > 1):
            raise OperatorError(f"permute: rank {twice[0]} of the group {what} twice; let it be in one pair")
    if size == 1:
        return x.clone() if flat else torch.zeros_like(x)
    result: Tensor = by_hand.permute(x, flat, axes, size)
    return result


# -- Checks


def _group(call: str, x: Any, place: Place, group: Group) -> tuple[list[str], int]:
    """The axes and the number of ranks of a group. Raises OperatorError unless `x` is a tensor of one rank."""
    check_tensor(call, x)
    return list(place.axes(group)), place.size(group)


def check_tensor(call: str, x: Any) -> None:
    """Raise OperatorError unless `x` is a tensor of one rank."""
    if not isinstance(x, Tensor):
        raise OperatorError(f"{call} takes a tensor, not {shown(x)}")
    if hasattr(x, "placements"):
        raise OperatorError(
            f"{call} takes the tensor of one rank, not a DTensor {list(x.shape)}; give it x.to_local(), or let "
            "x.full_tensor() gather it"
        )
    if x.layout is not torch.strided:
        raise OperatorError(f"{call} takes a dense tensor, not a {x.layout} one; give it x.to_dense()")


class ReduceOp(StrEnum):
    """The reductions in MindSpore's spelling, and the mean."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"


_OTHER_NAMES = {"avg": "mean", "product": "prod"}  # PyTorch's


def reduction(call: str, op: object) -> str:
    """The reduction `op`, given by name, as a ReduceOp or as torch.distributed's. Raises OperatorError for others."""
    name = op if isinstance(op, str) else _name_of_torch(op)
    word = _OTHER_NAMES.get(name.lower(), name.lower())
    if word not in by_hand.REDUCTIONS:
        given = f"ReduceOp.{name}" if name and not isinstance(op, str) else shown(op)
        raise OperatorError(f"{call}: op is {given}; write one of {', '.join(map(repr, by_hand.REDUCTIONS))}")
    return str(word)


def _name_of_torch(op: object) -> str:
    """The name of a reduction of torch.distributed; "" for any other object."""
    kinds = getattr(dist.ReduceOp, "RedOpType", None)
    if kinds is None or not isinstance(op, dist.ReduceOp | kinds):
        return ""
    return next((name for name, kind in kinds.__members__.items() if op == kind), "")


def _checked_reduction(call: str, x: Tensor, op: object) -> str:
    """The reduction `op` of tensors like `x`. Raises OperatorError if they do not have it."""
    op = reduction(call, op)
    whole = not (x.is_floating_point() or x.is_complex())
    kind = str(x.dtype).removeprefix("torch.")
    if op == "mean" and whole:
        raise OperatorError(f"{call}: the mean of {kind} is no {kind}; convert it, as by x.float()")
    if op in ("sum", "prod") and x.dtype is torch.bool:
        raise OperatorError(f"{call}: a {op} of truth values; count them, as by x.int(), or write op='max' for any")
    if op in ("max", "min") and x.is_complex():
        raise OperatorError(f"{call}: complex numbers have no order, and so no {op}")
    return op


def _needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _dim(call: str, x: Tensor, dim: object) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.dim() <= dim < x.dim():
        raise OperatorError(f"{call}: a tensor of shape {list(x.shape)} has no dim {shown(dim)}")
    return dim % x.dim()


def check_position(call: str, what: str, position: object, size: int | None = None) -> None:
    """Raise OperatorError unless `position` is a position in a group, of `size` ranks if given."""
    if isinstance(position, int) and not isinstance(position, bool) and 0 <= position < (size or position + 1):
        return
    there = f"; the positions in the group are 0 to {size - 1}" if size else ", which is no position in a group"
    raise OperatorError(f"{call}: {what} {shown(position)}{there}")


def _sizes(call: str, sizes: Any, count: int, own: int) -> list[int]:
    """The number of elements of each rank; without `sizes` the same as on this rank."""
    if sizes is None:
        return [own] * count
    given: list[Any] = list(sizes) if isinstance(sizes, Sequence) else []
    if len(given) != count or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in given):
        raise OperatorError(f"{call}: {shown(sizes)} are no sizes of {count} ranks; write one int for each")
    if len(set(given)) > 1 and manual_place() is not None:
        raise OperatorError(
            f"{call}: parts of the sizes {given} in a manual function, where all ranks have tensors of one shape; pad "
            f"them"
        )
    return given


def _slices(call: str, x: Tensor, dim: int, count: int, sizes: Any) -> list[int]:
    """The number of elements along `dim` for each rank. Raises OperatorError if they do not add up to the dim."""
    if sizes is None and x.shape[dim] % count:
        raise OperatorError(
            f"{call}: dim {dim} of {list(x.shape)} has {x.shape[dim]} elements, which {count} ranks cannot share "
            "evenly; pad it, or say how many each gets"
        )
    parts = _sizes(call, sizes, count, x.shape[dim] // count)
    if sum(parts) != x.shape[dim]:
        raise OperatorError(
            f"{call}: the sizes {parts} make {sum(parts)}, and dim {dim} of {list(x.shape)} has {x.shape[dim]} elements"
        )
    return parts
