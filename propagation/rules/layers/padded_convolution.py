"""Fuses a pad into the convolutions that read it.

A convolution that does not pad with zeros (`padding_mode="reflect"`), or pads by different amounts before and after an
image, is captured as a pad and a convolution. Split along the image, each would exchange its own windows. Where only
convolutions read the padded tensor, each becomes one operator, `partway::padded_convolution`, whose windows include the
padding; lowering writes it as the two operators again, or as the convolution alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, per_dim, shape
from ...ops.padded_convolution import padded_convolution
from ..builder import Builder

aten = torch.ops.aten

_PADS = (aten.pad.default, aten.constant_pad_nd.default)
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def absorb(module: fx.GraphModule) -> None:
    """Fuse every pad into the convolutions that read it, where the result is the same (in place; capture owns the
    module)."""
    for pad in list(module.graph.nodes):
        if pad.target in _PADS and pad.users and all(_takes(reader, pad) for reader in pad.users):
            for reader in list(pad.users):
                reader.replace_all_uses_with(_absorbed(Builder(module.graph, reader, 1, {}), reader, pad))
                module.graph.erase_node(reader)
            module.graph.erase_node(pad)


def _takes(reader: fx.Node, pad: fx.Node) -> bool:
    """Whether `reader` is a convolution that can absorb the padding of its operand."""
    if reader.target not in _CONVOLUTIONS or reader.args[0] is not pad:
        return False
    mode, number = _filled(pad)
    count = len(shape(reader.args[1])) - 2  # type: ignore[arg-type]
    own = any(per_dim(argument(reader, "padding"), count))
    spatial = not any(argument(pad, "pad")[2 * count :])
    if mode == "circular" and min(argument(pad, "pad")) < 0:  # PyTorch cuts before it wraps around
        return False
    return spatial and (not own or (mode == "constant" and number == 0)) and not math.isnan(number)


def _filled(pad: fx.Node) -> tuple[str, float]:
    """The mode of a pad, and its number."""
    mode = argument(pad, "mode") if "mode" in argument_names(pad) else "constant"
    return mode, float(argument(pad, "value") or 0.0) if mode == "constant" else 0.0


def _absorbed(b: Builder, conv: fx.Node, pad: fx.Node) -> fx.Node:
    """The convolution of the operand of `pad`, with the padding of both."""
    weight: Any = conv.args[1]
    count = len(shape(weight)) - 2
    own = per_dim(argument(conv, "padding"), count)
    padding = [*argument(pad, "pad"), *[0] * (2 * count)][: 2 * count]
    both = [n + own[count - 1 - i // 2] for i, n in enumerate(padding)]
    stride, dilation = (per_dim(argument(conv, name), count) for name in ("stride", "dilation"))
    return b(
        padded_convolution, pad.args[0], weight, argument(conv, "bias"), both, *_filled(pad), stride, dilation,
        argument(conv, "groups"),
    )  # fmt: skip
