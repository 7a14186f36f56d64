from __future__ import annotations

import dataclasses

import pytest

from partway import fusion
from partway.fusion import AllReduceFusion, FusionMode
from partway.strategy.errors import ContextError

KEYS = r'AllReduce fusion takes \{"mode": ..., "config": ...\} with no other keys, or a list of indices, not '
ONE_MB = r"mode size takes a whole number of MB, 1 or more, not "


def test_public_names_are_pinned():
    assert fusion.__all__ == [
        "AllReduceFusion",
        "FusionMode",
        "Member",
        "fuse",
        "gradient_all_reduces",
        "group",
        "member",
    ]


@pytest.mark.parametrize(
    ("option", "policy"),
    [
        ({"mode": "auto", "config": None}, AllReduceFusion(FusionMode.AUTO)),
        ({"mode": "auto"}, AllReduceFusion(FusionMode.AUTO)),
        ({"mode": "size", "config": 32}, AllReduceFusion(FusionMode.SIZE, 32)),
        ({"mode": "index", "config": [20, 35]}, AllReduceFusion(FusionMode.INDEX, (20, 35))),
        ([20, 35], AllReduceFusion(FusionMode.INDEX, (20, 35))),
    ],
)
def test_options_are_read_as_users_write_them(option, policy):
    assert AllReduceFusion.from_option(option) == policy


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ([], r"mode index takes at least one index, such as \[20, 35\], not an empty list"),
        ([35, 20], r"mode index takes ascending indices; write \[20, 35\] for \[35, 20\]"),
        ([20, 20, 35], r"mode index takes each index once; \[20, 20, 35\] repeats 20$"),
        (
            [35, 20, 35],
            r"takes each index once; \[35, 20, 35\] repeats 35; takes ascending indices; write \[20, 35\] for",
        ),
        ([0, 20], r"mode index takes whole numbers, 1 or more; \[0, 20\] has 0"),
        ([-1, 2.5, "3", True], r"takes whole numbers, 1 or more; \[-1, 2.5, '3', True\] has -1, 2.5, '3', True"),
        ({"mode": "index", "config": None}, r"mode index takes a list of indices such as \[20, 35\], not None"),
        ({"mode": "index", "config": 20}, r"mode index takes a list of indices such as \[20, 35\], not 20"),
        ({"mode": "size", "config": 0}, ONE_MB + "0"),
        ({"mode": "size", "config": -4}, ONE_MB + "-4"),
        ({"mode": "size", "config": 1.5}, ONE_MB + r"1\.5"),
        ({"mode": "size", "config": True}, ONE_MB + "True"),
        ({"mode": "size", "config": [4]}, ONE_MB + r"\(4,\)"),
        ({"mode": "size"}, ONE_MB + "None"),
        ({"mode": "auto", "config": 5}, r"mode auto takes no config \(a group is at most 64 MB\), not 5; mode size"),
        ({"mode": "siez", "config": 5}, r"mode 'siez' is unknown; write one of auto, size, index"),
        ({"mode": ["size"], "config": 5}, r"mode \['size'\] is unknown"),
        ({"config": 5}, KEYS + r"\{'config': 5\}"),
        ({"mode": "size", "size": 5}, KEYS),
        ("auto", KEYS + "'auto'"),
        (None, KEYS + "None"),
    ],
)
def test_wrong_option_is_rejected_saying_what_to_write(option, message):
    with pytest.raises(ContextError, match=message):
        AllReduceFusion.from_option(option)


def test_mode_of_a_policy_is_the_enum():
    with pytest.raises(ContextError, match="mode must be a FusionMode, not 'auto'"):
        AllReduceFusion("auto")


def test_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AllReduceFusion(FusionMode.AUTO).config = 3
