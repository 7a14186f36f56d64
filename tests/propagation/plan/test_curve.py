"""The picture of what memory costs."""

import itertools
import xml.etree.ElementTree as ET

import pytest
import torch

import partway as pw
from partway.propagation.plan.curve import MemoryCurve
from partway.propagation.plan.data import MemoryPoint

SVG = "{http://www.w3.org/2000/svg}"
HELD = ((80_000, 1e-3), (60_000, 1.5e-3), (20_000, 4e-3))
POINTS = MemoryCurve(MemoryPoint(held=held, seconds=seconds) for held, seconds in HELD)


def test_every_point_is_drawn_with_its_figures(tmp_path) -> None:
    POINTS.save_svg(tmp_path / "curve.svg")
    drawn = ET.fromstring((tmp_path / "curve.svg").read_text())
    circles = drawn.findall(f"{SVG}circle")
    assert [circle.findtext(f"{SVG}title") for circle in circles] == ["20 kB, 4 ms", "60 kB, 1.5 ms", "80 kB, 1 ms"]
    across, down = ([float(circle.attrib[key]) for circle in circles] for key in ("cx", "cy"))
    assert across == sorted(across)
    assert down == sorted(down)  # more memory, less time: lower in the picture, as y points down
    texts = [text.text for text in drawn.findall(f"{SVG}text")]
    assert {"most bytes on a device", "predicted step", "80 kB", "4 ms"} <= set(texts)
    assert drawn.attrib["aria-label"] == drawn.findtext(f"{SVG}title")


def test_between_two_points_the_smaller_plan_is_what_fits() -> None:
    path = ET.fromstring(POINTS._repr_svg_()).find(f"{SVG}path")
    corners = [tuple(map(float, corner.split(","))) for corner in path.attrib["d"][1:].split("L")]
    assert len(corners) == 5
    assert [a[1] == b[1] or a[0] == b[0] for a, b in itertools.pairwise(corners)] == [True] * 4


def test_one_point_and_none_are_pictures_too() -> None:
    for count in (0, 1):
        drawn = ET.fromstring(MemoryCurve(POINTS[:count])._repr_svg_())
        assert len(drawn.findall(f"{SVG}circle")) == count


def test_the_curve_of_a_plan_holds_less_and_takes_longer_from_point_to_point(tmp_path) -> None:
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.empty(1024, 64)
    plan = pw.compile(model, (x,), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),)).plan
    curve = plan.memory_curve()
    assert len(curve) > 1
    assert [point.held for point in curve] == sorted((point.held for point in curve), reverse=True)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(pw.StrategyError, match="a plan that was read from a file has no memory curve"):
        pw.Plan.load(tmp_path / "plan.json").memory_curve()
