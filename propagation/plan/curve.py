"""The cost of memory, as points and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike

from ...strategy.basics.files import MARKS, save
from ...strategy.basics.units import human, lasting
from .data import MemoryPoint

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 24, 56  # margins around the plot
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}line{stroke:#999}path{fill:none;stroke:#0b62a4;stroke-width:2}"
    "circle{fill:#0b62a4}@media(prefers-color-scheme:dark){text{fill:#ddd}path{stroke:#6db3f2}circle{fill:#6db3f2}}"
)


class MemoryCurve(tuple[MemoryPoint, ...]):
    """Plans from the one that holds the most, and is the fastest, to the one that holds the least. A notebook shows it
    as a picture."""

    __slots__ = ()

    def save_svg(self, path: str | PathLike[str]) -> None:
        """Write the picture to a file: bytes on a device against the predicted time of a step. Between two points the
        plan with fewer bytes is the one that fits. Raises StrategyError if it cannot be written."""
        save("the picture", path, f"{self._repr_svg_()}\n{MARKS['the picture'][0]}\n")

    def _repr_svg_(self) -> str:
        return "\n".join(_drawn(self))


def _drawn(points: Iterable[MemoryPoint]) -> Iterator[str]:
    """The lines of the picture."""
    ordered = sorted(points, key=lambda point: point.held)
    most = max((point.held for point in ordered), default=1) or 1
    longest = max((point.seconds for point in ordered), default=1.0) or 1.0
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(held: float) -> float:
        return LEFT + (right - LEFT) * held / most

    def y(seconds: float) -> float:
        return bottom - (bottom - TOP) * seconds / longest

    title = "The predicted time of a step against the bytes on a device"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
    yield f"<title>{title}</title><style>{_STYLE}</style>"
    yield f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
    yield f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{bottom}"/>'
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        at, up = x(part * most), y(part * longest)
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{human(part * most)}</text>'
        yield f'<text x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{lasting(part * longest)}</text>'
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">most bytes on a device</text>'
    yield f'<text x="{LEFT}" y="{TOP - 8}">predicted step</text>'
    corners = []
    for before, point in zip([None, *ordered], ordered, strict=False):
        if before is not None:  # up to the next point the smaller plan is all that fits
            corners.append(f"L{x(point.held):.1f},{y(before.seconds):.1f}")
        corners.append(f"{'L' if corners else 'M'}{x(point.held):.1f},{y(point.seconds):.1f}")
    yield f'<path d="{"".join(corners)}"/>'
    for point in ordered:
        said = f"{human(point.held)}, {lasting(point.seconds)}"
        yield f'<circle cx="{x(point.held):.1f}" cy="{y(point.seconds):.1f}" r="4"><title>{said}</title></circle>'
    yield "</svg>"
