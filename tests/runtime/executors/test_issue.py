"""How collectives are issued: every kind has an entry, and what they hold. (What they compute is tested in
test_execute.py.)"""

import torch

from partway.propagation.ops.collectives import COLLECTIVES
from partway.runtime.code.instructions import Code, ConvertLayout, Relayout
from partway.runtime.code.straight_line import compile_steps
from partway.runtime.executors import issue
from partway.runtime.executors.issue import ISSUERS, Scratch
from partway.strategy.placement import PARTIAL, REPLICATE, Kind, Shard


def test_every_kind_of_collective_has_an_entry():
    assert set(ISSUERS) == set(COLLECTIVES)


def test_only_large_scratch_is_kept_and_a_larger_piece_takes_the_place_of_one_too_small(monkeypatch):
    monkeypatch.setattr(issue, "_MAPPED", 64)
    scratch, like = Scratch(), torch.empty(0)
    small, large = scratch.take(4, like), scratch.take(32, like)
    scratch.give_back([small, large])
    again = scratch.take(20, like)
    assert again.shape == (20,)
    assert again.data_ptr() == large.data_ptr()  # the one piece that is kept
    scratch.give_back([again.view(4, 5)])
    larger = scratch.take(40, like)
    scratch.give_back([larger])
    assert scratch.take(32, like).data_ptr() == larger.data_ptr()


class Noting:
    """A dialect whose collectives note what becomes of them."""

    late = True

    def __init__(self):
        self.noted = []

    def express(self, step, bind):
        return f"{bind(self.issued)}({step.name!r})"

    def ranks(self, c):
        return ()

    def issued(self, name):
        self.noted.append(f"issue {name}")
        return Awaited(self.noted, name)


class Awaited:
    def __init__(self, noted, name):
        self.noted, self.name = noted, name

    def wait(self):
        self.noted.append(f"await {self.name}")
        return self.name


def noted_of(kind, source, target, *, grouped):
    """What becomes of four collectives of which nobody reads a result."""
    relayout = Relayout(kind, source, target, ("dp",), 2, "backward", (0,), grouped, (False,), (False,))
    steps = [ConvertLayout(i + 1, (0,), name, relayout) for i, name in enumerate("abcd")]
    dialect = Noting()
    code = Code(tuple(steps), 1, (1, 2, 3, 4), (False,) * 4, {}, "backward")
    assert compile_steps(code, steps, [0], code.outputs, dialect)([None]) == [*"abcd"]
    return dialect.noted


def test_two_collectives_that_hold_what_they_send_are_under_way_at_a_time():
    scatters = noted_of(Kind.REDUCE_SCATTER, PARTIAL, Shard(0), grouped=False)
    assert scatters[:6] == ["issue a", "issue b", "await a", "issue c", "await b", "issue d"]
    assert noted_of(Kind.ALL_REDUCE, PARTIAL, REPLICATE, grouped=True) == scatters


def test_what_is_added_up_in_place_is_awaited_where_it_is_read():
    alone = noted_of(Kind.ALL_REDUCE, PARTIAL, REPLICATE, grouped=False)
    assert alone[:4] == ["issue a", "issue b", "issue c", "issue d"]
