"""What the tests of mode overlap share: members, backwards with other collectives in them, and all ways to group."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from partway.fusion import Member
from partway.fusion.events import Compute, GradientEvents, Offer, Send, seconds

SECONDS = st.integers(0, 20).map(float)


def members(sizes, keys):
    return [
        Member(i, "P", "R", (key,), torch.float32, size) for i, (size, key) in enumerate(zip(sizes, keys, strict=True))
    ]


def message(group, found, costs):
    waiting, per_byte = costs[found[group[0]].key]
    return waiting + per_byte * sum(found[i].bytes for i in group)


@st.composite
def problems(draw, keys="ab"):
    count = draw(st.integers(1, 8))
    found = members(
        draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from(keys), min_size=count, max_size=count)),
    )
    times = sorted(draw(st.lists(SECONDS, min_size=count, max_size=count)))
    costs = {member.key: (draw(SECONDS), draw(SECONDS)) for member in {m.axes: m for m in found}.values()}
    return found, times, costs


def offered(found, times, costs):
    """The problem of gradients that are ready at `times`, with nothing else on the lane."""
    events = []
    for member, (before, now) in enumerate(itertools.pairwise([0, *times])):
        events += [Compute(now - before), Offer(member)]
    return GradientEvents(found, costs, tuple(events))


@st.composite
def schedules(draw, keys="abc"):
    """Gradients between computing, other collectives that computing or a gradient waits for, and computing
    that waits for gradients."""
    found, _, costs = draw(problems(keys))
    events, unread, late, sent = [], [], [], 0
    some = st.integers(0, 9).map(float)
    for member in range(len(found)):
        for _ in range(draw(st.integers(0, 3))):
            what = draw(st.sampled_from(["compute", "send", "wait", *["read"] * (member > 0)]))
            if what == "send":
                events.append(Send(sent, draw(SECONDS)))
                unread, sent = [*unread, sent], sent + 1
            elif what == "wait" and unread:
                events.append(Compute(draw(some), (draw(st.sampled_from(unread)),)))
            elif what == "read":
                read = draw(st.sets(st.integers(0, member - 1), min_size=1, max_size=2))
                if draw(st.booleans()):
                    events += [Compute(0.0, (), tuple(sorted(read))), Send(sent, draw(SECONDS), tuple(sorted(read)))]
                    late, sent = [*late, (sent, tuple(sorted(read)))], sent + 1
                elif late:
                    other, read = draw(st.sampled_from(late))
                    events.append(Compute(draw(some), (other,), read))
                else:
                    events.append(Compute(draw(some), (), tuple(sorted(read))))
            else:
                events.append(Compute(draw(SECONDS)))
        waits = unread and draw(st.booleans())
        events.append(Offer(member, (draw(st.sampled_from(unread)),) if waits else ()))
    events.append(Compute(draw(SECONDS)))
    return GradientEvents(found, costs, tuple(events))


def every_index(count):
    for size in range(count):
        for inner in itertools.combinations(range(1, count), size):
            yield (*inner, count)


def contiguous_within_keys(found):
    """All groupings in which the groups of each key are contiguous among its members."""
    keys = [[i for i, member in enumerate(found) if member.key == key] for key in {member.key for member in found}]
    parted = [
        [tuple(tuple(of[a:b]) for a, b in itertools.pairwise([0, *ends])) for ends in every_index(len(of))]
        for of in keys
    ]
    return [tuple(itertools.chain(*groups)) for groups in itertools.product(*parted)]


def the_least(problem, groupings):
    return min(seconds(problem, groups) for groups in groupings)
