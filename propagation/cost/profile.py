"""The figures of a device and its network, from a JSON file in which each group of figures names its source.

    {"name": "...", "peak": {"float64": ..., ...}, "memory": ..., "memory_bandwidth": ..., "overhead": ...,
     "sources": {"peak": "...", "memory": "...", "overhead": "..."},
     "levels": [{"name": "nvlink", "source": "...", "devices": 8, "bandwidth": ..., "latency": ..., "launch": ...},
                {"name": "infiniband", "source": "...", "devices": null, ...}]}

The presets are the files in profiles/; `partway calibrate` writes one for the machine it runs on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
from pydantic import Field, PlainSerializer, PlainValidator, ValidationError, field_validator
from pydantic_core import ErrorDetails

from ...strategy.basics.files import json_of, read, save
from ...strategy.errors import Problem, StrategyError, shown
from ...strategy.placement import Kind
from ..ops.collectives import COLLECTIVES, figures_of
from .rates import NOT_NEGATIVE, OTHER, OperatorRates, ProfileFigures, Rates

# -- Figures for each kind of collective -----------------------------------------------------------------------------

T = TypeVar("T")
BySize = tuple[tuple[int, float], ...]  # (group size, figure), by ascending size


@dataclass(frozen=True, slots=True)
class ByKind(Generic[T]):
    """One figure for each kind of collective that has its own."""

    all_reduce: T
    all_gather: T
    reduce_scatter: T
    all_to_all: T

    def of(self, kind: Kind) -> T:
        """The figure of a kind of collective; some kinds share one (`figures_of`)."""
        figure: T = getattr(self, _FIGURES[kind])
        return figure


_FIGURES = {kind: figures_of(kind).value for kind in COLLECTIVES}
_KINDS = tuple(field.name for field in fields(ByKind))
_POSITIVE = "a finite number above 0"
_TABLE = 'a table of algorithm bandwidths by group size, as in {"2": 3e11, "8": 2.5e11}'
_SHARE_OF_PEAK = "a number above 0 and up to 1, the share of the peak"
_SHARE = "a number above 0 and up to 1, the share of what it does alone"
_SHARE_OF_WAITS = "a number above 0 and up to 1, the share of what it waits by itself"
_OPERATORS = "a list of the rates of operators and kinds, each once, and among them other"
_LEVELS = "a list of one level or more, from inside out"
_BANDWIDTH = f"{_POSITIVE} (bytes/s), or for one kind of collective {_TABLE}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _refused(where: str, what: str, accepts: str) -> StrategyError:
    """The error that a validator raises; `where` is relative to the field that it checks."""
    return StrategyError("", [Problem(where, what, f"write {accepts}")])


def _by_kind(value: object, read: Callable[[str, Any], T]) -> ByKind[T]:
    """One figure for all kinds, or one for each kind from a mapping."""
    if not isinstance(value, Mapping):
        figure = read("", value)
        return ByKind(**dict.fromkeys(_KINDS, figure))
    for key in [*value, *_KINDS]:
        if key not in value or key not in _KINDS:
            what = "is missing" if key in _KINDS else "is not a kind of collective"
            raise _refused(f".{key}", what, f"one number for all, or one for each of {', '.join(_KINDS)}")
    return ByKind(**{key: read(f".{key}", value[key]) for key in _KINDS})


def _latency(where: str, value: Any) -> float:
    if not _is_number(value) or value < 0:
        raise _refused(where, f"is {shown(value)}", f"{NOT_NEGATIVE} (s)")
    return float(value)


def _bandwidth(where: str, value: Any) -> float | BySize:
    if isinstance(value, Mapping) and value:
        for size in value:
            if not re.fullmatch("[1-9][0-9]{0,8}", size) or int(size) < 2:
                raise _refused(f"{where}.{size}", "is not a group size", _TABLE)
        sizes = sorted(value, key=int)
        return tuple((int(size), _positive(f"{where}.{size}", value[size])) for size in sizes)
    return _positive(where, value)


def _positive(where: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        raise _refused(where, f"is {shown(value)}", _BANDWIDTH)
    return float(value)


def _written(figures: ByKind[float | BySize]) -> dict[str, float | dict[str, float]]:
    """The figures in the form of a file."""
    by_kind = {key: getattr(figures, key) for key in _KINDS}
    return {key: {str(n): rate for n, rate in f} if isinstance(f, tuple) else f for key, f in by_kind.items()}


_Latency = Annotated[ByKind[float], PlainValidator(lambda value: _by_kind(value, _latency)), PlainSerializer(_written)]
_Bandwidth = Annotated[
    ByKind[float | BySize], PlainValidator(lambda value: _by_kind(value, _bandwidth)), PlainSerializer(_written)
]


# -- The profile. A field's `description` says what it accepts. ------------------------------------------------------


_Flops = Annotated[float, Field(gt=0, description=f"{_POSITIVE} (operations/s)")]
_Source = Annotated[str, Field(min_length=1, description="a text that says where the figures come from")]


class PeakRates(ProfileFigures):
    """Operations per second, by the dtype that is computed in."""

    float64: _Flops
    float32: _Flops
    bfloat16: _Flops
    float16: _Flops

    def of(self, dtype: torch.dtype) -> float:
        """The peak for tensors of `dtype`: complex ones count as their parts, other dtypes as float32."""
        name = {torch.complex128: "float64"}.get(dtype, str(dtype).removeprefix("torch."))
        return getattr(self, name) if name in type(self).model_fields else self.float32


class Sources(ProfileFigures):
    """Where the figures of a device come from."""

    peak: _Source
    memory: _Source
    overhead: _Source


class Reached(ProfileFigures):
    """The share of its peak that a device reaches: of the operations in large matrix products and in attention, of the
    bytes in large copies."""

    products: Annotated[float, Field(gt=0, le=1, description=_SHARE_OF_PEAK)]
    attention: Annotated[float, Field(gt=0, le=1, description=_SHARE_OF_PEAK)]
    memory: Annotated[float, Field(gt=0, le=1, description=_SHARE_OF_PEAK)]
    source: _Source


PEAK = Reached(products=1.0, attention=1.0, memory=1.0, source="the peaks themselves")


class Together(ProfileFigures):
    """The speed of each lane while operators compute and a collective runs, as a share of its speed alone.

    queued    the share of its launch and latencies that a collective takes if it was issued before another one ended:
              no rank is late for it, and none has to be woken
    """

    computing: Annotated[float, Field(gt=0, le=1, description=_SHARE)]
    communicating: Annotated[float, Field(gt=0, le=1, description=_SHARE)]
    queued: Annotated[float, Field(gt=0, le=1, description=_SHARE_OF_WAITS)] = 1.0


ALONE = Together(computing=1.0, communicating=1.0)


class NetworkLevel(ProfileFigures):
    """One level of the network: ranks 0 to devices - 1 are in its first unit, the next `devices` in its second, ...

    devices     how many devices one unit holds (None: any number)
    bandwidth   for each kind of collective the bytes/s that one device sends while all devices of its unit send, or
                algorithm bandwidths (payload bytes over seconds, as nccl-tests print them) by group size
    latency     for each kind the seconds per message
    launch      seconds per collective
    trees       an all_reduce goes between units by trees, as NCCL's does: its latency grows with the logarithm of the
                number of units. Else it goes around a ring, as gloo's does, and so do all_gather and reduce_scatter
    """

    name: Annotated[str, Field(min_length=1, description="a name, such as nvlink")]
    source: _Source
    devices: Annotated[int | None, Field(ge=1, description="an int of 1 or more, or null for any number")]
    bandwidth: _Bandwidth
    latency: _Latency
    launch: Annotated[float, Field(ge=0, description=f"{NOT_NEGATIVE} (s)")]
    trees: Annotated[bool, Field(description="true or false")] = False


class DeviceProfile(ProfileFigures):
    """One device and the network that joins it to others.

    peak               operations/s by dtype
    memory             bytes of one device; memory_bandwidth in bytes/s
    overhead           seconds per operator, added to those of its work
    levels             the network from inside out: each level joins the devices of one unit
    reached            the shares of the peak and of the memory bandwidth that operators reach
    together           how much operators and collectives slow each other down when they run at the same time
    operators          measured rates of operators; if empty, as in the presets, an operator takes the time of its
                       operations, plus that of its bytes, plus the overhead
    """

    name: Annotated[str, Field(min_length=1, description="a name")]
    peak: PeakRates = Field(description="an object with float64, float32, bfloat16 and float16")
    memory: Annotated[float, Field(gt=0, description=f"{_POSITIVE} (bytes)")]
    memory_bandwidth: Annotated[float, Field(gt=0, description=f"{_POSITIVE} (bytes/s)")]
    overhead: Annotated[float, Field(ge=0, description=f"{NOT_NEGATIVE} (s)")]
    sources: Sources = Field(description="an object with peak, memory and overhead, each a text")
    levels: tuple[NetworkLevel, ...] = Field(description=_LEVELS)
    reached: Reached = Field(default=PEAK, description="an object with products, attention, memory and source")
    together: Together = Field(default=ALONE, description="an object with computing, communicating and queued")
    operators: tuple[OperatorRates, ...] = Field(default=(), description=_OPERATORS)

    @field_validator("levels")
    @classmethod
    def _levels_nest(cls, levels: tuple[NetworkLevel, ...]) -> tuple[NetworkLevel, ...]:
        """Check that a unit consists of whole units of the level before, so that a rank has one place in each level."""
        if not levels:
            raise _refused("", "is []", _LEVELS)
        inner = 1
        for index, level in enumerate(levels):
            if level.devices is None:
                if index + 1 < len(levels):
                    raise _refused(f"[{index}].devices", "is null", "null in the last level only")
            elif level.devices % inner or (index and level.devices == inner):
                fix = f"levels from inside out, each with a multiple of the devices before ({inner}); null in the last"
                raise _refused(f"[{index}].devices", f"is {level.devices}", fix)
            inner = level.devices or inner
        return levels

    @field_validator("operators")
    @classmethod
    def _rates_are_found(cls, operators: tuple[OperatorRates, ...]) -> tuple[OperatorRates, ...]:
        """Check that names are unique, and that there are rates for operators that are not listed."""
        names = [rates.name for rates in operators]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise _refused(f"[{index}].name", f"is {shown(name)}, as another is", _OPERATORS)
        if names and OTHER not in names:
            raise _refused("", f"has none named {shown(OTHER)}", _OPERATORS)
        return operators

    def __hash__(self) -> int:
        """Hash some of the figures only: profiles are keys of caches, and may have many rates."""
        return hash((self.name, self.memory, self.memory_bandwidth, self.overhead, self.peak, len(self.operators)))

    def rates_of(self, operator: str, kind: str = OTHER) -> OperatorRates | None:
        """The measured rates of an operator, else of its kind, else of "other"; None if the profile has no rates."""
        found = {rates.name: rates for rates in self.operators if rates.name in (operator, kind, OTHER)}
        return found.get(operator) or found.get(kind) or found.get(OTHER)

    def save(self, path: Path) -> None:
        """Write it as JSON that `profile_of` reads. Raises StrategyError if it cannot be written, or if the file
        at `path` is not a profile."""
        save("the device profile", path, self.model_dump_json(indent=1) + "\n")


# -- Reading one -----------------------------------------------------------------------------------------------------


def presets() -> tuple[str, ...]:
    """The names of the profiles that come with Partway."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def profile_of(name_or_path: str | Path) -> DeviceProfile:
    """The profile for the name of a preset, a torch device type, or the path of a JSON file.

    Raises StrategyError for anything else, naming the presets, and for a file without a complete profile, naming
    each wrong field and what it accepts.
    """
    if not isinstance(name_or_path, str | PathLike):
        raise StrategyError(
            f"device_profile is {shown(name_or_path)}; write the name of a preset or the path of a file"
        )
    name = _DEVICE_TYPES.get(str(name_or_path), str(name_or_path))
    if name in presets():
        return _preset(name)
    if not os.path.isfile(name_or_path):
        raise StrategyError(
            f"no device profile {shown(str(name_or_path))}: there is no such file, and the presets are "
            f"{', '.join(presets())}; write one of them or the path of a file that `partway calibrate` wrote"
        )
    return read_profile(Path(name_or_path))


