from __future__ import annotations

import torch

from partway.fusion import FusionMode, Member, by_overlap
from partway.fusion.events import Compute, Offer
from partway.fusion.modes import POLICIES
from partway.fusion.policy import Offers


class Outlook:
    """Four members of 1 MB. Messages cost 1 second and computing between two of them 9, or what `seconds` says."""

    def __init__(self, weights=False, order=(0, 1, 2, 3), chained=False, seconds=len):
        self.members = [Member(i, "P", "R", ("dp",), torch.float32, 1 << 20) for i in range(4)]
        self.weights, self.order, self.chained, self.seconds = weights, order, chained, seconds
        self.costs = {self.members[0].key: (1.0, 0.0)}
        self.asked = []

    def offers(self):
        self.asked.append("offers")
        events = tuple(event for i in range(4) for event in (Compute(0.0), Offer(i)))
        return Offers(self.order, events, self.chained)

    def first_uses(self):
        self.asked.append("first_uses")
        return [0.0, 9.0, 18.0, 27.0]


def test_gradients_are_grouped_by_their_events_and_weights_by_their_first_uses():
    gradients, weights = Outlook(), Outlook(weights=True, seconds=lambda groups: 0.0)
    assert by_overlap.group(gradients) == ()  # nothing grouped is predicted to be shorter still
    assert by_overlap.group(weights) == ((0,), (1,), (2,), (3,))
    assert gradients.asked == ["offers"]
    assert weights.asked == ["first_uses"]


def test_members_keep_their_numbers_in_whatever_order_they_are_offered():
    def seconds(groups):
        return 5.0 if not groups else 1.0

    assert by_overlap.group(Outlook(order=(2, 3, 0, 1), seconds=seconds)) == ((0, 1, 2, 3),)


def test_sizes_are_compared_too_where_a_member_needs_another_one():
    proposed = []
    by_overlap.group(Outlook(seconds=lambda groups: proposed.append(groups) or 1.0))
    alone = len(proposed)
    by_overlap.group(Outlook(chained=True, seconds=lambda groups: proposed.append(groups) or 1.0))
    assert len(proposed) - alone > alone


def test_it_starts_from_the_groups_of_mode_auto():
    members = Outlook().members
    assert POLICIES[FusionMode.OVERLAP].group(members, None) == POLICIES[FusionMode.AUTO].group(members, None)
