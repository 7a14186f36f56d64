"""Exact reductions where what a choice uses is limited: those of propagation, as far as they lose no choice that uses
less."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partway.propagation.minsum.network import Costs
from partway.propagation.minsum.reduce import Reduced, Reduction

Codes, Floats = NDArray[np.intp], NDArray[np.float64]


class _WithUses(Reduction):
    """`uses`: of each vertex what each option uses [resource, option]; `spent`: what was taken out uses."""

    def __init__(self, costs: Costs, uses: Sequence[Floats]) -> None:
        super().__init__(costs)
        self.uses = list(uses)
        self.spent = np.zeros(len(uses[0]) if uses else 0)

    def _alike(self, v: int) -> bool:
        """Whether all options of `v` use the same."""
        return bool((self.uses[v] == self.uses[v][:, :1]).all())

    def _keep(self, v: int, rows: Codes) -> None:
        self.uses[v] = self.uses[v][:, rows]
        super()._keep(v, rows)

    def _leave(self, v: int, near: tuple[int, ...], best: Codes) -> None:
        if len(near) == 1:
            self.uses[near[0]] = self.uses[near[0]] + self.uses[v][:, best]
        else:
            self.spent = self.spent + self.uses[v][:, 0]
        super()._leave(v, near, best)

    def _goes(self, v: int) -> bool:
        return self._alike(v) and super()._goes(v)

    def _leave_out_undercut(self, v: int) -> bool:
        return self._alike(v) and super()._leave_out_undercut(v)


def reduced_with(costs: Costs, uses: Sequence[Floats]) -> tuple[Reduced, list[Floats], Floats]:
    """What is left of a problem, what each option of its vertices uses, and what all that was taken out uses. Raises
    StrategyError as `reduced` does."""
    work = _WithUses(costs, uses)
    work.run()
    rest = work.result()
    return rest, [work.uses[v] for v in rest.vertices], work.spent
