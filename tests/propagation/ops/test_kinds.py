"""The rows of collective kinds: every one has what planning asks of it."""

import dataclasses
import itertools
import math

import pytest

from partway.fusion.policy import COLLECTIVES as GROUPED
from partway.propagation.cost.profile import ByKind
from partway.propagation.ops.collectives import (
    COLLECTIVES,
    Payload,
    figures_of,
    is_gather,
    is_reduction,
    payload_bytes,
    shares_of,
)
from partway.strategy import BROADCAST, PARTIAL, REPLICATE, Kind, Shard, kind, transpose
from partway.strategy.placement import LOCAL

STATES = (Shard(0), Shard(1), REPLICATE, BROADCAST, PARTIAL)


def test_every_kind_either_has_a_row_or_needs_no_other_rank():
    assert set(COLLECTIVES) | LOCAL == set(Kind)
    assert not set(COLLECTIVES) & LOCAL
    assert {kind for kind in Kind if kind.communicates} == set(COLLECTIVES)


def test_every_kind_is_predicted_by_figures_that_a_profile_has():
    own = {kind.value for kind in COLLECTIVES if figures_of(kind) is kind}
    assert own == {field.name for field in dataclasses.fields(ByKind)}
    assert {figures_of(kind).value for kind in COLLECTIVES} == own


def test_every_group_of_collectives_is_of_one_kind():
    assert sorted(row.fusion for row in COLLECTIVES.values() if row.fusion) == sorted(GROUPED)


def test_a_group_of_one_sends_nothing_but_what_neighbours_ask_for():
    for row in COLLECTIVES.values():
        assert row.payload is Payload.SENT or (row.wire(960, 1), row.steps(1)) == (0, 0)


def test_the_transposes_are_those_of_the_table():
    transposes = {}
    for source, target in itertools.permutations(STATES, 2):
        transposes.setdefault(kind(source, target), set()).add(kind(*transpose(source, target)))
    assert transposes[Kind.ALL_REDUCE] == {Kind.NOTHING, Kind.ALL_REDUCE}
    assert transposes[Kind.ALL_GATHER] == {Kind.SLICE, Kind.REDUCE_SCATTER}
    assert transposes[Kind.REDUCE_SCATTER] == {Kind.ALL_GATHER}
    assert transposes[Kind.ALL_TO_ALL] == {Kind.ALL_TO_ALL}


def test_what_gathers_makes_the_whole_and_what_reduces_takes_addends():
    for source, target in itertools.permutations(STATES, 2):
        way = kind(source, target)
        assert is_gather(way) == (isinstance(source, Shard) and not isinstance(target, Shard) and target != PARTIAL)
        assert is_reduction(way) == (source == PARTIAL)


@pytest.mark.parametrize("size", [2, 4])
def test_the_payload_of_a_local_tensor_is_its_share_of_the_whole(size):
    for source, target in itertools.permutations(STATES, 2):
        if (way := kind(source, target)).communicates:
            local = [8 // size if source == Shard(dim) else 8 for dim in range(2)]
            assert payload_bytes(source, target, local, 4, size) == shares_of([way], size)[way] * 4 * 64
            assert math.prod(local) in (64, 64 // size)
    with pytest.raises(ValueError, match="the payload of exchange is not a share of the whole value"):
        shares_of([Kind.EXCHANGE], size)
