"""Pictures and pages for people.

sharding.py   `visualize_sharding`: draws how a tensor lies on the devices of a mesh
pages.py      `partway show`: pages of saved plans, and the differences between two
timeline.py   `record_timeline`: the times of operators and collectives, as a list and as a page
sheet.py      a page of text, tables and pictures, which fetches nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.show.lanes import COLOURS, SCRIPT, STYLE, lanes_figure
    from partway.show.page.markup import safe
    from partway.show.sheet import sheet_of
    from partway.show.timeline import beside, totals
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "lanes": "COLOURS SCRIPT STYLE lanes_figure",
            "page.markup": "safe",
            "sheet": "sheet_of",
            "timeline": "beside totals",
        },
    )

__all__ = [
    "COLOURS",
    "SCRIPT",
    "STYLE",
    "beside",
    "lanes_figure",
    "safe",
    "sheet_of",
    "totals",
]
