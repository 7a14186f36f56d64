"""The rows that the experts of a plan's mixtures got in some steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...strategy.basics.suggest import did_you_mean
from ...strategy.errors import StrategyError, shown
from .data import PlanData

_DISPATCH = "partway.dispatch.default"


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The rows of one mixture of experts in the steps of a block, over all devices.

    layer       the path of its module, and its name in the graph
    by_expert   the rows of each expert
    by_device   the rows of each part of the experts that lies on a device of its own
    """

    layer: str
    by_expert: tuple[int, ...]
    by_device: tuple[int, ...]

    @property
    def busiest(self) -> float:
        """The rows of the busiest part over the mean of all parts; 1.0 without rows."""
        return max(self.by_device) * len(self.by_device) / sum(self.by_device) if sum(self.by_device) else 1.0

    @property
    def rows(self) -> str:
        """The rows in words."""
        experts, parts = (" ".join(map(str, rows)) for rows in (self.by_expert, self.by_device))
        return f"{experts} rows by expert, {parts} by device ({self.busiest:.2f})"

    def __str__(self) -> str:
        return f"{self.layer}: {self.rows}"


def loads_of(plan: PlanData, loads: Sequence[ExpertLoad]) -> dict[str, ExpertLoad]:
    """The load of each operator that begins a mixture, by its name. Raises StrategyError for a load of no mixture of
    the plan."""
    layers = {f"{o.module}.{o.name}".removeprefix("."): o.name for o in plan.operators if o.operator == _DISPATCH}
    found = {}
    for load in loads:
        if not isinstance(load, ExpertLoad):
            raise StrategyError(f"loads has {shown(load)}; give what record_expert_load yields, a list of ExpertLoad")
        if load.layer not in layers:
            known = did_you_mean(load.layer, sorted(layers), f"it has {', '.join(layers) or 'none'}")
            raise StrategyError(f"loads has rows of {load.layer!r}, which is no mixture of this plan; {known}")
        found[layers[load.layer]] = load
    return found
