"""`pw.ps.save`: a checkpoint of servers and workers, between two steps, while training goes on.

The servers keep their state as of one moment; a worker reads it piece by piece, and writes it like `pw.save`: whole
tensors in safetensors files, which `pw.load` reads without servers.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partway.checkpoints import (
    MODEL,
    OPTIMIZER,
    STATE,
    Content,
    KeptTensor,
    arrange,
    keep_whole,
    named_tensors,
    packed,
    random_states,
    saving,
)
from partway.checkpoints import folder as folders
from partway.ps.served import ServedOptimizer, served
from partway.ps.service import settings
from partway.ps.service.pieces import Parameter, RowRange
from partway.ps.service.server import Moved
from partway.ps.service.update import is_of_rows
from partway.ps.service.wire import DTYPES, tensor_of
from partway.strategy import RuntimeStateError


def save(
    path: str | os.PathLike[str], model: nn.Module, *, keep: int | None = None, asynchronous: bool = False, **state: Any
) -> Path | saving.Saving:
    """Write a checkpoint into the folder `path`: the model and the states of the servers' optimizer, as of one step.
    One worker calls it, between two steps; the others go on. `pw.load(path, model, optimizer)` reads it, also without
    servers, before `pw.ps.optimizer` takes the optimizer.

    model          the model of the optimizer's parameters; tensors that the servers do not have are this worker's
    keep           how many checkpoints to keep in the folder, the last ones; None: all
    asynchronous   True: it is written while this worker goes on. Returns a `Saving`
    state          further values to keep, as with `pw.save`

    Returns the path of the checkpoint. Raises RuntimeStateError if a value cannot be kept or written, or a server was
    started again meanwhile; earlier checkpoints stay as they are.
    """
    settings.required()
    own = served()
    saving.check(path, model, keep)
    saving.wait()
    folder = Path(path).absolute()
    content = _content(own, model, state)
    if not own.speaks:
        own.tell(lambda: None)
        return folder
    name = secrets.token_hex(8)
    assignment, _ = own.client.cut(name)
    cut = _Cut(own, name, assignment, _names(own, model))
    if asynchronous:
        return saving.in_background(lambda: _write(cut, content.copied(), folder, keep))
    return own.tell(lambda: _write(cut, content, folder, keep))


def _names(own: ServedOptimizer, model: nn.Module) -> dict[int, str]:
    """The names of the optimizer's parameters in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for described, parameter in zip(own.job.parameters, own.parameters, strict=True):
        if id(parameter) not in names:
            raise RuntimeStateError(
                f"{described.name} {list(described.shape)} is not the model's; give the one it is of"
            )
        found[described.index] = names[id(parameter)]
    return found


def _content(own: ServedOptimizer, model: nn.Module, state: dict[str, Any]) -> Content:
    """The content of this worker, without that of the servers."""
    theirs = {id(parameter) for parameter in own.parameters}
    tensors, aliases, extra = named_tensors(model)
    weights = {name: keep_whole(each) for name, each in tensors.items() if id(each) not in theirs}
    values: dict[str, Any] = {f"random.{name}": value for name, value in random_states().items()}
    values |= {f"model.{name}": value for name, value in extra.items()}
    for name, value in state.items():
        values[f"{STATE}{name}"] = value.state_dict() if hasattr(value, "state_dict") else value
    return Content({MODEL: weights}, aliases, {name: packed(name, value) for name, value in values.items()})


class _Cut:
    """The state of the servers at one moment, by pieces. `names`: of the parameters, by their index."""

    def __init__(self, own: ServedOptimizer, name: str, assignment: dict[str, str], names: dict[int, str]) -> None:
        self._client, self.job, self._name, self._where, self.names = own.client, own.job, name, assignment, names
        self.own = own

    def read(self, piece: RowRange) -> Moved:
        """Read a piece."""
        return self._client.read_cut(self._name, self._where[piece.key], piece.key)

    def release(self) -> None:
        """Free the servers' copies."""
        self._client.release_cut(self._name, sorted(set(self._where.values())))

    def part(self, piece: RowRange, value: Tensor) -> tuple[tuple[slice, ...], Tensor]:
        """The slices of a piece in its parameter, and its values."""
        parameter = self.job.parameters[piece.parameter]
        first = (slice(piece.start, piece.stop),) if parameter.shape else ()
        return (*first, *(slice(0, size) for size in parameter.shape[1:])), value.reshape(_shape(parameter, piece))


