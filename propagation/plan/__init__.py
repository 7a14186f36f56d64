"""The plan: decisions, their costs and their reasons, as data that outlives the model.

in       a SearchProblem and its Solution (search room), and the Program lowered from them (program room)
out      a Plan; and for a given plan, the Solution that it stands for on a problem

make            from the choices of a search to a Plan
data            the contents of a plan: tensors, operators, memory, the certificate; plan adds the methods for users
report          the table and the totals
explain         the reasons for an operator, a module or a tensor; alternatives finds other plans by searching again
curve           the cost of memory, and its picture
load            the rows that experts got, and the operators of a plan that they belong to
planned_graph   the operators and what they read, for networkx
plan_files      a plan as a JSON file, checked when it is read
replay          whether a plan fits a graph, and the Solution that it stands for there
stored, forms   plans and programs as data for the cache: how they are written and read, and the table of their forms
stored_graph    a captured graph as data
"""

from __future__ import annotations

from .alternatives import Alternatives, Origin, ScheduleSpan
from .data import Memory, OperatorPlan, PlanData, Producer, ProducerKind, TensorPlan
from .load import ExpertLoad, loads_of
from .plan import Plan
from .planned_graph import placed_reads
from .report import text

__all__ = [
    "Alternatives",
    "ExpertLoad",
    "Memory",
    "OperatorPlan",
    "Origin",
    "Plan",
    "PlanData",
    "Producer",
    "ProducerKind",
    "ScheduleSpan",
    "TensorPlan",
    "loads_of",
    "placed_reads",
    "text",
]
