"""The graph of one call of a function, and the queries that every later pass makes of it.

A graph is defined here; `capture/` makes it, and all later rooms read it. Nothing here plans or runs anything.

    graph.py       Graph: a functional torch.fx graph with the roles of its inputs and outputs; queries of all of it;
                   what `verify` checks
    port.py        one input or output: its role, and its name for users
    structure.py   arguments and results as flat lists of tensors, and back; names of arguments, of a module's tensors
    question.py    a question of a function about the values of a call, as operators that run for the answer
    nodes.py       queries of one node: value, shape, operands, arguments, kinds of operators, source line, and how
                   another node inherits it
    printer.py     the text of a graph, for everything that prints one
"""

from __future__ import annotations

from .nodes import computed_again, is_persons, operator_of
from .port import Role
from .structure import Call, check_call, flatten_call, name_of

__all__ = [
    "Call",
    "Role",
    "check_call",
    "computed_again",
    "flatten_call",
    "is_persons",
    "name_of",
    "operator_of",
]
