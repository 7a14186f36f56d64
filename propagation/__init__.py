"""From Python to a plan: a call is captured, its splits are searched for, and the program of one rank is written.

In come a function, one call of it, and the layouts that annotations allow; out come a Plan and the graphs that every
rank runs, before their collectives are grouped (fusion). The rooms, each of which imports only those before it:

    ops        operators of our own that programs are made of
    graph      the graph of one call, and what can be asked of it
    rules      how each operator splits, and what it is expanded to
    capture    from Python to a graph
    cost       what operators, collectives and conversions cost
    minsum     the least of a sum of costs by vertex and by pair of vertices
    problem    what there is to choose: options, and the prices of conversions
    memory     what a device holds, what is kept for the backward and what is computed again
    search     the search modes, also under a memory limit
    program    from the choices of a search to the forward and backward of one rank
    plan       what was decided and why, for people and files

`torch_internals.py` stands below them all.
"""
