"""Strips of the rows of experts and devices."""

import re

from partway.propagation.plan.load import ExpertLoad
from partway.show.page.load import load_sections


def test_no_loads_make_no_section():
    assert list(load_sections({})) == []


def test_the_most_loaded_is_the_darkest_and_all_are_in_the_text_for_readers():
    (section,) = load_sections({"dispatch": ExpertLoad("moe.dispatch", (4, 0, 8, 4), (4, 12))})
    assert section.name == "load"
    opacity = re.findall(r'fill-opacity="([\d.]+)"><title>(\w+ \d): (\d+) rows', section.body)
    assert [(of, int(rows)) for _, of, rows in opacity] == [
        ("device 0", 4), ("device 1", 12), ("expert 0", 4), ("expert 1", 0), ("expert 2", 8), ("expert 3", 4),
    ]  # fmt: skip
    assert [float(each) for each, _, _ in opacity] == [0.37, 1.0, 0.53, 0.06, 1.0, 0.53]
    assert 'aria-label="rows by expert: 4 0 8 4"' in section.body
    assert "allows for all is 1.50" in section.body


def test_a_mixture_without_rows_and_many_experts():
    (section,) = load_sections({"<d>": ExpertLoad("<d>", (0,) * 256, (0,) * 64)})
    assert section.body.count("<rect") == 320
    assert "<d>" not in section.body
    assert 'width="768"' in section.body
