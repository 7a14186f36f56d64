"""`state_dict` and `load_state_dict` of a sharded module under a launcher, whose parameters are DTensors.

Loading takes the same values as in one process: plain tensors, whole on every rank, and DTensors on any mesh are laid
out like the parameters before PyTorch copies them (or, with assign=True, replaces the parameters).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from partway.propagation.graph.structure import name_of
from partway.requests.dtensors import is_dtensor
from partway.runtime.ranks.agreement import agree, facts_of
from partway.strategy import RuntimeStateError

_FIX = "load the same file on every rank"


def follow_layouts(module: nn.Module) -> None:
    """Make `load_state_dict` of `module`, and of modules around it, lay out its tensors like the parameters. Values
    that are whole on ranks must agree."""
    module.register_load_state_dict_pre_hook(_lay_out)


def _lay_out(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    from torch.distributed.tensor import DTensor

    from partway.runtime.tensors.split_tensor import SplitTensor, placed_like

    held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    given = {
        name: (state_dict[prefix + name], tensor)
        for name, tensor in held.items()
        if isinstance(state_dict.get(prefix + name), Tensor)
    }
    plain = {name: value for name, (value, _) in given.items() if not is_dtensor(value) and not value.is_meta}
    if not any(is_dtensor(tensor) for _, tensor in given.values()):
        return
    agree(f"load a state_dict into {name_of(module)}", facts_of(plain, _FIX))
    for name, (value, tensor) in given.items():
        if is_dtensor(value) and value.device_mesh.size() != torch.distributed.get_world_size():
            raise RuntimeStateError(
                f"{prefix}{name} is a DTensor on {value.device_mesh}, a part of the ranks; give the whole tensor"
            )
        if isinstance(value, SplitTensor) and metadata.get("assign_to_params_buffers"):
            raise RuntimeStateError(
                f"{prefix}{name} is from the state_dict of a sharded module, and with assign=True two modules would "
                "share its memory, which their layouts need not allow; leave out assign"
            )
        if isinstance(tensor, DTensor) and value.shape == tensor.shape:
            state_dict[prefix + name] = placed_like(value, tensor)
