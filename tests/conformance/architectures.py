"""Architectures of Hugging Face's transformers and diffusers, small and with random weights, split over 8 simulated
devices.

    python tests/conformance/architectures.py --write        all; writes docs/coverage/architectures.md
    python tests/conformance/architectures.py gpt2 mamba     only these; prints the results

Each runs in its own process. Results are kept in out/architectures.jsonl, and `--write` continues from there; `--fresh`
discards them. A cell is right if the loss, every gradient and every other output equal those of one device, in float64.
Values that transformers casts to float32 stay in float64 here, so that rounding hides no error.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from command import arguments
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

import partway as pw

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "out" / "architectures.jsonl"
PAGE = ROOT / "docs" / "coverage" / "architectures.md"
SECONDS = 900  # for one architecture in all set-ups
BATCH, SEQUENCE, VOCABULARY, CLASSES = 8, 8, 96, 8
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**SIZES, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 4}
STATIC_EXPERTS = {"experts_implementation": "batched_mm"}

Batch = dict[str, Any]


# -- batches


def tokens(_: Any) -> Batch:
    """Token ids, with padding at the end of a sample, and a label for each; ranks have different numbers of labels."""
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[0, -2:] = 0
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def unpadded(config: Any) -> Batch:
    """Token ids and labels."""
    batch = tokens(config)
    del batch["attention_mask"]
    return batch


def brief(config: Any) -> Batch:
    """Half as many token ids and labels as in `unpadded`."""
    return {name: tensor[:, : SEQUENCE // 2] for name, tensor in unpadded(config).items()}


def classified(config: Any) -> Batch:
    """Padded token ids, and a class for each sample."""
    return {**tokens(config), "labels": torch.randint(0, CLASSES, (BATCH,))}


def images(config: Any) -> Batch:
    """Images, and a class for each."""
    side = getattr(config, "image_size", 32)
    return {"pixel_values": torch.randn(BATCH, 3, side, side), "labels": torch.randint(0, CLASSES, (BATCH,))}


def films(config: Any) -> Batch:
    """Short videos, and a class for each."""
    size = config.image_size
    return {
        "pixel_values": torch.randn(BATCH, config.num_frames, 3, size, size),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def masks(config: Any) -> Batch:
    """Images, and a class for each pixel."""
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, CLASSES, (BATCH, 32, 32))}


def pairs(config: Any) -> Batch:
    """Images and captions."""
    text = tokens(None)
    side = config.vision_config.image_size
    return {
        "input_ids": text["input_ids"],
        "attention_mask": text["attention_mask"],
        "pixel_values": torch.randn(BATCH, 3, side, side),
        "return_loss": True,
    }


def spectra(config: Any) -> Batch:
    """Speech spectra, and their transcripts."""
    features = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "labels": tokens(None)["labels"]}


def frames(config: Any) -> Batch:
    """Speech spectra with time as the first dim, and their transcripts."""
    features = torch.randn(BATCH, 2 * SEQUENCE, config.input_feat_per_channel)
    return {"input_features": features, "labels": tokens(None)["labels"].clamp(min=0)}


def sounds(_: Any) -> Batch:
    """Waveforms, and a class for each."""
    return {"input_values": torch.randn(BATCH, 640), "labels": torch.randint(0, CLASSES, (BATCH,))}


def speech(_: Any) -> Batch:
    """Waveforms, and a transcript for each."""
    return {"input_values": torch.randn(BATCH, 640), "labels": torch.randint(3, VOCABULARY, (BATCH, 3))}


def patched_audio(config: Any) -> Batch:
    """Spectra as images, and a class for each."""
    return {
        "input_values": torch.randn(BATCH, config.max_length, config.num_mel_bins),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def series(config: Any) -> Batch:
    """Several time series, and their continuations."""
    channels = config.num_input_channels
    return {
        "past_values": torch.randn(BATCH, config.context_length, channels),
        "future_values": torch.randn(BATCH, config.prediction_length, channels),
    }


def dated_series(config: Any) -> Batch:
    """A time series with features of its days, and its continuation."""
    past, days = config.context_length + max(config.lags_sequence), config.num_time_features
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, days),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, config.prediction_length),
        "future_time_features": torch.randn(BATCH, config.prediction_length, days),
    }


def noisy(_: Any) -> Batch:
    """Noisy images, the time step of each, and the noise."""
    return {
        "sample": torch.randn(BATCH, 3, 16, 16),
        "timestep": torch.randint(0, 1000, (BATCH,)),
        "noise": torch.randn(BATCH, 3, 16, 16),
    }


# -- models


def of(model_type: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers with random weights and without dropout."""

    def build() -> nn.Module:
        experts = options.get("experts_implementation")
        config = AutoConfig.for_model(model_type, **{k: v for k, v in options.items() if k != "experts_implementation"})
        for part in _configs(config):
            for name, number in vars(part).items():
                if ("drop" in name or name == "mask_time_prob") and isinstance(number, float):
                    setattr(part, name, 0.0)
        found = getattr(transformers, head)
        model = found.from_config(config) if head.startswith("Auto") else found(config)
        if experts:
            model.set_experts_implementation(experts)
        return model

    return build


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            yield from _configs(part)


