"""The state of a model and an optimizer, by name: tensors, each with this process's part, and other values."""

from __future__ import annotations

import copy
import io
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partway.checkpoints.tensor_files import Slices
from partway.requests import is_dtensor, whole
from partway.runtime import local_part_of
from partway.runtime.ranks import holders
from partway.strategy import RuntimeStateError

MODEL, OPTIMIZER, VALUES = "model", "optimizer", "state"  # the stems of the file names
STATE, RANDOM = "state.", "random."
_TENSOR = "partway.tensor"  # the only key of a dict that stands for a tensor of VALUES


@dataclass(frozen=True, eq=False)
class KeptTensor:
    """A tensor to keep: this process's `part`, at `slices`. `writes`: this process writes it, of the `holders`, the
    ranks that have it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    part: Tensor
    slices: Slices
    writes: bool
    holders: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Content:
    """The content of a checkpoint.

    tensors   by the name of their files, and by their own
    aliases   further names of tensors, each with the first one
    values    everything else, as bytes
    """

    tensors: Mapping[str, Mapping[str, KeptTensor]]
    aliases: Mapping[str, str]
    values: Mapping[str, bytes] = field(default_factory=dict)

    def copied(self) -> Content:
        """A copy on the CPU, which later steps of the training do not change."""
        tensors = {
            stem: {
                name: replace(kept, part=kept.part.detach().cpu().clone()) if kept.writes else kept
                for name, kept in group.items()
            }
            for stem, group in self.tensors.items()
        }
        return replace(self, tensors=tensors)


def content_of(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any], ranks: int, rank: int
) -> Content:
    """The content that a call of `save` keeps. Raises RuntimeStateError, with the name, for a value that cannot be
    kept."""
    weights, aliases, extra = named_tensors(model)
    values: dict[str, Any] = {f"{RANDOM}{name}": value for name, value in random_states().items()}
    values |= {f"model.{name}": value for name, value in extra.items()}
    kept: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        own, values[f"optimizer.{i}"] = optimizer_state(model, optimizer)
        kept |= {f"{prefix(i, optimizers)}{name}": tensor for name, tensor in own.items()}
    beside: dict[str, Tensor] = {}
    for name, value in state.items():
        said = value.state_dict() if hasattr(value, "state_dict") else value
        values[f"{STATE}{name}"] = _without_dtensors(said, name, beside)
    tensors = {MODEL: weights, OPTIMIZER: kept, VALUES: beside}
    return Content(
        {
            stem: {name: keep(tensor, ranks, rank, i) for i, (name, tensor) in enumerate(group.items())}
            for stem, group in tensors.items()
            if group
        },
        aliases,
        {name: packed(name, value) for name, value in values.items()},
    )


def prefix(number: int, optimizers: Sequence[Optimizer]) -> str:
    """The prefix of the names of one optimizer's tensors, if there are several."""
    return f"{number}." if len(optimizers) > 1 else ""


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The tensors of a state_dict under their first names, their further names with the first, and its other values.
    Raises RuntimeStateError for a tensor on the meta device."""
    first: dict[int, str] = {}
    tensors, aliases, extra = dict[str, Tensor](), dict[str, str](), dict[str, Any]()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif (known := first.setdefault(id(value), name)) != name:
            aliases[name] = known
        elif value.is_meta:
            raise RuntimeStateError(f"{name} is on the meta device, without values; call model.materialize(...) before")
        else:
            tensors[name] = value
    return tensors, aliases, extra


def every_name(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """All names of each tensor, by its first name."""
    names = {name: [name] for name in tensors}
    for other, first in aliases.items():
        names[first].append(other)
    return names


def part_of(tensor: Tensor) -> tuple[Slices, Tensor]:
    """The part of a tensor that this process has: its slices, and the part."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape), tensor.detach()
    dtensor: Any = tensor
    if any(placement.is_partial() for placement in dtensor.placements):
        raise RuntimeStateError(
            f"a DTensor {list(tensor.shape)} holds partial sums, {dtensor.placements}; redistribute it"
        )
    part = local_part_of(tensor).detach()
    chunks = dtensor.__create_chunk_list__()
    offsets = chunks[0].offsets if chunks else (0,) * tensor.dim()
    return tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True)), part


