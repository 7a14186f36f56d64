"""Pictures are as they are kept, and an SVG says of each box what the table says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from picture_layouts import LAYOUTS, files, picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_pictures_are_as_they_are_kept(path: Path) -> None:
    fix = "if this is meant, python tests/helpers/picture_layouts.py --write"
    assert path.read_text(encoding="utf-8") == files()[path] + "\n", fix


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_svg_says_for_each_box_who_holds_what(name: str) -> None:
    found = picture(name)
    root = ElementTree.fromstring(found.svg)
    parts = found.parts
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert titles[0] == found.title
    boxes = [title for title in titles[1:] if not title.startswith("device …")]
    row, column = parts.axes
    for panel in parts.panels():
        for r, line in zip(parts.spans(row), panel.devices, strict=True):
            for c, devices in zip(parts.spans(column), line, strict=True):
                across, down = (f"{s[0]}:{s[1]}" if dim is not None else "all" for dim, s in ((column, c), (row, r)))
                said = f"device{'s' if len(devices) > 1 else ''} {parts.words(devices)}: {down}, {across}"
                if len(parts.spans(row)) <= 16:
                    assert said in boxes
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("width", 0)) > 0
        assert float(rect.get("height", 0)) > 0
