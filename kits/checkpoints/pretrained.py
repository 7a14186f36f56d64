"""`save_pretrained` of a sharded model of Hugging Face's, under a launcher: each rank writes its parts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from partway.checkpoints.contents import MODEL, Content, keep, named_tensors
from partway.checkpoints.folder import drop, make_unfinished
from partway.checkpoints.manifest import MANIFEST, PARTS
from partway.checkpoints.ranks import Ranks
from partway.checkpoints.saving import LARGEST, check_alike, create_files, write_index, write_parts
from partway.checkpoints.tensor_files import arrange
from partway.propagation.graph import name_of
from partway.runtime import Fact, agree
from partway.strategy import RuntimeStateError, shown

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_pretrained(
    model: nn.Module, original: Callable[..., Any], directory: str | os.PathLike[str], options: Mapping[str, Any]
) -> None:
    """Write the files of `original`, the model's own method: rank 0 all but the weights, and each rank its parts of
    these. The weights have their names in the model, which from_pretrained takes.

    Raises RuntimeStateError for options that need whole weights on one process.
    """
    options = {key: value for key, value in options.items() if key != "is_main_process"}
    largest = _bytes(options.pop("max_shard_size", LARGEST))
    for name in ("state_dict", "push_to_hub", "variant"):
        if options.get(name):
            raise RuntimeStateError(
                f"save_pretrained of {name_of(model)} takes no {name} under a launcher, where each rank has parts of "
                "the weights; save into a folder, and go on from there in one process"
            )
    where = f"save {name_of(model)} in {directory}"
    agree(where, [Fact("the folder", str(Path(directory).absolute()))])
    ranks, folder = Ranks(), Path(directory)
    fresh = folder / ".partway.saving"
    tensors, _, _ = named_tensors(model)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    weights = {name: keep(tensor, ranks.size, ranks.rank, i) for i, (name, tensor) in enumerate(kept.items())}
    content = Content({MODEL: weights}, {})
    check_alike(content, ranks)
    files = arrange({name: (kept.dtype, kept.shape) for name, kept in weights.items()}, MODEL, largest)

    def begin() -> None:
        make_unfinished(fresh)
        create_files(fresh, {MODEL: files})

    def finish() -> None:
        write_index(fresh, files)
        for entry in sorted(fresh.iterdir()):
            if entry.name != MANIFEST and not PARTS.fullmatch(entry.name):
                os.replace(entry, folder / entry.name)
        drop(fresh)

    # it also changes the configuration, on which a plan depends
    ranks.together(
        where, lambda: original(directory, state_dict={}, is_main_process=not ranks.rank, **options) and None
    )
    ranks.first(where, begin)
    ranks.together(where, lambda: write_parts(content, fresh, {MODEL: files}, ranks.rank))
    ranks.first(where, finish)


def _bytes(size: int | str) -> int:
    """A size such as "5GB" in bytes."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)", str(size).upper())
    if isinstance(size, str) and not match:
        raise RuntimeStateError(f"max_shard_size is {shown(size)}; write a number of bytes, or a text such as '5GB'")
    return int(match[1]) * _UNITS[match[2]] if match else int(size)
