"""The sizes of a function's tensors that change from call to call, and captures for all of them.

A call that differs from an earlier one only in sizes has a graph of the same operators. So a dim that `dynamic` names,
or that has been seen with two sizes, gets a symbol in the next capture (propagation/capture/any_size.py), and calls of
other sizes use that capture and the strategies of its plan. New captures are made for the sizes 0 and 1, for a size
with which the function takes another branch, and for a function that has no capture for all sizes.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partway.propagation.capture.any_size import AnySize, OtherSizesError
from partway.propagation.capture.capture import Around, CaptureOptions, graph_at
from partway.propagation.capture.export.tracing import Dims
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.structure import Call
from partway.propagation.plan.plan import Plan
from partway.reuse.effects import Effects
from partway.reuse.replanning import Signature
from partway.reuse.state import State
from partway.strategy import CaptureError, Problem, raise_problems

_log = logging.getLogger("partway")
MOST_FAMILIES = 8  # of one function; the oldest is dropped first
_MOST_PLANS = 32
_SAME_DIMS = 3  # captures for the same dims: a function that branches on sizes has several


@dataclass(frozen=True)
class Captured:
    """A captured call, the state on which it depends beside its arguments, and its side effects."""

    graph: Graph
    state: State
    effects: Effects


@dataclass
class Family:
    """Calls that differ only in sizes.

    key                     their signature without the sizes
    captured                the function for all their sizes, with these `options`
    state, effects          the state on which it depends beside its arguments, and its side effects
    """

    key: Signature
    captured: AnySize
    options: CaptureOptions
    state: State
    effects: Effects

    def at(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around) -> Captured:
        """The capture of a call, by that of the family. Raises OtherSizesError if the function may take another
        branch."""
        return Captured(graph_at(self.captured, args, kwargs, self.options, around), self.state, self.effects)


class Sizes:
    """The known sizes of one function's tensors. `declared`: the `dynamic` of its request."""

    def __init__(self, declared: Mapping[str, Mapping[int, tuple[int, int] | None]]) -> None:
        self._declared = declared
        self._seen: defaultdict[Hashable, set[tuple[int, int]]] = defaultdict(set)
        self._fixed: defaultdict[Hashable, set[tuple[int, int]]] = defaultdict(set)
        self._families: list[Family] = []
        self.refused: dict[Signature, str] = {}  # why there is no capture for all sizes
        # searched plans, by the signature without sizes and whether for inference
        self.plans: OrderedDict[tuple[Signature, bool], Plan] = OrderedDict()

    def of(self, call: Call, key: Signature, known: Sequence[Signature]) -> CallSizes:
        """The known sizes for a call of the new signature `key`; `known`: the signatures of other calls. Raises
        StrategyError for a size outside the declared ones."""
        kind, shapes = _kind(key), [shape for shape, *_ in key.tensors]
        seen = self._seen[kind]
        for other in known:
            if _kind(other) == kind:
                seen |= _differing(shapes, [shape for shape, *_ in other.tensors])
        dims = (seen | self._dims_declared(call)) - self._fixed[kind]
        return CallSizes(self, key, frozenset((place, dim) for place, dim in dims if shapes[place][dim] >= 2))

    def _dims_declared(self, call: Call) -> set[tuple[int, int]]:
        dims: set[tuple[int, int]] = set()
        problems: list[Problem] = []
        for name, sizes in self._declared.items():
            places = [i for i, names in enumerate(zip(call.arguments, call.names, strict=True)) if name in names]
            if not places:
                fix = f"write one of {', '.join(dict.fromkeys(call.arguments)) or 'no names'}"
                problems.append(Problem("dynamic", f"names {name!r}, and the call has no such tensor", fix))
            for place in places:
                tensor, given = call.tensors[place], call.names[place]
                for dim, bounds in sizes.items():
                    if not -tensor.dim() <= dim < tensor.dim():
                        fix = f"write a dim from 0 to {tensor.dim() - 1}"
                        what = f"names dim {dim} of {given!r}, a tensor of {tensor.dim()} dims"
                        problems.append(Problem("dynamic", what, fix))
                        continue
                    size, dim = tensor.shape[dim], dim % tensor.dim()
                    if bounds is not None and not bounds[0] <= size <= bounds[1]:
                        what = f"is {size}, and dynamic says {bounds[0]} to {bounds[1]}"
                        fix = "give a tensor of such a size, or declare more sizes"
                        problems.append(Problem(f"dim {dim} of {given!r}", what, fix))
                    dims.add((place, dim))
        raise_problems("the sizes of this call are not those that were declared:", problems)
        return dims

    def families(self, key: Signature) -> list[Family]:
        """The families of a call of the signature `key`, the newest first."""
        found = [family for family in reversed(self._families) if family.key == _blank(key, family.captured.dims)]
        return [family for family in found if self._holds(family)]

    def _holds(self, family: Family) -> bool:
        renewed = family.state.renewed(family.captured.attempt.fn)
        if renewed is not None:
            family.state = renewed
        return renewed is not None

    def add(self, family: Family) -> None:
        """Keep a family."""
        self._families.append(family)
        self._fixed[_kind(family.key)] |= family.captured.attempt.changing - family.captured.dims
        del self._families[:-MOST_FAMILIES]
        if self._declared and (fixed := family.captured.fixed):
            self._warn(f"the function counts on the size of {fixed}")

    def refuse(self, blank: Signature, why: str) -> None:
        """Note why calls that differ only in the sizes missing in `blank` have no common capture."""
        self.refused[blank] = why
        if self._declared:
            self._warn(why)

    def _warn(self, why: str) -> None:
        _log.warning("what dynamic declares has a plan for each size: %s", why)


