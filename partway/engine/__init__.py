"""Calls of a sharded function or module.

engine.py           plans the first call of a signature, and runs later ones with its runner
runner.py           from the tensors of a call, through the step, to its result
placing.py          all ranks simulated in this process, or this rank of a process group
rank_facts.py       the facts that must be the same on every rank
sharded.py, materialize.py, state_dicts.py
                    a sharded module: its class, its parameters, its state dicts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.engine.engine import attached_engine
    from partway.engine.placing import settle
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "engine": "attached_engine",
            "placing": "settle",
        },
    )

__all__ = [
    "attached_engine",
    "settle",
]