class Denoiser(nn.Module):
    """The loss of a diffusion model: the error of its prediction of the noise."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> dict[str, Tensor]:
        found = self.unet(sample, timestep)
        guess = found if isinstance(found, Tensor) else found.sample
        return {"loss": nn.functional.mse_loss(guess, noise), "sample": guess}


class Residual(nn.Module):
    """Two convolutions of a U-Net, with the time step added between them."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(nn.functional.silu(self.norm2(y)))


class UNet(nn.Module):
    """A small version of Ho et al.'s U-Net: two image sizes, attention on the smaller one, skips between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width, time = width, 2 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, time), Residual(width, 2 * width, time)])
        self.smaller = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.larger = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = nn.ModuleList([Residual(4 * width, 2 * width, time), Residual(2 * width, width, time)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        time = self.time(self._waves(timestep))
        large = self.down[0](self.first(sample), time)
        small = self.down[1](self.smaller(large), time)
        places = self.norm(small).flatten(2).transpose(1, 2)
        seen = self.attention(places, places, places, need_weights=False)[0].transpose(1, 2).reshape(small.shape)
        y = self.up[0](torch.cat([small + seen, small], 1), time)
        y = self.larger(nn.functional.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.last(self.up[1](torch.cat([y, large], 1), time))

    def _waves(self, timestep: Tensor) -> Tensor:
        rates = torch.exp(-9.2 * torch.arange(self.width // 2) / (self.width // 2))
        angles = timestep[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


def diffusers_unet() -> nn.Module:
    """diffusers' UNet2DModel."""
    from diffusers import UNet2DModel

    return Denoiser(
        UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=8,
        )
    )


# -- the table


@dataclass(frozen=True)
class Architecture:
    """A model with its batch.

    build    the model, in the default dtype
    batch    a batch for a model of this config
    note     what a user has to set
    needs    a package that is not among Partway's test dependencies
    refused  the text of the CaptureError, if it cannot be captured
    """

    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[Any], Batch]
    note: str = ""
    needs: str = ""
    refused: str = ""


CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
IMAGE, AUDIO = "AutoModelForImageClassification", "AutoModelForAudioClassification"
EXPERTS_NOTE = '`model.set_experts_implementation("batched_mm")`: the default loops over the experts that were hit'
_STAGES = {"num_labels": CLASSES, "hidden_sizes": [16, 32], "depths": [1, 1]}
_PIXELS = {**WIDE, "image_size": 16, "patch_size": 4, "num_labels": CLASSES}
_WAVES = {
    **WIDE,
    "num_labels": CLASSES,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
}
_TRANSLATION = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_T5 = {
    "d_model": 32, "d_kv": 4, "d_ff": 64, "num_layers": 2, "num_heads": 8, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_MAMBA = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOWERS = {
    "text_config": WIDE,
    "vision_config": {**WIDE, "image_size": 16, "patch_size": 4},
    "projection_dim": 16,
}


def _decoder(model_type: str, **options: Any) -> Architecture:
    return Architecture("decoder", of(model_type, CAUSAL, **{**GROUPED, **options}), tokens)


def _encoder(model_type: str, **options: Any) -> Architecture:
    return Architecture("encoder", of(model_type, MASKED, **{**WIDE, **options}), tokens)


def _seq2seq(model_type: str, **options: Any) -> Architecture:
    return Architecture("encoder-decoder", of(model_type, SEQ2SEQ, **{**_TRANSLATION, **options}), tokens)


def _vision(model_type: str, **options: Any) -> Architecture:
    return Architecture("vision", of(model_type, IMAGE, **options), images)


def _experts(model_type: str, head: str = CAUSAL, **options: Any) -> Architecture:
    every = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True, **STATIC_EXPERTS, **options}
    return Architecture("mixture of experts", of(model_type, head, **every), tokens, EXPERTS_NOTE)


ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture("decoder", of("bloom", CAUSAL, **SIZES), tokens),
    "codegen": _decoder("codegen", n_ctx=32, rotary_dim=4, n_head=8),
    "cohere": _decoder("cohere"),
    "falcon": _decoder("falcon", new_decoder_architecture=True, num_kv_heads=4),
    "gemma": _decoder("gemma", head_dim=4),
    "gemma2": _decoder("gemma2", head_dim=4, sliding_window=4),
    "gemma3": _decoder("gemma3_text", head_dim=4, sliding_window=4),
    "gpt2": _decoder("gpt2"),
    "gpt_bigcode": _decoder("gpt_bigcode"),
    "gpt_neo": Architecture(
        "decoder", of("gpt_neo", CAUSAL, **SIZES, attention_types=[[["global", "local"], 1]], window_size=4), tokens
    ),
    "gpt_neox": _decoder("gpt_neox"),
    "gptj": _decoder("gptj", rotary_dim=4),
    "llama": _decoder("llama"),
    "mistral": _decoder("mistral", sliding_window=4),
    "mpt": Architecture("decoder", of("mpt", CAUSAL, **{**SIZES, "max_seq_len": 32}), tokens),
    "olmo2": _decoder("olmo2"),
    "opt": _decoder("opt", ffn_dim=64, word_embed_proj_dim=32),
    "phi": _decoder("phi"),
    "phi3": _decoder("phi3"),
    "qwen2": _decoder("qwen2"),
    "qwen3": _decoder("qwen3", head_dim=4),
    "stablelm": _decoder("stablelm"),
    "starcoder2": _decoder("starcoder2"),
    "albert": _encoder("albert", embedding_size=16),
    "bert": _encoder("bert"),
    "convbert": _encoder("convbert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    "deberta-v2": _encoder(
        "deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4, max_relative_positions=8
    ),
    "distilbert": Architecture("encoder", of("distilbert", MASKED, **SIZES, hidden_dim=64), tokens),
    "electra": _encoder("electra", embedding_size=16),
    "esm": _encoder("esm", mask_token_id=3, position_embedding_type="rotary", token_dropout=False),
    "fnet": Architecture("encoder", of("fnet", MASKED, **WIDE), unpadded),
    "funnel": Architecture(
        "encoder",
        of("funnel", MASKED, block_sizes=[1, 1], d_model=32, n_head=8, d_head=4, d_inner=64, vocab_size=VOCABULARY,
           num_decoder_layers=1),
        tokens,
    ),
    "longformer": Architecture(
        "encoder", of("longformer", MASKED, **WIDE, attention_window=4), tokens
    ),
    "modernbert": _encoder("modernbert", local_attention=4, cls_token_id=1, sep_token_id=2),
    "mpnet": _encoder("mpnet"),
    "roberta": _encoder("roberta", max_position_embeddings=40),
    "roberta classifier": Architecture(
        "encoder",
        of("roberta", "AutoModelForSequenceClassification", **{**WIDE, "max_position_embeddings": 40}, num_labels=8),
        classified,
    ),
    "squeezebert": _encoder(
        "squeezebert", embedding_size=32, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1,
        intermediate_groups=2, output_groups=2,
    ),
    "xlm-roberta": _encoder("xlm-roberta", max_position_embeddings=40),
    "xlnet": Architecture(
        "encoder",
        of("xlnet", "XLNetLMHeadModel", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=8, d_inner=64),
        unpadded,
    ),
    "bart": _seq2seq("bart"),
    "m2m_100": _seq2seq("m2m_100"),
    "marian": _seq2seq("marian", decoder_vocab_size=VOCABULARY),
    "mbart": _seq2seq("mbart"),
    "pegasus": _seq2seq("pegasus"),
    "prophetnet": Architecture(
        "encoder-decoder",
        of("prophetnet", SEQ2SEQ, vocab_size=VOCABULARY, hidden_size=32, encoder_ffn_dim=64, decoder_ffn_dim=64,
           num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=8, num_decoder_attention_heads=8,
           max_position_embeddings=32, ngram=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
           decoder_start_token_id=0),
        tokens,
    ),
    "t5": Architecture("encoder-decoder", of("t5", SEQ2SEQ, **_T5), tokens),
    "umt5": Architecture("encoder-decoder", of("umt5", SEQ2SEQ, **_T5), tokens),
    "beit": _vision("beit", **_PIXELS),
    "convnext": _vision("convnext", **_STAGES, num_stages=2),
    "convnextv2": _vision("convnextv2", **_STAGES, num_stages=2),
    "deit": Architecture("vision", of("deit", "DeiTForImageClassification", **_PIXELS), images),
    "dinov2": _vision("dinov2", **_PIXELS),
    "focalnet": _vision(
        "focalnet", num_labels=CLASSES, image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "mobilenet_v2": _vision("mobilenet_v2", num_labels=CLASSES, depth_multiplier=0.25, image_size=32),
    "mobilevit": _vision(
        "mobilevit", num_labels=CLASSES, image_size=32, hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 24, 32], num_attention_heads=4, num_hidden_layers=2,
    ),
    "poolformer": _vision(
        "poolformer", num_labels=CLASSES, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], image_size=32
    ),
    "pvt": _vision(
        "pvt", num_labels=CLASSES, image_size=32, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
    ),
    "regnet": _vision("regnet", **_STAGES, embedding_size=16, groups_width=8),
    "resnet": _vision("resnet", **_STAGES, embedding_size=16),
    "segformer": Architecture(
        "vision",
        of(
            "segformer",
            "AutoModelForSemanticSegmentation",
            num_labels=CLASSES,
            hidden_sizes=[16, 16, 32, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[2, 2, 4, 4],
            decoder_hidden_size=16,
        ),
        masks,
    ),
    "swin": _vision(
        "swin", image_size=16, patch_size=2, num_labels=CLASSES, embed_dim=16, depths=[2, 2], num_heads=[4, 8],
        window_size=4,
    ),
    "swinv2": _vision(
        "swinv2", image_size=16, patch_size=2, num_labels=CLASSES, embed_dim=16, depths=[2, 2], num_heads=[4, 8],
        window_size=4,
    ),
    "timesformer": Architecture(
        "vision", of("timesformer", "TimesformerForVideoClassification", **_PIXELS, num_frames=4), films
    ),
    "vit": _vision("vit", **_PIXELS),
    "vivit": Architecture(
        "vision", of("vivit", "VivitForVideoClassification", **_PIXELS, tubelet_size=[2, 4, 4], num_frames=4), films
    ),
    "clip": Architecture("vision and text", of("clip", "CLIPModel", **_TOWERS), pairs),
    "siglip": Architecture("vision and text", of("siglip", "SiglipModel", **_TOWERS), pairs),
    "audio-spectrogram-transformer": Architecture(
        "speech",
        of("audio-spectrogram-transformer", AUDIO, **WIDE, num_labels=CLASSES, patch_size=4, num_mel_bins=16,
           max_length=16, frequency_stride=4, time_stride=4),
        patched_audio,
    ),
    "hubert": Architecture("speech", of("hubert", AUDIO, **_WAVES), sounds),
    "speech_to_text": Architecture(
        "speech",
        of("speech_to_text", "Speech2TextForConditionalGeneration", **_TRANSLATION, input_feat_per_channel=8,
           max_source_positions=32, max_target_positions=32, conv_channels=16),
        frames,
    ),
    "wav2vec2": Architecture("speech", of("wav2vec2", AUDIO, **_WAVES), sounds),
    "wav2vec2 ctc": Architecture(
        "speech", of("wav2vec2", "AutoModelForCTC", **_WAVES), speech
    ),
    "wavlm": Architecture("speech", of("wavlm", AUDIO, **_WAVES), sounds),
    "whisper": Architecture(
        "speech",
        of("whisper", "WhisperForConditionalGeneration", **_TRANSLATION, num_mel_bins=8, max_source_positions=16,
           max_target_positions=16),
        spectra,
    ),
    "unet": Architecture("diffusion", lambda: Denoiser(UNet()), noisy),
    "diffusers unet": Architecture("diffusion", diffusers_unet, noisy, needs="diffusers"),
    "deepseek_v3": _experts(
        "deepseek_v3", n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1,
        num_key_value_heads=8,
    ),
    "gpt_oss": _experts("gpt_oss", num_local_experts=8, head_dim=4, sliding_window=4),
    "mixtral": _experts("mixtral", num_local_experts=8),
    "olmoe": _experts("olmoe", num_experts=8),
    "qwen2_moe": _experts("qwen2_moe", num_experts=8, moe_intermediate_size=16, shared_expert_intermediate_size=32),
    "qwen3_moe": _experts("qwen3_moe", num_experts=8, moe_intermediate_size=16, head_dim=4),
    "switch_transformers": Architecture(
        "mixture of experts",
        of("switch_transformers", SEQ2SEQ, **_T5, num_experts=8, num_decoder_layers=2, num_sparse_encoder_layers=1,
           num_sparse_decoder_layers=1, router_jitter_noise=0.0, **STATIC_EXPERTS),
        tokens,
        refused="its course depends on the values of tensors",
    ),
    "bamba": Architecture(
        "state space",
        of("bamba", CAUSAL, **GROUPED, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=4,
           mamba_d_state=8, mamba_chunk_size=4),
        tokens,
    ),
    "falcon_h1": Architecture(
        "state space",
        of("falcon_h1", CAUSAL, **GROUPED, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=4,
           mamba_d_state=8, mamba_chunk_size=4),
        tokens,
    ),
    "falcon_mamba": Architecture("state space", of("falcon_mamba", CAUSAL, **_MAMBA), unpadded),
    "jamba": Architecture(
        "state space",
        of("jamba", CAUSAL, **GROUPED, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
           expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=4,
           use_mamba_kernels=False, **STATIC_EXPERTS),
        tokens,
        EXPERTS_NOTE,
    ),
    "lfm2": Architecture(
        "state space",
        of("lfm2", CAUSAL, **GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=8),
        tokens,
    ),
    "mamba": Architecture("state space", of("mamba", CAUSAL, **_MAMBA), unpadded),
    "mamba2": Architecture(
        "state space", of("mamba2", CAUSAL, **_MAMBA, num_heads=8, head_dim=8, n_groups=4, chunk_size=4), unpadded
    ),
    "qwen3_next": Architecture(
        "state space",
        of("qwen3_next", CAUSAL, **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
           shared_expert_intermediate_size=16, head_dim=4, layer_types=["linear_attention", "full_attention"],
           linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=8,
           output_router_logits=True, **STATIC_EXPERTS),
        tokens,
        EXPERTS_NOTE,
    ),
    "recurrent_gemma": Architecture(
        "state space",
        of("recurrent_gemma", CAUSAL, **{**GROUPED, "num_hidden_layers": 3}, lru_width=32, attention_window_size=4),
        unpadded,
    ),
    "rwkv": Architecture(
        "state space", of("rwkv", CAUSAL, **SIZES, attention_hidden_size=32, context_length=32), brief
    ),
    "patchtsmixer": Architecture(
        "time series",
        of("patchtsmixer", "PatchTSMixerForPrediction", context_length=16, patch_length=4, patch_stride=4,
           num_input_channels=4, prediction_length=4, d_model=16, num_layers=2),
        series,
    ),
    "patchtst": Architecture(
        "time series",
        of("patchtst", "PatchTSTForPrediction", context_length=16, patch_length=4, patch_stride=4,
           num_input_channels=4, prediction_length=4, d_model=32, num_attention_heads=8, ffn_dim=64,
           num_hidden_layers=2, loss="mse"),
        series,
    ),
    "time_series_transformer": Architecture(
        "time series",
        of("time_series_transformer", "TimeSeriesTransformerForPrediction", prediction_length=4, context_length=8,
           lags_sequence=[1, 2, 3], num_time_features=2, d_model=16, encoder_layers=2, decoder_layers=2,
           encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32),
        dated_series,
    ),
    "perceiver": Architecture(
        "other",
        of("perceiver", "PerceiverForMaskedLM", num_latents=8, d_latents=32, d_model=16, num_blocks=1,
           num_self_attends_per_block=1, num_self_attention_heads=4, num_cross_attention_heads=4,
           vocab_size=VOCABULARY, max_position_embeddings=8),
        tokens,
    ),
}  # fmt: skip


