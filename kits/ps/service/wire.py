"""Tensors as arrays, which are sent without a copy, and back. NumPy has no bfloat16: its bits are sent as int16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip
_BITS = {torch.bfloat16: torch.int16}


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype on the wire, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def array_of(tensor: Tensor) -> Any:
    """The elements of a tensor in C order; no copy if it is contiguous and on the CPU."""
    plain = tensor.detach()
    if plain.dtype in _BITS:
        plain = plain.contiguous().view(_BITS[plain.dtype])
    return plain.contiguous().cpu().numpy()


def tensor_of(array: Any, dtype: str) -> Tensor:
    """A tensor of its own with the elements of an array, which may be read-only."""
    own = torch.from_numpy(np.array(array))
    kind = DTYPES[dtype]
    return own.view(kind) if kind in _BITS else own


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    flat = array_of(tensor).reshape(-1)
    return memoryview(flat).cast("B") if flat.size else memoryview(b"")


def tensor_from(data: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of its own from bytes."""
    kind = DTYPES[dtype]
    if not len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def copy_into(target: Tensor, array: Any) -> None:
    """Copy an array, which may be read-only, into a tensor of its shape and dtype."""
    plain = target.detach()
    if plain.dtype in _BITS and plain.is_contiguous():
        plain = plain.view(_BITS[plain.dtype])
    if plain.device.type == "cpu" and plain.dtype not in _BITS:
        np.copyto(plain.numpy(), array)
    else:
        target.detach().copy_(tensor_of(array, name_of(target.dtype)))
