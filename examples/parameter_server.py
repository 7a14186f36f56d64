"""One training script without servers, with servers on this machine, and with servers on many.

    python examples/parameter_server.py --no-servers                               # in this process alone
    python examples/parameter_server.py                                            # with a cluster of this process
    partway ps --workers 2 --servers 2 examples/parameter_server.py                # 2 workers, 2 servers
    partway ps --workers 2 --servers 2 examples/parameter_server.py --mode async --max-staleness 4
    python examples/parameter_server.py --compare                                  # data parallel, sync and async

With MS_ROLE and the other variables of docs/parameter_server.md the processes may be on any hosts.

`--model vit` learns digits with a small vision transformer. `--model recommender` predicts what 50,000 users think of
20,000 items: its tables stay on the servers, and a step moves the rows that its batch looks up, at most 480 of each.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Protocol

import torch
import typer
from digits import batches, load_digits
from models import VisionTransformer
from torch import Tensor, nn

import partway as pw

USERS, ITEMS, TASTES = 50_000, 20_000, 2
NOISE = 0.25  # what of an opinion nobody can predict
TEST = 20_000  # opinions kept for testing


class Recommender(nn.Module):
    """A vector for each user and each item, and a multi-layer perceptron that says how they fit."""

    def __init__(self, dim: int = 16, sparse: bool = True) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, dim, sparse=sparse), nn.Embedding(ITEMS, dim, sparse=sparse)
        self.fit = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor, opinions: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        found = self.fit(torch.cat([user, item, user * item], 1)).squeeze(1)
        return found if opinions is None else (nn.functional.mse_loss(found, opinions), found)


class Opinions:
    """What users think of items, all from seeds, so that any worker can make any batch: users and items have a few
    tastes each, an opinion is how far these agree, and some users and items are far more common than others."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._users, self._items = (torch.randn(n, TASTES, generator=generator) for n in (USERS, ITEMS))

    def draw(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        """Pairs of a user and an item, and opinions of deviation 1 and some noise."""
        generator = torch.Generator().manual_seed(seed)
        pairs = torch.stack([self._common(size, count, generator) for size in (USERS, ITEMS)], 1)
        agree = (self._users[pairs[:, 0]] * self._items[pairs[:, 1]]).sum(1) / math.sqrt(TASTES)
        return pairs, agree + NOISE * torch.randn(count, generator=generator)

    def _common(self, size: int, count: int, generator: torch.Generator) -> Tensor:
        """Numbers below `size`; half of them are among the first few hundred."""
        uniform = torch.rand(count, generator=generator)
        return torch.exp(uniform**1.5 * math.log(size)).long().clamp(max=size - 1)


class Model(StrEnum):
    VIT = "vit"
    RECOMMENDER = "recommender"


class Mode(StrEnum):
    SYNC = "sync"
    ASYNC = "async"


class Task(Protocol):
    """A model, its optimizer, its data, and how good it has become."""

    inputs: tuple[tuple[str | None, ...], ...]  # how a batch is divided, data parallel

    def model(self, servers: bool) -> nn.Module: ...
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...
    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]: ...
    def test(self, model: nn.Module) -> tuple[str, float]: ...


