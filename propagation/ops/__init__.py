"""Partway's own operators, which run in programs beside PyTorch's.

Each file is one family in the same order: what the operators compute (in its docstring), their schemas and names, their
kernels, their fake forms (shapes and dtypes alone), and their derivatives. Rules are in `rules/`.

    collectives.py          convert and convert_group, by which a program communicates; their kinds; constrain
    indexing.py             position, and lookups in a dim of which a rank has a part
    by_hand.py              collectives that people write in manual functions
    by_rank.py              values that differ by rank: constants, slices, masks
    random_numbers.py       numbers that do not depend on the layout
    constants.py            values that no gradient passes
    batch_norm.py           moments, statistics and their use, for BatchNorm and its kin
    cross_entropy.py        the sums over classes in cross entropy
    ctc.py                  CTC loss with results of static size
    experts.py              rows of a mixture of experts
    padded_convolution.py   a convolution with any padding
    recurrent.py            oneDNN's LSTM layer, with the workspace of its backward
    python/                 operators that call Python: control flow, hooks, manual functions
    keyed.py                the tables in which these look up a key
    registration.py         defines an operator with its kernel, its fake form and its derivative
    dtypes.py               the dtypes in which operators accumulate
"""

from __future__ import annotations

from . import by_hand

__all__ = [
    "by_hand",
]
