"""Weights as one file per rank, each with that rank's parts, and the strategy file of the plan that describes the
parts: MindSpore's format, with MindSpore's names for the functions.

A strategy file is written by `strategy_ckpt_config={"save_file": ...}` or `plan.save`. The file of a rank is one of
safetensors (`save_checkpoint`, or safetensors' own writer), or a dict of tensors that `torch.save` wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partway.checkpoints.contents import MODEL, Content, every_name, keep, named_tensors, part_of
from partway.checkpoints.rank_files import (
    Note,
    RankFile,
    SavedRanks,
    holders,
    shape_of,
    slices_of,
    transformed,
    write_file,
)
from partway.checkpoints.ranks import Ranks
from partway.checkpoints.saving import check_alike
from partway.checkpoints.tensor_files import SUFFIX
from partway.engine import attached_engine, settle
from partway.options import current
from partway.propagation.graph import Role, name_of
from partway.propagation.plan import Plan
from partway.requests import engine_of, is_dtensor
from partway.runtime import Fact, agreement, get_group_size, get_rank, launched
from partway.strategy import Layout, RuntimeStateError, StrategyError, common_part, shown

Filename = str | os.PathLike[str]


@dataclass(frozen=True)
class WeightLayout:
    """How a plan splits a weight: its `layout` (mesh and placements), and its whole shape."""

    layout: Layout
    full_shape: tuple[int, ...]

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self.layout.mesh

    @property
    def placements(self) -> Any:
        """The placement on each axis of the mesh."""
        return self.layout.placements

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part; of uneven parts, the longest."""
        return self.layout.local_shape(self.full_shape)


# -- MindSpore's functions


def infer_predict_layout(model: nn.Module, *predict_data: Any) -> dict[str, WeightLayout]:
    """Plan the call `model(*predict_data)` for inference, without running it. Returns the layout of each weight.

    Under a launcher the weights are then laid out so. Raises StrategyError for a module that is not sharded, and the
    errors of a first call.
    """
    if not isinstance(model, nn.Module) or engine_of(model) is None:
        raise StrategyError(
            f"infer_predict_layout plans a sharded module, and {name_of(model)} is not one; call shard on it before"
        )
    plan = attached_engine(model).planned_only(predict_data).plan
    weights = [tensor for tensor in plan.inputs if tensor.role is Role.PARAMETER]
    return {tensor.name: WeightLayout(plan.layout_of(tensor.codes), tuple(tensor.shape)) for tensor in weights}


def save_checkpoint(network: nn.Module, filename: Filename) -> list[Path]:
    """Write the weights of `network` as one safetensors file per rank. `filename` contains {rank}, as in
    "ckpt/rank_{rank}/model.safetensors". Under a launcher each process writes its own file, and every rank calls it;
    when it returns, all files are there. For virtual devices one process writes all files, as the last plan splits the
    weights. Returns the files that this process wrote.

    Raises RuntimeStateError if ranks that hold the same part of a weight have different values of it, like `save`.
    """
    if "{rank}" not in os.fspath(filename) or "\0" in os.fspath(filename):
        raise RuntimeStateError(
            f"filename is {shown(filename)}; write where the rank goes in it, as in rank_{{rank}}/x"
        )
    tensors, _, _ = named_tensors(network)
    plan = _latest(network)
    if launched():
        ranks = Ranks()
        kept = {name: keep(tensor, ranks.size, ranks.rank, i) for i, (name, tensor) in enumerate(tensors.items())}
        check_alike(Content({MODEL: kept}, {}), ranks)
        own = {name: each.slices for name, each in kept.items()}
        if any(own[name] != slices_of(plan, name, tuple(t.shape), get_rank()) for name, t in tensors.items()):
            plan = None  # they were laid out differently since
        note = Note.of(get_rank(), get_group_size(), own, plan)
        with agreement(f"save {name_of(network)} as one file per rank") as facts:
            facts.append(Fact("filename", os.fspath(filename)))
            return [write_file(_named(filename, get_rank()), {name: each.part for name, each in kept.items()}, note)]
    written, count = [], plan.mesh.device_num if plan else 1
    for rank in range(count):
        slices = {name: slices_of(plan, name, tuple(t.shape), rank) for name, t in tensors.items()}
        parts = {name: t.detach()[slices[name]] for name, t in tensors.items()}
        written.append(write_file(_named(filename, rank), parts, Note.of(rank, count, slices, plan)))
    return written


def load_distributed_checkpoint(
    network: nn.Module,
    checkpoint_filenames: Sequence[Filename],
    predict_strategy: Mapping[str, WeightLayout] | None = None,
    train_strategy_filename: Filename | None = None,
) -> None:
    """Give `network` the weights that were saved as one file per rank: merged, and cut as the network is split.

    checkpoint_filenames      the files of all ranks: in any order if they state their ranks; files of another program,
                              or of torch.save, in the order of ranks
    predict_strategy          the result of infer_predict_layout: the weights are laid out so. None: their layouts stay;
                              whole for a network that is not sharded
    train_strategy_filename   the strategy file of the training; None: that of strategy_ckpt_config's load_file

    A process reads only the bytes of its parts. Raises RuntimeStateError for files that are missing, too few, or of
    another strategy, and StrategyError for a strategy of another model; then nothing is changed.
    """
    if not isinstance(network, nn.Module):
        raise RuntimeStateError(f"network is {shown(network)}; it must be an nn.Module")
    if isinstance(checkpoint_filenames, str | bytes) or not isinstance(checkpoint_filenames, Sequence):
        raise RuntimeStateError(f"checkpoint_filenames is {shown(checkpoint_filenames)}; write a list of paths")
    source = SavedRanks.of(_strategy(train_strategy_filename), dict(enumerate(map(Path, checkpoint_filenames))))
    tensors, aliases, _ = named_tensors(network)
    names = every_name(tensors, aliases)
    wanted: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        known = next((n for n in names[name] if n in source.names), None)
        if known is None:
            raise StrategyError(f"{name} of the network is not in {source.files[0]}; load the weights of this network")
        source.check(known, tuple(tensor.shape), source.files)
        wanted.append((known, tensor))
    if predict_strategy is not None:
        _lay_out(network, predict_strategy, tensors)
    with torch.no_grad():
        for known, tensor in wanted:
            slices, part = part_of(tensor)
            source.read(known, tuple(tensor.shape), slices, part)


