"""What things cost: collectives by alpha-beta per axis, operators by a roofline.

The time of a collective over n ranks is `launch + steps * latency + wire / bandwidth`, with `wire` the bytes that
one rank sends in a ring (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005):

    all_reduce       2 (n - 1) / n * bytes             2 (n - 1) steps
    all_gather       (n - 1) / n * bytes of the whole  (n - 1) steps
    reduce_scatter   (n - 1) / n * bytes of the whole  (n - 1) steps
    all_to_all       (n - 1) / n * bytes held          (n - 1) steps

An operator takes `max(flops / peak, bytes / memory bandwidth)` (Williams et al., "Roofline", 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from ..strategy.errors import StrategyError
from ..strategy.mesh import Mesh
from ..strategy.placement import Kind

# Forward plus backward of an operator, in units of the forward: each operand's gradient costs about as much.
BACKWARD_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device and its links. flops in FLOP/s, bandwidths in bytes/s, latency in seconds per ring step, launch in
    seconds per collective."""

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    launch: float


# cpu: two shared cores and gloo over loopback, as measured for this project; h100: NVIDIA's data sheet for dense
# TF32, HBM3 and NVLink, with the collective bandwidth and latency of an 8-GPU NVSwitch node.
PROFILES = {
    "cpu": DeviceProfile("cpu", flops=5e10, memory_bandwidth=1e10, link_bandwidth=1e9, latency=2e-5, launch=3e-5),
    "cuda": DeviceProfile(
        "h100", flops=4.0e14, memory_bandwidth=3.35e12, link_bandwidth=4.5e11, latency=2e-6, launch=5e-6
    ),
}


def profile_of(device: str) -> DeviceProfile:
    """The profile for a device type. Raises StrategyError, naming those there are."""
    if device not in PROFILES:
        raise StrategyError(f"no device profile for {device!r}; accepted: {', '.join(map(repr, PROFILES))}")
    return PROFILES[device]


class Level(Enum):
    """What the search weighs most: `shard(..., level=)`."""

    COMMUNICATION = 0  # the largest ratio of computation to communication
    MEMORY = 1  # the least memory on a device
    SPEED = 2  # the least predicted time


@dataclass(frozen=True, slots=True)
class Weights:
    """The objective: seconds of communication, of latency, of computation, and gigabytes held, weighed."""

    wire: float
    latency: float
    compute: float
    memory: float


WEIGHTS = {
    Level.COMMUNICATION: Weights(wire=1.0, latency=0.1, compute=0.1, memory=1e-9),
    Level.MEMORY: Weights(wire=1e-3, latency=1e-3, compute=1e-3, memory=1.0),
    Level.SPEED: Weights(wire=1.0, latency=1.0, compute=1.0, memory=1e-9),
}


def wire_bytes(kind: Kind, payload: float, size: int) -> float:
    """Bytes that one of `size` ranks sends. `payload`: the whole value's bytes; all_to_all: the bytes held."""
    if not kind.communicates:
        return 0.0
    once = (size - 1) / size * payload
    return 2 * once if kind is Kind.ALL_REDUCE else once


def steps(kind: Kind, size: int) -> int:
    """How many messages follow one another."""
    if not kind.communicates:
        return 0
    return (2 if kind is Kind.ALL_REDUCE else 1) * (size - 1)


def waiting_seconds(kind: Kind, size: int, profile: DeviceProfile) -> float:
    """The part of a collective's time that does not depend on its bytes."""
    return profile.launch + steps(kind, size) * profile.latency if kind.communicates else 0.0


def collective_cost(kind: Kind, mesh: Mesh, axes: tuple[str, ...], profile: DeviceProfile) -> tuple[float, float]:
    """What a collective over `axes` costs: seconds, and seconds per byte of its payload."""
    size = math.prod(mesh.size(axis) for axis in axes)
    return waiting_seconds(kind, size, profile), wire_bytes(kind, 1.0, size) / profile.link_bandwidth


def collective_seconds(kind: Kind, payload: float, size: int, profile: DeviceProfile) -> float:
    """The predicted time of one collective."""
    return waiting_seconds(kind, size, profile) + wire_bytes(kind, payload, size) / profile.link_bandwidth


def operator_seconds(flops: Any, moved: Any, profile: DeviceProfile) -> Any:
    """The predicted time of one operator that computes `flops` and moves `moved` bytes."""
    return np.maximum(flops / profile.flops, moved / profile.memory_bandwidth)
