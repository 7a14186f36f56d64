"""What a rank holds when a Llama generates: what the plan of a token predicts, and what lives in 8 processes.

    python benchmarks/inference_memory.py                 # plans Llama-3-8B on 8 devices, runs a small one in 8
    python benchmarks/inference_memory.py --layers 4      # fewer layers of Llama-3-8B

Llama-3-8B (bfloat16, its weights on the meta device) has a static cache of 4096 places for 8 texts; a prompt of half
of that is read at once. The bar for a token is an eighth of the weights, an eighth of the cache, and what one layer
works with. So the memory limit leaves little beside the two eighths: room for what the prompt's call works with. The
small model runs without a limit; live bytes are those of its parameters' and caches' parts, and the most that operators
have made at a time (live_bytes.py).
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from live_bytes import LiveBytes
from script import free_port, start
from torch import Tensor, nn

import partway as pw
from partway.requests.dtensors import noted

RANKS = 8
BATCH, PLACES = 8, 4096
ROOM = 4e8  # bytes for what a prompt's call works with


class Token(nn.Module):
    """A causal language model as a function of ids, a cache and positions: the scores of the last token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, cache: Any, positions: Tensor) -> Any:
        return self.model(ids, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1)


def llama(**sizes: int) -> nn.Module:
    """Eight heads for keys and values, as Llama-3-8B has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return Token(LlamaForCausalLM(LlamaConfig(num_key_value_heads=8, max_position_embeddings=8192, **sizes))).eval()


def cache_of(model: Any, places: int) -> Any:
    """A cache that its first call makes."""
    from transformers import StaticCache

    return StaticCache(config=model.model.config, max_cache_len=places)


def positions(start: int, stop: int) -> Tensor:
    """Of the tokens of every text."""
    return torch.arange(start, stop)[None]


def planned(layers: int) -> None:
    """The plans of Llama-3-8B, for a prompt and for a token."""
    with torch.device("meta"):
        plain = llama(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            vocab_size=128256,
        ).to(torch.bfloat16)
    weights = sum(p.nbytes for p in plain.parameters())
    shape = BATCH, 8, PLACES, 128
    cache_bytes = 2 * layers * 2 * torch.Size(shape).numel()
    eighths = (weights + cache_bytes) / RANKS
    begin = time.perf_counter()
    pw.set_algo_parameters(memory_limit=1.02 * eighths + ROOM)
    with torch.inference_mode():
        model: Any = pw.shard(plain, mesh={"tp": RANKS}, inference=True)
        cache = cache_of(model, PLACES)
        model.infer_predict_layout(torch.ones(BATCH, PLACES // 2, dtype=torch.long), cache, positions(0, PLACES // 2))
        made = next(tensor for tensor in model.plan.outputs if tuple(tensor.shape) == shape)
        print(f"prompt: {model.plan.memory}, after {time.perf_counter() - begin:.0f} s", flush=True)
        layout = model.plan.layout_of(made.codes)
        for layer in cache.layers:  # as the prompt's call would leave it, with memory that nobody touches
            layer.lazy_initialization(*[torch.empty(BATCH, 8, 1, 128, dtype=torch.bfloat16)] * 2)
            layer.keys, layer.values = (noted(torch.empty(shape, dtype=torch.bfloat16), layout) for _ in range(2))
        model.infer_predict_layout(
            torch.ones(BATCH, 1, dtype=torch.long), cache, positions(PLACES // 2, PLACES // 2 + 1)
        )
    memory, expanded = model.plan.memory, 4 * cache_bytes / layers / RANKS
    print(f"token: {memory}, after {time.perf_counter() - begin:.0f} s")
    print(
        f"  parameters {memory.parameters / weights * RANKS:.3f} of an eighth, the cache "
        f"{memory.inputs / cache_bytes * RANKS:.3f}; beside both {memory.working / 1e6:.1f} MB, of which a layer's "
        f"keys and values for 32 heads are {expanded / 1e6:.1f}; all is {memory.total / eighths:.3f} of both eighths",
        flush=True,
    )


def rank(index: int, port: int) -> None:
    """One process: a prompt, and three tokens."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(index)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pw.init()
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    model: Any = pw.shard(llama(vocab_size=2048, **sizes), mesh={"tp": RANKS}, inference=True)
    with torch.inference_mode():
        cache = cache_of(model, 512)
        cache = model(torch.ones(BATCH, 64, dtype=torch.long), cache, positions(0, 64)).past_key_values
        one = torch.ones(BATCH, 1, dtype=torch.long)
        cache = model(one, cache, positions(64, 65)).past_key_values
        with LiveBytes() as live:
            cache = model(one, cache, positions(65, 66)).past_key_values
    predicted = model.plan.memory
    parameters = sum(p.to_local().nbytes for p in model.parameters())
    held = sum(t.to_local().nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    found = parameters + held + live.peak
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, found)
    if index == 0:
        print(
            f"{RANKS} processes: predicted {predicted.total / 1e6:.3f} MB, lives {min(every) / 1e6:.3f} to "
            f"{max(every) / 1e6:.3f} MB, ratio {predicted.total / max(every):.3f} (parameters {parameters / 1e6:.3f}, "
            f"cache {held / 1e6:.3f}, made {live.peak / 1e6:.3f}; predicted {predicted})"
        )
    dist.destroy_process_group()


def main(
    layers: Annotated[int, typer.Option(min=1, help="of Llama-3-8B")] = 32,
    plan: Annotated[bool, typer.Option(help="plan Llama-3-8B")] = True,
) -> None:
    if plan:
        planned(layers)
    mp.spawn(rank, (free_port(),), nprocs=RANKS)


if __name__ == "__main__":
    start(main)
