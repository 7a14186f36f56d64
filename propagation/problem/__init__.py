"""The search space: a graph as vertices with options, and edges with the prices of conversions.

Input: a `Graph`, the layouts that annotations allow, and `Settings` (mesh, device profile, weights of the objective,
options). Output: a `SearchProblem`, and its numbers for `minsum`. The formulas of its costs: docs/design/planning.md,
"The objective".

formulate.py          from a graph to a problem
operator_options.py   the options of an operator, and the cost of each by itself
manual_option.py      the one option of a manual function
problem.py            the problem as data, with the costs of converting its tensors; as `Costs` or as a `Network`
"""
