"""The collectives of a program: the bytes, the cost and the cause of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...strategy.basics.units import human, lasting
from ...strategy.mesh import Mesh
from ...strategy.placement import Kind
from ..cost.cost import collective_seconds, wire_bytes
from ..cost.profile import DeviceProfile
from .local_program import Conversion, LocalProgram

PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program. Bytes are those of one rank; `members` are the tensors of a fused one.

    payload_bytes   as defined for the kind in `propagation/ops/collectives.py`
    wire_bytes      sent by one rank
    predicted_time  seconds, by the device profile
    where, path     the operator that required the conversion, and the module it is in
    """

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    wire_bytes: float
    phase: str
    tensor: str
    source: str
    producer: str
    consumer: str
    where: str
    path: str
    dtype: str
    predicted_time: float
    tag: int
    members: tuple[str, ...] = ()

    @property
    def cost(self) -> str:
        """The bytes that each rank sends, and the predicted time."""
        return f"{self.group_size} ranks send {human(self.wire_bytes)} each, {lasting(self.predicted_time)}"

    def __str__(self) -> str:
        return (
            f"{self.phase} {self.kind} over {','.join(self.axes)} ({self.group_size} ranks) of {self.tensor}, "
            f"{self.payload_bytes:,} bytes: {self.producer} -> {self.consumer}"
        )


def collective(conversion: Conversion, phase: str, mesh: Mesh, profile: DeviceProfile) -> Collective | None:
    """The collective of `conversion` in `phase`, or None if it needs no other rank there."""
    kind = conversion.kind(phase)
    if not kind.communicates:
        return None
    payload = conversion.payload(phase)
    return Collective(
        kind=kind,
        axes=conversion.axes,
        group_size=conversion.size,
        payload_bytes=payload,
        wire_bytes=wire_bytes(kind, payload, conversion.size),
        phase=phase,
        tensor=conversion.tensor,
        source=conversion.line,
        producer=conversion.producer,
        consumer=conversion.consumer,
        where=conversion.where,
        path=conversion.path,
        dtype=str(conversion.dtype).removeprefix("torch."),
        predicted_time=collective_seconds(kind, payload, mesh, conversion.axes, profile),
        tag=conversion.tag,
        members=(conversion.tensor,),
    )


def collectives_of(program: LocalProgram, profile: DeviceProfile) -> tuple[Collective, ...]:
    """The collectives of `program`, those of the forward first."""
    conversions = program.conversions
    conversions += tuple(replace(c, again=True) for c in conversions if c.repeated)
    every = (collective(c, phase, program.mesh, profile) for phase in PHASES for c in conversions)
    return tuple(c for c in every if c is not None)
