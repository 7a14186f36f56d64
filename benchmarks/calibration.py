"""How well predicted step times agree with measured ones, on two gloo processes of this machine.

    python benchmarks/calibration.py [--steps 15] [--profile FILE] [--json out/calibration.json]

Calibrates this machine (`partway calibrate --quick`, or takes the profile of FILE), then runs a GPT-2 of two layers and
a multilayer perceptron, data parallel and tensor parallel, and compares the plan's predicted time of one forward and
backward with the measured one (the slower of the two ranks). "one device" is the same work in plain PyTorch without
splitting, beside the time that the operators alone are predicted to take. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import GPT2Config, GPT2LMHeadModel

import partway as pw
from partway.measure.calibrate import calibrate

RANKS = 2


class MLP(nn.Module):
    """Two blocks of 1024 to 4096 to 1024, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
        self.widen, self.out = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        return nn.functional.mse_loss(self.out(torch.relu(self.widen(x))), target)


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    """16.8 million parameters, batch 1024."""
    return MLP(), {"x": torch.randn(1024, 1024), "target": torch.randn(1024, 1024)}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two layers of width 512, 8 heads, batch 8 x 128."""
    config = GPT2Config(
        n_layer=2, n_embd=512, n_head=8, n_positions=128, vocab_size=8192, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 8192, (8, 128))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Case:
    """A model and how a person splits it; the search does the rest."""

    name: str
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]
    annotations: Mapping[str, Any]


CASES = (
    Case(
        "mlp, data parallel", mlp, {"mesh": {"dp": RANKS}, "in_strategy": {"x": ("dp", None), "target": ("dp", None)}}
    ),
    Case(
        "mlp, tensor parallel",
        mlp,
        {
            "mesh": {"tp": RANKS},
            "in_strategy": {"x": (None, None), "target": (None, None)},
            "parameter_plan": {
                **dict.fromkeys(("up.weight", "widen.weight"), ("tp", None)),
                **dict.fromkeys(("down.weight", "out.weight"), (None, "tp")),
            },
        },
    ),
    Case("gpt2, data parallel", gpt2, {"mesh": {"dp": RANKS}, "in_strategy": {"input_ids": ("dp", None)}}),
    Case(
        "gpt2, tensor parallel",
        gpt2,
        {
            "mesh": {"tp": RANKS},
            "in_strategy": {"input_ids": (None, None)},
            "parameter_plan": {
                "transformer.h.*.mlp.c_fc.weight": (None, "tp"),
                "transformer.h.*.mlp.c_proj.weight": ("tp", None),
                "transformer.h.*.attn.c_proj.weight": ("tp", None),
            },
        },
    ),
)


def seconds_of(model: Callable[..., Any], batch: dict[str, Tensor], steps: int, together: bool) -> list[float]:
    """The seconds of each forward and backward, after two to warm up; `together`: ranks start each step as one."""
    found = []
    for _ in range(steps + 2):
        if together:
            dist.barrier()
        start = time.perf_counter()
        result = model(**batch)
        (result if isinstance(result, Tensor) else result.loss).backward()
        found.append(time.perf_counter() - start)
    return found[2:]


def run(rank: int, profile: str, steps: int, folder: str) -> None:
    """One rank of all cases; what it measured goes to a file."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gloo tells of each group that it makes
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    # a plan prices every collective by itself
    pw.set_auto_parallel_context(device_profile=profile, comm_fusion={"openstate": False})
    cases = []
    for case in CASES:
        torch.manual_seed(0)
        model, batch = case.build()
        alone = seconds_of(model, batch, steps, together=True)
        sharded: Any = pw.shard(model, **case.annotations)
        measured = seconds_of(sharded, batch, steps, together=True)
        plan = sharded.plan
        cases.append(
            {
                "case": case.name,
                "predicted": plan.predicted_time,
                "operators": sum(o.seconds for o in plan.operators),
                "collectives": sum(c.predicted_time for c in plan.collectives),
                "number": len(plan.collectives),
                "sent": plan.wire_bytes,
                "measured": measured,
                "one_device": alone,
            }
        )
    Path(folder, f"{rank}.json").write_text(json.dumps(cases))
    dist.barrier()
    dist.destroy_process_group()


def main(
    steps: Annotated[int, typer.Option(help="steps of each case; the median is shown")] = 15,
    profile: Annotated[Path | None, typer.Option(help="a device profile in place of a calibration")] = None,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/calibration.json"),
) -> None:
    """Calibrate, run every case, and print a table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if profile is None:
        profile = out.with_name("profile.json")
        found = calibrate(RANKS, quick=True)
        found.profile.save(profile)
        print(found.report())
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (str(profile), steps, folder), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    table = Table(title=f"milliseconds of a step on {RANKS} gloo processes, median of {steps} (min to max)")
    for column in ("case", "predicted", "operators", "collectives", "measured", "predicted/measured", "one device"):
        table.add_column(column, no_wrap=True)
    figures = []
    for parts in zip(*ranks, strict=True):
        case = parts[0]
        measured, alone = (
            [max(times) for times in zip(*(part[key] for part in parts), strict=True)]
            for key in ("measured", "one_device")
        )
        ratios = [case["predicted"] / seconds for seconds in measured]
        table.add_row(
            case["case"], f"{1e3 * case['predicted']:.1f}", f"{1e3 * case['operators']:.1f}",
            f"{1e3 * case['collectives']:.1f} ({case['number']})", _spread(measured, 1e3), _spread(ratios, 1.0, 2),
            _spread(alone, 1e3),
        )  # fmt: skip
        figures.append({**case, "measured": measured, "one_device": alone, "ratio": statistics.median(ratios)})
    Console(width=160).print(table)
    facts = {"machine": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    out.write_text(json.dumps({**facts, "profile": json.loads(profile.read_text()), "cases": figures}, indent=1))
    print(f"wrote {out}")


def _spread(values: list[float], scale: float, digits: int = 1) -> str:
    low, middle, high = (f"{scale * f(values):.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})"


if __name__ == "__main__":
    start(main)
