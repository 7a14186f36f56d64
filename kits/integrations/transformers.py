"""`Trainer` of Hugging Face's transformers, for sharded models: under a launcher it trains as in one process.

    from partway.integrations.transformers import Trainer

    trainer = Trainer(model=pw.shard(model, ...), args=arguments, train_dataset=...)

`per_device_train_batch_size` is the size of the whole batch, which the plan splits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import transformers

from partway import load, save
from partway.integrations.accelerate import Accelerator

_STATE = "partway"  # the folder of a checkpoint with the optimizer's state


class Trainer(transformers.Trainer):
    """A Trainer whose model may be sharded."""

    optimizer: Any  # accelerate's stand-in for DeepSpeed's optimizer is not one of PyTorch's, and needs DeepSpeed

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as one for sharded models."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        use = self.args.eval_use_gather_object
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=use)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in Hugging Face's format; every rank calls it, and writes its parts."""
        folder, model, processing = output_dir or self.args.output_dir, self._sharded, self.processing_class
        assert folder is not None
        model.save_pretrained(folder)
        if self.args.should_save and processing is not None:
            processing.save_pretrained(folder)

    @property
    def _sharded(self) -> Any:
        return self.model

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / _STATE, self._sharded, self.optimizer, scheduler=self.lr_scheduler, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (folder := Path(checkpoint) / _STATE).is_dir():
            load(folder, self._sharded, self.optimizer, scheduler=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load(resume_from_checkpoint, model or self._sharded)
