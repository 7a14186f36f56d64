"""The training script of the jobs of served.py, in float64: a small recommender (a table by rows, a perceptron on it,
dropout) and, on request, a perceptron and a vision transformer, on batches computed from the number of the step. The
variables SERVED_... configure it, and each finished step is a line in steps.N."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import partway as pw

FOLDER = Path(os.environ.get("SERVED_FOLDER", "."))


def option(name: str, default: str = "") -> str:
    """An option of this script."""
    return os.environ.get(f"SERVED_{name.upper()}", default)


class Killer(torch.optim.SGD):
    """SGD that kills the process in its step, once, if a file requests it."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        flag = FOLDER / "kill_in_step"
        if flag.exists() and "steps" not in os.environ.get("MS_ROLE", ""):
            flag.unlink()
            os.kill(os.getpid(), 9)
        return super().step(closure)


def optimizer(parameters, kind: str) -> torch.optim.Optimizer:  # type: ignore[no-untyped-def]
    """One of the optimizers of the jobs."""
    kinds = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
        "killer": lambda: Killer(parameters, lr=0.1, momentum=0.9),
    }
    return kinds[kind]()


class ViT(nn.Module):
    """A vision transformer for images of 8x8: four patches and a class token, one layer. Its attention has no biases:
    the gradient of the keys' bias is only rounding error, which AdamW divides by its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, bias=False)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3))

    def forward(self, images: Tensor) -> Tensor:
        parts = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), parts], 1) + self.places
        scores: Tensor = self.head(self.layer(tokens)[:, 0])
        return scores


def made(width: int = 32, dropout: float = 0.0, sparse: bool = True, more: bool = False) -> nn.ModuleDict:
    """The model of its seed; `more`: with a perceptron and a vision transformer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3))
    model = nn.ModuleDict({"table": nn.Embedding(100, 8, sparse=sparse), "net": net})
    if more:
        model["mlp"] = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 3))
        model["vit"] = ViT()
    return model


def losses_of(model: nn.ModuleDict, step: int, mine: slice = slice(None)) -> list[Tensor]:
    """The losses of a part of a step's batch: the recommender's and, if they exist, those of the other models."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 100, (12, 2), generator=generator)
    labels = torch.randint(0, 3, (12,), generator=generator)
    scores = [model["net"](model["table"](ids[mine]).flatten(1))]
    if "vit" in model:
        images = torch.randn(12, 1, 8, 8, generator=generator)
        scores += [model["mlp"](images[mine]), model["vit"](images[mine])]
    return [nn.functional.cross_entropy(each, labels[mine]) for each in scores]


def stepped(model: nn.ModuleDict, own: torch.optim.Optimizer, step: int, mine: slice = slice(None)) -> list[float]:
    """Take a step, with the learning rate of its number. Return the losses."""
    for group in own.param_groups:
        group["lr"] = group.setdefault("first", group["lr"]) * 0.99**step
    losses = losses_of(model, step, mine)
    own.zero_grad()
    torch.stack(losses).sum().backward()
    own.step()
    return [loss.item() for loss in losses]


def one_device(steps: int, kind: str = "sgd", more: bool = False) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The result on one device with the whole batch of each step: the parameters, and the losses of each step."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = made(sparse=False, more=more)
        own = optimizer(model.parameters(), kind)
        losses = [stepped(model, own, step) for step in range(steps)]
        return state_of(model, model["table"].weight), losses
    finally:
        torch.set_default_dtype(before)


def state_of(model: nn.ModuleDict, table: Tensor) -> dict[str, Tensor]:
    """All parameters, by name."""
    found = {name: each.detach().clone() for name, each in model.named_parameters() if name != "table.weight"}
    return {**found, "table": table.detach().clone()}


def main() -> None:
    """Train as a worker of a job."""
    bound, mode = option("bound"), option("mode", "sync")
    pw.set_ps_context(
        enable_ps=True, mode=mode, max_staleness=int(bound) if bound else None,
        durability=option("durability", "process"), shard_folder=option("shards") or None,
        enable_ssl=option("config") != "", config_file_path=option("config"), gradient_dtype=option("dtype") or None,
    )  # fmt: skip
    pw.init()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    model = made(int(option("width", "32")), float(option("dropout", "0")), more=option("more") != "")
    pw.set_param_ps(model if option("part") == "" else model["table"])
    own = pw.ps.optimizer(optimizer(model.parameters(), option("optimizer", "sgd")))
    with open(FOLDER / f"steps.{own.worker}", "a") as lines:
        for step in pw.ps.steps(int(option("steps", "20"))):
            index, count = pw.ps.share() if mode == "sync" else (0, 1)
            here = f"{own.worker}:{step}"
            if here in (option("die_in_forward"), option("die_in_push")) and not (FOLDER / "died").exists():
                if here == option("die_in_push"):
                    die_after_a_push(own)
                else:
                    model["net"].register_forward_hook(lambda *_: die())
            losses = stepped(model, own, step, slice(index, None, count))
            time.sleep(float(option("nap", "0")))
            lines.write(json.dumps([step, time.time(), losses, index, count]) + "\n")
            lines.flush()
    if own.worker == 0:
        torch.save(state_of(model, own.client.rows(0, torch.arange(100))), FOLDER / "final.pt")
        (FOLDER / "status.json").write_text(json.dumps(pw.ps.status()))
        if mode == "async":
            (FOLDER / "staleness.json").write_text(json.dumps(pw.ps.staleness()))
    (FOLDER / f"counts.{own.worker}").write_text(json.dumps(own.client.counts))


def die() -> None:
    """Kill this process, once."""
    (FOLDER / "died").touch()
    os.kill(os.getpid(), 9)


def die_after_a_push(own) -> None:  # type: ignore[no-untyped-def]
    """Kill this process when exactly one of the servers has its gradients."""
    link = own.client._link
    call = link.call

    def once(name, method, *arguments):  # type: ignore[no-untyped-def]
        sent = call(name, method, *arguments)
        if method in ("prepare", "push"):
            link.wait([sent])
            die()
        return sent

    link.call = once


if __name__ == "__main__":
    main()
