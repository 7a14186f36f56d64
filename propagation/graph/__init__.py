"""The graph of one call of a function, and what every later pass asks of it.

Here a graph is defined; `capture/` makes it, and all rooms after this one read it. Nothing here plans or runs anything.

    graph.py       Graph: a functional torch.fx graph with the roles of its inputs and outputs; what `verify` promises
    port.py        one input or output: its role, and the name that a person knows it by
    structure.py   arguments and results as flat lists of tensors, and back; names of arguments, of a module's tensors
    question.py    what a function asks of the values of a call, as operators that are run for the answer
    nodes.py       queries of one node: value, shape, operands, arguments, source line, kinds of operators
    printer.py     the text of a graph, which everything that holds one prints
    queries.py     queries of a whole graph: constants, gradient flow, what is differentiated or recomputed
"""
