"""`load`: restore a model, an optimizer and further values from a checkpoint.

Everything is checked before anything is changed: that the checkpoint is of this model and this optimizer, and that
every byte is as it was written. Each process checks a share of the parts, and reads its own.
"""

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partway.checkpoints import folder as folders
from partway.checkpoints import saving
from partway.checkpoints.contents import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    STATE,
    VALUES,
    check_value,
    every_name,
    named_tensors,
    parameter_names,
    part_of,
    prefix,
    set_random_state,
    unpacked,
    with_tensors,
)
from partway.checkpoints.converted import ConvertedPlace, converted
from partway.checkpoints.manifest import Manifest, parts_in, read_manifest, state_file, whole
from partway.checkpoints.progress import progress
from partway.checkpoints.ranks import Ranks
from partway.checkpoints.tensor_files import FilePlace, Report, checksum_of, places_in, read_part
from partway.requests import is_dtensor
from partway.runtime import Fact, agree, launched
from partway.runtime.tensors import by_element
from partway.strategy import Problem, RuntimeStateError, counted, raise_problems, shown
from partway.strategy.basics import nearest

AnyPlace = FilePlace | ConvertedPlace
_SHOWN = 8  # names that an error lists


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of the folder `path`. `manifest` is None for safetensors files that Partway did not write."""

    path: Path
    manifest: Manifest | None
    places: Mapping[str, Mapping[str, FilePlace]]  # of the model, the optimizer and other values, by name

    @property
    def processes(self) -> int:
        """The number of processes that saved it."""
        return self.manifest.processes if self.manifest else 1

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of weights, each with the first one."""
        return self.manifest.aliases if self.manifest else {}


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    strict: bool = True,
    skip: Collection[str] = (),
    **state: Any,
) -> dict[str, Any]:
    """Restore `model` and `optimizer` from the folder `path`, which `save` wrote: from the last checkpoint there, or
    the one that `path` is. A folder of safetensors files, such as Hugging Face's, gives a model its weights.

    model       sharded, before or after its first call, or not; its mesh and the number of processes may be others
    optimizer   of its parameters; several in the order in which they were saved
    strict      False: tensors that only the model or only the checkpoint has are left alone
    skip        the names of values to leave out, which may be per rank
    state       objects with a load_state_dict(), by the names under which they were saved

    The random generators continue where they were (those that differed between ranks only on as many ranks). Returns
    all further values that were saved, by name. Under a launcher every rank calls it; each reads its own parts.

    Raises RuntimeStateError, before anything is changed, for a checkpoint of another model or of other sizes, and for a
    damaged or missing file, which it names.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    _check(path, model, optimizers, state)
    saving.wait()
    if launched():
        facts = [Fact("the path", str(Path(path).absolute())), Fact("what is loaded", ", ".join(state))]
        facts += [Fact("strict", str(strict)), Fact("skip", ", ".join(sorted(skip)) or "nothing")]
        agree(f"load the checkpoint in {path}", facts)
    ranks = Ranks()
    where = f"load the checkpoint in {path}"
    chosen = Path(ranks.first(where, lambda: str(folders.newest(Path(path).absolute()))))
    checkpoint, wanted, values = ranks.each(
        where, lambda: _checked(chosen, model, optimizers, strict, set(skip), ranks)
    )
    ranks.together(where, lambda: _put(checkpoint, wanted, values, model, optimizers, state, ranks.rank))
    return {name.removeprefix(STATE): value for name, value in values.items() if name.startswith(STATE)}


def _check(path: Any, model: Any, optimizers: Sequence[Any], state: Mapping[str, Any]) -> None:
    folders.check_path(path)
    if model is not None and not isinstance(model, nn.Module):
        raise RuntimeStateError(f"model is {shown(model)}; it must be an nn.Module")
    if optimizers and model is None:
        raise RuntimeStateError("an optimizer is loaded with the model that its parameters are of; give both")
    for name, value in state.items():
        if not hasattr(value, "load_state_dict"):
            raise RuntimeStateError(f"{name} has no load_state_dict(); load returns plain values")


# -- Checking, which changes nothing


def _checked(
    path: Path, model: nn.Module | None, optimizers: Sequence[Optimizer], strict: bool, skip: set[str], ranks: Ranks
) -> tuple[Checkpoint, dict[str, tuple[Tensor, AnyPlace]], dict[str, Any]]:
    """A checkpoint, the place in it for each tensor of the model, and its values, after all checks."""
    checkpoint = _opened(path)
    wanted = {} if model is None else _wanted(checkpoint, model, strict)
    values = _values(checkpoint, skip, ranks)
    for i, optimizer in enumerate(optimizers):
        assert model is not None
        _check_optimizer(checkpoint, model, optimizer, values.get(f"optimizer.{i}"), prefix(i, optimizers))
    stems = {MODEL} if model is not None else set()
    stems |= {OPTIMIZER} if optimizers else set()
    _check_parts(checkpoint, stems | {VALUES}, ranks)
    return checkpoint, wanted, values


def _opened(path: Path) -> Checkpoint:
    if not folders.is_checkpoint(path):
        names = sorted(entry.name for entry in path.glob("*.safetensors"))
        return Checkpoint(path, None, {MODEL: places_in(path, names)})
    manifest = read_manifest(path)
    for name, size in manifest.sizes.items():
        file = path / name
        if not file.is_file():
            raise RuntimeStateError(f"{file} is missing; the checkpoint is incomplete")
        if file.stat().st_size != size:
            raise RuntimeStateError(f"{file} is damaged: it has {file.stat().st_size:,} bytes, and had {size:,}")
    for name, checksum in manifest.checksums.items():
        with whole(path / name):
            if zlib.crc32((path / name).read_bytes()) != checksum:
                raise RuntimeStateError(f"{path / name} is damaged: its content has changed since it was saved")
    places = {
        stem: places_in(path, [name for name in manifest.headers if name.startswith(stem)], manifest.headers)
        for stem in (MODEL, OPTIMIZER, VALUES)
    }
    return Checkpoint(path, manifest, places)


def _wanted(checkpoint: Checkpoint, model: nn.Module, strict: bool) -> dict[str, tuple[Tensor, AnyPlace]]:
    """Each tensor of the model with its place in the checkpoint."""
    tensors, aliases, _ = named_tensors(model)
    places = checkpoint.places[MODEL]
    found = places if checkpoint.manifest else converted(model, places)
    there = dict[str, AnyPlace](found)
    for name, first in checkpoint.aliases.items():
        if first in there:
            there.setdefault(name, there[first])
    names = every_name(tensors, aliases)
    wanted: dict[str, tuple[Tensor, AnyPlace]] = {}
    problems: list[Problem] = []
    missing = []
    for name, tensor in tensors.items():
        place = next((there[other] for other in names[name] if other in there), None)
        if place is None:
            missing.append(name)
        elif place.shape != tuple(tensor.shape):
            what = f"has shape {list(tensor.shape)}, and in the checkpoint {list(place.shape)}"
            problems.append(Problem(name, what, "load it into a model of the same sizes"))
        else:
            wanted[name] = tensor, place
    known = {*tensors, *aliases, *checkpoint.aliases}
    unexpected = [name for name in found if name not in known]
    if strict:
        fix = "load the checkpoint of this model, or pass strict=False"
        for name in missing[:_SHOWN]:
            near = nearest(name, unexpected, most=1)
            problems.append(Problem(name, "is not in the checkpoint" + (f", which has {near[0]}" if near else ""), fix))
        problems += [
            Problem(name, "is in the checkpoint, and the model does not have it", fix) for name in unexpected[:_SHOWN]
        ]
        more = max(0, len(missing) - _SHOWN) + max(0, len(unexpected) - _SHOWN)
        problems += [Problem("and", f"{more} more", fix)] if more else []
    try:
        raise_problems(f"{checkpoint.path} is of another model:", problems)
    except Exception as error:
        raise RuntimeStateError(str(error)) from None
    return wanted


def _values(checkpoint: Checkpoint, skip: set[str], ranks: Ranks) -> dict[str, Any]:
    """This rank's values other than tensors."""
    if not checkpoint.manifest:
        return {}
    differ = set(checkpoint.manifest.differ)
    file = checkpoint.path / state_file(0)
    blobs = _blobs(file, differ)
    if differ and checkpoint.processes == ranks.size and ranks.rank:
        own = _blobs(file := checkpoint.path / state_file(ranks.rank), differ)
        blobs |= {name: own[name] for name in differ}
    elif checkpoint.processes != ranks.size:
        for name in sorted(differ):
            if name.removeprefix(STATE).startswith(RANDOM):
                del blobs[name]
                if ranks.rank == 0 and name.removeprefix(RANDOM) in ("torch", "cuda"):  # operators draw from these
                    warnings.warn(
                        f"the random generator of {name.removeprefix(RANDOM)} was another on each of the "
                        f"{checkpoint.processes} ranks that saved {checkpoint.path}; it stays as it is on {ranks.size}",
                        stacklevel=7,
                    )
            elif name.removeprefix(STATE) not in skip:
                raise RuntimeStateError(
                    f"{name.removeprefix(STATE)} was another on each of the {checkpoint.processes} ranks that saved "
                    f"{checkpoint.path}, and there are {ranks.size}; load it on as many, or leave it out with "
                    f"skip=({name.removeprefix(STATE)!r},)"
                )
    wanted = {name: blob for name, blob in blobs.items() if name.removeprefix(STATE) not in skip}
    with whole(file):
        values = {name: unpacked(blob.numpy().tobytes()) for name, blob in wanted.items()}
        for name, value in values.items():
            check_value(name, value, checkpoint.places[VALUES])
    return values


