"""Programs that people write by hand, right ones and wrong ones, each with what one device computes.

    cases.py              what a program is, and the list of all
    tensor_parallel.py    weights that are split: Megatron's blocks, embeddings, low-rank adapters
    data_parallel.py      training loops: means, sums, accumulated and scattered gradients, decay, clipping
    losses.py             entropies over a split vocabulary, masks, label smoothing
    sequence_parallel.py  sequences that are split: norms, attention over all keys, rings, heads for positions
    experts.py            mixtures of experts, and meshes of two axes

A line of a wrong program says what is wrong with it, in a comment: the name of a `Mistake`.
"""

from programs_by_hand import (  # noqa: F401 - each adds its programs
    data_parallel,
    experts,
    losses,
    sequence_parallel,
    tensor_parallel,
)
from programs_by_hand.cases import RIGHT, WRONG, Program

__all__ = ["RIGHT", "WRONG", "Program"]
