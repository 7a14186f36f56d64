"""`Accelerator` of Hugging Face's accelerate, for sharded models: one script, with the numbers of one process.

Accelerate's own wraps a model in DistributedDataParallel, gives each process other batches, scales by the number of
processes and gathers results. Here all processes run one program: each reads the same batches, of which the plan takes
the parts; losses and results are those of the whole batch on every rank, so there is nothing to gather.
"""

from __future__ import annotations

from typing import Any

import accelerate
from torch import Tensor, nn

from partway.options import current
from partway.propagation import tree_map
from partway.requests import engine_of, whole
from partway.strategy import StrategyError


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator whose models may be sharded. A batch is that of one process; seeds must be the same on all
    ranks."""

    @property
    def num_processes(self) -> int:
        """1: the number of processes with data of their own. (`process_index` and `is_main_process` are the
        launcher's.)"""
        return 1

    @property
    def split_batches(self) -> bool:
        """True: a step is a step of one process, so that a scheduler advances once a step."""
        return True

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model; a sharded one is not wrapped. Raises StrategyError if each rank would get part of a batch."""
        sharded = any(engine_of(module) is not None for module in model.modules())
        if sharded and current().gives_parts:
            raise StrategyError(
                "dataset_strategy says that each rank has its part of a batch, and this Accelerator gives every rank "
                "the whole batch; set dataset_strategy to 'full_batch'"
            )
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode or sharded)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """The tensors themselves, whole: every rank has them."""
        return whole(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The data itself, with whole tensors: every rank has it."""
        return whole(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The result of reducing over one process: the tensors, times `scale`."""
        return tree_map(lambda t: t * scale if isinstance(t, Tensor) else t, whole(tensor))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The tensors: all ranks have the same."""
        return tensor
