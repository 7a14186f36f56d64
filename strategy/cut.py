"""How ranks cut one dim where their parts are unlike: slices that are not all full, and windows that reach over the
edges of slices.

A dim of 28 over 8 ranks is cut into slices of 4, as `torch.chunk` would, and the last rank has none. All ranks hold
tensors of one shape all the same, so that they run one program: what is behind the end of a short slice means nothing,
and what reads over a dim fills it in first. A dim that several axes cut is cut by one after another, major first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Span = tuple[int, int]  # from the first element of a dim to the one after the last
REPEATS = ("reflect", "replicate", "circular")  # how a dim may go on beyond its ends, as torch.nn.functional.pad says


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim of `size` elements that axes of the sizes `axes` cut, major first."""

    size: int
    axes: tuple[int, ...]

    @property
    def width(self) -> int:
        """The elements that each rank holds, those that mean nothing included."""
        return _cut(self)[0]

    @property
    def spans(self) -> tuple[Span, ...]:
        """What each rank has of the dim, in the order of their positions; (end, end) where that is nothing."""
        return _cut(self)[1]

    @property
    def even(self) -> bool:
        """Whether all slices are full."""
        return self.width * len(self.spans) == self.size

    @property
    def chunked(self) -> bool:
        """Whether one axis after another cuts what the ones before left as `torch.chunk` does, and so DTensor. (Behind
        several axes of which the first leaves a short slice, it does not.)"""
        spans: list[Span] = [(0, self.size)]
        for count in self.axes:
            spans = [own for span in spans for own in _chunks(*span, count)]
        return tuple(spans) == self.spans

    def __str__(self) -> str:
        return f"{self.size}/{'x'.join(map(str, self.axes))}"

    @classmethod
    def of_text(cls, text: str) -> Cut:
        """The cut whose `str` is `text`."""
        size, _, axes = text.partition("/")
        return cls(int(size), tuple(map(int, axes.split("x"))))


def _chunks(start: int, stop: int, count: int) -> list[Span]:
    width = -(-(stop - start) // count)
    return [(min(start + i * width, stop), min(start + (i + 1) * width, stop)) for i in range(count)]


@lru_cache(maxsize=4096)
def _cut(cut: Cut) -> tuple[int, tuple[Span, ...]]:
    width, spans = cut.size, [(0, cut.size)]
    for count in cut.axes:
        width = -(-width // count)
        spans = [
            (min(start + i * width, stop), min(start + (i + 1) * width, stop))
            for start, stop in spans
            for i in range(count)
        ]
    return width, tuple(spans)


@dataclass(frozen=True, slots=True)
class Strip:
    """Neighbouring elements of a window: `count` of them, from place `at` of the window on, are those that the rank at
    position `source` holds from place `start` on: in order (`step` 1), from the last to the first (-1), or the one
    element over and over (0)."""

    source: int
    start: int
    count: int
    at: int
    step: int

    @property
    def rows(self) -> int:
        """How many different elements that are."""
        return self.count if self.step else 1


@dataclass(frozen=True, slots=True)
class SliceWindow:
    """Every rank holds a window of dim `dim`: its slice and some of what lies next to it, or any other range.

    cut     how the dim is cut into the slices that windows are made of
    spans   the window of each rank; it may begin before the dim and end behind it
    width   the elements that each rank holds, at least those of its span; what is behind that is zero
    fill    what is beyond the ends of the dim: a number, or how the dim goes on there (see `REPEATS`)
    adds    what ranks hold are addends, and windows overlap: the placement of the gradient of a window
    """

    dim: int
    cut: Cut
    spans: tuple[Span, ...]
    width: int
    fill: float | str = 0.0
    adds: bool = False

    def __str__(self) -> str:
        spans = ",".join(f"{start}:{stop}" for start, stop in self.spans)
        return f"W{self.dim}|{self.cut}|{spans}|{self.width}|{self.fill}{'+' * self.adds}"

    @classmethod
    def of_text(cls, text: str) -> SliceWindow:
        """The window whose `str` is `text`."""
        dim, cut, spans, width, fill = text.removesuffix("+").split("|")
        pairs = tuple((int(start), int(stop)) for start, stop in (span.split(":") for span in spans.split(",")))
        beyond = fill if fill in REPEATS else float(fill)
        return cls(int(dim[1:]), Cut.of_text(cut), pairs, int(width), beyond, text.endswith("+"))

    def strips(self, position: int) -> tuple[Strip, ...]:
        """What the window of the rank at `position` is made of; the rest of it is filled."""
        return _strips(self.cut, self.spans[position], self.fill)

    @property
    def filled(self) -> float:
        """The number that is beyond the ends of the dim."""
        return 0.0 if isinstance(self.fill, str) else self.fill

    @property
    def rows(self) -> tuple[int, int]:
        """How many elements of the dim the busiest rank sends to have windows made, and to have their addends added."""
        return _rows(self)[:2]

    @property
    def offsets(self) -> int:
        """How many different neighbours there are: how often all ranks pass something on to the one so much further."""
        return _rows(self)[2]

    @property
    def local(self) -> int | None:
        """Where in its own slice each rank finds its window, if it is one place for all; else None."""
        pairs = [(span, own) for span, own in zip(self.spans, self.cut.spans, strict=True) if span[0] < span[1]]
        starts = {span[0] - own[0] for span, own in pairs}
        inside = all(own[0] <= span[0] and span[1] <= own[1] for span, own in pairs)
        first = min(starts, default=0)
        return first if inside and len(starts) == 1 and first + self.width <= self.cut.width else None


@lru_cache(maxsize=65536)
def _strips(cut: Cut, span: Span, fill: float | str) -> tuple[Strip, ...]:
    found: list[Strip] = []
    size, width, slices = cut.size, cut.width, cut.spans
    for place, index in enumerate(range(*span)):
        element = _element(index, size, fill)
        if element is None:
            continue
        source = _holder(slices, element, min(element // width, len(slices) - 1) if width else 0)
        start = element - slices[source][0]
        last = found[-1] if found else None
        if last and last.source == source and last.at + last.count == place:
            step = start - (last.start + last.step * (last.count - 1))
            if abs(step) <= 1 and (last.count == 1 or step == last.step):
                found[-1] = Strip(source, last.start, last.count + 1, last.at, step)
                continue
        found.append(Strip(source, start, 1, place, 1))
    return tuple(found)


def _holder(slices: tuple[Span, ...], element: int, guess: int) -> int:
    """The position of the slice that has `element`, sought from `guess` on: short slices lie before it, at most."""
    while not slices[guess][0] <= element < slices[guess][1]:
        guess += 1 if element >= slices[guess][1] else -1
    return guess


def _element(index: int, size: int, fill: float | str) -> int | None:
    """The element of a dim of `size` that is at `index`, which may be beyond its ends."""
    if 0 <= index < size:
        return index
    match fill:
        case "reflect":
            return -index if index < 0 else 2 * (size - 1) - index
        case "replicate":
            return min(max(index, 0), size - 1)
        case "circular":
            return index % size
        case _:
            return None


@lru_cache(maxsize=4096)
def _rows(window: SliceWindow) -> tuple[int, int, int]:
    sent, returned, offsets = [0] * len(window.spans), [0] * len(window.spans), set()
    for position in range(len(window.spans)):
        for run in window.strips(position):
            if run.source != position:
                sent[run.source] += run.rows
                returned[position] += run.rows
                offsets.add(position - run.source)
    return max(sent), max(returned), len(offsets)
