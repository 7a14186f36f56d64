"""What a device holds under a choice, and the fates of results: kept for the backward, recomputed, or gone.

Input: a `SearchProblem`. Output: a `KeepProblem`, in which every option is joined by a fate, with a price per byte at
each time; and the `HeldBytes` of one choice with its fates. Reasons: docs/design/memory.md; formulas:
docs/design/planning.md, "The objective".

needs.py            what the backward reads of each call
stretches.py        the stretches of the graph that are recomputed one at a time
fates.py            the fates of results after the forward, one row each
keeping.py          options with their fates
backward_memory.py  what a device then holds, operator by operator; gradients.py: the part of gradients
"""