class DigitsTask:
    """Digits, with a vision transformer."""

    inputs: tuple[tuple[str | None, ...], ...] = (("dp", None, None, None),)

    def __init__(self) -> None:
        self._digits = load_digits()

    def model(self, servers: bool) -> nn.Module:
        return VisionTransformer()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=4e-3)

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        size = 60
        yield from batches(self._digits, size, math.ceil(steps / (len(self._digits.labels) // size)))

    def test(self, model: nn.Module) -> tuple[str, float]:
        found = model(self._digits.test_images).argmax(1)
        return "test accuracy", (found == self._digits.test_labels).float().mean().item()


class OpinionsTask:
    """Opinions, with a recommender."""

    inputs: tuple[tuple[str | None, ...], ...] = (("dp", None),)

    def __init__(self) -> None:
        self._opinions = Opinions()

    def model(self, servers: bool) -> nn.Module:
        return Recommender(sparse=servers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adagrad, which leaves rows alone that no batch looks up."""
        groups: dict[float, list[nn.Parameter]] = {0.25: [], 0.06: []}
        for name, parameter in model.named_parameters():
            groups[0.06 if "fit" in name else 0.25].append(parameter)
        return torch.optim.Adagrad([{"params": each, "lr": rate} for rate, each in groups.items()])

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._opinions.draw(1 + step, 480) for step in range(steps))

    def test(self, model: nn.Module) -> tuple[str, float]:
        pairs, opinions = self._opinions.draw(10**6, TEST)
        return "test error", (model(pairs) - opinions).square().mean().sqrt().item()


TASKS: dict[Model, type[Task]] = {Model.VIT: DigitsTask, Model.RECOMMENDER: OpinionsTask}


def main(
    model: Annotated[Model, typer.Option(help="what to train")] = Model.VIT,
    mode: Annotated[Mode, typer.Option(help="whether a step waits for all workers")] = Mode.SYNC,
    steps: Annotated[int, typer.Option(min=1, help="of each worker")] = 400,
    max_staleness: Annotated[int | None, typer.Option(help="of a push in async mode [any]")] = None,
    servers: Annotated[bool, typer.Option(help="whether servers hold the parameters")] = True,
    shard: Annotated[bool, typer.Option("--shard", help="without servers: data parallel on all devices")] = False,
    double: Annotated[bool, typer.Option("--double", help="in float64")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="train three times, with 2 workers; draw the losses")
    ] = False,
    out: Annotated[Path, typer.Option(help="the folder to write to")] = Path("out/parameter_server"),
) -> None:
    """Train a model and write its losses."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns where this is not said
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    if compare:
        compared(model, steps, 4 if max_staleness is None else max_staleness, out)
    else:
        train(model, mode if servers and not shard else None, steps, max_staleness, shard, out)


def train(model: Model, mode: Mode | None, steps: int, max_staleness: int | None, shard: bool, out: Path) -> None:
    """Train with servers in a mode, or (None) without."""
    if mode is None:
        pw.set_ps_context(enable_ps=False)
    else:
        pw.set_ps_context(enable_ps=True, mode=mode.value, max_staleness=max_staleness)
    devices = pw.init(simulate=2 if shard else 1)
    torch.manual_seed(0)
    task = TASKS[model]()
    net = task.model(servers=mode is not None)
    if shard:
        net = pw.shard(net, mesh={"dp": devices}, in_strategy=task.inputs)
    if mode is not None:
        pw.set_param_ps(net)
    optimizer = pw.ps.optimizer(task.optimizer(net))

    data, rates = list(task.batches(steps)), [group["lr"] for group in optimizer.param_groups]
    worker, workers = pw.ps.share()
    losses: list[tuple[int, float, float]] = []
    began = 0.0
    for step in pw.ps.steps(steps):
        mine, count = pw.ps.share()  # which part of the batch is this worker's; others may come and go
        loss, _ = net(*(each[mine::count] for each in data[step]))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * pace(step, steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        began = began or perf_counter()
        losses.append((step, perf_counter() - began, loss.item()))

    net.eval()
    with torch.no_grad():
        what, value = task.test(net)
    run = "data parallel" if shard else "no servers" if mode is None else mode.value
    found: dict[str, Any] = {
        "model": model,
        "run": run,
        "worker": worker,
        "workers": workers,
        "losses": losses,
        what: value,
    }
    if mode is Mode.ASYNC:
        found |= {"max_staleness": max_staleness, "staleness": pw.ps.staleness()}
    if pw.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{model}_{run.replace(' ', '_')}_{worker}.json"
        path.write_text(json.dumps(found))
        print(f"{len(losses)} steps, {what} {value:.4f}; the losses are in {path}", flush=True)
    pw.shutdown()


def pace(step: int, steps: int) -> float:
    """By what the rates of learning are multiplied: it rises for a while, since stale gradients mislead the most at the
    beginning, and then falls. It follows from the step's number, so that a worker that comes later has it right."""
    return min(4 * (step + 1) / steps, 1 - step / steps)


# -- The comparison

TITLES = {
    "data parallel": "data parallel, 2 processes",
    "sync": "sync, 2 workers and 2 servers",
    "async": "async, 2 workers and 2 servers",
}
COLORS = {"data parallel": "#9e9e9e", "sync": "#1f77b4", "async": "#d95f02"}


def compared(model: Model, steps: int, max_staleness: int, out: Path) -> None:
    """Train data parallel, in sync and in async mode, and draw what came of it."""
    partway = [sys.executable, "-m", "partway.commands.cli"]
    served = [*partway, "ps", "--workers", "2", "--servers", "2"]
    ways = {
        "data parallel": ([*partway, "run", "--workers", "2"], ["--shard"]),
        "sync": (served, ["--mode", "sync"]),
        "async": (served, ["--mode", "async", "--max-staleness", str(max_staleness)]),
    }
    common = ["--model", model.value, "--steps", str(steps), "--out", str(out)]
    for run, (launcher, own) in ways.items():
        for path in out.glob(f"{model}_{run.replace(' ', '_')}_*.json"):
            path.unlink()
        print(f"{model}, {TITLES[run]}", flush=True)
        logs = ["--logs", str(out / "logs")]
        subprocess.run([*launcher, *logs, __file__, *common, *own], check=True, stdout=subprocess.DEVNULL)
    found = [results(model, run, out) for run in ways]
    for run, each in zip(ways, found, strict=True):
        what = next(name for name in each if name.startswith("test"))
        line = f"  {run:13}  {what} {each[what]:.4f}, {each['losses'][-1][1]:.1f} s"
        if "staleness" in each:
            line += (
                f", largest staleness {max(stale for _, _, stale in each['staleness'])} (bound {each['max_staleness']})"
            )
        print(line)
    print(f"the picture is {draw(out, list(ways))}")


def results(model: Model, run: str, out: Path) -> dict[str, Any]:
    """What worker 0 wrote, with the mean of all workers' losses of each step."""
    paths = sorted(out.glob(f"{model}_{run.replace(' ', '_')}_*.json"))
    first, *others = [json.loads(path.read_text()) for path in paths]
    losses = [[loss for _, _, loss in each["losses"]] for each in (first, *others)]
    means = [sum(each) / len(each) for each in zip(*losses, strict=False)]
    first["losses"] = [[step, seconds, mean] for (step, seconds, _), mean in zip(first["losses"], means, strict=False)]
    return first  # type: ignore[no-any-return]


def draw(out: Path, runs: list[str]) -> Path:
    """Loss over time, and below it the staleness of each push; a column for each model that was trained in `out`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    models = [
        model for model in Model if all(list(out.glob(f"{model}_{run.replace(' ', '_')}_0.json")) for run in runs)
    ]
    figure, panels = plt.subplots(
        2, len(models), squeeze=False, figsize=(7.5 * len(models), 7), height_ratios=(3, 1.2), layout="constrained"
    )
    for model, above, below in zip(models, *panels, strict=True):
        ends = []
        for run in runs:
            found = results(model, run, out)
            seconds, losses = [each[1] for each in found["losses"]], [each[2] for each in found["losses"]]
            above.plot(seconds, losses, color=COLORS[run], alpha=0.25, linewidth=0.8)
            above.plot(seconds, smooth(losses), color=COLORS[run], linewidth=2, label=TITLES[run])
            what = next(name for name in found if name.startswith("test"))
            ends.append(f"{run} {found[what]:.1%}" if what == "test accuracy" else f"{run} {found[what]:.3f}")
        above.set(
            title=f"{model}, {len(losses)} steps. {what}: {', '.join(ends)}", ylim=(0, None), xlim=(0, None),
            xlabel="seconds after the first step", ylabel="loss (thin) and its running mean",
        )  # fmt: skip
        above.legend(frameon=False)
        show_staleness(below, results(model, "async", out))
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path = out / "loss.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def show_staleness(axes: Any, found: dict[str, Any]) -> None:
    """The staleness of each push, by worker, and its bound."""
    for worker, color in ((0, "#d95f02"), (1, "#7570b3")):
        beside = 0.1 * (-1) ** worker  # so that both are seen
        own = [
            (number, stale + beside) for number, (who, _, stale) in enumerate(found["staleness"], 1) if who == worker
        ]
        axes.plot(*zip(*own, strict=True), ".", color=color, markersize=5, alpha=0.6, label=f"worker {worker}")
    bound = found["max_staleness"]
    axes.axhline(bound, color="black", linestyle="--", linewidth=1)
    axes.text(0.01, bound + 0.15, f"max_staleness={bound}", fontsize=9, transform=axes.get_yaxis_transform())
    axes.set(xlabel="push, in async mode", ylabel="staleness", ylim=(-0.5, bound + 1), xlim=(0, None))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.05))


def smooth(losses: list[float], weight: float = 0.15) -> list[float]:
    """Their running mean."""
    means = losses[:1]
    for loss in losses[1:]:
        means.append((1 - weight) * means[-1] + weight * loss)
    return means


if __name__ == "__main__":
    typer.run(main)
