"""The operators of Partway's own: what runs inside a program beside PyTorch's operators.

Each file is one family and reads alike: what the operators compute (in its docstring), their schemas and names, their
kernels, their fake forms (shapes and dtypes alone), and their derivatives. Rules are in `rules/`.

    kinds.py                what planning knows of each kind of collective
    collectives.py          convert and convert_group, by which a program communicates; constrain
    indexing.py             position, and lookups in a dim that a rank has a part of
    by_rank.py              what differs by rank: constants, slices, masks
    random_numbers.py       numbers that do not depend on the layout
    batch_norm.py           moments, statistics and their use, for BatchNorm and its kin
    cross_entropy.py        the sums over classes that cross entropy is made of
    ctc.py                  CTC loss with results of static size
    padded_convolution.py   a convolution with any padding
    recurrent.py            oneDNN's LSTM layer, with what its backward reads
    python/                 operators that call Python: control flow, hooks, manual functions
    keyed.py                what these find by a key
    registration.py         how an operator gets its kernel, its fake form and its derivative
    dtypes.py               the dtypes in which operators accumulate
"""
