"""The search for a plan: one strategy for every operator at the least cost, with a lower bound on every plan's cost.

Input: a `SearchProblem` (room `problem`). Output: a `Solution`, one option for every vertex. The formulas of the
objective, each with the function that computes it: docs/design/planning.md, "The objective".

search.py           the entry `search`, and the table of search modes, a row each
exact.py            dynamic_programming, with `minsum`; its bound is reported with the plan of every mode
propagate.py        sharding_propagation: from the annotations to their neighbours
recursive.py        recursive_programming: one mesh axis after another
within_memory.py    the search under a memory limit: strategies and fates (room `memory`) together
solution.py         the result of a search, and the check of it
"""
