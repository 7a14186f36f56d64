"""The boxes of pictures, beside the parts that ranks really hold."""

from __future__ import annotations

import pytest
import torch
from picture_layouts import LAYOUTS, boxes, picture

from partway.runtime.simulate import split
from partway.runtime.slices import Placed
from partway.show.pictures.parts import listed


@pytest.mark.parametrize("name", LAYOUTS)
def test_boxes_are_what_the_ranks_hold(name: str) -> None:
    placed, shape = LAYOUTS[name]
    whole = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
    parts, place = picture(name).parts, Placed(placed, shape)
    held = dict(enumerate(split(whole, placed)))
    shown = dict(boxes(parts))
    assert len(shown) == sum(1 for _ in boxes(parts)), "a device is in two boxes"
    assert {*shown} | {*parts.idle} == {*held}
    for device, spans in shown.items():
        drawn = whole[tuple(slice(*span) for span in spans)]
        own = held[device][tuple(slice(0, size) for size in place.held(device))]
        assert torch.equal(drawn, own)
    for device in parts.idle:
        assert 0 in place.held(device)


def test_numbers_of_devices_are_said_in_short() -> None:
    assert listed([0, 1, 2, 3, 8, 9, 12]) == "0–3, 8, 9, 12"
