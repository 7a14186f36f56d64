"""Which strategy every operator takes: the one that costs least, with a bound on what every plan costs.

In: a `SearchProblem` (room `problem`). Out: a `Solution`, one option for every vertex. The objective stands as
formulas, each with the function that computes it, in docs/design/planning.md, "The objective".

search.py           the entry `search`, and the table of search modes, a row each
exact.py            dynamic_programming, by `minsum`, whose bound stands beside the plan of every mode
propagate.py        sharding_propagation: from the annotations to their neighbours
recursive.py        recursive_programming: one mesh axis after another
within_memory.py    the search under a memory limit: strategies and fates (room `memory`) together
solution.py         what a search returns, and the check of it
"""
