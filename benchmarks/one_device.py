"""A step of training on one device, beside plain PyTorch, torch.compile and FSDP2 of one rank.

    python benchmarks/one_device.py [--device cuda] [--model gpt2 ...] [--rounds 21] [--small] [--kernels 20]

Forward and backward in bfloat16 on a mesh of one device, where nothing is sent: what Partway adds, and what it leaves
out. All contenders of a model take turns, a step each; a ratio is that of two steps of one turn, to torch.compile's.
`issued` is how long Python takes to hand a step to the device, and `peak` what it holds beside what was there before
the contender was made. Two passes: `alone`, a process as a script is run by itself; `group`, in a process group of one
rank, as torchrun with one process makes it, where FSDP2 and Partway's split parameters are at home.

`--small` has layers so small that only the host counts: what a step costs beyond its kernels, without a GPU.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

import partway as pw
from partway.measure.contenders import quartiles

logging.set_verbosity_error()
WARM = 5
REFERENCE = "torch.compile"
Batch = dict[str, Tensor]


# -- Models ------------------------------------------------------------------------------------------------------------


def tokens(samples: int, length: int, words: int) -> Batch:
    """Texts, each word of which is to be predicted from those before it."""
    ids = torch.randint(words, (samples, length))
    return {"input_ids": ids, "labels": ids}


def images(samples: int, size: int, classes: int) -> Batch:
    """Images and their classes."""
    return {"pixel_values": torch.randn(samples, 3, size, size), "labels": torch.randint(classes, (samples,))}


def gpt2(small: bool) -> tuple[nn.Module, Batch]:
    """GPT-2 (124 M), 8 texts of 1,024 words."""
    size: dict[str, Any] = {"n_layer": 12, "vocab_size": 101, "n_embd": 32, "n_head": 4} if small else {}
    config = GPT2Config(
        **size, bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    return GPT2LMHeadModel(config), tokens(*((1, 8) if small else (8, 1024)), config.vocab_size)


def attends(small: bool, layers: int, inner: int) -> dict[str, Any]:
    """The sizes of a decoder of 4,096 wide layers and 32,000 words, `inner` wide between two products."""
    width, heads, words = (32, 4, 101) if small else (4096, 32, 32000)
    return {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 64 if small else inner,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2 if small else 8, "vocab_size": words,
        "use_cache": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def llama(small: bool) -> tuple[nn.Module, Batch]:
    """4 layers of Llama-3-8B and 32,000 words, 2 texts of 2,048 words."""
    config = LlamaConfig(**attends(small, 12 if small else 4, 14336))
    return LlamaForCausalLM(config), tokens(*((1, 8) if small else (2, 2048)), config.vocab_size)


def mixtral(small: bool) -> tuple[nn.Module, Batch]:
    """2 layers of 8 experts, each a quarter as wide as Mixtral-8x7B's, 2 texts of 2,048 words."""
    config = MixtralConfig(**attends(small, 2, 3584), num_local_experts=8, num_experts_per_tok=2)
    return MixtralForCausalLM(config), tokens(*((1, 8) if small else (2, 2048)), config.vocab_size)


def resnet50(small: bool) -> tuple[nn.Module, Batch]:
    """ResNet-50, 64 images of 224 x 224."""
    size: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32]} if small else {}
    config = ResNetConfig(num_labels=1000, **size)
    return ResNetForImageClassification(config), images(*((2, 32) if small else (64, 224)), 1000)


def vit(small: bool) -> tuple[nn.Module, Batch]:
    """ViT-B/16, 64 images of 224 x 224."""
    size: dict[str, Any] = (
        {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32} if small else {}
    )
    config = ViTConfig(num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
    return ViTForImageClassification(config), images(*((2, 32) if small else (64, 224)), 1000)


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2, "llama": llama, "resnet50": resnet50, "vit": vit, "mixtral": mixtral,
}  # fmt: skip


# -- Contenders --------------------------------------------------------------------------------------------------------


def fsdp(model: nn.Module, device: str) -> nn.Module:
    """FSDP2 of one rank: each block that there are several of, and the rest."""
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1):
        for layer in layers:
            fully_shard(layer)
    fully_shard(model)
    return model


def compiled(model: nn.Module, device: str) -> Any:
    """What torch.compile makes of it."""
    return torch.compile(model)


def ours(model: nn.Module, device: str) -> Any:
    """Partway's, on a mesh of one device."""
    return pw.shard(model, mesh={"dp": 1}, device=device)


Make = Callable[[nn.Module, str], Any]
ALONE: dict[str, Make] = {
    "plain": lambda model, device: model, REFERENCE: compiled, "partway": ours, "partway, inductor": ours,
}  # fmt: skip
GROUP: dict[str, Make] = {
    REFERENCE: compiled,
    "FSDP2": fsdp,
    "FSDP2, torch.compile": lambda model, device: compiled(fsdp(model, device), device),
    "partway, inductor": ours,
}


