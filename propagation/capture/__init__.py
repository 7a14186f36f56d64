"""From Python to a Graph: one call of a function or module is traced with torch.export and cleaned up.

The input is a callable, its arguments and, if it may ask for them, the values of its tensors. The output is a verified
Graph, or a CaptureError that names the caller's line. Start with capture.py, which lists the passes.

    capture.py          the passes, and the inputs and outputs of a graph
    symbols.py          one capture for all sizes of some dims, and its graph at each; one graph for all integers
    hooks.py            hooks of tensors and modules, as operators
    initialisers.py     the graph that initialises a module's tensors
    export/             one call through torch.export
    rewrites/           operators rewritten in terms of others
    manual/             functions that a person wrote for one rank
"""
