"""Folders of Hugging Face's with other weights than the model: transformers renames them, or makes one of several.

A folder of Mixtral has a matrix for each expert, and the model one stack of them:

    block_sparse_moe.experts.0.w1.weight, ...experts.1.w1.weight, ... and w3     mlp.experts.gate_up_proj

Of such a tensor a process makes the whole, one after another, and keeps its part.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partway.checkpoints.tensor_files import FilePlace, read_part

Sources = Sequence[tuple[str, str, FilePlace]]  # each with the pattern of its name, and its name


@dataclass(frozen=True, eq=False)
class ConvertedPlace:
    """A tensor of `shape` that transformers makes of `sources`: what `converter` calls `name` of what it makes for
    `first`, its first result."""

    name: str
    first: str
    converter: Any
    sources: Sources
    model: nn.Module
    shape: tuple[int, ...]

    def whole(self, folder: Path) -> Tensor:
        """The whole tensor, read from the files in `folder`."""
        read: list[Tensor] = []
        for _, _, place in self.sources:
            read.append(torch.empty(place.shape, dtype=place.dtype))
            read_part(folder, place, tuple(slice(0, size) for size in place.shape), read[-1], lambda read: None)
        return _made(self.first, self.converter, self.sources, read, self.model)[self.name]


def _made(first: str, converter: Any, sources: Sources, tensors: Sequence[Tensor], model: Any) -> dict[str, Tensor]:
    """All that a converter makes of `tensors`, those of `sources`."""
    own = copy.deepcopy(converter)  # it collects tensors
    for (pattern, source, _), tensor in zip(sources, tensors, strict=True):
        own.add_tensor(first, source, pattern, tensor)
    made = own.convert(first, model=model, config=model.config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def converted(model: nn.Module, places: Mapping[str, FilePlace]) -> Mapping[str, FilePlace | ConvertedPlace]:
    """`places`, the weights of a folder, by their names in `model`, if it is of transformers, as its `from_pretrained`
    converts them."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return places
    from transformers import conversion_mapping, core_model_loading

    its: Any = model
    mapping = conversion_mapping.get_model_conversion_mapping(its)
    renamings = [each for each in mapping if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, core_model_loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    found: dict[str, FilePlace | ConvertedPlace] = {}
    several: dict[str, tuple[Any, list[tuple[str, str, FilePlace]]]] = {}
    for source in sorted(places, key=core_model_loading.dot_natural_key):
        name, pattern = source, None
        if source not in known:
            name, pattern = core_model_loading.rename_source_key(
                source, renamings, converters, its.base_model_prefix, known
            )
        if pattern is None or name not in known:
            found[name if name in known else source] = places[source]
        else:
            several.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, source, places[source]))
    for first, (converter, sources) in several.items():
        likes = [torch.empty(place.shape, device="meta") for _, _, place in sources]
        for name, like in _made(first, converter, sources, likes, model).items():
            found[name] = ConvertedPlace(name, first, converter, sources, model, tuple(like.shape))
    return found
