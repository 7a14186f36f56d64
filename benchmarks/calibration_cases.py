"""The steps of `calibration.py` and `plan_order.py`: models, and how a person splits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from partway.measure.workloads import UNet, Workload, gpt2, mlp, resnet50


class Loss(nn.Module):
    """A model of transformers that returns its loss."""

    def __init__(self, model: nn.Module, given: str) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model(**{self.given: x}, labels=labels).loss
        return loss


def llama(layers: int = 2, width: int = 512, tokens: int = 128, vocabulary: int = 8192) -> Workload:
    """A Llama with 8 heads, 4 of keys."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=vocabulary, use_cache=False,
    )  # fmt: skip

    def batch(samples: int) -> tuple[Tensor, ...]:
        ids = torch.randint(vocabulary, (samples, tokens))
        return ids, ids.clone()

    return Workload("llama", lambda: Loss(LlamaForCausalLM(config), "input_ids"), batch, 4, (2, 2))


def vit(layers: int = 4, width: int = 384, pixels: int = 112) -> Workload:
    """A vision transformer with 6 heads on patches of 16 pixels."""
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=4 * width,
        image_size=pixels, num_labels=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, 3, pixels, pixels), torch.randint(100, (samples,))

    return Workload("vit", lambda: Loss(ViTForImageClassification(config), "pixel_values"), batch, 4, (4, 1))


def unet(width: int = 16, pixels: int = 96) -> Workload:
    """A U-Net of four levels."""

    def batch(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, 3, pixels, pixels), torch.randint(2, (samples, pixels, pixels))

    return Workload("unet", lambda: UNet(width), batch, 2, (4, 3), own_statistics=True)


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "mlp": lambda: mlp(1024, 6, each=256),
    "gpt2": lambda: gpt2(2, 128, 512, 16384),
    "llama": llama,
    "vit": vit,
    "resnet50": lambda: resnet50(96),
    "unet": unet,
}
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("layers.0.weight", "layers.2.weight", "layers.4.weight"),
    "gpt2": ("blocks.*.q.weight", "blocks.*.k.weight", "blocks.*.v.weight", "blocks.*.up.weight"),
    "llama": tuple(f"*.{name}_proj.weight" for name in ("q", "k", "v", "gate", "up")),
    "vit": ("*.attention.q_proj.weight", "*.attention.k_proj.weight", "*.attention.v_proj.weight", "*.fc1.weight"),
}
ROWS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("layers.1.weight", "layers.3.weight", "layers.5.weight"),
    "gpt2": ("blocks.*.out.weight", "blocks.*.down.weight"),
    "llama": ("*.o_proj.weight", "*.down_proj.weight"),
    "vit": ("*.attention.o_proj.weight", "*.fc2.weight"),
}


@dataclass(frozen=True)
class Case:
    """A step: a model, and how it is split over a number of processes.

    how    data: the batch; tensor: the weights of the layers, as Megatron does; images: their height; both: the batch
           in two, and each half by weights or by the height of images
    """

    model: str
    how: str
    ranks: int
    backend: str = "eager"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.how}, {self.ranks}" + ("" if self.backend == "eager" else f", {self.backend}")

    def arguments(self, work: Workload) -> dict[str, Any]:
        """The arguments of `shard`."""
        other = "tp" if self.model in COLUMNS else "sp"
        counts = {"data": {"dp": self.ranks}, "both": {"dp": 2, other: self.ranks // 2}}
        mesh = counts.get(self.how, {other: self.ranks})
        batch = work.by("dp" if "dp" in mesh else None)
        if "sp" in mesh:
            batch = tuple((*dims[:2], "sp", None) if len(dims) == 4 else dims for dims in batch)
        weights = {}
        if "tp" in mesh:
            weights = dict.fromkeys(COLUMNS[self.model], ("tp", None)) | dict.fromkeys(ROWS[self.model], (None, "tp"))
        return {"mesh": mesh, "in_strategy": batch, **({"parameter_plan": weights} if weights else {})}


def cases(ranks: int) -> tuple[Case, ...]:
    """The steps on a number of processes."""
    alone = ("data",)
    hows = {1: alone, 2: ("data", "tensor")}.get(ranks, ("data", "both"))
    images = {1: alone, 2: ("data", "images")}.get(ranks, ("data", "images", "both"))
    steps = [Case(model, how, ranks) for model in WORKLOADS for how in (hows if model in COLUMNS else images)]
    compiled = [Case(model, "data", ranks, "inductor") for model in ("mlp", "gpt2")] if ranks <= 2 else []
    return (*steps, *compiled)
