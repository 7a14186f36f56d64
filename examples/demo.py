"""Train a vision transformer and a ResNet over 8 virtual devices, beside the same training on one device.

    python examples/demo.py [--net vit|resnet|both] [--epochs N] [--devices N] [--out FOLDER]

Everything runs in this process, on the CPU. What is shown is written to out/demo/ as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import partway as pw

try:
    import matplotlib as mpl
    from digits import Digits, batches, load_digits

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import sklearn  # noqa: F401 - digits reads its data
except ModuleNotFoundError as missing:
    sys.exit(
        f"the demo needs {missing.name}; `make demo` installs what it needs, and so does\n"
        "    python -m pip install -c constraints.txt '.[demo]'"
    )
from models import ResNet, VisionTransformer

BATCH = 64
ROWS = 20  # of the plan, on the screen; the whole is in plan.txt
LEGEND = """\
  strategy  the index that each axis splits; R: none, every device does the whole
  layout    of the result on {axes}: S0, S1, ...: split along that dim, R: whole on every device,
            B: whole, for different work, P: every device holds an addend
The whole plan is in {path}
"""


@dataclass(frozen=True)
class Example:
    """A network, and how much of its split a person says: the batch, and one weight."""

    title: str
    make: Callable[[], nn.Module]
    weight: str
    strategy: tuple[str | None, ...]
    rate: float


EXAMPLES = {
    "vit": Example("vision transformer", VisionTransformer, "blocks.0.up.weight", ("tp", None), 2e-3),
    "resnet": Example("ResNet", ResNet, "blocks.0.conv1.weight", ("tp", None, None, None), 3e-3),
}


class Net(StrEnum):
    VIT = "vit"
    RESNET = "resnet"
    BOTH = "both"


@dataclass
class Run:
    """One finished training."""

    losses: list[float]
    accuracy: float
    seconds: float
    plan: pw.Plan | None = None
    program: str = ""


def demo(
    net: Annotated[Net, typer.Option(help="which network to train")] = Net.BOTH,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the 1,437 training images")] = 6,
    devices: Annotated[int, typer.Option(min=2, help="virtual devices, an even number")] = 8,
    out: Annotated[Path, typer.Option(help="the folder to write to")] = Path("out/demo"),
) -> None:
    """Train over virtual devices and on one device; show the plan, both losses, and the files that were written."""
    if devices % 2:
        raise typer.BadParameter(
            "the devices form a mesh of 2 rows, so their number must be even", param_hint="--devices"
        )
    console = Console(highlight=False)
    if not console.is_terminal:  # a log file is as wide as its lines
        console.width = 175
    torch.set_num_threads(1)  # the tensors are small
    torch.set_default_dtype(torch.float64)  # an error of the split cannot pass for rounding
    started = perf_counter()
    mesh = pw.Mesh({"dp": 2, "tp": pw.init(simulate=devices) // 2})
    digits = load_digits()
    console.print(
        Panel(
            f"Handwritten digits are learned on [bold]{devices} virtual devices[/], a mesh of {mesh}.\n"
            "Two annotations say how the batch and one weight are split; Partway infers the rest,\n"
            "rewrites the model into the program of one device, and runs it for all of them in this process.\n"
            "The same training on one device runs beside it: [bold]the losses must agree[/], here in float64.",
            title="Partway", title_align="left", expand=False, padding=(0, 2),
        )
    )  # fmt: skip
    written: list[Path] = []
    for name in [net.value] if net is not Net.BOTH else EXAMPLES:
        written += show(console, EXAMPLES[name], digits, mesh, epochs, out / name)
    console.print(f"[bold]Written[/] (all in {perf_counter() - started:.0f} s)")
    for path in written:
        console.print(f"  {path}", soft_wrap=True)


def show(console: Console, example: Example, digits: Digits, mesh: pw.Mesh, epochs: int, out: Path) -> list[Path]:
    """Train one example both ways and show what happened; returns the files written."""
    console.rule(f"[bold]{example.title}", align="left", style="none")
    console.print(f'  the batch   in_strategy=(("dp", None, None, None),)\n'
                  f'  one weight  parameter_plan={{"{example.weight}": {example.strategy}}}\n'.replace("'", '"'),
                  markup=False)  # fmt: skip
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        one = train(progress, "1 device", example, digits, epochs, mesh=None)
        split = train(progress, f"{mesh.device_num} virtual devices", example, digits, epochs, mesh)
    plan = split.plan
    assert plan is not None
    out.mkdir(parents=True, exist_ok=True)
    files = [out / name for name in ("plan.txt", "plan.json", "program.txt", "loss.csv", "loss.png")]
    files[0].write_text(f"{plan.table(every=True)}\n")
    plan.save(files[1])
    files[2].write_text(f"{split.program}\n")
    pairs = enumerate(zip(one.losses, split.losses, strict=True), 1)
    head = f"step,1 device,{mesh.device_num} virtual devices\n"
    files[3].write_text(head + "".join(f"{i},{a!r},{b!r}\n" for i, (a, b) in pairs))
    draw(files[4], example.title, one, split, mesh)

    console.print()
    console.print(plan.table(rows=ROWS, width=console.width), markup=False, soft_wrap=True)
    console.print(LEGEND.format(path=files[0], axes=", ".join(mesh.axes)), soft_wrap=True)
    console.print(losses(one, split, mesh))
    gap = max(abs(a - b) for a, b in zip(one.losses, split.losses, strict=True))
    console.print(f"  largest difference of the two losses in {len(one.losses)} steps: [bold]{gap:.1e}[/]")
    console.print(f"  test accuracy: {one.accuracy:.1%} on 1 device, {split.accuracy:.1%} on {mesh.device_num}\n")
    return files


def train(progress: Progress, title: str, example: Example, digits: Digits, epochs: int, mesh: pw.Mesh | None) -> Run:
    """The training, split over `mesh` or (None) not."""
    torch.manual_seed(0)
    model = example.make()
    if mesh is not None:
        model = pw.shard(
            model, mesh=mesh, in_strategy=(("dp", None, None, None),), parameter_plan={example.weight: example.strategy}
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.rate)
    task = progress.add_task(
        title.ljust(20), total=len(digits.labels) // BATCH * epochs, loss="" if mesh is None else "capture and plan"
    )
    curve: list[float] = []
    started = perf_counter()
    for images, labels in batches(digits, BATCH, epochs):
        loss, _ = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        progress.update(task, advance=1, loss=f"loss {curve[-1]:.4f}")
    run = Run(curve, 0.0, perf_counter() - started)
    if mesh is not None:  # of the training step, not of the test that follows
        run.plan, run.program = model.plan, str(model.program)
    model.eval()
    with torch.no_grad():
        run.accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()
    return run


def losses(one: Run, split: Run, mesh: pw.Mesh) -> Table:
    """Some steps of both loss curves, side by side."""
    table = Table(title="loss", title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    for column in ("step", "1 device", f"{mesh.device_num} virtual devices", "difference"):
        table.add_column(column, justify="right")
    count = len(one.losses)
    for i in sorted({round(k * (count - 1) / 7) for k in range(8)}):
        a, b = one.losses[i], split.losses[i]
        table.add_row(str(i + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    table.add_row("", f"{one.seconds:.1f} s", f"{split.seconds:.1f} s", "", style="dim")
    return table


def draw(path: Path, title: str, one: Run, split: Run, mesh: pw.Mesh) -> None:
    """Both loss curves, one on the other, and their difference below."""
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, height_ratios=(3, 1), figsize=(8, 5.5), layout="constrained"
    )
    steps = range(1, len(one.losses) + 1)
    above.plot(steps, one.losses, color="#9ecae1", linewidth=5, label="1 device")
    above.plot(steps, split.losses, color="#08306b", linewidth=1.2, label=f"{mesh.device_num} virtual devices ({mesh})")
    above.set(
        title=f"{title} on digits: the loss does not depend on the split", ylabel="cross-entropy loss", ylim=(0, None)
    )
    above.legend(frameon=False)
    gaps = [abs(a - b) for a, b in zip(one.losses, split.losses, strict=True)]
    below.semilogy(steps, [max(gap, 1e-17) for gap in gaps], ".", color="#08306b", markersize=4)
    below.set(xlabel="step", ylabel="difference", ylim=(3e-18, 1e-2))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(demo)
