"""Measured times of operators, as a few rates for each: of a call, of a floating-point operation, and of a byte read
or written.

    seconds = call + flops * flop + sum over KNEES k of byte[k] * max(moved - k, 0)
              + mapped * written, if that is MAPPED or more

A byte may cost more beyond each knee, as the tensors of a call outgrow one cache after the other. So the time is a
piecewise linear function, which more work never shortens. It is at least the time that the peak and the memory's
bandwidth allow (Williams et al., "Roofline", 2009) for the bytes that no cache holds. `partway calibrate` fits the
rates to the steps of small networks; an operator that none of them calls has the rates of its kind.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

Floats = NDArray[np.float64]

KNEES = (0, 1 << 20, 1 << 23)  # bytes, about the sizes of a core's caches
MAPPED = 1 << 25  # bytes of a result from which glibc maps new memory for it; GPUs have their own allocators
POINTWISE, VIEW, OTHER = "pointwise", "view", "other"  # the kinds that have rates for operators without their own

NOT_NEGATIVE = "a finite number of 0 or more"
_Seconds = Annotated[float, Field(ge=0)]


class ProfileFigures(BaseModel):
    """Figures of a profile; the `description` of a field states what it accepts."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Rates(ProfileFigures):
    """The rates of an operator.

    call     seconds per call
    flop     seconds per floating-point operation in float32; in another dtype longer in proportion to the lower peak
    byte     seconds per byte read or written beyond each of KNEES, added up
    mapped   additional seconds per byte written to newly mapped memory
    """

    call: Annotated[_Seconds, Field(description=f"{NOT_NEGATIVE} (s)")]
    flop: Annotated[_Seconds, Field(description=f"{NOT_NEGATIVE} (s)")]
    byte: Annotated[
        tuple[_Seconds, _Seconds, _Seconds], Field(strict=False, description=f"a list of {len(KNEES)} numbers (s)")
    ]
    mapped: Annotated[_Seconds, Field(description=f"{NOT_NEGATIVE} (s)")]

    def seconds(self, flops: ArrayLike, moved: ArrayLike, written: ArrayLike) -> Floats:
        """The time of a call, or of several, of `flops` operations (in float32), whose tensors have `moved` bytes read
        and written, of which `written` are written."""
        features = features_of(flops, moved, written)
        seconds: Floats = np.tensordot(np.array(self.numbers), np.stack(features), axes=1)
        return seconds

    @property
    def numbers(self) -> tuple[float, ...]:
        """The rates in the order of `features_of`."""
        return (self.call, self.flop, *self.byte, self.mapped)

    @classmethod
    def of(cls, numbers: Any) -> Rates:
        """The rates with these numbers, in the order of `features_of`."""
        call, flop, *byte, mapped = map(float, numbers)
        return cls(call=call, flop=flop, byte=(byte[0], byte[1], byte[2]), mapped=mapped)


def features_of(flops: ArrayLike, moved: ArrayLike, written: ArrayLike) -> tuple[Floats, ...]:
    """The factors of the rates in the time of a call."""
    figures = (np.asarray(each, dtype=np.float64) for each in (flops, moved, written))
    work, moved, written = np.broadcast_arrays(*figures)
    beyond = (np.maximum(moved - knee, 0.0) for knee in KNEES)
    return (np.ones_like(moved), work, *beyond, np.where(written >= MAPPED, written, 0.0))


class OperatorRates(ProfileFigures):
    """The rates of one operator, by its name as PyTorch prints it, or of a kind of operators.

    forward    of a call
    backward   of all gradients of a call together, if measured: by the flops and bytes of the forward
    """

    name: Annotated[str, Field(min_length=1, description="the name of an operator, such as aten.mm.default, or a kind")]
    forward: Rates = Field(description="an object with call, flop, byte and mapped")
    backward: Annotated[Rates | None, Field(description="an object with call, flop, byte and mapped, or null")] = None
