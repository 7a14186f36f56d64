"""Gather tensors of which ranks hold parts, and exchange numbers, outside of programs.

Every rank is known to reach the collectives of a program. A script's use of a split tensor may happen on one rank
alone, or differ from rank to rank: so before anything is sent the ranks exchange its purpose, and while one waits its
watch asks the others for their activity (`Watch.wait_for`).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ...strategy.cut import Cut
from ...strategy.errors import RuntimeStateError
from ...strategy.torch_mesh import has_nccl
from ..executors.issue import all_gather, as_bytes
from ..ranks.agreement import agree
from ..ranks.doing import place_of
from ..ranks.watch import watch
from ..torch_internals import is_documented, local_part_of, spec_of

_ADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0, dtype=parts.dtype),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


def gather(tensor: Tensor, what: str) -> Tensor:
    """The whole of a DTensor as a plain tensor, for `what`. If each rank has all of it, it is that memory, and nothing
    is sent; else every rank calls it. Raises RuntimeStateError if one does not."""
    part, spec = local_part_of(tensor), spec_of(tensor)
    mesh, placements = spec.mesh, spec.placements
    if all(isinstance(p, Replicate) for p in placements):
        return part.detach()
    shape = list(spec.shape)
    purpose = f"gather a tensor of shape {shape}, which {what} needs whole"
    if not is_documented(spec) or any(isinstance(p, Partial) and p.reduce_op not in _ADDED for p in placements):
        agree(purpose, ())  # cut in a way that only DTensor knows
        return _by_dtensor(tensor)
    device, own = part.device, part.detach()
    if own.device.type != mesh.device_type:
        own = own.to(mesh.device_type)
    for axis, size in reversed([*enumerate(_sizes_on_the_way(shape, spec))]):
        placement = placements[axis]
        if isinstance(placement, Replicate) or mesh.size(axis) == 1:
            continue
        group = mesh.get_group(axis)
        _check_same(group, f"{purpose}", f"{own.dtype} {placement}")
        if isinstance(placement, Partial):
            own = _ADDED[placement.reduce_op](_gathered(own, group, purpose))
        else:
            own = _joined(own, placement.dim, size, group, purpose)
    return own.to(device)


def exchange(mesh: Any, numbers: Tensor, what: str) -> Tensor:
    """The vectors `numbers` of all ranks of a DeviceMesh, by rank in its order, for `what`; every rank calls it."""
    own = numbers.detach().to(mesh.device_type).unsqueeze(0)
    purpose = f"exchange {len(numbers)} numbers for {what}"
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            _check_same(group, purpose, str(numbers.dtype))
            own = _gathered(own, group, purpose).flatten(0, 1)
    return own.to(numbers.device)


def _sizes_on_the_way(shape: list[int], spec: Any) -> list[int]:
    """For each axis, the size of the dim that it cuts, within the slice of this rank on the axes before it (0 for an
    axis that cuts none)."""
    sizes, left = [], list(shape)
    for placement, count, position in zip(
        spec.placements, spec.mesh.shape, spec.mesh.get_coordinate() or (), strict=True
    ):
        sizes.append(left[placement.dim] if isinstance(placement, Shard) else 0)
        if isinstance(placement, Shard):
            start, stop = Cut(left[placement.dim], (count,)).chunks[position]
            left[placement.dim] = stop - start
    return sizes


def _joined(part: Tensor, dim: int, size: int, group: Any, purpose: str) -> Tensor:
    """The parts along `dim`, of `size` elements in all, of the ranks of `group`."""
    spans = Cut(size, (dist.get_world_size(group),)).chunks
    width = spans[0][1] - spans[0][0]
    sent = part.movedim(dim, 0)
    if len(sent) < width:
        sent = torch.cat([sent, sent.new_zeros((width - len(sent), *sent.shape[1:]))])
    every = _gathered(sent, group, purpose)
    whole = every.flatten(0, 1)
    if width * len(spans) != size:
        whole = torch.cat([every[i, : stop - start] for i, (start, stop) in enumerate(spans)])
    return whole.movedim(0, dim).contiguous()


def _gathered(part: Tensor, group: Any, purpose: str) -> Tensor:
    """The tensors of the ranks of `group`, of one shape, stacked in the order of the ranks."""
    sent = part.contiguous()
    every = sent.new_empty((dist.get_world_size(group), *sent.shape))
    if sent.numel():
        work = all_gather(as_bytes(every), as_bytes(sent), group=group, async_op=True)
        watch().wait_for(work, group, purpose)
    return every


def _check_same(group: Any, purpose: str, detail: str) -> None:
    """Raise RuntimeStateError unless all ranks of `group` are here for the same purpose."""
    digest = zlib.crc32(f"{purpose} {detail}".encode())
    device = "cuda" if has_nccl(group) else "cpu"
    digests = _gathered(torch.tensor([digest], device=device), group, purpose).flatten()
    if bool((digests != digest).any()):
        frame = sys._getframe(1)
        raise RuntimeStateError(
            f"the ranks are at different points of the program: rank {dist.get_rank()} would {purpose}"
            f"{place_of(frame)}, and others do something else with a tensor that lies split; run the same program on "
            "every rank"
        )


def _by_dtensor(tensor: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor(local_part_of(tensor).detach(), spec_of(tensor), requires_grad=False).full_tensor()