@dataclass
class CallSizes:
    """The known sizes of one call to be planned.

    key       its signature
    dims      the dims whose sizes change
    family    the family of the call, once it is captured
    """

    sizes: Sizes
    key: Signature
    dims: Dims
    family: Family | None = None

    def captured(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Around,
        capture: Callable[[Dims], tuple[AnySize, CaptureOptions, State, Effects]],
    ) -> Captured | None:
        """The capture of the call, made from one for all sizes: an earlier one or, if none applies, the one that
        `capture` makes. None: the call has to be captured by itself."""
        alike = self.sizes.families(self.key)
        for family in alike:
            with contextlib.suppress(OtherSizesError):
                found = family.at(args, kwargs, around)
                self.family = family
                return found
        blank = _blank(self.key, self.dims)
        if not self.dims or blank in self.sizes.refused or len(alike) >= _SAME_DIMS:
            return None
        try:
            captured, options, state, effects = capture(self.dims)
            if not captured.dims:
                raise CaptureError(f"it counts on the size of {captured.fixed}")
            family = Family(_blank(self.key, captured.dims), captured, options, state, effects)
            found = family.at(args, kwargs, around)
        except (CaptureError, OtherSizesError) as error:
            self.sizes.refuse(blank, str(error).splitlines()[0])
            return None
        self.sizes.add(family)
        self.family = family
        return found

    @property
    def known(self) -> bool:
        """Whether there is a family of the call."""
        return bool(self.sizes.families(self.key))

    def plan(self, inference: bool) -> Plan | None:
        """The searched plan of calls like this one with other sizes, or None."""
        return self.sizes.plans.get((self._alike, inference))

    def searched(self, plan: Plan, inference: bool) -> None:
        """Keep the searched plan of the call."""
        if self.family or self.dims:
            self.sizes.plans[self._alike, inference] = plan
            while len(self.sizes.plans) > _MOST_PLANS:
                self.sizes.plans.popitem(last=False)

    @property
    def _alike(self) -> Signature:
        """The signature that calls of other sizes have in common with this one."""
        return self.family.key if self.family else _blank(self.key, self.dims)

    @property
    def why_not(self) -> str:
        """Why the call has no capture for all sizes; "" if it has one, or needs none."""
        return "" if self.family else self.sizes.refused.get(_blank(self.key, self.dims), "")


def _kind(key: Signature) -> Hashable:
    """The part of a signature that is equal for calls with comparable sizes."""
    return key.structure, tuple(len(shape) for shape, *_ in key.tensors)


def _differing(shapes: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> set[tuple[int, int]]:
    """The dims, as (tensor, dim), of different sizes that are both at least 2."""
    return {
        (place, dim)
        for place, pair in enumerate(zip(shapes, others, strict=True))
        for dim, (size, other) in enumerate(zip(*pair, strict=True))
        if size != other and min(size, other) >= 2
    }


def _blank(key: Signature, dims: Dims) -> Signature:
    """A signature without the sizes of `dims`, and without the strides of dense tensors, which depend on them."""
    memory, gradients = key.answers
    if memory is not None:
        shapes = [shape for shape, *_ in key.tensors]
        memory = tuple(
            "dense" if strides == _dense(shape) else strides for strides, shape in zip(memory, shapes, strict=True)
        )
    tensors = tuple(
        (tuple(-1 if (place, dim) in dims else size for dim, size in enumerate(shape)), *rest)
        for place, (shape, *rest) in enumerate(key.tensors)
    )
    return key._replace(tensors=tensors, answers=(memory, gradients))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
