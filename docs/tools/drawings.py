"""The drawings of the site: each placement and conversion of the glossary, and the plan on the first page.

    python docs/tools/drawings.py           writes docs/images/*.svg

A device is a square, the whole tensor; what it holds is filled. An element has one color wherever it is, so that one
sees it move. What is held follows from the layouts themselves (`Layout.slices`), and the plan is one that Partway
makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

import partway as pw
from partway.strategy.basics.units import human
from partway.strategy.placement import kind

IMAGES = Path(__file__).parents[1] / "images"
X = pw.Mesh({"x": 4})
XY = pw.Mesh({"dp": 2, "tp": 2})
R, B, P = pw.Replicate(), pw.Broadcast(), pw.Partial()
S0, S1 = pw.Shard(0), pw.Shard(1)

Cells = dict[tuple[int, int], str]  # what a device holds: elements, with a sign on each

# name: layout, shape
PLACEMENTS: dict[str, tuple[pw.Layout, tuple[int, int]]] = {
    "replicate": (pw.Layout(X, (R,)), (4, 4)),
    "shard_rows": (pw.Layout(X, (S0,)), (4, 4)),
    "shard_columns": (pw.Layout(X, (S1,)), (4, 4)),
    "broadcast": (pw.Layout(X, (B,)), (4, 4)),
    "partial": (pw.Layout(X, (P,)), (4, 4)),
    "partial_max": (pw.Layout(X, (pw.Partial("max"),)), (4, 4)),
    "two_axes": (pw.Layout(XY, (S0, S1)), (4, 4)),
    "two_axes_on_one_dim": (pw.Layout(XY, (S0, S0)), (4, 4)),
    "split_and_replicated": (pw.Layout(XY, (S0, R)), (4, 4)),
    "split_and_partial": (pw.Layout(XY, (S0, P)), (4, 4)),
    "uneven": (pw.Layout(X, (S0,)), (7, 4)),
    "fewer_elements": (pw.Layout(X, (S0,)), (3, 4)),
}
CONVERSIONS: dict[str, tuple[Any, Any]] = {
    "all_gather": (S0, R),
    "reduce_scatter": (P, S0),
    "all_reduce": (P, R),
    "all_to_all": (S0, S1),
    "slice": (R, S0),
    "pad": (S0, P),
    "keep": (R, P),
    "nothing": (R, B),
}
SIDE, GAP, LEFT, TOP = 64.0, 22.0, 12.0, 30.0
RED = "#c62828"  # what is sent


def held(layout: pw.Layout, shape: tuple[int, int], device: int) -> Cells:
    """The elements that a device holds. Σ: an addend of each; 0: it holds zeros."""
    rows, columns = (range(size)[part] for size, part in zip(shape, layout.slices(shape, device), strict=True))
    sign = {"P": "Σ", "Pmax": "max"}.get(next((str(p) for p in layout.placements if str(p)[0] == "P"), ""), "")
    return {(row, column): sign for row in rows for column in columns}


def placement(name: str) -> str:
    """The drawing of a placement."""
    layout, shape = PLACEMENTS[name]
    mesh = layout.mesh
    devices = [held(layout, shape, device) for device in range(mesh.device_num)]
    title = f"{layout} of {list(shape)}"
    return _page(title, [("", devices, shape)], [_device(mesh, d) for d in range(mesh.device_num)])


def conversion(name: str) -> str:
    """The drawing of a conversion: what devices hold before it and after."""
    source, target = CONVERSIONS[name]
    assert str(kind(source, target)) == name, f"{source} to {target} takes {kind(source, target)}"
    shape = (4, 4)
    before, after = ([held(pw.Layout(X, (p,)), shape, d) for d in range(4)] for p in (source, target))
    if name == "keep":
        after = [dict.fromkeys(cells, "0" if d else "Σ") for d, cells in enumerate(after)]
    if name == "pad":
        after = [{cell: "Σ" if cell in before[d] else "0" for cell in cells} for d, cells in enumerate(after)]
    rows = [(str(source), before, shape), (str(target), after, shape)]
    return _page(f"{name}: {source} to {target}", rows, [_device(X, d) for d in range(4)])


def halo() -> str:
    """The drawing of an exchange: a window of three rows needs one row of each neighbour."""
    shape = (8, 4)
    layout = pw.Layout(X, (S0,))
    before = [held(layout, shape, d) for d in range(4)]
    after = [
        {(row, column): "" if (row, column) in cells else "h" for row in _around(cells, 8) for column in range(4)}
        for cells in before
    ]
    return _page("exchange: S0 to windows of S0, a halo of one row", [("S0", before, shape), ("W0", after, shape)],
                 [_device(X, d) for d in range(4)])  # fmt: skip


def routed() -> str:
    """The drawing of rows that are sent to their experts: as many as there are."""
    shape, of_experts = (8, 4), ((0, 2, 5), (1,), (), (3, 4, 6, 7))
    before = [held(pw.Layout(X, (S0,)), shape, d) for d in range(4)]
    after = [{(row, column): "" for row in rows for column in range(4)} for rows in of_experts]
    rows = [("T0", before, shape), ("E0", after, shape)]
    return _page("all_to_allv: T0 to E0", rows, [_device(X, d) for d in range(4)])


def by_hand(name: str) -> str:
    """The drawing of a collective that only programs by hand have."""
    shape = (4, 4)
    own = [held(pw.Layout(X, (S0,)), shape, d) for d in range(4)]
    if name == "permute":
        rows = [("before", own, shape), ("after", [own[d - 1] for d in range(4)], shape)]
        return _page("permute: each device's part goes to the next", rows, [_device(X, d) for d in range(4)])
    whole = held(pw.Layout(X, (R,)), shape, 0)
    rows = [("before", [whole, {}, {}, {}], shape), ("after", [whole] * 4, shape)]
    return _page("broadcast: what device 0 has goes to all", rows, [_device(X, d) for d in range(4)])


def _around(cells: Iterable[tuple[int, int]], size: int) -> range:
    rows = [row for row, _ in cells]
    return range(max(0, min(rows) - 1), min(size, max(rows) + 2))


def _device(mesh: pw.Mesh, device: int) -> str:
    at = ", ".join(f"{axis} {c}" for axis, c in zip(mesh.axes, mesh.coordinate(device), strict=True))
    return f"device {device}" if len(mesh.axes) == 1 else f"{device}: {at}"


def _page(title: str, rows: Sequence[tuple[str, list[Cells], tuple[int, int]]], names: Sequence[str]) -> str:
    label = 56.0 if any(name for name, _, _ in rows) else 0.0
    wide = max(LEFT * 2 + label + len(names) * (SIDE + GAP), 7.4 * len(title) + 2 * LEFT)
    high = TOP + 16 + len(rows) * (SIDE + GAP) + 6
    body = [_text(LEFT, 20, title, bold=True)]
    for r, (name, devices, shape) in enumerate(rows):
        y = TOP + 16 + r * (SIDE + GAP)
        body.append(_text(LEFT, y + SIDE / 2 + 4, name))
        for d, cells in enumerate(devices):
            x = LEFT + label + d * (SIDE + GAP)
            if not r:
                body.append(_text(x + SIDE / 2, y - 6, names[d], size=10, anchor="middle"))
            body += _square(x, y, cells, shape)
        if r:
            for d in range(len(devices)):
                x = LEFT + label + d * (SIDE + GAP) + SIDE / 2
                body.append(f'<path d="M{x:g} {y - GAP + 4:g}v{GAP - 9:g}m-4 -5l4 5l4 -5" fill="none" stroke="#555"/>')
    return _svg(title, wide, high, body)


def _square(x: float, y: float, cells: Cells, shape: tuple[int, int]) -> Iterator[str]:
    size = f'width="{SIDE:g}" height="{SIDE:g}"'
    yield f'<rect x="{x:g}" y="{y:g}" {size} fill="none" stroke="#999" stroke-dasharray="3 3"/>'
    down, across = SIDE / shape[0], SIDE / shape[1]
    for (row, column), sign in cells.items():
        hue = 360 * row / shape[0]
        light = 88 if sign in ("Σ", "max") else 97 if sign == "0" else 58 + 22 * column / shape[1]
        edge = (
            ' stroke="#222" stroke-width="1.5"'
            if sign == "h"
            else ' stroke="#fff"'
            if sign != "0"
            else ' stroke="#bbb"'
        )
        yield (
            f'<rect x="{x + column * across:.4g}" y="{y + row * down:.4g}" width="{across:.4g}" height="{down:.4g}" '
            f'fill="hsl({hue:.0f} 65% {light:.0f}%)"{edge}/>'
        )
    signs = sorted({sign for sign in cells.values() if sign in ("Σ", "max", "0")})
    for sign in signs:
        at = [cell for cell, is_sign in cells.items() if is_sign == sign]
        middle = sum(row + 0.5 for row, _ in at) / len(at)
        if sign != "0" or len(signs) == 1:
            yield _text(x + SIDE / 2, y + middle * down + 5, sign, size=14, anchor="middle", bold=True)


class Classifier(nn.Module):
    """What the first page shows a plan of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A perceptron, and a loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