def _blobs(path: Path, differ: Collection[str]) -> dict[str, Tensor]:
    """The bytes of all values in a file, by name. Raises RuntimeStateError if one of `differ` is missing."""
    with whole(path):
        blobs = unpacked(path.read_bytes())
        if not isinstance(blobs, dict) or not all(
            isinstance(name, str) and isinstance(blob, Tensor) and blob.dtype is torch.uint8
            for name, blob in blobs.items()
        ):
            raise ValueError("holds no values")
        if lacks := sorted(set(differ) - blobs.keys()):
            raise ValueError(f"lacks {lacks[0]}")
        return blobs


def _check_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, saved: Any, start: str) -> None:
    kind = type(optimizer).__name__
    if saved is None:
        raise RuntimeStateError(f"{checkpoint.path} has no state of {kind}; it was saved without an optimizer")
    names = parameter_names(model, optimizer)
    if saved["class"] != kind:
        raise RuntimeStateError(f"{checkpoint.path} has the state of {saved['class']}, not of {kind}")
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    known = [group["params"] for group in saved["groups"]]
    if [*map(set, groups)] != [*map(set, known)]:
        i = next((i for i, (a, b) in enumerate(zip(groups, known, strict=False)) if set(a) != set(b)), None)
        differ = "" if i is None else f"; group {i} differs, such as in {min(set(groups[i]) ^ set(known[i]))}"
        raise RuntimeStateError(
            f"{checkpoint.path} has the state of {kind} for {_groups(known)}, and this has {_groups(groups)}{differ}"
            "; make the optimizer as it was made then"
        )
    own = {name for group in known for name in group}
    for full, place in checkpoint.places[OPTIMIZER].items():
        name, _, _ = full.removeprefix(f"{start}state.").rpartition(".")
        if full.startswith(f"{start}state.") and name not in own:
            raise RuntimeStateError(f"{checkpoint.path / place.file} is damaged: its {shown(full)} is of no parameter")


