"""A strategy of Lightning for modules that hold sharded ones: one script, with the numbers of one process.

    from partway.integrations.lightning import PartwayStrategy

    trainer = lightning.Trainer(strategy=PartwayStrategy(), devices=1)

Lightning's own strategies wrap a module and give each process other batches. Under a launcher this one lets all
processes run one program: each reads the same batches, of which the plan takes the parts, so that losses and metrics
are those of the whole batch on every rank. Rank 0 logs and writes checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import Optimizer

from partway.requests import whole
from partway.runtime import get_rank, init, launched
from partway.runtime.tensors import bring_up_to_date


class PartwayStrategy(SingleDeviceStrategy):
    """One device for Lightning, and as many processes as the launcher has started for Partway."""

    strategy_name = "partway"

    def __init__(self, device: str | torch.device | None = None, **options: Any) -> None:
        """`device`: the device of batches (default: this process's GPU, or the CPU)."""
        if launched():
            init()
        fitting = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        super().__init__(device or fitting, **options)
        if launched():
            self.global_rank = get_rank()

    @property
    def is_global_zero(self) -> bool:
        """Whether this process logs and writes."""
        return self.global_rank == 0

    def setup(self, trainer: Any) -> None:
        """Set up as on one device. Metrics of torchmetrics see the whole batch on every rank, so they must not be added
        up."""
        super().setup(trainer)
        torchmetrics = sys.modules.get("torchmetrics")
        if launched() and torchmetrics is not None and self.lightning_module is not None:
            for module in self.lightning_module.modules():
                if isinstance(module, torchmetrics.Metric):
                    metric: Any = module
                    metric.sync_on_compute = False

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        if launched():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of process `src`, such as the folder of checkpoints."""
        if not launched():
            return obj
        values = [obj]
        dist.broadcast_object_list(values, src)
        return values[0]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint, with whole tensors; every rank calls it. (`partway.save` needs no whole
        ones.)"""
        gathered = whole(checkpoint)
        if self.is_global_zero:
            super().save_checkpoint(gathered, filepath, storage_options)
        self.barrier()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers their states, laid out as their parameters are."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            assert isinstance(optimizer, Optimizer)
            bring_up_to_date(optimizer)
