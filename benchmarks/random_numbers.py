"""What random numbers cost, under each value of the option random_numbers.

    python benchmarks/random_numbers.py
    torchrun --nproc-per-node 2 benchmarks/random_numbers.py

First the mask of a tensor of 2^24 elements (each rank draws its part, of PyTorch's numbers all of it); then steps of
a small GPT with dropout, data parallel over the processes, in turns. Prints the best and the median of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partway as pw
from partway.propagation.ops.random_numbers import RandomNumbers, draw, keys
from partway.runtime.launching.process import get_group_size, get_rank, init, launched, shutdown
from partway.strategy.cut import Cut

ELEMENTS, P = 2**24, 0.9
LAYERS, WIDTH, HEADS, LENGTH, BATCH, DROPOUT = 4, 256, 4, 256, 8, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), DROPOUT)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), DROPOUT)


def masks(world: int, rank: int) -> dict[str, Callable[[], Tensor]]:
    cut, place = Cut(ELEMENTS, (world,)), torch.tensor(rank)
    fresh = torch.empty(ELEMENTS)
    (key,) = keys(1)

    def drawn(stream: bool) -> Tensor:
        split = ([place], [0], [str(cut)]) if world > 1 else ([], [], [])
        mask: Tensor = draw(key, *split, "bernoulli", [P], [ELEMENTS], torch.bool, torch.device("cpu"), stream)
        return mask

    return {
        RandomNumbers.TORCH: lambda: fresh.bernoulli_(P),
        RandomNumbers.COUNTER: lambda: drawn(stream=False),
        RandomNumbers.RANK: lambda: drawn(stream=True),
    }


def steps(world: int) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for mode in RandomNumbers:
        torch.manual_seed(0)
        x = torch.randn(BATCH, LENGTH, WIDTH)
        with pw.auto_parallel_context(random_numbers=mode):
            model = pw.shard(
                nn.Sequential(*(Block() for _ in range(LAYERS))), mesh={"dp": world}, in_strategy=(("dp", None, None),)
            )

            def step(model: Any = model, x: Tensor = x, mode: str = mode) -> None:
                with pw.auto_parallel_context(random_numbers=mode):
                    model(x).square().mean().backward()

            step()
        found[mode] = step
    return found


def measure(title: str, contenders: dict[str, Callable[[], Any]], rounds: int, rank: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        for name, found in seconds.items():
            print(f"{title}, {name:8} best {min(found) * 1e3:7.1f} ms, median {statistics.median(found) * 1e3:7.1f} ms")


def main() -> None:
    if launched():
        init()
    world, rank = (get_group_size(), get_rank()) if launched() else (1, 0)
    torch.manual_seed(0)
    measure(f"mask of 2^24 on {world}", masks(world, rank), 7, rank)
    measure(f"step of a GPT on {world}", steps(world), 9, rank)
    if launched():
        shutdown()


if __name__ == "__main__":
    main()
