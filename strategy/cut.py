"""How ranks cut one dim into unequal parts: slices that are not all full, and windows that reach beyond slices.

A dim of 28 over 8 ranks is cut into slices of 4, as `torch.chunk` does, and the last rank has none. All ranks hold
tensors of the same shape, so that they run one program: a short slice is padded with undefined values, and an operator
that reads along the dim fills the padding first. Where several axes cut a dim, each cuts the slices of the axes before
it, major first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

Span = tuple[int, int]  # from the first element of a dim to the one after the last
REPEATS = ("reflect", "replicate", "circular")  # how a dim may continue beyond its ends: modes of functional.pad


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim of `size` elements that axes of the sizes `axes` cut, major first.

    width   the number of elements that each rank holds, with the padding of a short slice
    spans   the elements of the dim that each rank has, by position; (end, end) for a rank that has none
    """

    size: int
    axes: tuple[int, ...]
    width: int = field(init=False, repr=False, compare=False)
    spans: tuple[Span, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width, spans = _slices(self.size, self.axes)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "spans", spans)

    @property
    def even(self) -> bool:
        """Whether all slices are full."""
        return self.width * len(self.spans) == self.size

    @property
    def chunked(self) -> bool:
        """Whether a DTensor has the same slices. (It does not if a slice of an earlier axis is short.)"""
        return self.chunks == self.spans

    @property
    def chunks(self) -> tuple[Span, ...]:
        """The slice of each rank of a DTensor: each axis cuts the slices of the axes before it as `torch.chunk`
        does."""
        spans: list[Span] = [(0, self.size)]
        for count in self.axes:
            spans = [own for span in spans for own in _chunks(*span, count)]
        return tuple(spans)

    def __str__(self) -> str:
        return f"{self.size}/{'x'.join(map(str, self.axes))}"

    @classmethod
    def of_text(cls, text: str) -> Cut:
        """The cut whose `str` is `text`."""
        size, _, axes = text.partition("/")
        return cls(int(size), tuple(map(int, axes.split("x"))))


def _chunks(start: int, stop: int, count: int) -> list[Span]:
    return _pieces((start, stop), -(-(stop - start) // count), count)


def _pieces(span: Span, width: int, count: int) -> list[Span]:
    """`span` in `count` pieces of `width`, of which the last may be short or empty."""
    start, stop = span
    return [(min(start + i * width, stop), min(start + (i + 1) * width, stop)) for i in range(count)]


@lru_cache(maxsize=4096)
def _slices(size: int, axes: tuple[int, ...]) -> tuple[int, tuple[Span, ...]]:
    width, spans = size, [(0, size)]
    for count in axes:
        width = -(-width // count)
        spans = [piece for span in spans for piece in _pieces(span, width, count)]
    return width, tuple(spans)


@dataclass(frozen=True, slots=True)
class Strip:
    """Neighbouring elements of a window that come from one rank: the `count` elements at place `at` of the window are
    those at place `start` of the rank at position `source`, in order (`step` 1), in reverse order (-1), or one element
    repeated (0)."""

    source: int
    start: int
    count: int
    at: int
    step: int

    @property
    def rows(self) -> int:
        """The number of distinct elements."""
        return self.count if self.step else 1


@dataclass(frozen=True, slots=True)
class SliceWindow:
    """Every rank holds a window of dim `dim`: its slice with some of its neighbours', or any other range.

    cut     how the dim is cut into the slices that windows are made of
    spans   the window of each rank; it may begin before the dim and end after it
    width   the elements that each rank holds, at least those of its span; those after the span are zero
    fill    the values beyond the ends of the dim: a number, or how the dim continues there (see `REPEATS`)
    adds    whether ranks hold addends of overlapping windows: the placement of the gradient of a window
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
        """The strips of the window of the rank at `position`; the rest of it is filled."""
        return _strips(self.cut, self.spans[position], self.fill)

    @property
    def filled(self) -> float:
        """The number beyond the ends of the dim; 0 where the dim continues there."""
        return 0.0 if isinstance(self.fill, str) else self.fill

    @property
    def rows(self) -> tuple[int, int]:
        """The numbers of elements that the busiest rank sends to make the windows, and to add their addends."""
        return _rows(self)[:2]

    @property
    def offsets(self) -> int:
        """The number of different distances between ranks that exchange elements."""
        return _rows(self)[2]

    @property
    def local(self) -> int | None:
        """Where the window of each rank begins in its own slice, if that is the same for all ranks; else None."""
        pairs = [(span, own) for span, own in zip(self.spans, self.cut.spans, strict=True) if span[0] < span[1]]
        starts = {span[0] - own[0] for span, own in pairs}
        inside = all(own[0] <= span[0] and span[1] <= own[1] for span, own in pairs)
        first = min(starts, default=0)
        return first if inside and len(starts) == 1 and first + self.width <= self.cut.width else None


@lru_cache(maxsize=65536)
def _strips(cut: Cut, span: Span, fill: float | str) -> tuple[Strip, ...]:
    strips: list[Strip] = []
    size, width, slices = cut.size, cut.width, cut.spans
    for place, index in enumerate(range(*span)):
        element = _element(index, size, fill)
        if element is None:
            continue
        source = _holder(slices, element, min(element // width, len(slices) - 1) if width else 0)
        start = element - slices[source][0]
        last = strips[-1] if strips else None
        if last and last.source == source and last.at + last.count == place:
            step = start - (last.start + last.step * (last.count - 1))
            if abs(step) <= 1 and (last.count == 1 or step == last.step):
                strips[-1] = Strip(source, last.start, last.count + 1, last.at, step)
                continue
        strips.append(Strip(source, start, 1, place, 1))
    return tuple(strips)


def _holder(slices: tuple[Span, ...], element: int, guess: int) -> int:
    """The position of the slice with `element`. `guess` is right unless slices before it are short."""
    while not slices[guess][0] <= element < slices[guess][1]:
        guess += 1 if element >= slices[guess][1] else -1
    return guess


def _element(index: int, size: int, fill: float | str) -> int | None:
    """The element of a dim of `size` at `index`, which may be beyond its ends; None where a number fills them."""
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
        for strip in window.strips(position):
            if strip.source != position:
                sent[strip.source] += strip.rows
                returned[position] += strip.rows
                offsets.add(position - strip.source)
    return max(sent), max(returned), len(offsets)
