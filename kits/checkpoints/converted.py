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


@dataclass(frozen=True, eq=False)
class ConvertedPlace:
    """A tensor that transformers makes of others: `sources` are their places with the patterns of their names, and the
    tensor is what `converter` calls `name` of what it makes for `first`, its first result."""

    name: str
    first: str
    converter: Any
    sources: Sequence[tuple[str, str, FilePlace]]
    model: nn.Module

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self._made({place: torch.empty(place.shape, device="meta") for _, _, place in self.sources}).shape)

    def whole(self, folder: Path) -> Tensor:
        """The whole tensor, read from the files in `folder`."""
        read: dict[FilePlace, Tensor] = {}
        for _, _, place in self.sources:
            read[place] = torch.empty(place.shape, dtype=place.dtype)
            read_part(folder, place, tuple(slice(0, size) for size in place.shape), read[place], lambda read: None)
        return self._made(read)

    def _made(self, tensors: Mapping[FilePlace, Tensor]) -> Tensor:
        converter = copy.deepcopy(self.converter)
        for pattern, source, place in self.sources:
            converter.add_tensor(self.first, source, pattern, tensors[place])
        made = converter.convert(self.first, model=self.model, config=self.model.config)[self.name]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor


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
        for name in _names(first, converter, sources, model):
            found[name] = ConvertedPlace(name, first, converter, sources, model)
    return found


def _names(first: str, converter: Any, sources: Sequence[tuple[str, str, FilePlace]], model: Any) -> Sequence[str]:
    """The names of all that a converter makes."""
    trial = copy.deepcopy(converter)
    for pattern, source, place in sources:
        trial.add_tensor(first, source, pattern, torch.empty(place.shape, device="meta"))
    return list(trial.convert(first, model=model, config=model.config))
