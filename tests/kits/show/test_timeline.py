"""A timeline is a list of spans, and a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.program.timeline import COMMUNICATION, COMPUTE, Span
from partway.show.timeline import Timeline, beside, totals

BAD = "</script><img src=x onerror=alert(1)>"


def recorded(devices: int, folder: Path) -> tuple[Timeline, str]:
    """A step of a small network, and its page."""
    torch.manual_seed(0)
    with pw.auto_parallel_context(device_num=devices, parallel_mode="data_parallel", full_batch=True):
        model, x = pw.shard(nn.Linear(64, 8)), torch.ones(8 * devices, 64)
        model(x).sum().backward()
        with pw.record_timeline() as timeline:
            model(x).sum().backward()
            assert timeline == []
        path = folder / f"{pw.get_rank()}.html"
        timeline.save_html(path, predicted=model.program.schedule.spans)
    return timeline, path.read_text(encoding="utf-8")


def test_a_timeline_is_a_list_of_spans_and_a_page_of_what_was_measured_and_predicted(tmp_path: Path) -> None:
    timeline, page = recorded(2, tmp_path)
    assert isinstance(timeline, list)
    assert {span.lane for span in timeline} == {COMPUTE, COMMUNICATION}
    assert "<h1>What ran when</h1>" in page
    for lane in ("computing", "collectives over d0"):
        for source in ("measured", "predicted"):
            assert f'aria-label="{lane}, {source}"' in page
    assert "(all_reduce): " in page
    assert "kB</title>" in page  # how much a collective sends


def on_a_rank(folder: str) -> str:
    timeline, page = recorded(2, Path(folder))
    assert timeline.whose in page
    return timeline.whose


@pytest.mark.gloo
def test_the_page_of_a_rank_says_whose_it_is(tmp_path: Path, on_ranks) -> None:  # type: ignore[no-untyped-def]
    whose = on_ranks(2, on_a_rank, str(tmp_path))
    assert [text.partition(" (")[0] for text in whose] == ["rank 0 of 2", "rank 1 of 2"]


def test_what_fails_in_a_block_leaves_what_ran_before(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), pw.record_timeline() as timeline:  # noqa: PT012
        recorded(2, tmp_path)
        raise ZeroDivisionError
    assert timeline


def test_an_empty_timeline_says_that_nothing_ran(tmp_path: Path) -> None:
    Timeline().save_html(tmp_path / "none.html")
    assert "<p>Nothing ran.</p>" in (tmp_path / "none.html").read_text(encoding="utf-8")


def test_a_name_with_markup_is_only_a_name(tmp_path: Path) -> None:
    span = Span(BAD, "forward", COMMUNICATION, 0.0, 1.0, {"kind": BAD, "axes": BAD, "bytes": 3})
    Timeline([span]).save_html(tmp_path / "bad.html", predicted=[span])
    page = (tmp_path / "bad.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert page.count("<script") == 1


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pw.StrategyError) as error:
        Timeline().save_html(tmp_path)
    assert str(error.value) == f"could not write the page to {str(tmp_path)!r}: Is a directory"


def test_what_is_no_span_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pw.StrategyError) as error:
        Timeline().save_html(tmp_path / "x.html", predicted=[3])  # type: ignore[list-item]
    assert str(error.value) == "3 is not a Span; pass predicted=model.program.schedule.spans"


def test_lanes_of_one_name_stand_together() -> None:
    step = [Span("a", "forward", COMPUTE, 0.0, 1.0), Span("b", "backward", COMMUNICATION, 1.0, 1.0, {"axes": "dp"})]
    names = [lane.name for lane in beside({"measured": step, "predicted": step})]
    assert names == [
        "computing, measured", "computing, predicted", "collectives over dp, measured", "collectives over dp, "
                                                                                        "predicted"
    ]  # fmt: skip


def test_totals_say_how_long_it_took_and_of_what() -> None:
    table = totals(
        {"measured": [Span("a", "forward", COMPUTE, 0.0, 1.0), Span("b", "forward", COMMUNICATION, 1.0, 3.0)]}
    )
    assert [part.split("<")[0] for part in table.split('class="number">')[1:]] == ["4 s", "1 s", "3 s"]
    assert "1 collective<" in table
