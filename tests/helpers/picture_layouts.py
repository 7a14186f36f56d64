"""Twenty layouts with pictures, by name: the mesh, the placement on each axis, the shape. The pictures are in
tests/kits/show/golden.

python tests/helpers/picture_layouts.py --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from partway.show.pictures.parts import LayoutParts
from partway.show.sharding import ShardingPicture, visualize_sharding
from partway.strategy import Layout, Mesh
from partway.strategy.cut import Span
from partway.strategy.layout import layout
from partway.strategy.placement import placement_from_code

_CASES: Mapping[str, tuple[Mapping[str, int], Sequence[str], tuple[int, ...]]] = {
    "a vector": ({"dp": 4}, ("S0",), (8,)),
    "a vector, unevenly": ({"dp": 4}, ("S0",), (10,)),
    "a short vector": ({"dp": 8}, ("S0",), (5,)),
    "a scalar": ({"dp": 4}, ("R",), ()),
    "a matrix by rows": ({"tp": 4}, ("S0",), (8, 6)),
    "a matrix by columns": ({"tp": 4}, ("S1",), (8, 6)),
    "a matrix by both": ({"dp": 2, "tp": 4}, ("S0", "S1"), (8, 12)),
    "a matrix by columns, then rows": ({"dp": 2, "tp": 4}, ("S1", "S0"), (8, 12)),
    "both unevenly": ({"dp": 2, "tp": 4}, ("S0", "S1"), (7, 10)),
    "two axes on one dim": ({"dp": 2, "tp": 2}, ("S0", "S0"), (8, 4)),
    "two axes on one dim, unevenly": ({"dp": 2, "tp": 4}, ("S0", "S0"), (28, 4)),
    "split and copied": ({"dp": 2, "tp": 4}, ("R", "S1"), (4, 8)),
    "whole": ({"dp": 2, "tp": 4}, ("R", "R"), (4, 8)),
    "broadcast": ({"dp": 2, "tp": 2}, ("B", "S0"), (4, 8)),
    "addends": ({"tp": 4}, ("P",), (4, 8)),
    "addends of parts, copied": ({"dp": 2, "tp": 2, "cp": 2}, ("S0", "P", "R"), (5, 8)),
    "candidates": ({"dp": 2, "tp": 2}, ("S0", "Pmax"), (4, 8)),
    "an image by width": ({"dp": 2, "sp": 4}, ("S0", "S3"), (4, 3, 32, 32)),
    "three dims": ({"a": 2, "b": 2, "c": 2}, ("S0", "S1", "S2"), (2, 4, 8)),
    "many devices": ({"a": 32, "b": 2}, ("S0", "S1"), (1024, 64)),
}

LAYOUTS: Mapping[str, tuple[Layout, tuple[int, ...]]] = {
    name: (layout(Mesh(axes), tuple(map(placement_from_code, codes))), shape)
    for name, (axes, codes, shape) in _CASES.items()
}

GOLDEN = Path(__file__).parents[1] / "kits" / "show" / "golden"


def picture(name: str) -> ShardingPicture:
    """The picture of one of LAYOUTS."""
    return visualize_sharding(*LAYOUTS[name])


def files() -> dict[Path, str]:
    """The files of the golden pictures: one with all texts, and one for each SVG."""
    texts = "\n\n".join(f"{name}\n{picture(name).text}" for name in LAYOUTS)
    svgs = {GOLDEN / f"{name.replace(',', '').replace(' ', '_')}.svg": picture(name).svg for name in LAYOUTS}
    return {GOLDEN / "layouts.txt": texts} | svgs


def boxes(parts: LayoutParts) -> Iterator[tuple[int, list[Span]]]:
    """For each device, the elements of every dim in the boxes that name it."""
    row, column = parts.axes
    for panel in parts.panels():
        for r, line in zip(parts.spans(row), panel.devices, strict=True):
            for c, devices in zip(parts.spans(column), line, strict=True):
                spans = [(0, size) for size in parts.shape]
                for dim, span in (*panel.at, (row, r), (column, c)):
                    if dim is not None:
                        spans[dim] = span
                yield from ((device, spans) for device in devices)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    GOLDEN.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text + "\n", encoding="utf-8")