def keep(tensor: Tensor, ranks: int, rank: int, number: int) -> KeptTensor:
    """This process's part of a tensor. The tensor's `number` picks the process that writes it, of those that have it,
    so that each writes about as much."""
    slices, part = part_of(tensor)
    if is_dtensor(tensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
        places = zip(tensor.placements, coordinate or (), range(mesh.ndim), strict=False)  # type: ignore[attr-defined]
        writes = coordinate is not None and all(
            at == number % mesh.size(axis) for placement, at, axis in places if placement.is_replicate()
        )
    else:
        writes = rank == number % ranks
    return KeptTensor(tensor.dtype, tuple(tensor.shape), part, slices, writes, holders(tensor) if ranks > 1 else ())


def keep_whole(tensor: Tensor) -> KeptTensor:
    """A tensor that this process has whole, and writes alone."""
    own = whole(tensor).detach()
    return KeptTensor(own.dtype, tuple(own.shape), own, tuple(slice(0, size) for size in own.shape), True)


# -- Optimizers


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer: tensors as "state.<parameter>.<key>", and everything else."""
    names = parameter_names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"state.{names[id(parameter)]}.{key}"] = value
            else:
                values.setdefault(names[id(parameter)], {})[key] = value
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return tensors, {"groups": groups, "values": values, "class": type(optimizer).__name__}


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """The names of an optimizer's parameters, by their ids. Raises RuntimeStateError for one that the model lacks."""
    from partway.runtime.tensors import bring_up_to_date

    bring_up_to_date(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RuntimeStateError(
                    f"{type(optimizer).__name__} has a parameter of shape {list(parameter.shape)} that the model does "
                    "not have; give the model that it was made of"
                )
    return names


# -- Random generators


def random_states() -> dict[str, Any]:
    """The states of the random generators of PyTorch, of Python and, if it is in use, of NumPy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy.random" in sys.modules:
        import numpy as np

        numpy: Any = np.random.get_state()
        name, keys, *rest = numpy
        states["numpy"] = [str(name), torch.tensor(keys.astype("int64")), *map(_plain, rest)]
    return states


def set_random_state(name: str, state: Any) -> None:
    """Set the state of a generator from `random_states`."""
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        version, keys, gauss = state
        random.setstate((version, tuple(keys), gauss))
    elif name == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    elif name == "numpy":
        import numpy as np

        np.random.set_state(_numpy_state(state))


def check_value(name: str, value: Any, places: Mapping[str, Any]) -> None:
    """Check a value that was read under `name`. Raises ValueError, or the error of a generator, if it is not a value of
    that kind. `places`: the tensors in the files, whose names stand for them in values."""
    kind, _, rest = name.partition(".")
    if f"{kind}." == RANDOM:
        check_random_state(rest, value)
    elif kind == OPTIMIZER:
        groups, values, of = value["groups"], value["values"], value["class"]
        names = {name for group in groups for name in group["params"]}
        if not isinstance(of, str) or {type(own) for own in values.values()} - {dict} or values.keys() - names:
            raise ValueError("holds no state of an optimizer")
    elif f"{kind}." == STATE:
        with_tensors(copy.deepcopy(value), None, lambda name, _: places[name])


def check_random_state(name: str, state: Any) -> None:
    """Raise the generator's error for a state that it cannot take."""
    if name == "torch":
        torch.Generator().set_state(state)
    elif name == "python":
        random.Random().setstate((state[0], tuple(state[1]), state[2]))
    elif name == "cuda" and torch.cuda.is_available():
        torch.Generator("cuda").set_state(state)
    elif name == "numpy":
        import numpy as np

        np.random.RandomState().set_state(_numpy_state(state))


def _numpy_state(state: Any) -> Any:
    kind, keys, *rest = state
    return kind, keys.numpy().astype("uint32"), *rest


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


# -- Values


def _without_dtensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace the DTensors in a value by names, and add them to `tensors`: each rank has only a part of them."""
    if is_dtensor(value):
        name = path if path not in tensors else f"{path}.{len(tensors)}"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        copied = copy.copy(value)  # attributes of a state_dict beside its items stay
        copied.update({key: _without_dtensors(inner, f"{path}.{key}", tensors) for key, inner in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(_without_dtensors(inner, f"{path}.{i}", tensors) for i, inner in enumerate(value))
    return value


def with_tensors(value: Any, like: Any, read: Callable[[str, Any], Tensor]) -> Any:
    """Replace the names of tensors in a value by tensors: `read` gets each name and the object at its place in
    `like`."""
    if isinstance(value, dict) and value.keys() == {_TENSOR}:
        return read(value[_TENSOR], like)
    if isinstance(value, dict):
        others = like if isinstance(like, Mapping) else {}
        value.update({key: with_tensors(inner, others.get(key), read) for key, inner in value.items()})
        return value
    if type(value) in (list, tuple):
        places = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        return type(value)(with_tensors(inner, place, read) for inner, place in zip(value, places, strict=True))
    return value


def packed(name: str, value: Any) -> bytes:
    """A value as bytes that can be read without running anything. Raises RuntimeStateError, with its `name`, if it
    cannot."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unpacked(file.getvalue())
    except Exception as error:
        raise RuntimeStateError(
            f"{name} cannot be kept in a checkpoint, which holds numbers, texts, tensors, and lists and dicts of them: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """The inverse of `packed`."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
