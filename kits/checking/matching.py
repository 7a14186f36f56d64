"""Pair the records of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from partway.checking.records import TensorRecord


def matched(one: Sequence[TensorRecord], other: Sequence[TensorRecord], collectives: bool = True) -> Mapping[int, int]:
    """Map records of `one` to those of `other` from the same operator in the same line, in the same order. Without
    `collectives`, neither these nor the values computed inside of `partway.ops` have a counterpart."""
    left, right = (
        [i for i, record in enumerate(records) if collectives or not record.collective] for records in (one, other)
    )
    keys = [[records[i].key for i in numbers] for records, numbers in ((one, left), (other, right))]
    if keys[0] == keys[1]:
        return dict(zip(left, right, strict=True))
    blocks = SequenceMatcher(a=keys[0], b=keys[1], autojunk=False).get_matching_blocks()
    return {left[block.a + i]: right[block.b + i] for block in blocks for i in range(block.size)}
