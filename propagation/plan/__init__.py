"""The plan: what was decided, what it costs and why, as data that outlives the model.

in       a SearchProblem and its Solution (search room), and the LocalProgram lowered from them (program room)
out      a Plan; and for a plan that is given, the Solution that it stands for on a problem

make            from the choices of a search to a Plan
data            what a plan holds: tensors, operators, memory, the certificate; plan adds what people call
report          the table and the totals
explain         why something is as it is; alternatives finds what the plan could have been, by searching again
curve           what memory costs, and its picture
lanes           what runs when, as bars on one axis of time: a picture, and a part of a page
planned_graph   the operators and what they read, for networkx
plan_files      a plan as a JSON file, checked when it is read
replay          whether a plan fits a graph, and the Solution that it stands for there
stored, forms   plans and programs as data for the cache: how they are written and read, and the table of their forms
"""