def _groups(groups: Sequence[Sequence[str]]) -> str:
    """ "2 groups with 6 parameters"."""
    return f"{counted(len(groups), 'group')} with {counted(sum(map(len, groups)), 'parameter')}"


def _check_parts(checkpoint: Checkpoint, stems: Collection[str], ranks: Ranks) -> None:
    """Raise RuntimeStateError if a byte of the tensors is not as it was written. This rank checks a share of them."""
    if not checkpoint.manifest:
        return
    every = parts_in(checkpoint.path, checkpoint.manifest, checkpoint.places)
    parts = [part for stem, part in every if stem in stems]
    parts.sort(key=lambda part: -math.prod(s.stop - s.start for s in part[2]) * part[0].dtype.itemsize)
    mine = parts[ranks.rank :: ranks.size]
    total = sum(math.prod(s.stop - s.start for s in slices) * place.dtype.itemsize for place, _, slices, _ in mine)
    with progress("checking", total, ranks.rank) as report:
        for place, name, slices, checksum in mine:
            if checksum_of(checkpoint.path, place, slices, report) != checksum:
                raise RuntimeStateError(
                    f"{checkpoint.path / place.file} is damaged: the values of {name} are not what was saved"
                )


# -- Changing


def _put(
    checkpoint: Checkpoint,
    wanted: Mapping[str, tuple[Tensor, AnyPlace]],
    values: dict[str, Any],
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    state: Mapping[str, Any],
    rank: int,
) -> None:
    """Restore everything from the checkpoint."""
    for name in state:
        if f"{STATE}{name}" not in values:
            known = ", ".join(n.removeprefix(STATE) for n in values if n.startswith(STATE)) or "nothing"
            raise RuntimeStateError(f"{checkpoint.path} has no {name}; its named values are {known}")
    _put_tensors(checkpoint, values, state, rank)
    for name, value in state.items():  # before the steps that cannot fail: they may refuse
        value.load_state_dict(values[f"{STATE}{name}"])
    with progress("loading", sum(part_of(t)[1].nbytes for t, _ in wanted.values()), rank) as report, torch.no_grad():
        for tensor, place in wanted.values():
            _read(checkpoint, place, tensor, report)
        for i, optimizer in enumerate(optimizers):
            assert model is not None
            _put_optimizer(checkpoint, model, optimizer, values[f"optimizer.{i}"], prefix(i, optimizers), report)
    if model is not None:
        extra = {n.removeprefix("model."): value for n, value in values.items() if n.startswith("model.")}
        for name, value in extra.items():
            path = name.removesuffix("_extra_state").removesuffix(".")
            model.get_submodule(path).set_extra_state(value)
    for name, value in values.items():
        if name.startswith(RANDOM):
            set_random_state(name.removeprefix(RANDOM), value)


