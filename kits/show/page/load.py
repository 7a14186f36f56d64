"""The rows that experts got, on the page of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partway.propagation.plan import ExpertLoad
from partway.show.page.document import Section
from partway.show.page.markup import safe
from partway.show.page.tables import find, table


def load_sections(loads: Mapping[str, ExpertLoad]) -> Iterator[Section]:
    """The section of the load of each operator; empty if there is none."""
    if not loads:
        return
    rows = [
        (
            find(name),
            f"{sum(load.by_expert):,}",
            f"{load.busiest:.2f}",
            _strip(load.by_device, "device"),
            _strip(load.by_expert, "expert"),
        )
        for name, load in loads.items()
    ]
    head = ("mixture", "#rows", "#busiest device / mean", "by device", "by expert")
    said = (
        "<p>The darkest of a row has most; point at one for its rows. The least <code>expert_load</code> that allows "
        f"for all is {max(load.busiest for load in loads.values()):.2f}.</p>"
    )
    yield Section("load", "Load of experts", said + table("Rows of the recorded steps", head, rows))


def _strip(rows: tuple[int, ...], of: str) -> str:
    """A strip with a box for each of `rows`, the darker the more rows."""
    most, width = max(*rows, 1), min(14, max(3, 420 // len(rows)))
    boxes = "".join(
        f'<rect x="{i * width}" y="0" width="{width - 0.5}" height="16" fill="var(--accent)" '
        f'fill-opacity="{0.06 + 0.94 * count / most:.2f}"><title>{of} {i}: {count:,} rows</title></rect>'
        for i, count in enumerate(rows)
    )
    said = safe(f"rows by {of}: {' '.join(map(str, rows))}")
    return f'<svg width="{width * len(rows)}" height="16" role="img" aria-label="{said}">{boxes}</svg>'
