"""The annotations of a function, read as the layouts that each tensor may have.

The input is `PlanInputs` (the captured graph, the `Request` of a `shard` or `compile`, the options). The output is, for
a mesh, `Annotations`: the layouts that the search may choose from, by the name of the tensor.

    constrain         while a function is captured: marks the tensors that are annotated inside it
    constraint_text   a strategy as text, the form of such a mark in the graph
    given             the part of each input that a process is given, by the dataset_strategy
    annotate          all sources (in_strategy, parameter_plan, ...) as statements on single tensors, checked on the
                      mesh, and merged into the allowed layouts
    manual_layouts    the layouts of a manual function's tensors

Problems are collected, and raised as one StrategyError. `strategy/validate.py` checks the strategies themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.annotations.manual_layouts import InStrategy, in_layouts, out_layouts
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "manual_layouts": "InStrategy in_layouts out_layouts",
        },
    )

__all__ = [
    "InStrategy",
    "in_layouts",
    "out_layouts",
]