def _shape(parameter: Parameter, piece: RowRange) -> tuple[int, ...]:
    return (piece.stop - piece.start, *parameter.shape[1:]) if parameter.shape else ()


def _write(cut: _Cut, content: Content, folder: Path, keep: int | None) -> Path:
    try:
        firsts = {piece.parameter: cut.read(piece) for piece in reversed(cut.job.pieces)}
        kept, values = _described(cut, firsts)
        numbers = {name: keep_whole(each) for name, each in _numbers(cut, firsts).items()}
        tensors = {MODEL: {**content.tensors[MODEL], **kept[MODEL]}, OPTIMIZER: {**kept[OPTIMIZER], **numbers}}
        content = replace(
            content,
            tensors={stem: group for stem, group in tensors.items() if group},
            values={**content.values, "optimizer.0": packed("the optimizer", values)},
        )
        with folders.begun(folder) as fresh:
            files = {
                stem: arrange({name: (each.dtype, each.shape) for name, each in group.items()}, stem, saving.LARGEST)
                for stem, group in content.tensors.items()
            }
            saving.create_files(fresh, files)
            size = sum(cut.job.size(piece) for piece in cut.job.pieces)
            saving.write_parts(content, fresh, files, 0, _parts(cut), size)
            saving.write_values(content.values, set(), fresh, 0)
            return saving.complete(content, fresh, files, set(), keep, 1)
    finally:
        cut.release()


def _described(cut: _Cut, firsts: dict[int, Moved]) -> tuple[dict[str, dict[str, KeptTensor]], dict[str, Any]]:
    """The servers' tensors to write, and the optimizer's other values."""
    kept: dict[str, dict[str, KeptTensor]] = {MODEL: {}, OPTIMIZER: {}}
    values: dict[str, dict[str, Any]] = {}
    none = torch.empty(0)
    for index, moved in firsts.items():
        parameter, name = cut.job.parameters[index], cut.names[index]
        kept[MODEL][name] = KeptTensor(DTYPES[parameter.dtype], parameter.shape, none, (), False)
        value = tensor_of(moved.value, parameter.dtype)
        for key, each in moved.state.items():
            if is_of_rows(key, each, value):
                kept[OPTIMIZER][f"state.{name}.{key}"] = KeptTensor(each.dtype, parameter.shape, none, (), False)
            elif not isinstance(each, Tensor):
                values.setdefault(name, {})[key] = each
    groups = [
        {**group, "params": [cut.names[i] for i in _indices(cut, number)]}
        for number, group in enumerate(cut.own.param_groups)
    ]
    return kept, {"groups": groups, "values": values, "class": type(cut.own.inner).__name__}


def _indices(cut: _Cut, group: int) -> list[int]:
    return [parameter.index for parameter in cut.job.parameters if parameter.group == group]


def _numbers(cut: _Cut, firsts: dict[int, Moved]) -> dict[str, Tensor]:
    """The states of an optimizer with one number a parameter, such as the number of steps."""
    found = {}
    for index, moved in firsts.items():
        value = tensor_of(moved.value, cut.job.parameters[index].dtype)
        for key, each in moved.state.items():
            if isinstance(each, Tensor) and not is_of_rows(key, each, value):
                found[f"state.{cut.names[index]}.{key}"] = each
    return found


def _parts(cut: _Cut) -> Iterator[saving.Part]:
    """The parts of the servers, one piece after another."""
    for piece in cut.job.pieces:
        moved, name = cut.read(piece), cut.names[piece.parameter]
        value = tensor_of(moved.value, cut.job.parameters[piece.parameter].dtype)
        yield (MODEL, name, *cut.part(piece, value))
        for key, each in moved.state.items():
            if is_of_rows(key, each, value):
                yield (OPTIMIZER, f"state.{name}.{key}", *cut.part(piece, each))
