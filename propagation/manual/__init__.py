"""Manual functions: programs of one rank that a person wrote by hand (`pw.manual`), inside a graph that is planned.

In comes the graph of a traced manual function (`capture/manual/`), in which collectives are operators
(`ops/by_hand.py`). Out goes what lowering puts in the place of its call: local operators and conversions.

    manual.py      a manual function, as a value: its graph, and the layouts of what goes in and comes out
    variance.py    on which axes each value varies from rank to rank, and so what its gradient is
    writing.py     collectives as conversions, and conversions where ranks make their own use of what is alike
    flows.py       where gradients flow inside, which follows from where they flow around the call
"""
