"""A step of GPT-2 on one device, beside plain PyTorch and torch.compile.

    python benchmarks/one_device.py [--device cuda] [--layers 12] [--batch 8] [--length 1024] [--kernels 20]

Forward and backward in bfloat16, on a mesh of one device: what Partway adds, and what it leaves out, where nothing is
sent. Contenders take their rounds one after another. `issued` is how long Python takes to hand the step to the device.
`--kernels` lists what takes the device most time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import partway as pw

WARM = 5
CONTENDERS: dict[str, Callable[[Any, str], Any]] = {
    "plain": lambda model, device: model,
    "torch.compile": lambda model, device: torch.compile(model),
    "partway": lambda model, device: pw.shard(model, mesh={"dp": 1}, device=device),
    "partway, inductor": lambda model, device: pw.shard(model, mesh={"dp": 1}, device=device),
}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the model")] = 12,
    batch: Annotated[int, typer.Option(help="texts")] = 8,
    length: Annotated[int, typer.Option(help="tokens of a text")] = 1024,
    rounds: Annotated[int, typer.Option(help="steps of each, after the first five")] = 13,
    kernels: Annotated[int, typer.Option(help="how many to list")] = 0,
) -> None:
    """Measure."""
    ids = torch.randint(50257, (batch, length), device=device)
    table = Table("contender", "ms", "issued, ms", "first, s", "peak, GB", "loss", box=SIMPLE_HEAD)
    console, models = Console(width=120), dict[str, Any]()
    for name, made in CONTENDERS.items():
        pw.reset_auto_parallel_context()
        torch.manual_seed(0)
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        plain = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_positions=length, **quiet)).to(device, torch.bfloat16)
        with pw.auto_parallel_context(backend="inductor" if name.endswith("inductor") else "eager"):
            model = made(plain, device)
            times, issued, loss = _timed(model, ids, WARM + rounds)
            peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
            each = [statistics.median(seconds[WARM:]) * 1e3 for seconds in (times, issued)]
            table.add_row(name, *(f"{ms:.2f}" for ms in each), f"{times[0]:.1f}", f"{peak:.2f}", f"{loss:.4f}")
            models[name] = model
    console.print(table)
    for name, model in models.items() if kernels else ():  # at the end: what was traced once is slower ever after
        console.print(f"{name}:\n{_kernels(model, ids, kernels)}")


def _timed(model: Any, ids: torch.Tensor, steps: int) -> tuple[list[float], list[float], float]:
    """The seconds of each step, those until it was issued, and the last loss."""
    times, issued, loss = [], [], 0.0
    _wait(ids)
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        began = time.perf_counter()
        loss = _step(model, ids)
        issued.append(time.perf_counter() - began)
        _wait(ids)
        times.append(time.perf_counter() - began)
    return times, issued, float(loss)


def _step(model: Any, ids: torch.Tensor) -> Any:
    loss = model(ids, labels=ids).loss
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return loss.detach()


def _wait(on: torch.Tensor) -> None:
    if on.is_cuda:
        torch.cuda.synchronize()


def _kernels(model: Any, ids: torch.Tensor, count: int) -> str:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        _step(model, ids)
        _wait(ids)
    key = "self_device_time_total" if ids.is_cuda else "self_cpu_time_total"
    return str(seen.key_averages().table(sort_by=key, row_limit=count, max_name_column_width=90))


if __name__ == "__main__":
    start(main)
