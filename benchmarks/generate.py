"""The time of a token that a Llama generates with a static cache: Partway on virtual devices and on gloo processes,
beside one process, the same model by hand with DTensor, and what the ranks' own programs take.

    python benchmarks/generate.py                         # batch 1 and 8, 64 tokens; 4 virtual devices, 2 processes
    python benchmarks/generate.py --processes 4 --rounds 3
    python benchmarks/generate.py --no-gloo

Ways take turns, in one process (virtual devices) and in one group of processes (gloo); each figure is the median over
texts, and a ratio is that of the two texts of one round, with its quartiles. "Its ranks' own programs" is the decode
step of one rank as plain Python (step_graphs.py: no runtime, no other rank, collectives free) times the ranks, plus
what `generate` itself takes for a token of the plain model.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from script import free_port, start
from step_graphs import inference_step
from torch import nn

import partway as pw

PROMPT = 16
TOKENS = 64
Ways = dict[str, nn.Module]


def llama(hidden: int, layers: int) -> nn.Module:
    """Eight heads, of which pairs share keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=8 * hidden // 3 // 32 * 32, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=8192, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def by_hand(model: nn.Module, ranks: int) -> nn.Module:
    """Tensor parallelism as PyTorch's tutorial writes it: projections by columns, then by rows; the embedding by rows
    and the head by columns, whose scores are gathered. Each rank has its heads' part of the cache."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = dict.fromkeys(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    )
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, dist.init_device_mesh("cpu", (ranks,)), plan)


def milliseconds(model: Any, batch: int, seed: int, tokens: int) -> tuple[float, torch.Tensor]:
    """Of a token (the first one apart, which reads the prompt), and the text."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 8192, (batch, PROMPT))
    times: list[float] = []
    with torch.inference_mode():
        text = model.generate(
            ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, cache_implementation="static",
            disable_compile=True, stopping_criteria=[_Clock(times)],
        )  # fmt: skip
    return 1000 * (times[-1] - times[0]) / (len(times) - 1), text


class _Clock:
    """Notes when each token is there, and stops nothing."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def rounds(ways: Ways, batch: int, count: int) -> dict[str, list[float]]:
    """The milliseconds of each way in each round. Raises RuntimeError where a text differs from the first way's."""
    for model in ways.values():
        milliseconds(model, batch, 0, 4)
        milliseconds(model, batch, 0, 4)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(count):
        texts = []
        for name, model in ways.items():
            took, text = milliseconds(model, batch, seed, TOKENS)
            found[name].append(took)
            texts.append(text)
        for name, text in zip(ways, texts, strict=True):
            if not torch.equal(text, texts[0]):
                raise RuntimeError(f"{name} generates another text than {next(iter(ways))}")
    return found


def report(title: str, found: dict[str, list[float]], ours: str) -> None:
    """Medians, and the ratio of `ours` to each other way."""
    print(title)
    for name, times in found.items():
        line = f"  {name:36} {statistics.median(times):7.2f} ms a token"
        if name != ours:
            low, middle, high = statistics.quantiles(
                [a / b for a, b in zip(found[ours], times, strict=True)], n=4, method="inclusive"
            )
            line += f"   {ours} is {middle:.2f} of it ({low:.2f} to {high:.2f})"
        print(line, flush=True)


def virtual(hidden: int, layers: int, batch: int, count: int, devices: int) -> None:
    """One process: plain, and virtual devices."""
    plain = llama(hidden, layers)
    model: Any = pw.shard(llama(hidden, layers), mesh={"tp": devices}, inference=True)
    ways = {"one process": plain, "partway": model}
    found = rounds(ways, batch, count)
    own = [_own(model, plain, batch, devices, found["one process"][i]) for i in range(count)]
    report(f"batch {batch}, {devices} virtual devices", {**found, "its ranks' own programs": own}, "partway")


def _own(model: Any, plain: Any, batch: int, devices: int, token: float) -> float:
    """Milliseconds of the ranks' decode steps, and of what `generate` does beside the model."""
    alone = 1000 * _median(inference_step(model), 30)
    return devices * alone + max(0.0, token - 1000 * _forward(plain, batch))


def _forward(plain: Any, batch: int) -> float:
    """Seconds of a decode step of the plain model, without `generate`."""
    from transformers import StaticCache

    cache = StaticCache(config=plain.config, max_cache_len=PROMPT + TOKENS)
    with torch.inference_mode():
        plain(torch.ones(batch, PROMPT, dtype=torch.long), past_key_values=cache)
        one = torch.ones(batch, 1, dtype=torch.long)
        place = torch.tensor([PROMPT])
        mask = torch.ones(batch, PROMPT + 1, dtype=torch.long)
        return _median(
            lambda: plain(one, past_key_values=cache, attention_mask=mask, position_ids=place[None]), TOKENS // 2
        )


def _median(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def rank(index: int, port: int, sizes: tuple[int, int], batches: Sequence[int], count: int, ranks: int) -> None:
    """One process of a group."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(index)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pw.init()
    ways = {
        "DTensor by hand": by_hand(llama(*sizes), ranks),
        "partway": pw.shard(llama(*sizes), mesh={"tp": ranks}, inference=True),
    }
    plain = llama(*sizes)
    for batch in batches:
        found = rounds(ways, batch, count)
        if index == 0:
            alone = rounds({"one process": plain}, batch, count)  # while the others wait, which takes no core
            report(f"batch {batch}, {ranks} gloo processes", {**alone, **found}, "partway")
        dist.barrier()
    dist.destroy_process_group()


def main(
    hidden: Annotated[int, typer.Option(help="width of the model")] = 512,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    devices: Annotated[int, typer.Option(min=2, help="virtual devices")] = 4,
    processes: Annotated[int, typer.Option(min=2)] = 2,
    count: Annotated[int, typer.Option("--rounds", min=2, help="texts of each way")] = 5,
    gloo: Annotated[bool, typer.Option(help="measure processes too")] = True,
) -> None:
    torch.set_num_threads(1)
    batches = (1, 8)
    for batch in batches:
        virtual(hidden, layers, batch, count, devices)
    if gloo:
        mp.spawn(rank, (free_port(), (hidden, layers), batches, count, processes), nprocs=processes)


if __name__ == "__main__":
    start(main)
