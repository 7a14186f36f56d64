"""Whoever listens hears of a search; whoever has stopped does not."""

from __future__ import annotations

import contextlib

from partway.strategy.basics.blocks import listening, tell


def test_all_who_listen_hear_until_they_stop():
    one, other = list[tuple[float, float]](), list[tuple[float, float]]()
    tell(4.0, 0.0)
    with listening(lambda *said: one.append(said)):
        tell(3.0, 1.0)
        with contextlib.suppress(ValueError), listening(lambda *said: other.append(said)):
            tell(2.0, 2.0)
            raise ValueError
        tell(1.0, 1.0)
    tell(0.0, 0.0)
    assert one == [(3.0, 1.0), (2.0, 2.0), (1.0, 1.0)]
    assert other == [(2.0, 2.0)]
