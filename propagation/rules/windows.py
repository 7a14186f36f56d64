"""Windows of operators that read beyond a rank's slice: convolutions, pools, interpolation, padding.

For each dim a rule has the *reach* of a range of the result: the range of the operand that it depends on. A rank needs
the reach of its slice of the result: a window of the operand, assembled by an exchange with the neighbouring ranks
(`strategy/cut.py`), with corners where one dim is exchanged after another. The window includes its padding, so that the
operator runs on it without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...strategy.cut import Cut, SliceWindow, Span


class Reach(Protocol):
    """The range of the operand that the range [start, stop) of the result depends on, as a frozen value."""

    def __call__(self, start: int, stop: int) -> Span: ...


@dataclass(frozen=True, slots=True)
class Strided:
    """The reach of a kernel of `extent` elements (dilation included) at every `stride`, after `before` elements of
    padding."""

    extent: int
    stride: int = 1
    before: int = 0

    def __call__(self, start: int, stop: int) -> Span:
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.extent


@dataclass(frozen=True, slots=True)
class Spread:
    """The reach of a transposed convolution, which spreads each element over `extent` of the result (dilation included)
    at every `stride`, and cuts off the first `before`. It includes elements that add nothing if the range of the result
    is not covered without them."""

    extent: int
    stride: int = 1
    before: int = 0

    def __call__(self, start: int, stop: int) -> Span:
        first, last = start + self.before, stop + self.before
        begin = min(-((self.extent - 1 - first) // self.stride), first // self.stride)
        return begin, max((last - 1) // self.stride, -((self.extent - last) // self.stride)) + 1

    def place(self, start: int) -> int:
        """The place of `start` within the range over which the reach of [start, ...) is spread."""
        return start + self.before - self(start, start + 1)[0] * self.stride


@dataclass(frozen=True, slots=True)
class WholeRows:
    """The reach `each` among rows, in a dim that holds consecutive rows of `length` elements."""

    each: Reach
    length: int

    def __call__(self, start: int, stop: int) -> Span:
        begin, end = self.each(start, stop)
        return begin * self.length, end * self.length


@dataclass(frozen=True, slots=True)
class Halo:
    """The `reach` into operand `operand` of a slice of `factor` in the result. (`fill`: see SliceWindow.)"""

    operand: int
    factor: str
    reach: Reach
    fill: float | str = 0.0

    def window(self, dim: int, operand: Cut, result: Cut) -> SliceWindow:
        """The windows along `dim` of the operand with the cut `operand`, for a result with the cut `result`."""
        end = (operand.size, operand.size)
        spans = [self.reach(start, stop) if start < stop else end for start, stop in result.spans]
        full = (self.reach(start, start + result.width) for start, stop in result.spans if start < stop)
        return SliceWindow(dim, operand, tuple(spans), max(stop - start for start, stop in full), self.fill)


def by_dim(windows: Mapping[tuple[int, str], SliceWindow], operand: int) -> dict[int, SliceWindow]:
    """The windows of one operand by their dims."""
    return {window.dim: window for (i, _), window in windows.items() if i == operand}


def own_slice(like: SliceWindow) -> SliceWindow:
    """A rank's slice of the dim of `like`, as a window."""
    return SliceWindow(like.dim, like.cut, like.cut.spans, like.cut.width, like.fill)


def united(wanted: Sequence[Mapping[int, SliceWindow]]) -> Mapping[int, SliceWindow] | None:
    """One window for each dim that contains all of `wanted` (the windows of each reader of a tensor, by dim), each at
    the same place on every rank; None if there is none. A reader without a window along a dim reads the slice."""
    every = {window.dim: window for reader in wanted for window in reader.values()}
    joint_windows: dict[int, SliceWindow] = {}
    for dim, like in sorted(every.items()):
        own = own_slice(like)
        windows = [reader.get(dim, own) for reader in wanted]
        if any(window.fill != like.fill for window in windows if window is not own):
            return None
        joint = _union(windows)
        if any(place_in(joint, window) is None for window in windows):
            return None
        joint_windows[dim] = joint
    return joint_windows


def _union(windows: Sequence[SliceWindow]) -> SliceWindow:
    first = windows[0]
    spans = []
    for each in zip(*(window.spans for window in windows), strict=True):
        full = [span for span in each if span[0] < span[1]] or [each[0]]
        spans.append((min(start for start, _ in full), max(stop for _, stop in full)))
    starts = [[span[0] - joint[0] + window.width for span, joint in _full(window, spans)] for window in windows]
    return SliceWindow(first.dim, first.cut, tuple(spans), max(map(max, starts)), first.fill)


def place_in(joint: SliceWindow, window: SliceWindow) -> int | None:
    """The place in `joint` where the `window` of every rank begins; None if it differs by rank."""
    places = {span[0] - whole[0] for span, whole in _full(window, joint.spans)}
    if len(places) > 1:
        return None
    place = min(places, default=0)
    return place if place >= 0 and place + window.width <= joint.width else None


def _full(window: SliceWindow, spans: Sequence[Span]) -> Iterable[tuple[Span, Span]]:
    """The nonempty spans of `window`, each with the corresponding one of `spans`."""
    return [(span, other) for span, other in zip(window.spans, spans, strict=True) if span[0] < span[1]]
