"""Which strategy every operator takes: from a graph with annotations to the choice that costs least.

In: a `Graph`, the layouts that annotations allow, and `Settings` (mesh, device profile, weights of the objective,
options). Out: a `Solution`, one option for every vertex of the `SearchProblem`, with a bound on every plan's cost.

formulate.py         a graph becomes a problem: vertices, their options, edges; operator_options.py: the options of an
                     operator and what each costs; weights_read.py: which weights the backward reads
problem.py           the problem as data, and what it costs to convert each of its tensors
network.py           the problem as numbers
search.py            the entry `search`, and the table of search modes, a row each (propagate.py, recursive.py, ...)
exact.py             the exact search: narrow.py leaves out what no optimal plan takes, eliminate.py does the rest;
                     many.py: where costs are too many to be written out
least.py             the least of any costs, where elimination is too much: reduce.py makes a problem smaller,
                     messages.py bounds it, forests.py finds plans to start from, branch.py divides it
needs.py             what the backward reads; stretches.py: where the graph is cut for what is computed again
keeping.py           options with what is kept, computed again or let go; timeline.py: what a device then holds
memory.py            the exact search under a memory limit
progress.py          how far a search under way has come, for who listens
solution.py          what a search returns, and the check of it
"""
