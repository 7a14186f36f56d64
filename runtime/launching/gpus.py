"""The GPU of a rank. Each rank has its own; with PARTWAY_SHARE_GPU=1 ranks may share one.

NCCL refuses two ranks of one host on one GPU, and tells hosts apart by NCCL_HOSTID. So ranks that share a GPU pose as
hosts of their own, and send to each other over sockets: numbers, orders and waits are those of as many GPUs, times are
not. (NCCL 2.30.3 and newer can share GPUs by itself: if NCCL_MULTI_RANK_GPU_ENABLE is set, it is left to that.)
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from ...strategy.errors import RuntimeStateError

SHARE = "PARTWAY_SHARE_GPU"
_BY_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE"
# For ranks that share a GPU. Each of their kernels holds this many multiprocessors until its peers' run, too.
_SHARING = {"NCCL_MAX_CTAS": "2"}
_AS_HOSTS = {"NCCL_NET": "Socket"}


def may_share() -> bool:
    """Return whether ranks may share a GPU. Raises RuntimeStateError if the variable is neither 0 nor 1."""
    text = os.environ.get(SHARE, "0")
    if text not in ("0", "1"):
        raise RuntimeStateError(f"{SHARE} is {text!r}; it must be 1 (ranks may share a GPU) or 0")
    return text == "1"


def take(store: Any, rank: int, local: int | None, one_host: bool) -> int:
    """Claim a GPU in `store`, make it the current one of this process, and return its number.

    local      the rank's position on its host, which indexes the GPUs that this process sees (often only its own);
               None: not known
    one_host   all ranks are on this host

    Raises RuntimeStateError if another rank has the GPU, and they may not share.
    """
    position, seen = local if local is not None else rank if one_host else 0, torch.cuda.device_count()
    index = position % seen
    claims = f"gpu/{torch.cuda.get_device_properties(index).uuid}"
    number = store.add(claims, 1)
    store.set(f"{claims}/{number}", str(rank))
    here = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun says how many ranks its host has
    if may_share() and not (here.isdecimal() and int(here) <= seen):
        share(rank, one_host)
    elif number > 1:
        raise RuntimeStateError(_taken(rank, local, index, int(store.get(f"{claims}/1"))))
    torch.cuda.set_device(index)
    return index


def take_of(rank: int, ranks: int) -> None:
    """Make a GPU the current one of process `rank` of `ranks`, which were started for a measurement."""
    check_enough(ranks)
    count = torch.cuda.device_count()
    if ranks > count:
        share(rank, one_host=True)
    torch.cuda.set_device(rank % count)


def check_enough(ranks: int) -> None:
    """Raise RuntimeStateError unless this host has a GPU for each of `ranks`, or they may share."""
    count = torch.cuda.device_count()
    if ranks > count and not may_share():
        raise RuntimeStateError(
            f"{ranks} processes need a GPU each, and there {'is' if count == 1 else 'are'} {count}; use fewer "
            f"processes, or set {SHARE}=1 to have them share, which shows numbers and says nothing of times"
        )


def share(rank: int, one_host: bool) -> None:
    """Make NCCL treat this process as a host of its own; variables that are set already stay."""
    wanted = dict(_SHARING)
    if _BY_NCCL not in os.environ:
        wanted |= _AS_HOSTS | {"NCCL_HOSTID": f"{socket.gethostname()}/{rank}"}
        wanted |= {"NCCL_SOCKET_IFNAME": "lo"} if one_host else {}
    for name, text in wanted.items():
        os.environ.setdefault(name, text)


def _taken(rank: int, local: int | None, index: int, owner: int) -> str:
    who = "since nothing says which process of its host it is" if local is None else f"as process {local} of its host"
    seen = torch.cuda.device_count()
    return (
        f"rank {rank} has no GPU of its own: this process sees {seen}, and rank {owner} has number {index}, which rank "
        f"{rank} would take, too, {who} (LOCAL_RANK); start no more than a process for each GPU, use backend='gloo', "
        f"or set {SHARE}=1 to have ranks share, which shows numbers and says nothing of times"
    )