def _put_tensors(checkpoint: Checkpoint, values: dict[str, Any], state: Mapping[str, Any], rank: int) -> None:
    """Replace the names of tensors in values by tensors: by this rank's part if the object to restore has a DTensor of
    that shape, else by the whole."""
    places = checkpoint.places.get(VALUES, {})
    with progress("loading", sum(place.size for place in places.values()), rank) as report:

        def read(name: str, like: Any) -> Tensor:
            place = places[name]
            if is_dtensor(like) and tuple(like.shape) == place.shape:
                tensor = torch.zeros_like(like.detach(), dtype=place.dtype)
            else:
                tensor = torch.empty(place.shape, dtype=place.dtype)
            _read(checkpoint, place, tensor, report)
            return tensor

        for name in [name for name in values if places and name.startswith(STATE)]:
            owner: Any = state.get(name.removeprefix(STATE))
            like = owner.state_dict() if hasattr(owner, "state_dict") else None
            values[name] = with_tensors(values[name], like, read)


def _read(checkpoint: Checkpoint, place: AnyPlace, tensor: Tensor, report: Report) -> None:
    slices, part = part_of(tensor)
    if isinstance(place, ConvertedPlace):
        part.copy_(place.whole(checkpoint.path)[slices])
        report(part.nbytes)
    else:
        read_part(checkpoint.path, place, slices, part, report)


def _put_optimizer(
    checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], start: str, report: Report
) -> None:
    """Give an optimizer its options and its states; a tensor with an entry for each element is placed like its
    parameter."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Any]] = {name: dict(value) for name, value in saved["values"].items()}
    for full, place in checkpoint.places[OPTIMIZER].items():
        if not full.startswith(f"{start}state."):
            continue
        name, _, key = full.removeprefix(f"{start}state.").rpartition(".")
        parameter = parameters[name]
        if by_element(key, place.shape, parameter):
            value = torch.zeros_like(parameter.detach(), dtype=place.dtype)
        else:
            value = torch.empty(place.shape, dtype=place.dtype, device=_device(optimizer, key, parameter))
        _read(checkpoint, place, value, report)
        states.setdefault(name, {})[key] = value
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[parameters[name]] = state
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _device(optimizer: Optimizer, key: str, parameter: Tensor) -> torch.device:
    """The device of a state: the parameter's, except for a number of steps that only the CPU reads."""
    apart = key == "step" and not any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return torch.device("cpu") if apart else parameter.device
