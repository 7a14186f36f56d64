"""The language models of published training runs: a Llama-like and a GPT-like decoder.

A Llama-like block has RMSNorm, rotary positions, grouped keys and values and a gated MLP (SiLU); a GPT-like block has
LayerNorm, learned positions and an MLP with GELU. Linear layers have no biases, whose cost is negligible. The names of
the modules are those of Hugging Face's Llama, so that one set of annotations splits both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Architecture:
    """The shapes of a decoder.

    family      "llama" or "gpt"
    heads, kv   attention heads, and heads of keys and values
    tied        whether the output layer has the weights of the embedding
    flash       whether attention is one kernel; otherwise scores are in memory, masked and normalized
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    tied: bool
    flash: bool = True

    @property
    def in_block(self) -> int:
        """The parameters of one block's matrices and norms."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * head * self.kv
        return attention + (3 if self.family == "llama" else 2) * self.hidden * self.ffn + 2 * self.hidden

    def parameters(self, sequence: int) -> int:
        """All parameters, with learned positions for a GPT."""
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        positions = sequence * self.hidden if self.family == "gpt" else 0
        return self.layers * self.in_block + tables + positions + self.hidden


class Attention(nn.Module):
    """Causal attention; with rotary positions for a Llama."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.head, self.groups, self.rotary = a.hidden // a.heads, a.heads // a.kv, a.family == "llama"
        self.flash = a.flash
        self.q_proj = nn.Linear(a.hidden, a.hidden, bias=False)
        self.k_proj = nn.Linear(a.hidden, a.kv * self.head, bias=False)
        self.v_proj = nn.Linear(a.hidden, a.kv * self.head, bias=False)
        self.o_proj = nn.Linear(a.hidden, a.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [batch, sequence, hidden]; `cos`, `sin` [sequence, head]."""
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in projected)
        if self.rotary:
            q, k = (_rotated(y, cos, sin) for y in (q, k))
        if self.groups > 1:
            k, v = (
                y[:, :, None].expand(-1, -1, self.groups, -1, -1).reshape(q.shape) for y in (k, v)
            )  # each head of keys serves a group
        if self.flash:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(2, 3) / self.head**0.5).masked_fill(later, float("-inf"))
            attended = scores.softmax(-1) @ v
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, half), -1) * sin


class Block(nn.Module):
    """A block with norms before its halves."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gated = a.family == "llama"
        self.input_layernorm, self.post_attention_layernorm = _norm(a), _norm(a)
        self.self_attn = Attention(a)
        if self.gated:
            self.gate_proj = nn.Linear(a.hidden, a.ffn, bias=False)
        self.up_proj = nn.Linear(a.hidden, a.ffn, bias=False)
        self.down_proj = nn.Linear(a.ffn, a.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [batch, sequence, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        y = F.silu(self.gate_proj(y)) * self.up_proj(y) if self.gated else F.gelu(self.up_proj(y))
        return x + self.down_proj(y)


def _norm(a: Architecture) -> nn.Module:
    if a.family == "llama":
        return nn.RMSNorm(a.hidden, eps=1e-5)
    return nn.LayerNorm(a.hidden, bias=False)


class Decoder(nn.Module):
    """The embedding, the blocks and the last norm."""

    def __init__(self, a: Architecture, sequence: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(a.vocab, a.hidden)
        self.positions = nn.Embedding(sequence, a.hidden) if a.family == "gpt" else None
        self.layers = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = _norm(a)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`tokens` [batch, sequence]."""
        x = self.embed_tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LanguageModel(nn.Module):
    """A decoder with its output layer, in `dtype`. The call gives the mean cross entropy of the next tokens."""

    def __init__(self, a: Architecture, sequence: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = Decoder(a, sequence)
        self.lm_head = nn.Linear(a.hidden, a.vocab, bias=False)
        if a.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.to(dtype)
        self.cos: Tensor
        head = a.hidden // a.heads
        self.register_buffer("cos", torch.empty(sequence, head, dtype=dtype), persistent=False)
        self.register_buffer("sin", torch.empty(sequence, head, dtype=dtype), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """`tokens`, `labels` [batch, sequence]."""
        logits = self.lm_head(self.model(tokens, self.cos, self.sin))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