_PRESETS = Path(__file__).with_name("profiles")
_DEVICE_TYPES = {"cuda": "h100"}  # the presets of device types that are not names of presets


@lru_cache(maxsize=64)
def _preset(name: str) -> DeviceProfile:
    return read_profile(_PRESETS / f"{name}.json")


def read_profile(path: Path) -> DeviceProfile:
    """The profile in a file. Raises StrategyError with all problems."""
    data = read("the device profile", path)
    try:
        profile = DeviceProfile.model_validate_json(data)
        json_of(data)
        return profile
    except ValidationError as error:
        problems = [problem for details in error.errors(include_url=False) for problem in _problems(details)]
        raise StrategyError(f"{str(path)!r} is not a device profile:", problems) from None
    except ValueError as error:
        problem = Problem("the file", str(error), f"write {_accepts(())}")
        raise StrategyError(f"{str(path)!r} is not a device profile:", [problem]) from None


def _problems(error: ErrorDetails) -> Iterator[Problem]:
    """One of pydantic's errors, in terms of the file."""
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"]).removeprefix(".")
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, StrategyError):
        yield from (Problem(where + p.where, p.what, p.fix) for p in cause.problems)
    elif error["type"] == "extra_forbidden":
        yield Problem(where, "is not a field", f"remove it: what is read is {_accepts(error['loc'][:-1])}")
    else:
        what = {"missing": "is missing", "json_invalid": "is not JSON"}.get(error["type"])
        what = what or f"is {_shortened(error['input'])}"
        yield Problem(where or "the file", what, f"write {_accepts(error['loc'])}")


_NESTED: dict[str, type[ProfileFigures]] = {
    "peak": PeakRates,
    "sources": Sources,
    "levels": NetworkLevel,
    "reached": Reached,
    "together": Together,
    "operators": OperatorRates,
    "forward": Rates,
    "backward": Rates,
}


def _accepts(location: tuple[int | str, ...]) -> str:
    """A description of the values that the field at a location accepts."""
    kind: type[ProfileFigures] = DeviceProfile
    of_objects = True
    accepts = f"an object with {', '.join(kind.model_fields)}"
    for key in location:
        if isinstance(key, str):
            field = kind.model_fields[key]
            kind, of_objects = _NESTED.get(key, kind), key in _NESTED
            accepts = field.description or accepts
        elif of_objects:
            accepts = f"an object with {', '.join(kind.model_fields)}"
    return accepts


def _shortened(value: object) -> str:
    return shown(value, 60)
