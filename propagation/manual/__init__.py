"""Manual functions: programs of one rank that a user wrote by hand (`pw.manual`), inside a planned graph.

Input: the graph of a traced manual function (`capture/manual/`), in which collectives are operators
(`ops/by_hand.py`). Output: the local operators and conversions that lowering puts in the place of its call.

    manual.py      a manual function as a value: its graph, and the layouts of its operands and results
    variance.py    the axes on which each value varies from rank to rank, which determine its gradient
    writing.py     collectives as conversions, and conversions where ranks use an equal value in their own way
    flows.py       the gradients inside, derived from those around the call
"""