def rank_list_for_transform(
    rank_id: int, src_strategy_file: Filename | None = None, dst_strategy_file: Filename | None = None
) -> list[int]:
    """The ranks whose files are needed to make that of rank `rank_id` of another strategy. None for a strategy: the
    weights are whole, in one file."""
    source, target = _strategy(src_strategy_file, False), _strategy(dst_strategy_file, False)
    _check_rank(rank_id, target)
    needed = {0}
    for name, layout in (source.parameters if source else {}).items():
        shape = shape_of(source, name)
        wanted = slices_of(target, name, shape, rank_id)
        needed |= {rank for rank, own in holders(layout, shape) if common_part(own, wanted) is not None}
    return sorted(needed)


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, Filename],
    save_checkpoint_file_name: Filename,
    src_strategy_file: Filename | None = None,
    dst_strategy_file: Filename | None = None,
) -> Path:
    """Write the file of rank `rank_id` of one strategy from the files of another, given by rank: those that
    `rank_list_for_transform` names."""
    source, target = _strategy(src_strategy_file, False), _strategy(dst_strategy_file, False)
    for needed in rank_list_for_transform(rank_id, src_strategy_file, dst_strategy_file):
        if needed not in checkpoint_files_map:
            raise RuntimeStateError(
                f"the checkpoint of rank {needed} is needed to make that of rank {rank_id}; give it"
            )
    files = {rank: RankFile(Path(file)) for rank, file in checkpoint_files_map.items()}
    return transformed(SavedRanks(source, files), target, rank_id, Path(save_checkpoint_file_name))


def transform_checkpoints(
    src_dir: Filename,
    dst_dir: Filename,
    ckpt_prefix: str,
    src_strategy_file: Filename | None = None,
    dst_strategy_file: Filename | None = None,
) -> None:
    """Write the files of all ranks of one strategy, as dst_dir/rank_0/<ckpt_prefix>0.safetensors and so on, from those
    of another in src_dir/rank_0, src_dir/rank_1 and so on; in each folder it takes the last file by name. None for a
    strategy: the weights are whole, in one file, that of rank 0."""
    files = dict(_files_in(Path(src_dir)))
    target = _strategy(dst_strategy_file, False)
    for rank in range(target.mesh.device_num if target else 1):
        for needed in rank_list_for_transform(rank, src_strategy_file, dst_strategy_file):
            if needed not in files:
                raise RuntimeStateError(
                    f"the checkpoint of rank {needed} is needed to make that of rank {rank}, and {src_dir} has no file "
                    f"in rank_{needed}"
                )
    for rank in range(target.mesh.device_num if target else 1):
        path = Path(dst_dir) / f"rank_{rank}" / f"{ckpt_prefix}{rank}{SUFFIX}"
        transform_checkpoint_by_rank(rank, files, path, src_strategy_file, dst_strategy_file)


# -- Their parts


def _strategy(filename: Filename | None, default: bool = True) -> Plan | None:
    """The plan in a strategy file; without a name that of the context, or None."""
    path = filename or (current().strategy_ckpt_config.load_file if default else "")
    return Plan.load(path) if path else None


def _latest(network: nn.Module) -> Plan | None:
    """The plan of the last call; None for a network that is not sharded, or in a process that has its parts already."""
    if engine_of(network) is None:
        return None
    try:
        return attached_engine(network).latest().plan
    except RuntimeStateError:
        if launched():
            return None
        raise


def _named(filename: Filename, rank: int) -> Path:
    return Path(os.fspath(filename).replace("{rank}", str(rank)))


def _files_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """The last file of each rank in `folder`."""
    for entry in sorted(folder.glob("rank_*")):
        number = entry.name.removeprefix("rank_")
        inside = entry.iterdir() if entry.is_dir() else ()
        files = sorted(file for file in inside if file.is_file() and not file.name.startswith("."))
        if number.isdigit() and files:
            yield int(number), files[-1]


def _check_rank(rank: Any, target: Plan | None) -> None:
    count = target.mesh.device_num if target else 1
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < count:
        raise StrategyError(f"rank_id is {shown(rank)}; it must be an int from 0 to {count - 1}")


def _lay_out(network: nn.Module, wanted: Mapping[str, WeightLayout], tensors: Mapping[str, Tensor]) -> None:
    """Lay out the weights of `network` as infer_predict_layout returned."""
    for name, weight in wanted.items():
        if name not in tensors:
            raise StrategyError(f"predict_strategy has {name}, which the network lacks; infer it for this network")
        if weight.full_shape != tuple(tensors[name].shape):
            raise StrategyError(
                f"predict_strategy has {name} of shape {list(weight.full_shape)}, and the network of "
                f"{list(tensors[name].shape)}; infer it for this network"
            )
        if launched() and not is_dtensor(tensors[name]):
            raise StrategyError(
                f"predict_strategy splits {name}, and the network is not sharded; call shard on it before"
            )
    settle(network, {name: weight.layout for name, weight in wanted.items()})
