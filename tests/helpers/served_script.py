"""What the jobs of served.py train, in float64: a table by rows, a perceptron, and dropout, on batches that follow from
the number of the step. SERVED_... say how; each finished step is a line in steps.N."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import partway as pw

FOLDER = Path(os.environ["SERVED_FOLDER"])


def option(name: str, default: str = "") -> str:
    """An option of this script."""
    return os.environ.get(f"SERVED_{name.upper()}", default)


class Killer(torch.optim.SGD):
    """SGD that kills the process in which it steps, once, where a file asks for it."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        flag = FOLDER / "kill_in_step"
        if flag.exists() and "steps" not in os.environ.get("MS_ROLE", ""):
            flag.unlink()
            os.kill(os.getpid(), 9)
        return super().step(closure)


def optimizer(parameters) -> torch.optim.Optimizer:  # type: ignore[no-untyped-def]
    """That of the job."""
    kinds = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
        "killer": lambda: Killer(parameters, lr=0.1, momentum=0.9),
    }
    return kinds[option("optimizer", "sgd")]()


def main() -> None:
    """Train."""
    bound = option("bound")
    pw.set_ps_context(
        enable_ps=option("plain") == "", mode=option("mode", "sync") if option("plain") == "" else "sync",
        max_staleness=int(bound) if bound else None, durability=option("durability", "process") if option("plain") == "" else "process",
    )  # fmt: skip
    pw.init()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = int(option("width", "32"))
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(100, 8, sparse=option("plain") == ""),
            "net": nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(float(option("dropout", "0"))), nn.Linear(width, 3)),
        }
    )  # fmt: skip
    pw.set_param_ps(model if option("part") == "" else model["table"])
    own = pw.ps.optimizer(optimizer(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.99)
    worker = getattr(own, "worker", 0)
    total, nap = int(option("steps", "20")), float(option("nap", "0"))
    lines = open(FOLDER / f"steps.{worker}", "a")
    for step in pw.ps.steps(total):
        for group in own.param_groups:
            group["lr"] = group["initial_lr"] * 0.99**step
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 100, (12, 2), generator=generator)
        labels = torch.randint(0, 3, (12,), generator=generator)
        index, count = pw.ps.share() if option("mode", "sync") == "sync" else (0, 1)
        mine = slice(index, None, count)
        if option("die_in_forward") == f"{worker}:{step}" and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            os.kill(os.getpid(), 9)
        loss = nn.functional.cross_entropy(model["net"](model["table"](ids[mine]).flatten(1)), labels[mine])
        own.zero_grad()
        loss.backward()
        if option("die_in_push") == f"{worker}:{step}" and not (FOLDER / "died").exists():
            die_after_a_push(own)
        own.step()
        time.sleep(nap)
        lines.write(json.dumps([step, time.time(), loss.item(), index, count]) + "\n")
        lines.flush()
    del schedule
    if worker == 0:
        state = {name: parameter.detach().clone() for name, parameter in model["net"].named_parameters()}
        table = model["table"].weight if option("plain") else own.client.rows(0, torch.arange(100))
        torch.save({**state, "table": table.detach().clone()}, FOLDER / "final.pt")
        if not option("plain"):
            (FOLDER / "status.json").write_text(json.dumps(pw.ps.status()))
            if option("mode") == "async":
                (FOLDER / "staleness.json").write_text(json.dumps(pw.ps.staleness()))
    if not option("plain"):
        (FOLDER / f"counts.{worker}").write_text(json.dumps(own.client.counts))


def die_after_a_push(own) -> None:  # type: ignore[no-untyped-def]
    """Kill this process when one of the servers has its gradients, and no other."""
    link = own.client._link
    call = link.call

    def once(name, method, *arguments):  # type: ignore[no-untyped-def]
        sent = call(name, method, *arguments)
        if method in ("prepare", "push"):
            link.wait([sent])
            (FOLDER / "died").touch()
            os.kill(os.getpid(), 9)
        return sent

    link.call = once


main()
