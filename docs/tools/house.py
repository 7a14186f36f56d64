"""Draws the house from its imports: docs/design/house.svg, and the table of docs/design/house.md.

    python docs/tools/house.py

A box is a room (a folder of modules) with its modules and lines. A line leads from a room to one that it imports, as
wide as it has imports, unless a way over other rooms says so already. Rooms stand above all that they import; those
that import each other stand side by side.
"""

from __future__ import annotations

import ast
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[2]
DRAWING = ROOT / "docs" / "design" / "house.svg"
PAGE = ROOT / "docs" / "design" / "house.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"
COLOURS = {
    "strategy": "#dff0e3",
    "propagation": "#e2ebfb",
    "fusion": "#fbf0da",
    "runtime": "#f9e3e0",
    "partway": "#f1e6f7",
}
WIDTH, HEIGHT, ACROSS, DOWN = 132, 40, 150, 96  # of a box, and from one to the next


def modules() -> dict[str, Path]:
    """Each module by the name that Python has for it."""
    found = {}
    for folder, _, names in sorted(os.walk(ROOT / "partway", followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[dotted.removesuffix(".__init__")] = path
    return found


def package_of(module: str, every: Mapping[str, Path]) -> str:
    """The package that a module is in."""
    return module if every[module].name == "__init__.py" else module.rpartition(".")[0]


def room_of(module: str, every: Mapping[str, Path]) -> str:
    """As `package_of`, but what a stage takes of PyTorch's private names is a room of its own."""
    return module if module.endswith(".torch_internals") else package_of(module, every)


def imports(module: str, every: Mapping[str, Path]) -> Iterator[str]:
    """The modules of Partway that a module imports when it is imported."""
    package = package_of(module, every)
    for node in ast.parse(every[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}" if f"{base}.{alias.name}" in every else base
                if name in every:
                    yield name


def edges(every: Mapping[str, Path]) -> Counter[tuple[str, str]]:
    """How often modules of one room import those of another."""
    found = Counter[tuple[str, str]]()
    for module in every:
        for name in imports(module, every):
            one, other = room_of(module, every), room_of(name, every)
            if one != other:
                found[one, other] += 1
    return found


def _together(rooms: Collection[str], leads: Collection[tuple[str, str]]) -> networkx.DiGraph:
    """The graph of the rooms, in which those that import each other are one."""
    graph = networkx.DiGraph([*leads])
    graph.add_nodes_from(rooms)
    return networkx.condensation(graph)


def heights(rooms: Collection[str], leads: Collection[tuple[str, str]]) -> dict[str, int]:
    """How many rooms stand below each, one on another; rooms that import each other stand side by side."""
    together = _together(rooms, leads)
    height: dict[int, int] = {}
    for number in reversed(list(networkx.topological_sort(together))):
        height[number] = 1 + max((height[below] for below in together.successors(number)), default=-1)
    return {room: height[number] for room, number in together.graph["mapping"].items()}


def levels(rooms: Collection[str], leads: Collection[tuple[str, str]]) -> dict[str, int]:
    """The height of each room, kits above all others."""
    kits = {room for room in rooms if _top(room) == "kits"}
    core = heights(set(rooms) - kits, [pair for pair in leads if not kits & set(pair)])
    above = heights(kits, [pair for pair in leads if kits >= set(pair)])
    return core | {room: max(core.values()) + 1 + height for room, height in above.items()}


def direct(rooms: Collection[str], leads: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those that no way over other rooms says already, and those between rooms that import each other."""
    together = _together(rooms, leads)
    of = together.graph["mapping"]
    kept = set(networkx.transitive_reduction(together).edges)
    return {(one, other) for one, other in leads if of[one] == of[other] or (of[one], of[other]) in kept}


def drawing(sizes: Mapping[str, tuple[int, int]], leads: Counter[tuple[str, str]]) -> str:
    """The drawing as SVG."""
    at, shown = levels(sizes, leads), direct(sizes, leads)
    rows = [[room for room in sorted(sizes) if at[room] == level] for level in range(max(at.values()) + 1)]
    across = max(map(len, rows))
    width, height = across * ACROSS + 20, len(rows) * DOWN + 20
    place = {}
    for level, row in enumerate(rows):
        for i, room in enumerate(row):
            place[room] = (
                (width - len(row) * ACROSS) / 2 + i * ACROSS + ACROSS / 2,
                height - 20 - level * DOWN - HEIGHT / 2,
            )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for one, other in sorted(shown):
        count = leads[one, other]
        (x, y), (to_x, to_y) = place[one], place[other]
        y, to_y = y + HEIGHT / 2, to_y - HEIGHT / 2
        lines.append(
            f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + 30:.0f} {to_x:.0f} {to_y - 30:.0f} {to_x:.0f} {to_y:.0f}" '
            f'fill="none" stroke="#8893a8" stroke-opacity="0.45" stroke-width="{0.5 + math.log2(1 + count) / 2:.1f}"/>'
        )
    for room, (x, y) in place.items():
        count, length = sizes[room]
        lines.append(
            f'<rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="{_colour(room)}" stroke="#44506a"/>'
            f'<text x="{x:.0f}" y="{y - 3:.0f}" font-size="11" text-anchor="middle">{_name(room)}</text>'
            f'<text x="{x:.0f}" y="{y + 12:.0f}" font-size="9.5" fill="#44506a" text-anchor="middle">'
            f"{count} modules, {length:,} lines</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _name(room: str) -> str:
    return room.removeprefix("partway.") or room


def _top(room: str) -> str:
    """The folder at the top of the checkout that a room is in."""
    return Path(os.path.realpath(ROOT.joinpath(*room.split(".")))).relative_to(ROOT).parts[0]


def _colour(room: str) -> str:
    return COLOURS.get(_top(room), "#f2f2f2")


def table(sizes: Mapping[str, tuple[int, int]]) -> str:
    """The rooms with what their `__init__` says of them."""
    lines = ["| room | modules | lines | |", "| --- | ---: | ---: | --- |"]
    for room, (count, length) in sorted(sizes.items()):
        path = Path(os.path.realpath(ROOT.joinpath(*room.split(".")))).relative_to(ROOT).as_posix()
        if room.endswith(".torch_internals"):
            continue
        text = (ROOT / path / "__init__.py").read_text(encoding="utf-8")
        said = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| [{path}/](../../{path}/__init__.py) | {count} | {length:,} | {said} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write both."""
    every = modules()
    sizes: dict[str, tuple[int, int]] = {}
    for module, path in every.items():
        room = room_of(module, every)
        count, length = sizes.get(room, (0, 0))
        sizes[room] = (count + 1, length + len(path.read_text(encoding="utf-8").splitlines()))
    DRAWING.write_text(drawing(sizes, edges(every)), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(head + BEGIN + table(sizes) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
