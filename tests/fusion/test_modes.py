from __future__ import annotations

import dataclasses

import pytest
import torch

from partway import fusion
from partway.fusion import Fusion, FusionMode, FusionPolicies, Member, group
from partway.fusion.modes import POLICIES, modes_of
from partway.fusion.policy import COLLECTIVES
from partway.strategy.errors import ContextError

KEYS = r'^takes \{"mode": ..., "config": ...\} with no other keys, or a list of indices, not '
ONE_MB = r"^mode size takes a whole number of MB, 1 or more, not "


def test_public_names_are_pinned():
    assert fusion.__all__ == [
        "Fusion",
        "FusionMode",
        "FusionPolicies",
        "Member",
        "fuse",
        "fuse_program",
        "gradient_collectives",
        "group",
        "member",
        "weight_gathers",
    ]


def test_every_mode_has_a_row_and_every_collective_of_the_rows_an_option():
    assert list(POLICIES) == list(FusionMode)
    assert {name for policy in POLICIES.values() for name in policy.collectives} <= set(COLLECTIVES)
    assert tuple(field.name for field in dataclasses.fields(FusionPolicies)) == COLLECTIVES


def test_at_most_one_mode_of_a_collective_is_written_as_a_list():
    for collective in COLLECTIVES:
        assert sum(bool(POLICIES[mode].shorthand) for mode in modes_of(collective)) <= 1


@pytest.mark.parametrize("mode", FusionMode)
def test_every_mode_groups_each_member_once(mode):
    members = [Member(i, "P", "R", ("dp",), torch.float32, 1 << 20) for i in range(6)]
    fusion = Fusion(mode, {FusionMode.SIZE: 2, FusionMode.INDEX: (2, 3)}.get(mode))
    for groups in (group(members, fusion), fusion.policy.updates(members, fusion.config)):
        assert sorted(i for positions in groups for i in positions) == list(range(6))


@pytest.mark.parametrize(
    ("option", "policy"),
    [
        ({"mode": "auto", "config": None}, Fusion(FusionMode.AUTO)),
        ({"mode": "auto"}, Fusion(FusionMode.AUTO)),
        ({"mode": "size", "config": 32}, Fusion(FusionMode.SIZE, 32)),
        ({"mode": "index", "config": [20, 35]}, Fusion(FusionMode.INDEX, (20, 35))),
        ([20, 35], Fusion(FusionMode.INDEX, (20, 35))),
        ({"mode": "overlap"}, Fusion(FusionMode.OVERLAP)),
        ({"mode": "overlap", "config": None}, Fusion(FusionMode.OVERLAP)),
    ],
)
def test_options_are_read_as_users_write_them(option, policy):
    assert Fusion.from_option(option) == policy


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
        ({"mode": "siez", "config": 5}, r"^mode 'siez' is unknown; write one of auto, size, index, overlap$"),
        (
            {"mode": "overlap", "config": 5},
            r"^mode overlap takes no config \(the cost model chooses the groups\), not 5;",
        ),
        ({"mode": ["size"], "config": 5}, r"mode \['size'\] is unknown"),
        ({"config": 5}, KEYS + r"\{'config': 5\}"),
        ({"mode": "size", "size": 5}, KEYS),
        ("auto", KEYS + "'auto'"),
        (None, KEYS + "None"),
    ],
)
def test_wrong_option_is_rejected_saying_what_to_write(option, message):
    with pytest.raises(ContextError, match=message):
        Fusion.from_option(option)


@pytest.mark.parametrize("collective", ["allgather", "reducescatter"])
def test_index_is_a_mode_of_allreduce_only(collective):
    assert Fusion.from_option({"mode": "overlap"}, collective) == Fusion(FusionMode.OVERLAP)
    with pytest.raises(ContextError, match=r"^mode index is one of allreduce only; write one of auto, size, overlap$"):
        Fusion.from_option({"mode": "index", "config": [20]}, collective)
    with pytest.raises(ContextError, match=r"^mode 'big' is unknown; write one of auto, size, overlap$"):
        Fusion.from_option({"mode": "big"}, collective)
    with pytest.raises(ContextError, match=r"with no other keys, not \[20\]$"):
        Fusion.from_option([20], collective)
    with pytest.raises(ContextError, match=f"^{collective}: mode index is one of allreduce only; write one of auto, "):
        FusionPolicies(**{collective: Fusion(FusionMode.INDEX, (20,))})


def test_mode_of_a_policy_is_the_enum():
    with pytest.raises(ContextError, match=r"^the mode of a Fusion must be a FusionMode, not 'auto'$"):
        Fusion("auto")


def test_policy_is_frozen_and_equal_however_its_indices_are_given():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Fusion(FusionMode.AUTO).config = 3
    assert {Fusion(FusionMode.INDEX, [20, 35])} == {Fusion(FusionMode.INDEX, (20, 35))}


@pytest.mark.parametrize("option", [{"mode": "auto", "config": None}, {"mode": "index", "config": [20, 35]}])
def test_a_policy_is_written_as_it_is_read(option):
    assert Fusion.from_option(option).option == option


def test_policies_are_true_if_there_is_one():
    assert not FusionPolicies()
    assert FusionPolicies(reducescatter=Fusion(FusionMode.AUTO))
