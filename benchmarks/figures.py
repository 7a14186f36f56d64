"""The measured figures that pages quote: `figures.json`, one entry for each measurement.

A measurement has the section of RESULTS.md (or the page) that reports it, its day, machine and command, and its
figures by key. A figure has a value (or several), each a number as the section writes it or two of them with an
operator (`"9.0 - 8.4"`), its unit, and where a benchmark can write it, the benchmark's own name for it (`case`).

A page that quotes a figure marks it with a comment: `7.4 s <!-- figure: plan.llama8b.capture -->`. A number that nobody
measured (a specification, a limit that was asked for) has the mark `<!-- figure: given -->`.
tests/benchmarks/test_figures.py compares pages, this file and RESULTS.md.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("figures.json")


def read(path: Path = FILE) -> list[dict[str, Any]]:
    """The measurements."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    return found


def write(section: str, command: str, values: Mapping[str, str], path: Path = FILE) -> list[str]:
    """Write the values of a run, by the benchmark's names, over the figures of those names, and return their keys.

    section   the heading in RESULTS.md under which the run is reported; it ends with the day
    command   what was run; figures of another benchmark's commands keep their values
    """
    script, measurements, moved = command.split()[1], read(path), {}
    new = {
        "section": section,
        "date": section[-10:],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {version('torch')}",
        "command": command,
        "figures": moved,
    }
    for measurement in measurements:
        theirs, is_new = measurement["figures"], (measurement["section"], measurement["command"]) == (section, command)
        for key, figure in list(theirs.items()):
            written = script in measurement["command"] and figure.get("case") in values
            if written or is_new:
                moved[key] = theirs.pop(key)
            if written:
                moved[key]["value"] = values[figure["case"]]
    data = {"measurements": [m for m in (new, *measurements) if m["figures"]]}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return sorted(key for key, figure in moved.items() if figure.get("case") in values)
