"""The parameter server: `pw.ps`. Gradients go to servers, which hold the parameters and take the optimizer's steps.

    pw.set_ps_context(enable_ps=True)
    pw.init()
    pw.set_param_ps(model)
    optimizer = pw.ps.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

Without `enable_ps` the same lines train in this process.

    marks.py        `set_param_ps`: which parameters
    served.py       `optimizer`, `steps`, `share`: the loop
    workers.py      a worker's parameters: those of this process, or of a group of ranks
    saving.py       `save`: a checkpoint of the whole, while training goes on
    jobs.py         `partway ps`: all processes on this machine; live.py: its display
"""

from __future__ import annotations

from partway.ps.saving import save
from partway.ps.served import ServedOptimizer, optimizer, share, staleness, status, steps

__all__ = ["ServedOptimizer", "optimizer", "save", "share", "staleness", "status", "steps"]
