"""`record_timeline`: the times of operators and collectives, as a list of spans that can be shown as a page."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike

from partway.propagation.program import COMMUNICATION, COMPUTE, Span
from partway.runtime import get_group_size, get_rank
from partway.runtime import record_timeline as record_spans
from partway.show.lanes import SCRIPT, STYLE, Lane, lanes_figure
from partway.show.page.markup import safe
from partway.show.page.time import lanes_of
from partway.show.sheet import sheet_of
from partway.strategy import StrategyError, counted, shown
from partway.strategy.basics import lasting, save


class Timeline(list[Span]):
    """The spans of one rank, in the order of their ends. `whose`: "rank 1 of 2"; "" for a single process."""

    whose = ""

    def save_html(self, path: str | PathLike[str], *, predicted: Iterable[Span] = ()) -> None:
        """Write the timeline as a page: one file that a browser opens from disk, and that fetches nothing.

        predicted   the predicted spans, drawn beside it: `model.program.schedule.spans`

        Every rank records its own, and the page names the rank: use a path of its own for each, such as
        f"timeline-{pw.get_rank()}.html". Raises StrategyError if it cannot be written.
        """
        expected = list(predicted)
        if wrong := next((one for one in expected if not isinstance(one, Span)), None):
            raise StrategyError(f"{shown(wrong)} is not a Span; pass predicted=model.program.schedule.spans")
        sources = {"measured": list(self), **({"predicted": expected} if expected else {})}
        title = f"What ran when, on {self.whose}" if self.whose else "What ran when"
        body = (
            f"{totals(sources)}\n{lanes_figure('Measured and predicted' if expected else 'Measured', beside(sources))}"
        )
        save("the page", path, sheet_of(title, body, STYLE, SCRIPT))


@contextlib.contextmanager
def record_timeline() -> Iterator[Timeline]:
    """Record the times of each operator and each collective of the steps inside the block, on this rank, under the
    names that `program.schedule` uses for its predictions. It is a list of spans, filled when the block ends.

    with pw.record_timeline() as timeline:
        step()
    timeline.save_html("timeline.html", predicted=model.program.schedule.spans)

    In simulation operators are those of the first rank, and the gaps between them are the time of the other ranks. A
    collective lasts while its results are made; values that the ranks add up before, as they run, are in no span.

    Timing costs about a microsecond for each operator.
    """
    timeline, spans = Timeline(), list[Span]()
    try:
        with record_spans() as spans:
            yield timeline
    finally:
        timeline.extend(spans)
        if spans and get_group_size() > 1:
            timeline.whose = f"rank {get_rank()} of {get_group_size()} ({socket.gethostname()})"


def beside(sources: Mapping[str, Iterable[Span]]) -> list[Lane]:
    """The lanes of several timelines, such as {"measured": ..., "predicted": ...}, with lanes of one name together."""
    lanes: dict[str, list[Lane]] = {}
    for source, spans in sources.items():
        for lane in lanes_of(list(spans)):
            lanes.setdefault(lane.name, []).append(Lane(f"{lane.name}, {source}", lane.spans))
    return [lane for together in lanes.values() for lane in together]


def totals(sources: Mapping[str, Iterable[Span]]) -> str:
    """A table of the length of each timeline, and of its computation and communication, as HTML."""
    rows = []
    for source, given in sources.items():
        spans = list(given)
        sums = [sum(span.seconds for span in spans if span.lane == lane) for lane in (COMPUTE, COMMUNICATION)]
        end = max((span.end for span in spans), default=0.0)
        sent = counted(sum(span.lane == COMMUNICATION for span in spans), "collective")
        cells = "".join(f'<td class="number">{lasting(seconds)}</td>' for seconds in (end, *sums))
        rows.append(f'<tr><th scope="row">{safe(source)}</th>{cells}<td>{sent}</td></tr>')
    head = "".join(
        f'<th scope="col"{" class=number" if i else ""}>{name}</th>'
        for i, name in enumerate(("", "from begin to end", "computing", "collectives (may overlap)"))
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}<th></th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
