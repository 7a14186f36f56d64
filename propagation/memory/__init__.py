"""The memory of a device under a choice, and the fates of results: kept for the backward, recomputed, or gone.

Input: a `SearchProblem`. Output: a `KeepProblem`, in which every option has a fate, with a price per byte at each time;
and the bytes `Held` under one choice with its fates. Reasons: docs/design/memory.md; formulas:
docs/design/planning.md, "The objective".

held.py             start here: the lives of tensors added up, of a choice and of a program
needs.py            the tensors of each call that its backward reads
stretches.py        the stretches of the graph that are recomputed one at a time
fates.py            the fates of results after the forward, one row each
keeping.py          options with their fates
paths.py            who reads whose results
reader.py           the fates, costs and bytes of a choice
backward_memory.py  the bytes that a device then holds, operator by operator; gradients.py counts those of gradients
"""