# -- one cell


class InDouble(TorchFunctionMode):
    """Keeps values in float64 that are cast to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = (torch.utils._pytree.tree_map(_doubled, given) for given in (args, kwargs or {}))
        return func(*args, **kwargs)


def _doubled(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given


def in_double(model: nn.Module) -> nn.Module:
    """The same model, with a forward that stays in float64."""
    for module in model.modules():
        if vars(module).get("dtype") is torch.float32:  # the dtype of a router
            module.dtype = torch.float64
    kind: Any = type(model)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with InDouble():
            return kind.forward(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return model


def build(name: str) -> nn.Module:
    """A model of the table, in float64 and in training mode."""
    torch.manual_seed(0)
    with InDouble():
        model = ARCHITECTURES[name].build()
    return in_double(model.double().train())


def batch_for(name: str, model: nn.Module) -> Batch:
    """The batch of a model."""
    torch.manual_seed(1)
    return ARCHITECTURES[name].batch(getattr(model, "config", None))


def batch_split(batch: Batch, axis: str) -> dict[str, Any]:
    """`in_strategy` for a split batch."""
    return {n: (axis, *[None] * (t.ndim - 1)) for n, t in batch.items() if isinstance(t, Tensor)}


def block_split(model: nn.Module, axis: str, count: int) -> dict[str, Any]:
    """`parameter_plan` for the matrices of the first block: the longer dim of each, as in Megatron-LM."""
    plan = {}
    for path, parameter in first_block(model).items():
        rows, columns = parameter.shape[:2]
        dim = int(columns > rows)
        dim = dim if parameter.shape[dim] % count == 0 else 1 - dim
        if parameter.shape[dim] % count == 0:
            plan[path] = tuple(axis if d == dim else None for d in range(parameter.ndim))
    return plan


def first_block(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of the first module in a list with at least two modules, by name."""
    for path, module in model.named_modules():
        if path.endswith(".0"):
            found = {f"{path}.{n}": p for n, p in module.named_parameters() if p.ndim >= 2}
            if len(found) > 1:
                return found
    return {}


