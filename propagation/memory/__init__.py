"""What a device holds under a choice, and what is kept for the backward or computed again: the fates of results.

In: a `SearchProblem`. Out: a `KeepProblem`, in which every option is joined by a fate, with a price of a byte at each
time; and the `Timeline` of one choice with its fates. Why it is so: docs/design/memory.md; as formulas:
docs/design/planning.md, "The objective".

needs.py            what the backward reads of each call
stretches.py        where the graph is cut for what is computed again
fates.py            what becomes of results after the forward: a row for each fate
keeping.py          options with their fates
backward_memory.py  what a device then holds, operator by operator; gradients.py: the gradients of values among it
"""
