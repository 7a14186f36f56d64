"""What there is to choose: a graph as vertices with options, and edges with the prices of conversions.

In: a `Graph`, the layouts that annotations allow, and `Settings` (mesh, device profile, weights of the objective,
options). Out: a `SearchProblem`, and its numbers as `minsum` takes them. What its costs are made of stands as formulas
in docs/design/planning.md, "The objective".

formulate.py          a graph becomes a problem
operator_options.py   the options of an operator, and what each costs by itself; manual_option.py: the one option of a
manual function weights_read.py       which weights the backward reads
problem.py            the problem as data, and what it costs to convert each of its tensors
cost_tables.py        the problem as `Costs` or as a `Network`
"""