def _split_batch(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"mesh": {"dp": 8}, "in_strategy": batch_split(batch, "dp")}


def _split_block(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"mesh": {"tp": 8}, "parameter_plan": block_split(model, "tp", 8)}


def _split_both(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {
        "mesh": {"dp": 2, "tp": 4},
        "in_strategy": batch_split(batch, "dp"),
        "parameter_plan": block_split(model, "tp", 4),
    }


SETUPS: Mapping[str, Callable[[nn.Module, Batch], dict[str, Any]]] = {
    "batch": _split_batch,
    "first block": _split_block,
    "2 x 4": _split_both,
}


@dataclass(frozen=True)
class Cell:
    """The result of an architecture in one set-up. `status` is right, refused or WRONG."""

    name: str
    setup: str
    status: str
    reason: str = ""
    fallbacks: list[str] = field(default_factory=list)
    collectives: int = 0
    operators: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        more = f", replicated: {' '.join(self.fallbacks)}" if self.fallbacks else ""
        what = self.reason or f"{self.operators} operators, {self.collectives} collectives, {self.seconds:.1f} s{more}"
        return f"{self.name}, {self.setup}: {self.status} ({what})"


@dataclass(frozen=True)
class Reference:
    """The results of one device."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def train(model: nn.Module, batch: Batch) -> Reference:
    """All outputs of one call, and the gradients of its loss."""
    result = model(**batch)
    loss = result["loss"]
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Reference({"loss": loss.detach(), **dict(tensors_in(result))}, gradients)


def tensors_in(value: Any, path: str = "result") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a result by their paths, including those of caches."""
    if isinstance(value, Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from tensors_in(part, f"{path}[{i}]")
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.dtype | torch.device):
        yield from tensors_in(vars(value), f"{path}:{type(value).__name__}")


def differences(found: Reference, expected: Reference) -> list[str]:
    """The differences, largest first. Rounding may cause 1e-10, and cancellation 100 units of rounding of the largest
    gradient."""
    wrong: dict[str, float] = {}
    sides = (found.outputs, expected.outputs), (found.gradients, expected.gradients)
    for other, own in sides:
        if list(other) != list(own):
            return [f"{sorted(set(own) ^ set(other))} are there on one side only"]
        present = [t for t in own.values() if t is not None and t.numel()]
        largest = max((t.double().norm().item() for t in present), default=0.0)
        for name, tensor in own.items():
            if (tensor is None) != (other[name] is None):
                return [f"the gradient of {name} is there on one side only"]
            if tensor is None:
                continue
            if (other[name].shape, other[name].dtype) != (tensor.shape, tensor.dtype):
                return [
                    f"{name} is {other[name].dtype}{list(other[name].shape)}, not {tensor.dtype}{list(tensor.shape)}"
                ]
            a, b = (t.double().nan_to_num(1e4, 1e5, -1e5) for t in (other[name], tensor))
            error, allowed = (a - b).norm().item(), 1e-10 * b.norm().item() + 2e-14 * largest
            if not error <= allowed:
                wrong[f"{name} is {error:.1e} off (of {b.norm().item():.1e})"] = error / max(allowed, 1e-300)
    return sorted(wrong, key=lambda text: -wrong[text])


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def check(name: str, setup: str, expected: Reference) -> Cell:
    """Compare one architecture in one set-up with one device."""
    from partway.strategy.errors import PartwayError

    model = build(name)
    batch = batch_for(name, model)
    pw.reset_auto_parallel_context()
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            annotations = SETUPS[setup](model, batch)
            sharded: Any = pw.shard(model, **annotations)
            found = train(sharded, batch)
        except PartwayError as error:
            return Cell(name, setup, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Cell(name, setup, "WRONG", f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    plan = sharded.plan
    wrong = differences(found, expected)
    reason = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return Cell(
        name, setup, "WRONG" if wrong else "right", reason, sorted(plan.unknown_operators), len(plan.collectives),
        len(plan.operators), seconds,
    )  # fmt: skip


def check_all(name: str, setups: tuple[str, ...] = tuple(SETUPS)) -> Iterator[Cell]:
    """One architecture in several set-ups."""
    transformers.logging.set_verbosity_error()
    torch.set_default_dtype(torch.float64)
    try:
        model = build(name)
        expected = train(model, batch_for(name, model))
        assert expected.outputs["loss"].isfinite()
        for setup in setups:
            yield check(name, setup, expected)
    finally:
        torch.set_default_dtype(torch.float32)
        pw.reset_auto_parallel_context()


# -- all of them


_PROCESSES = multiprocessing.get_context("forkserver")


def in_a_process(
    name: str,
    seconds: float = SECONDS,
    check: Callable[[str], Iterator[Cell]] = check_all,
    setups: Iterable[str] = tuple(SETUPS),
) -> list[Cell]:
    """Run `check` in its own process, for at most `seconds`."""
    _PROCESSES.set_forkserver_preload(["partway", "transformers"])
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send_cells, args=(check, name, theirs))
    process.start()
    theirs.close()
    cells: list[Cell] = []
    reason, end = f"it took more than {seconds:.0f} s", time.monotonic() + seconds
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            found = ours.recv()
            if isinstance(found, str):
                reason = found
                break
            cells.append(found)
    except EOFError:
        reason = "its process ended"
    process.kill()
    process.join()
    missing = [setup for setup in setups if setup not in {cell.setup for cell in cells}]
    return cells + [Cell(name, setup, "WRONG", reason) for setup in missing]


def _send_cells(check: Callable[[str], Iterator[Cell]], name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        for cell in check(name):
            pipe.send(cell)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def run_all(names: list[str], workers: int = 2) -> Iterator[list[Cell]]:
    """The cells of each of `names`, two architectures at a time."""
    with ThreadPoolExecutor(workers) as pool:
        for ran in as_completed([pool.submit(in_a_process, name) for name in names]):
            yield ran.result()


def kept() -> dict[str, list[Cell]]:
    """Earlier results of each architecture."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known: dict[str, list[Cell]] = {}
    for cell in (Cell(**json.loads(line)) for line in lines):
        known[cell.name] = [c for c in known.get(cell.name, []) if c.setup != cell.setup] + [cell]
    return known


_HEAD = """# Architectures of Hugging Face

Written by `python tests/conformance/architectures.py --write`; do not edit. torch {torch}, transformers {transformers}.

{count} architectures, small (2 layers, width 32, 8 heads, a batch of 8) and random, in training, on 8 simulated
devices:

| set-up | mesh | annotated |
| --- | --- | --- |
| batch | 8 | the batch dim of every input |
| first block | 8 | the matrices of the first block, each along its longer dim; nothing else |
| 2 x 4 | 2 x 4 | the batch over one axis, the first block over the other |

All other layouts are inferred. A cell is **right** if its loss, every gradient and every other output (also caches)
equal those of one device in float64, to 1e-10. It also has the number of collectives of a step, and the seconds of the
first step on one core (capture, planning, differentiation, and the step itself on all 8 ranks in one process).
`fallbacks` are operators without a rule, which run replicated.

{totals}"""


def page(known: Mapping[str, list[Cell]]) -> str:
    """The page with all results."""
    families = list(dict.fromkeys(architecture.family for architecture in ARCHITECTURES.values()))
    cells = [cell for name in ARCHITECTURES for cell in known.get(name, [])]
    counts = {status: sum(cell.status == status for cell in cells) for status in ("right", "refused", "WRONG")}
    without = sum(cell.status == "right" and not cell.fallbacks for cell in cells)
    totals = f"Of {len(cells)} cells {counts['right']} are right, {without} of them without a fallback; "
    totals += f"{counts['refused']} are refused, {counts['WRONG']} are wrong."
    if left := len(ARCHITECTURES) * len(SETUPS) - len(cells):
        totals += f" {left} have not been run."
    text = [
        _HEAD.format(
            torch=torch.__version__.split("+")[0], transformers=transformers.__version__, count=len(ARCHITECTURES),
            totals=totals,
        )
    ]  # fmt: skip
    for family in families:
        text += [
            "",
            f"## {family.capitalize()}",
            "",
            f"| architecture | operators | {' | '.join(SETUPS)} | fallbacks |",
        ]
        text += ["| --- | --- |" + " --- |" * (len(SETUPS) + 1)]
        text += [_line(name, known.get(name, [])) for name, of in ARCHITECTURES.items() if of.family == family]
        notes = {of.note: None for of in ARCHITECTURES.values() if of.family == family and of.note}
        text += [line for note in notes for line in ("", note)]
    others: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.status != "right":
            reason = re.sub(rf"/\S*/site-packages/|{ROOT}/", "", " ".join(cell.reason.split()))[:400]
            others.setdefault((cell.name, cell.status, reason), []).append(cell.setup)
    if others:
        text += ["", "## Not right", ""]
        text += [f"- {name} ({', '.join(found)}): {status}. {why}" for (name, status, why), found in others.items()]
    return "\n".join(text) + "\n"


def _line(name: str, cells: list[Cell]) -> str:
    found = {cell.setup: cell for cell in cells}
    columns = [
        f"{cell.status}, {cell.collectives}, {cell.seconds:.0f} s" if cell.status == "right" else cell.status
        for cell in (found.get(setup, Cell(name, setup, "not run")) for setup in SETUPS)
    ]
    fallbacks = sorted({f"`{operator.removeprefix('aten.')}`" for cell in cells for operator in cell.fallbacks})
    operators = max((cell.operators for cell in cells), default=0)
    return f"| {name} | {operators} | {' | '.join(columns)} | {', '.join(fallbacks)} |"


def main() -> None:
    given = arguments(__doc__, RESULTS)
    known = kept()
    for cells in run_all(given.names or [n for n in ARCHITECTURES if len(known.get(n, [])) < len(SETUPS)]):
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)
        sys.stdout.write("".join(f"{cell}\n" for cell in cells))
    if given.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(kept()))


if __name__ == "__main__":
    main()