def first_plan() -> str:
    """The drawing of a plan: each operator with its layout, and what is sent before it."""
    with torch.device("meta"):
        plan = pw.compile(
            Classifier(), (torch.empty(4096, 512),), mesh={"dp": 2, "tp": 4},
            in_strategy=(("dp", None),), parameter_plan={"up.weight": ("tp", None)},
        ).plan  # fmt: skip
    notes = {"x": 'in_strategy=(("dp", None),)', "up.weight": 'parameter_plan={"up.weight": ("tp", None)}'}
    body = [_text(LEFT, 22, f"two annotations; all else is inferred, on {plan.mesh}", bold=True)]
    y = 38.0
    for tensor in sorted(plan.inputs, key=lambda each: each.name not in notes):
        told = tensor.name in notes
        text = f"{tensor.name} {list(tensor.shape)}"
        body += _row(
            y, text, _codes(plan.mesh, tensor.codes), notes.get(tensor.name, ""), "#ffe0b2" if told else "#eceff1"
        )
        y += 26
    y += 8
    for operator in plan.operators:
        here = [each for each in plan.collectives if operator.name in each.consumer.split()]
        for each in here:
            if each.phase == "forward":
                sent = f"↓ {each.kind} over {', '.join(each.axes)}: {human(each.wire_bytes)} sent"
                body.append(_text(LEFT + 150, y + 10, sent, size=11, fill=RED))
                y += 18
        back = ", ".join(f"{each.kind}({', '.join(each.axes)})" for each in here if each.phase == "backward")
        name = f"{operator.module} {operator.operator.split('.')[1]}".strip()
        body += _row(
            y, name, _codes(plan.mesh, operator.results[0]), f"splits {operator.strategy.strip('()')}", "#c5cae9"
        )
        if back:
            body.append(_text(LEFT + 430, y + 14, f"backward {back}", size=11, fill=RED))
        y += 26
    y += 16
    total = f"one rank sends {human(plan.wire_bytes)} a step"
    body.append(_text(LEFT, y, total, size=11, fill=RED))
    return _svg("a plan from two annotations", 760, y + 14, body)