@dataclass
class Run:
    """One contender: its model, and the seconds of its steps and those until each was issued."""

    name: str
    model: Any
    context: dict[str, Any]
    first: float = 0.0
    peak: float = 0.0
    loss: float = 0.0
    times: list[float] = field(default_factory=list)
    issued: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward. The gradients are let go."""
        with pw.auto_parallel_context(**self.context):
            loss: Tensor = self.model(**batch).loss
            loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        return loss.detach()

    def timed(self, batch: Batch) -> tuple[float, float]:
        """Of a step: until it is issued, and until it is done."""
        wait(batch)
        began = time.perf_counter()
        loss = self.step(batch)
        issued = time.perf_counter() - began
        wait(batch)
        seconds = time.perf_counter() - began
        self.loss = float(loss)
        return issued, seconds


def begun(name: str, make: Make, model: str, batch: Batch, small: bool, device: str) -> Run:
    """A contender after its first steps."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if cuda else 0
    plain = MODELS[model](small)[0].to(device, torch.bfloat16).train()
    context = {"backend": "inductor" if name.endswith("inductor") else "eager"}
    with pw.auto_parallel_context(**context):
        run = Run(name, make(plain, device), context)
    for step in range(WARM):
        if cuda and step == WARM - 1:
            torch.cuda.reset_peak_memory_stats()
        _, seconds = run.timed(batch)
        run.first = run.first or seconds
    run.peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if cuda else 0.0
    return run


def measured(contenders: dict[str, Make], model: str, rounds: int, small: bool, device: str) -> tuple[list[Run], Batch]:
    """All contenders of one model, after `rounds` turns."""
    torch.manual_seed(0)
    _, batch = MODELS[model](small)
    batch = {name: t.to(device, torch.bfloat16 if t.is_floating_point() else t.dtype) for name, t in batch.items()}
    torch._dynamo.reset()
    runs = list[Run]()
    for name, make in contenders.items():
        try:
            runs.append(begun(name, make, model, batch, small, device))
        except Exception as error:
            if name.startswith("partway") or name == REFERENCE:
                raise
            print(f"{model}, {name}: {type(error).__name__}, {str(error).splitlines()[0][:100]}")
    for _ in range(rounds):
        for run in runs:
            issued, seconds = run.timed(batch)
            run.issued.append(issued)
            run.times.append(seconds)
    return runs, batch


def wait(batch: Batch) -> None:
    """Until the device has done all."""
    if next(iter(batch.values())).is_cuda:
        torch.cuda.synchronize()


# -- Figures -----------------------------------------------------------------------------------------------------------


def ratios(run: Run, reference: Run, of: str) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(getattr(run, of), getattr(reference, of), strict=True)]


def row(run: Run, reference: Run) -> list[str]:
    """A line of the table."""
    ms = [statistics.median(each) * 1e3 for each in (run.times, run.issued)]
    of = "" if run is reference else quartiles(ratios(run, reference, "times"))
    return [
        run.name, f"{ms[0]:.2f}", of, f"{ms[1]:.2f}", f"{ms[1] - statistics.median(reference.issued) * 1e3:+.2f}",
        f"{run.first:.1f}", f"{run.peak:.2f}", f"{run.loss:.4f}",
    ]  # fmt: skip


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    model: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(MODELS)}; may be repeated [all]")] = None,
    rounds: Annotated[int, typer.Option(help="turns, after the first five steps of each")] = 13,
    small: Annotated[bool, typer.Option("--small", help="layers so small that only the host counts")] = False,
    kernels: Annotated[int, typer.Option(help="how many to list")] = 0,
    out: Annotated[Path | None, typer.Option(help="where to write all figures, as JSON")] = None,
) -> None:
    """Measure."""
    console, figures = Console(width=140), list[dict[str, Any]]()
    for name in model or MODELS:
        for where, contenders in (("alone", ALONE), ("group", GROUP)):
            if where == "group":
                backend = "nccl" if device == "cuda" else "gloo"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            pw.reset_auto_parallel_context()
            runs, batch = measured(contenders, name, rounds, small, device)
            reference = next(run for run in runs if run.name == REFERENCE)
            columns = ("ms", f"of {REFERENCE}", "issued, ms", "more", "first, s", "peak, GB", "loss")
            table = Table(f"{name}, {where}", *columns, box=SIMPLE_HEAD)
            for run in runs:
                table.add_row(*row(run, reference))
                figures.append({"model": name, "where": where, **{key: value for key, value in vars(run).items()
                                if key not in ("model", "context")}})  # fmt: skip
            console.print(table)
            if out is not None:  # each time: a run may be ended
                out.write_text(json.dumps(figures))
            for run in runs if kernels else ():  # at the end: what was traced once is slower ever after
                console.print(f"{run.name}:\n{most_of(run, batch, kernels)}")
            del runs, reference, run
            gc.collect()
            if where == "group":
                pw.shutdown()


def most_of(run: Run, batch: Batch, count: int) -> str:
    """What takes the device most of a step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run.timed(batch)
    cuda = next(iter(batch.values())).is_cuda
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    return str(seen.key_averages().table(sort_by=key, row_limit=count, max_name_column_width=90))


if __name__ == "__main__":
    start(main)
