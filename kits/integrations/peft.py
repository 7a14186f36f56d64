"""`save_pretrained` of adapters of Hugging Face's peft, for a sharded model, or a model that holds a sharded one."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from partway.engine import attached_engine
from partway.propagation.graph import name_of
from partway.requests import engine_of, whole
from partway.runtime import Fact, agree, get_rank, launched


def save_pretrained(model: Any, directory: str | os.PathLike[str], **options: Any) -> None:
    """Write the files of `model.save_pretrained(directory, **options)`. Under a launcher every rank calls it; the
    adapter is gathered, and rank 0 writes it."""
    kind = attached_engine(model).kind if engine_of(model) is not None else type(model)
    original: Any = kind.save_pretrained  # type: ignore[attr-defined]
    if launched():
        where = f"save the adapter of {name_of(model)} in {directory}"
        agree(where, [Fact("the folder", str(directory))])
        options |= {"state_dict": _adapter(model), "is_main_process": get_rank() == 0}
    original(model, directory, **options)


def _adapter(model: Any) -> dict[str, Tensor]:
    """The weights of the adapter, whole: the trained ones, and those with its prefix."""
    prefix = getattr(model.base_model, "prefix", None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {n: t for n, t in model.state_dict().items() if n in trained or (prefix and prefix in n)}
    return whole(kept)
