"""How long a plan takes: CPU seconds of each pass, for GPT-2 124M and 8 layers of Llama-3-8B's shapes.

    python benchmarks/plan_time.py [--repeat 3] [--json out/plan_time.json]

The models stand on the meta device; no weight is made. "rules" is formulating the search problem (rules, options,
costs), "search" the exact search, "lower" writing the program of one rank, "differentiate" tracing its forward and
backward. For comparison autoparallel (PyTorch 2.13, the integer program over the joint graph) needs 98 CPU seconds
for GPT-2 124M on 2x4 and 118 for 8 Llama-3-8B layers on 8x8, 22 on 8 (its own trace and apply included).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from partway.annotate import Request, annotate
from partway.compile import settings_of
from partway.context import AlgoParameters, ParallelContext
from partway.propagation.capture import capture
from partway.propagation.differentiate import differentiate
from partway.propagation.graph import differentiated
from partway.propagation.lower import lower
from partway.propagation.plan import make_plan
from partway.propagation.problem import formulate
from partway.propagation.search import SearchMode, dynamic_programming
from partway.strategy import Mesh

PASSES = ("capture", "rules", "search", "lower", "differentiate")
MESHES = {"8": Mesh({"dp": 8}), "2x4": Mesh({"dp": 2, "tp": 4})}


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 124M, batch 8 x 1024."""
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    tokens = torch.empty(8, 1024, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """8 layers of Llama-3-8B, bfloat16, batch 8 x 8192."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.empty(8, 8192, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def measure(build: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]], mesh: Mesh) -> dict[str, Any]:
    """CPU seconds of each pass, and what the plan is."""
    with torch.device("meta"):
        model, kwargs = build()
    context, algo = ParallelContext(), AlgoParameters()
    request = Request(in_strategy={"input_ids": ("dp", None)}, mesh=mesh)
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
        return result

    graph = timed("capture", lambda: capture(model, (), kwargs))
    notes = annotate(graph, model, request, mesh, context, algo, {}, None)
    problem = timed(
        "rules",
        lambda: formulate(graph, settings_of(graph, request, mesh, context, algo), notes.allowed, notes.as_it_lies),
    )
    solution = timed("search", lambda: dynamic_programming(problem))
    local = timed("lower", lambda: lower(problem, solution.choice))
    timed("differentiate", lambda: differentiate(local, differentiated(graph)))
    plan = make_plan(problem, solution, local, SearchMode.DYNAMIC_PROGRAMMING)
    return {
        "seconds": seconds,
        "operators": len(plan.operators),
        "vertices": len(problem.vertices),
        "width": solution.width,
        "proven": solution.proven,
        "wire_mb": plan.wire_bytes / 1e6,
    }


def main(
    repeat: Annotated[int, typer.Option(help="runs of each case; the median is shown")] = 3,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/plan_time.json"),
) -> None:
    """Measure every case and print a table."""
    table = Table(title=f"CPU seconds to plan, median of {repeat} (min to max), torch {torch.__version__}")
    for column in ("model", "mesh", *PASSES, "beside capture", "operators", "width", "optimum", "sent MB"):
        table.add_column(column, no_wrap=True)
    figures: list[dict[str, Any]] = []
    for name, build in (("gpt2 124M", gpt2), ("llama3-8b, 8 layers", llama)):
        for label, mesh in MESHES.items():
            runs = [measure(build, mesh) for _ in range(repeat)]
            beside = [sum(run["seconds"][p] for p in PASSES[1:]) for run in runs]
            cells = [_spread([run["seconds"][p] for run in runs]) for p in PASSES]
            last = runs[-1]
            table.add_row(
                name, label, *cells, _spread(beside), str(last["operators"]), str(last["width"]),
                "proven" if last["proven"] else "not proven", f"{last['wire_mb']:.0f}",
            )  # fmt: skip
            figures.append({"model": name, "mesh": label, "runs": runs})
    Console(width=200).print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"machine": platform.processor(), "torch": torch.__version__, "cases": figures}, indent=1)
    )
    print(f"wrote {out}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
