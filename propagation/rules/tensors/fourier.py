"""Fourier transforms: the transformed dims stay whole, the others split."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, shape, value
from ..builder import Builder, Expansion
from ..dims import over_dims
from ..row import Row, RowFunction, parse_row
from ..rule import Rule

aten = torch.ops.aten


def _dims(node: fx.Node) -> list[int]:
    """The transformed dims: those named, else as many of the last dims as there are sizes, else all."""
    count, dims = len(shape(operands(node)[0])), argument(node, "dim")
    sizes = argument(node, "s") if "s" in argument_names(node) else None
    if dims is None:
        return list(range(count - len(sizes) if sizes is not None else 0, count))
    return [d % max(count, 1) for d in (dims if isinstance(dims, list | tuple) else [dims])]


def transform(node: fx.Node) -> Rule:
    """The transformed dims stay whole."""
    return over_dims(node, {}, whole=_dims(node))


def frames(node: fx.Node) -> Rule:
    """stft: signals become frames of frequencies; a real result has a last dim for real and imaginary parts."""
    signal = "b 1" if len(shape(operands(node)[0])) == 2 else "1"
    parts = "" if value(node).is_complex() else " 1"
    return parse_row(Row(f"{signal}, 1 -> {signal} 1{parts}", linear=("0",)), node)


def _shift(b: Builder, node: fx.Node) -> fx.Node:
    """Each dim is rolled by half of it: fftshift rounds down, ifftshift up."""
    x, dims = operands(node)[0], _dims(node)
    up = int(node.target is aten.fft_ifftshift.default)
    return b(aten.roll.default, x, [(shape(x)[d] + up) // 2 for d in dims], dims) if dims else b(aten.alias.default, x)


def _overlapped(b: Builder, node: fx.Node) -> fx.Node:
    """istft: inverse transforms of the frames, times the window, added up where they overlap and divided by the sum of
    the squared windows. (PyTorch's operator reads values, which fake tensors do not have.)"""
    x, *window = operands(node)
    size, length = argument(node, "n_fft"), argument(node, "length")
    hop = argument(node, "hop_length") or size // 4
    total, start = size + hop * (shape(x)[-1] - 1), size // 2 if argument(node, "center") else 0
    stop = total - start if length is None else start + length
    back = aten.fft_ifft.default if value(node).is_complex() else aten.fft_irfft.default  # from the lower half alone
    frames = b(back, x, size, -2, "ortho" if argument(node, "normalized") else None)
    width = argument(node, "win_length") or size
    shaped = window[0] if window else b(aten.ones.default, [width], dtype=value(frames).dtype, device=value(x).device)
    if width < size:
        shaped = b(aten.pad.default, shaped, [(size - width) // 2, size - width - (size - width) // 2])
    shaped = b(aten.unsqueeze.default, shaped, 1)
    squares = b(aten.expand.default, b(aten.mul.Tensor, shaped, shaped), [size, shape(x)[-1]])

    def added(columns: fx.Node) -> fx.Node:
        image = b(aten.col2im.default, columns, [1, total], [1, size], [1, 1], [0, 0], [1, hop])
        return b(aten.slice.Tensor, b(aten.squeeze.dims, image, [-3, -2]), -1, start, min(stop, total))

    signal = b(aten.div.Tensor, added(b(aten.mul.Tensor, frames, shaped)), added(squares))
    return b(aten.pad.default, signal, [0, stop - total]) if stop > total else signal


_KINDS = ("fft", "hfft", "ifft", "ihfft", "irfft", "rfft")

ROWS: dict[Any, Row | RowFunction] = {
    **{getattr(aten, f"fft_{kind}{many}").default: transform for kind in _KINDS for many in ("", "2", "n")},
    aten.stft.center: frames,
    aten.stft.default: frames,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.fft_fftshift.default: _shift,
    aten.fft_ifftshift.default: _shift,
    aten.istft.default: _overlapped,
}
