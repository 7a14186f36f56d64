"""Small models with random weights, their inputs, and what one device computes of them.

A `Case` is a model and a batch; `reference(case)` runs it on one device. Sizes are the least that 8 ranks can split:
8 heads, a batch of 8, widths that are multiples of 8. Everything is drawn from a fixed seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

logging.set_verbosity_error()

BATCH, SEQUENCE, VOCABULARY, CLASSES = 8, 8, 64, 8
LAYERS = int(os.environ.get("ZOO_LAYERS", "4"))  # of the transformers: conftest.py sets it


class MLP(nn.Module):
    """Three layers and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.fc3(torch.tanh(self.fc2(torch.relu(self.fc1(x))))), target)


class ConvNet(nn.Module):
    """Two convolutions, each with a batch norm, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32, momentum=0.3)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(pixel_values)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and a Megatron-style annotation of its first block.

    ranks       how many dims each input has; the batch is the first
    block       for a pattern of parameters of the first block a letter per dim: `x` is split, `.` is not
    single      whether the model computes in float32 whatever its parameters are
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype, int], dict[str, Tensor]]
    ranks: Mapping[str, int]
    block: Mapping[str, str]
    single: bool = False

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.model().to(dtype)

    def batch(self, dtype: torch.dtype = torch.float64, step: int = 0, size: int = BATCH) -> dict[str, Tensor]:
        torch.manual_seed(100 + step)
        return self.inputs(dtype, size)

    def batch_split(self, by: Any) -> dict[str, tuple[Any, ...]]:
        """`in_strategy` for a batch split by `by`, a split count or the name of an axis."""
        rest = 1 if isinstance(by, int) else None
        return {name: (by, *[rest] * (rank - 1)) for name, rank in self.ranks.items()}

    def block_split(self, by: Any) -> dict[str, tuple[Any, ...]]:
        """`parameter_plan` for the first block: layers that give split columns, then layers that take them."""
        rest = 1 if isinstance(by, int) else None
        return {name: tuple(by if dim == "x" else rest for dim in dims) for name, dims in self.block.items()}


def _features(dtype: torch.dtype, size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 16, dtype=dtype), "target": torch.randn(size, CLASSES, dtype=dtype)}


def _classified(dtype: torch.dtype, size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 16, dtype=dtype), "target": torch.randint(0, CLASSES, (size,))}


def _tokens(dtype: torch.dtype, size: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE))
    labels = ids.clone()
    labels[0, :3] = -100  # ranks do not hold equally many valid targets
    return {"input_ids": ids, "labels": labels}


def _images(side: int) -> Callable[[torch.dtype, int], dict[str, Tensor]]:
    def inputs(dtype: torch.dtype, size: int) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(size, 3, side, side, dtype=dtype),
            "labels": torch.randint(0, CLASSES, (size,)),
        }

    return inputs


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """`LAYERS` layers, 8 heads; no dropout unless asked for."""
    sizes = {"n_layer": LAYERS, "n_embd": 32, "n_head": 8, "n_positions": 2 * SEQUENCE, "vocab_size": VOCABULARY}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**{**sizes, **quiet, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False, **options})
    model = GPT2LMHeadModel(config)
    model.loss_function = next_token_loss
    return model


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss in the dtype of the model: transformers' own casts to float32 (llama has that one)."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def llama(kv_heads: int = 4) -> LlamaForCausalLM:
    """`LAYERS` layers, 8 heads in `kv_heads` groups."""
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=LAYERS,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=8,
            num_key_value_heads=kv_heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=2 * SEQUENCE,
            use_cache=False,
        )
    )


def vit() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=LAYERS,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=8,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def resnet50() -> ResNetForImageClassification:
    """ResNet-50's layout, 16 bottleneck blocks in 4 stages, with narrow channels and small images.

    Blocks start near the identity, as is usual for training: else float32 is 7e-4 off float64 on one device already.
    """
    model = ResNetForImageClassification(
        ResNetConfig(
            depths=[3, 4, 6, 3],
            layer_type="bottleneck",
            embedding_size=8,
            hidden_sizes=[32, 32, 32, 32],
            num_labels=CLASSES,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("layer.2.normalization.weight"):
            nn.init.constant_(parameter, 0.2)
    return model


_MLP_BLOCK = {"fc1.weight": "x.", "fc1.bias": "x", "fc2.weight": ".x"}
_GPT2_BLOCK = {  # Conv1D keeps its weight transposed, and q, k and v are one
    "transformer.h.0.attn.c_attn.weight": ".x",
    "transformer.h.0.attn.c_attn.bias": "x",
    "transformer.h.0.attn.c_proj.weight": "x.",
    "transformer.h.0.mlp.c_fc.weight": ".x",
    "transformer.h.0.mlp.c_fc.bias": "x",
    "transformer.h.0.mlp.c_proj.weight": "x.",
}
_LLAMA_BLOCK = {
    "model.layers.0.self_attn.[qkv]_proj.weight": "x.",
    "model.layers.0.self_attn.o_proj.weight": ".x",
    "model.layers.0.mlp.gate_proj.weight": "x.",
    "model.layers.0.mlp.up_proj.weight": "x.",
    "model.layers.0.mlp.down_proj.weight": ".x",
}
_VIT_BLOCK = {
    "vit.layers.0.attention.[qkv]_proj.weight": "x.",
    "vit.layers.0.attention.[qkv]_proj.bias": "x",
    "vit.layers.0.attention.o_proj.weight": ".x",
    "vit.layers.0.mlp.fc1.weight": "x.",
    "vit.layers.0.mlp.fc1.bias": "x",
    "vit.layers.0.mlp.fc2.weight": ".x",
}
_RESNET_BLOCK = {
    "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight": "x...",
    "resnet.encoder.stages.0.layers.0.layer.1.convolution.weight": ".x..",
}
_CONVNET_BLOCK = {"conv1.weight": "x...", "conv1.bias": "x", "norm1.*": "x", "conv2.weight": ".x.."}
_TOKENS, _IMAGES = {"input_ids": 2, "labels": 2}, {"pixel_values": 4, "labels": 1}

CASES = {
    "mlp": Case(MLP, _features, {"x": 2, "target": 2}, _MLP_BLOCK),
    "mlp_classes": Case(lambda: MLP(nn.functional.cross_entropy), _classified, {"x": 2, "target": 1}, _MLP_BLOCK),
    "convnet": Case(ConvNet, _images(8), _IMAGES, _CONVNET_BLOCK),
    "gpt2": Case(gpt2, _tokens, _TOKENS, _GPT2_BLOCK),
    "llama": Case(llama, _tokens, _TOKENS, _LLAMA_BLOCK, single=True),
    "llama_heads": Case(lambda: llama(8), _tokens, _TOKENS, _LLAMA_BLOCK, single=True),
    "vit": Case(vit, _images(8), _IMAGES, _VIT_BLOCK),
    "resnet50": Case(resnet50, _images(32), _IMAGES, _RESNET_BLOCK),
}