def _codes(mesh: pw.Mesh, codes: Sequence[str]) -> str:
    return " ".join(f"{axis}:{code}" for axis, code in zip(mesh.axes, codes, strict=True))


def _row(y: float, name: str, layout: str, note: str, fill: str) -> Iterator[str]:
    yield f'<rect x="{LEFT:g}" y="{y:g}" width="290" height="20" rx="4" fill="{fill}"/>'
    yield _text(LEFT + 8, y + 14, name)
    yield _text(LEFT + 282, y + 14, layout, anchor="end")
    yield _text(LEFT + 302, y + 14, note, size=11)


def _svg(title: str, wide: float, high: float, body: Iterable[str]) -> str:
    """On white, so that it is readable on any page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{wide:.4g}" height="{high:.4g}" '
        f'viewBox="0 0 {wide:.4g} {high:.4g}" font-family="ui-sans-serif, system-ui, sans-serif">'
    )
    back = f'<rect width="{wide:.4g}" height="{high:.4g}" rx="6" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *body, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", bold: bool = False,
          fill: str = "#222") -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place}{weight} fill="{fill}">{escape(words)}</text>'


def drawings() -> dict[str, str]:
    """All drawings by file name."""
    made = {f"placement_{name}.svg": placement(name) for name in PLACEMENTS}
    made |= {f"conversion_{name}.svg": conversion(name) for name in CONVERSIONS}
    made |= {f"collective_{name}.svg": by_hand(name) for name in ("permute", "broadcast")}
    made |= {"conversion_all_to_allv.svg": routed(), "conversion_exchange.svg": halo()}
    return {**made, "first_plan.svg": first_plan()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    for name, svg in drawings().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
