"""Manual programs of one rank as users write them, a GPT with them as manual functions, and the same GPT on one
device."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partway as pw
from partway.strategy import Partial, Replicate


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in which the keys and values of all ranks move around a ring. q, k, v: [batch, heads, positions,
    width], with a rank's share of the positions."""
    n, here, own = pw.axis_size("tp"), pw.axis_index("tp"), q.shape[-2]
    out, weight = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(n):
        source = (here - step) % n
        if source <= here:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if source == here:
                scores = scores.masked_fill(torch.ones(own, own, dtype=torch.bool).triu(1), -math.inf)
            total = scores.logsumexp(-1)
            new = torch.logaddexp(weight, total)
            out = out * (weight - new).exp()[..., None] + (scores.softmax(-1) @ v) * (total - new).exp()[..., None]
            weight = new
        if step < n - 1:
            pairs = [(rank, (rank + 1) % n) for rank in range(n)]
            k, v = pw.ops.permute(k, pairs, group="tp"), pw.ops.permute(v, pairs, group="tp")
    return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def split_mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, last: Tensor) -> Tensor:
    """Megatron-LM's MLP: the first weight split by rows, the second by columns, and one sum."""
    return pw.ops.all_reduce(F.gelu(x @ up.t() + bias) @ down.t(), group="tp") + last


def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, last: Tensor) -> Tensor:
    return F.gelu(x @ up.t() + bias) @ down.t() + last


def exchanged_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Send each token to the rank of its expert, and back. x: [tokens, width]; up, down: the weights of a rank's
    experts."""
    count = up.shape[0] * pw.axis_size("tp")
    weight, chosen = (x @ gate).softmax(-1).max(-1)
    places = F.one_hot(chosen, count).to(x.dtype)
    sent = pw.ops.all_to_all(torch.einsum("td,te->etd", x, places), 0, 1, group="tp")
    back = pw.ops.all_to_all(torch.relu(sent @ up) @ down, 1, 0, group="tp")
    return torch.einsum("etd,te->td", back, places) * weight[:, None]


def experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weight, chosen = (x @ gate).softmax(-1).max(-1)
    places = F.one_hot(chosen, len(up)).to(x.dtype)
    made = torch.relu(torch.einsum("td,te->etd", x, places) @ up) @ down
    return torch.einsum("etd,te->td", made, places) * weight[:, None]


def split_loss(hidden: Tensor, vocabulary: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over a vocabulary of which a rank has a part; the addend of a rank's tokens."""
    logits = hidden @ vocabulary.t()
    largest = pw.ops.all_reduce(logits.detach().amax(-1), "max", group="tp")
    total = pw.ops.all_reduce((logits - largest[:, None]).exp().sum(-1), group="tp")
    own = labels - pw.axis_index("tp") * len(vocabulary)
    has = (own >= 0) & (own < len(vocabulary))
    wanted = logits.gather(1, own.clamp(0, len(vocabulary) - 1)[:, None])[:, 0] * has
    return (total.log() + largest - pw.ops.all_reduce(wanted, group="tp")).sum()


def loss(hidden: Tensor, vocabulary: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ vocabulary.t(), labels, reduction="sum")


_HEADS = ("dp", None, "tp", None)
_TOKENS = (("dp", "tp"), None)

PLAIN = {"attention": attention, "mlp": mlp, "experts": experts, "loss": loss}
MANUALS: dict[str, Any] = {
    "attention": pw.manual(ring_attention, (_HEADS, _HEADS, _HEADS), (_HEADS,)),
    "mlp": pw.manual(
        split_mlp,
        (("dp", None, None), ("tp", None), ("tp",), (None, "tp"), None),
        (("dp", None, None),),
    ),
    "experts": pw.manual(
        exchanged_experts,
        (_TOKENS, None, ("tp", None, None), ("tp", None, None)),
        (_TOKENS,),
    ),
    "loss": pw.manual(split_loss, (("dp", None), ("tp", None), ("dp",)), ((Partial(), Replicate()),)),
}


class Layer(nn.Module):
    """A layer of the GPT. `by_hand`: which of its parts are manual functions."""

    def __init__(self, width: int, heads: int, by_hand: str) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Parameter(torch.randn(width, 8))
        self.wide = nn.Parameter(torch.randn(8, width, 2 * width) / 4)
        self.narrow = nn.Parameter(torch.randn(8, 2 * width, width) / 4)

    def part(self, name: str) -> Any:
        return MANUALS[name] if name in self.by_hand else PLAIN[name]

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).split(width, -1)
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in qkv)
        x = x + self.proj(self.part("attention")(q, k, v).transpose(1, 2).reshape(batch, length, width))
        up, down = self.up, self.down
        x = x + self.part("mlp")(self.between(x), up.weight, up.bias, down.weight, down.bias)
        tokens = self.between(x).flatten(0, 1)
        return x + self.part("experts")(tokens, self.gate, self.wide, self.narrow).view(batch, length, width)


class GPT(nn.Module):
    """Four layers: one with PyTorch's operators, and one each with a manual function for its attention, its MLP and its
    experts; the loss is a manual function too. With `manuals=False`, on one device, it has no manual function."""

    def __init__(self, manuals: bool, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.manuals = manuals
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        parts = ("", "attention", "mlp", "experts") if manuals else ("",) * 4
        self.layers = nn.ModuleList(Layer(width, 4, part) for part in parts)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        loss_of = MANUALS["loss"] if self.manuals else loss
        return loss_of(self.norm(x).flatten(0, 1), self.tokens.weight, labels.flatten()) / labels.numel()


def pair(**given: Any) -> tuple[GPT, Any]:
    """The GPT on one device in float64, and the same GPT with its manual functions, sharded with `given`."""
    torch.manual_seed(3)
    plain = GPT(manuals=False).double()
    model = GPT(manuals=True).double()
    model.load_state_dict(plain.state_dict())
    return plain, pw.shard(model, in_strategy=(("dp", None), ("dp", None)), **given)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {"ids": torch.randint(0, 32, (4, 8)), "labels": torch.randint(0, 32, (4, 8))}
