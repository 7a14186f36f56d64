"""Where a model is cut into stages, beside all ways to cut it."""

import itertools
import random

import pytest

from partway.propagation.pipeline.actions import Stages
from partway.propagation.pipeline.orders import gpipe, listed, one_forward_one_backward
from partway.propagation.pipeline.play import played
from partway.propagation.pipeline.stages import ModelPiece, best_partition, times_of
from partway.strategy.errors import DoesNotFitError

ORDERS = {
    "gpipe": lambda placed, m: lambda _: gpipe(placed, m),
    "1f1b": lambda placed, m: lambda _: one_forward_one_backward(placed, m),
    "apart": lambda placed, m: lambda times: listed(placed, m, times, placed.devices),
}
IN_FLIGHT = {"gpipe": lambda p, m, s: m, "1f1b": lambda p, m, s: min(m, p - s), "apart": lambda p, m, s: min(m, p)}


def drawn(rng):
    """Pieces with other times each, on as many devices as there are stages."""
    count, p, m = rng.randint(4, 12), rng.choice([2, 3, 4]), rng.choice([3, 4, 6, 8])
    pieces = [
        ModelPiece(
            rng.uniform(0.2, 3),
            rng.uniform(0.2, 3),
            rng.uniform(0, 3),
            rng.uniform(0, 0.3),
            rng.uniform(1, 4),
            rng.random(),
        )
        for _ in range(count)
    ]
    return pieces, p, m


def seconds_of(pieces, starts, order):
    times = times_of(pieces, starts)
    return played(order(times), times).seconds


@pytest.mark.parametrize("name", ORDERS)
def test_the_best_of_all_partitions_is_found(name):
    rng = random.Random(len(name))
    for _ in range(67):
        pieces, p, m = drawn(rng)
        placed, flight = Stages(p), lambda s, p=p, m=m: IN_FLIGHT[name](p, m, s)
        order = ORDERS[name](placed, m)
        every = [(0, *cuts) for cuts in itertools.combinations(range(1, len(pieces)), p - 1)]
        held = {starts: bytes_of(pieces, starts, flight) for starts in every}
        limit = rng.choice([float("inf"), sorted(held.values())[len(held) // 2]])
        able = [starts for starts in every if held[starts] <= limit]
        found = best_partition(pieces, placed, m, order, flight, name == "apart", limit, most=len(every))
        assert found.played.seconds == pytest.approx(min(seconds_of(pieces, starts, order) for starts in able))
        assert found.bound == pytest.approx(found.played.seconds)
        equal = tuple(round(stage * len(pieces) / p) for stage in range(p))
        assert limit < float("inf") or found.played.seconds <= seconds_of(pieces, equal, order) + 1e-9
        few = best_partition(pieces, placed, m, order, flight, name == "apart", limit, most=1)
        assert few.bound <= found.played.seconds + 1e-9 <= few.played.seconds + 2e-9


def bytes_of(pieces, starts, in_flight):
    stages = [pieces[i:j] for i, j in itertools.pairwise((*starts, len(pieces)))]
    return max(sum(piece.rest + in_flight(s) * piece.kept for piece in stage) for s, stage in enumerate(stages))


def test_many_equal_layers_are_cut_close_to_the_bound():
    pieces = [ModelPiece(0.5, 0.1, 0.1), *[ModelPiece(1, 1, 1, 0.05)] * 126, ModelPiece(1.5, 1.5, 1)]
    placed = Stages(16)
    found = best_partition(pieces, placed, 64, ORDERS["1f1b"](placed, 64), lambda s: 16 - s)
    assert found.played.seconds <= 1.06 * found.bound
    assert found.starts[0] == 0


def test_stages_that_hold_too_much_are_refused_with_what_would_do():
    pieces = [ModelPiece(1, 1, 1, 0.0, 10.0, 1.0)] * 4
    with pytest.raises(DoesNotFitError, match="in 2 stages that holds less than 24 B on a device"):
        best_partition(pieces, Stages(2), 4, ORDERS["1f1b"](Stages(2), 4), lambda s: 2 - s, limit=20.0)
