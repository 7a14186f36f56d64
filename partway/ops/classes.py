"""The collectives with MindSpore's interface: objects made once, with their arguments, and called with tensors.

`group` is as for the functions, and `op` is any spelling of a reduction, kept in the functions' spelling. Arguments are
checked when an object is made; those that depend on the tensor or on the number of ranks, when it is called. Gradients
are those of the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partway.ops import collectives as functions
from partway.ops.collectives import check_position, check_tensor, reduction
from partway.ops.neighbors import check_borders, check_ranks, check_shapes, exchange, neighbor_exchange_v2
from partway.ops.where import check_group, here
from partway.strategy import OperatorError
from partway.strategy.errors import shown
from partway.strategy.place import Group


@dataclass(frozen=True)
class AllReduce:
    """`all_reduce(x, op, group)`. Raises OperatorError for an unknown reduction, StrategyError for an invalid group."""

    op: str = "sum"
    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)
        object.__setattr__(self, "op", reduction("AllReduce", self.op))

    def __call__(self, x: Tensor) -> Tensor:
        """The reduction of all ranks' `x`."""
        return functions.all_reduce(x, self.op, self.group)


@dataclass(frozen=True)
class AllGather:
    """`all_gather(x, 0, group)`. Raises StrategyError for an invalid group."""

    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)

    def __call__(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, put together along their first dim."""
        return functions.all_gather(x, 0, self.group)


@dataclass(frozen=True)
class ReduceScatter:
    """`reduce_scatter(x, op, 0, group)`. Raises as AllReduce does."""

    op: str = "sum"
    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)
        object.__setattr__(self, "op", reduction("ReduceScatter", self.op))

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's slice, along the first dim, of the reduction of all ranks' `x`."""
        return functions.reduce_scatter(x, self.op, 0, self.group)


@dataclass(frozen=True)
class Broadcast:
    """`broadcast(x, root_rank, group)` of each of several tensors. Raises OperatorError for an impossible position,
    StrategyError for an invalid group."""

    root_rank: int
    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)
        check_position("Broadcast", "root_rank is", self.root_rank)

    def __call__(self, xs: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
        """The tensors of the rank at the position `root_rank`."""
        if isinstance(xs, Tensor):
            raise OperatorError("Broadcast takes a tuple of tensors, not a tensor; call it with (x,), and take [0]")
        return tuple(functions.broadcast(x, self.root_rank, self.group) for x in xs)


@dataclass(frozen=True)
class AlltoAll:
    """`all_to_all(x, split_dim, concat_dim, group)`; `split_count` is the number of ranks in the group. Raises
    OperatorError for arguments that are not ints and, when called, for another count; StrategyError for an invalid
    group."""

    split_count: int
    split_dim: int
    concat_dim: int
    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)
        for name in ("split_count", "split_dim", "concat_dim"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or (name == "split_count" and given < 1):
                raise OperatorError(f"AlltoAll: {name} is {shown(given)}; write a whole number")

    def __call__(self, x: Tensor) -> Tensor:
        """A piece of every rank's `x`, put together along `concat_dim`."""
        size = here("AlltoAll").size(self.group)
        if size != self.split_count:
            raise OperatorError(
                f"AlltoAll: split_count is {self.split_count}, and the group has {size} ranks; make them equal"
            )
        return functions.all_to_all(x, self.split_dim, self.concat_dim, self.group)


@dataclass(frozen=True)
class NeighborExchange:
    """`neighbor_exchange`: sends tensors of `send_shapes`, and receives those of `recv_shapes` and `recv_type`. Raises
    OperatorError for arguments that do not fit, StrategyError for an invalid group."""

    send_rank_ids: Sequence[int]
    recv_rank_ids: Sequence[int]
    recv_shapes: Sequence[Sequence[int]]
    send_shapes: Sequence[Sequence[int]]
    recv_type: torch.dtype
    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)
        if not isinstance(self.recv_type, torch.dtype):
            raise OperatorError(
                f"NeighborExchange: recv_type is {shown(self.recv_type)}; write a dtype, as torch.float32"
            )
        for ids, shapes in (("send_rank_ids", "send_shapes"), ("recv_rank_ids", "recv_shapes")):
            ranks = check_ranks("NeighborExchange", ids, getattr(self, ids))
            given = check_shapes("NeighborExchange", shapes, getattr(self, shapes))
            if len(ranks) != len(given):
                raise OperatorError(
                    f"NeighborExchange: {ids} has {len(ranks)} ranks, and {shapes} {len(given)} shapes; write one "
                    "for each"
                )

    def __call__(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the neighbours sent."""
        call = "NeighborExchange"
        for i, (x, shape) in enumerate(zip(xs, self.send_shapes, strict=False)):
            check_tensor(call, x)
            if list(x.shape) != list(shape):
                raise OperatorError(
                    f"{call}: tensor {i} has the shape {list(x.shape)}, and send_shapes says {list(shape)}"
                )
        return tuple(
            exchange(
                call, xs, self.send_rank_ids, self.recv_rank_ids, self.recv_shapes, self.group, self.recv_type, None
            )
        )


@dataclass(frozen=True)
class NeighborExchangeV2:
    """`neighbor_exchange_v2(x, ...)`. Raises OperatorError for arguments that do not fit, StrategyError for an invalid
    group."""

    send_rank_ids: Sequence[int]
    send_lens: Sequence[int]
    recv_rank_ids: Sequence[int]
    recv_lens: Sequence[int]
    data_format: str = "NCHW"
    group: Group = None

    def __post_init__(self) -> None:
        check_group(self.group)
        check_borders(
            "NeighborExchangeV2",
            self.send_rank_ids,
            self.send_lens,
            self.recv_rank_ids,
            self.recv_lens,
            self.data_format,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`x` with the borders of its neighbours around it."""
        return neighbor_exchange_v2(
            x, self.send_rank_ids, self.send_lens, self.recv_rank_ids, self.recv_lens, self.data_format, self.group
        )
