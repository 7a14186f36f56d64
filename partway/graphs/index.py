"""The index of a call: what each pass changed, as a table for people and as data for `partway diff`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from partway.graphs.folders import HEAD
from partway.strategy.units import human

DATA, TEXT, PLAN = "index.json", "index.txt", "plan.json"
_HEADS = ("file", "pass", "nodes", "collectives", "sent", "seconds", "what changed")


class Row(BaseModel):
    """What one pass did.

    file          the file that shows what it made; "" for none
    nodes         how many operators the graph calls before it and after it
    collectives   those that the graph issues after it, by kind
    wire_bytes    what one rank sends in them
    seconds       that the pass took; None if it was not run, since what it makes was loaded
    kept          what it made is in the plan; False of a mesh or a setting that was tried
    """

    model_config = ConfigDict(frozen=True)

    file: str = ""
    name: str
    before: int | None = None
    nodes: int | None = None
    collectives: Mapping[str, int] = {}
    wire_bytes: float = 0.0
    seconds: float | None = None
    changed: str = ""
    kept: bool = True


class Index(BaseModel):
    """The index of a call.

    call     the name of its folder
    origin   where the plan comes from
    failed   the error that ended planning
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["partway graphs 1"] = HEAD  # type: ignore[assignment]
    call: str
    level: int
    mesh: str = ""
    origin: str = ""
    failed: str = ""
    rows: tuple[Row, ...] = ()

    def text(self) -> str:
        """The table, below what is said of all passes together. The column of seconds is the only one in which two
        equal runs differ."""
        lines = [f"{HEAD}: {self.call}"]
        lines += [f"mesh {self.mesh}"] if self.mesh else []
        lines += [self.origin] if self.origin else []
        lines += [f"planning failed: {self.failed}"] if self.failed else []
        cells = [_HEADS, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADS))]
        lines += ["", *(_aligned(row, widths) for row in cells), "", *_FOOT]
        return "\n".join(lines) + "\n"


_FOOT = (
    "nodes: operators before the pass -> after it. sent: what one rank sends in the collectives that are there.",
    "seconds: of the pass, without what it takes to save its graph. plan.json: Plan.load reads it.",
)


def _cells(row: Row) -> Sequence[str]:
    nodes = "" if row.nodes is None else str(row.nodes)
    if row.before is not None and row.before != row.nodes:
        nodes = f"{row.before} -> {nodes}"
    collectives = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items())
    seconds = "" if row.seconds is None else f"{row.seconds:.3f}"
    changed = row.changed if row.kept else f"(not kept) {row.changed}"
    sent = human(row.wire_bytes) if row.collectives else ""
    return row.file, row.name, nodes, collectives, sent, seconds, changed


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    right = ("nodes", "sent", "seconds")
    padded = [
        cell.rjust(width) if head in right else cell.ljust(width)
        for head, cell, width in zip(_HEADS, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()
