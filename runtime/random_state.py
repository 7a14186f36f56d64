"""Read, restore and share among ranks the states of the random generators that a step draws from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..strategy.mesh import Mesh
from .executors.execute import process_group
from .launching.process import device_type

Generators = tuple[Tensor, Tensor | None]  # the states of the CPU generator and, if there is a GPU, of its generator


def states_of(device: torch.device) -> Generators:
    """The states of the generators from which a step on this device draws."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def put_back(states: Generators, device: torch.device) -> None:
    """Set the generators to `states` again."""
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


@contextlib.contextmanager
def drawing_again(states: Generators | None, device: torch.device) -> Iterator[None]:
    """Draw the same numbers again from `states`, and leave the generators as they are."""
    if states is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        put_back(states, device)
        yield


def generators() -> dict[str, Tensor]:
    """The states of the random generators that operators draw from, by their names in messages."""
    states = {"the random generator": torch.get_rng_state()}
    if device_type() == "cuda":
        states["the random generator of CUDA"] = torch.cuda.get_rng_state()
    return states


def share_generators(part: Mesh | None = None) -> None:
    """Give every rank of the job, or of the mesh `part` of it, the generator states of the first rank. Each of them
    calls it."""
    states: list[Any] = [generators()]
    group = process_group(part, part.axes) if part else None
    dist.broadcast_object_list(states, part.ranks[0] if part else 0, group=group)
    cpu, *cuda = states[0].values()
    torch.set_rng_state(cpu)
    for state in cuda:
        torch.cuda.set_rng_state(state)
