"""Which records of two runs belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from partway.checking.records import TensorRecord


def matched(one: Sequence[TensorRecord], other: Sequence[TensorRecord], collectives: bool = True) -> Mapping[int, int]:
    """For records of `one` those of `other` that the same operator of the same line made, in the same order. Without
    `collectives` these, and what is computed inside of `partway.ops`, have no counterpart."""
    left, right = (
        [i for i, record in enumerate(records) if collectives or not record.collective] for records in (one, other)
    )
    keys = [[records[i].key for i in numbers] for records, numbers in ((one, left), (other, right))]
    if keys[0] == keys[1]:
        return dict(zip(left, right, strict=True))
    blocks = SequenceMatcher(a=keys[0], b=keys[1], autojunk=False).get_matching_blocks()
    return {left[block.a + i]: right[block.b + i] for block in blocks for i in range(block.size)}
