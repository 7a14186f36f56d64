from __future__ import annotations

import json
import re

import pytest

from partway.propagation.program.timeline import Span, save_chrome_trace
from partway.strategy.errors import StrategyError

MM = Span("mm", "forward", "compute", 0.0, 2e-3, {"kind": "aten.mm.default"})
SUM = Span("convert", "backward", "communication", 1e-3, 0.5e-3, {"kind": "all_reduce", "bytes": 64})


def test_a_trace_has_a_process_for_each_source_and_a_row_for_each_lane(tmp_path):
    save_chrome_trace(tmp_path / "step.json", {"predicted": [MM, SUM], "measured": [MM]})
    trace = json.loads((tmp_path / "step.json").read_text())
    events = trace["traceEvents"]
    names = [(e["name"], e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", 0, None, "predicted"),
        ("thread_name", 0, 0, "compute"),
        ("thread_name", 0, 1, "communication"),
        ("process_name", 1, None, "measured"),
        ("thread_name", 1, 0, "compute"),
        ("thread_name", 1, 1, "communication"),
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"]) for e in spans] == [("mm", 0, 0), ("convert", 0, 1), ("mm", 1, 0)]


def test_times_are_microseconds_and_what_is_known_of_a_span_is_kept(tmp_path):
    save_chrome_trace(str(tmp_path / "step.json"), {"predicted": [SUM]})
    (event,) = [e for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert (event["ts"], event["dur"], event["cat"]) == (pytest.approx(1000), pytest.approx(500), "backward")
    assert event["args"] == {"phase": "backward", "kind": "all_reduce", "bytes": 64}


def test_a_span_ends_when_its_seconds_are_over():
    assert SUM.end == pytest.approx(1.5e-3)


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "step.json"
    message = f"could not write the timeline to {str(path)!r}: File exists"
    with pytest.raises(StrategyError, match=re.escape(message)):
        save_chrome_trace(path, {"predicted": [MM]})


def test_a_span_is_on_one_of_two_lanes_and_takes_no_negative_time():
    with pytest.raises(StrategyError, match=r"^span 'mm' is on lane 'gpu'; write 'compute' or 'communication'$"):
        Span("mm", "forward", "gpu", 0.0, 1.0)
    with pytest.raises(StrategyError, match=r"^span 'mm' takes -1\.0 s; write 0 or more$"):
        Span("mm", "forward", "compute", 0.0, -1.0)
