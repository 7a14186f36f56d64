"""How long pages of plans take to open, and how large they are.

    python benchmarks/pages.py                      # all; plans that were made before are read from out/pages
    python benchmarks/pages.py --shots docs/images  # with a screenshot of each, for the documentation

Each page is opened by a headless Chromium from disk, `--repeat` times, each time in a new window. Printed are its bytes
(the scripts are 0.54 MB of them), the seconds that `save_html` takes (of a saved plan, so without alternatives), the
milliseconds from the start of loading until the graph is drawn and answers (median, least and most), and the longest
task of a script, which nothing on the page can interrupt. Bars: 2 s and 200 ms. Needs `pip install playwright` and
Debian's chromium.
"""

from __future__ import annotations

import io
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from plan_time import SHAPES
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start
from torch import Tensor, nn

import partway as pw
from partway.measure.workloads import ResNet50, UNet

OUT = Path("out/pages")
WINDOW = {"width": 1280, "height": 860}
BARS = {"interactive": 2000.0, "task": 200.0}  # milliseconds


class Loss(nn.Module):
    """A causal language model as a function of ids: its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids, labels=ids).loss


@dataclass(frozen=True)
class Case:
    """A model on a mesh, as it is annotated.

    make     gives it and what it is called with, on the meta device
    select   what is selected on the screenshot
    """

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    mesh: dict[str, int]
    in_strategy: Any
    parameter_plan: Any = None
    select: str = ""

    def plan(self) -> pw.Plan:
        """Its plan."""
        with torch.device("meta"):
            model, inputs = self.make()
        of = {"in_strategy": self.in_strategy, "parameter_plan": self.parameter_plan}
        return pw.compile(model, inputs, mesh=self.mesh, **of).plan


def _ids(batch: int, sequence: int) -> tuple[Tensor, ...]:
    return (torch.empty(batch, sequence, dtype=torch.long),)


def _language(name: str, layers: int, batch: int) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    return lambda: (Loss(SHAPES[name].build(layers)), _ids(batch, SHAPES[name].sequence))


def _experts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=4, num_local_experts=8, vocab_size=32000, use_cache=False,
        )
    )  # fmt: skip
    model.set_experts_implementation("batched_mm")
    return Loss(model), _ids(8, 512)


def _images(size: int, classes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.empty(8, 3, size, size), torch.empty(classes, dtype=torch.long)


CASES = (
    Case("gpt2", _language("GPT-2 124M", 12, 8), {"dp": 2, "tp": 4}, (("dp", None),),
         {"model.transformer.h.*.mlp.c_fc.weight": (None, "tp")}, "addmm_2"),
    Case("llama405b", _language("Llama-3-405B", 126, 64), {"dp": 64, "tp": 32, "sp": 8}, (("dp", None),),
         select="model.model.layers.1.mlp"),
    Case("resnet50", lambda: (ResNet50(), _images(224, (8,))), {"w": 8}, ((None, None, None, "w"), None),
         select="blocks.0.conv2"),
    Case("unet", lambda: (UNet(width=8, levels=3), _images(512, (8, 512, 512))), {"h": 2, "w": 2},
         ((None, None, "h", "w"), None), select="down.0.conv2"),
    Case("experts", _experts, {"dp": 2, "ep": 4}, (("dp", None),),
         {"model.model.layers.*.mlp.experts.*": ("ep", None, None)}, "model.model.layers.0.mlp.experts"),
)  # fmt: skip


SELECTED = {case.name: case.select for case in CASES}


def many(operators: int = 20_000) -> pw.Plan:
    """A plan of so many operators, none in a module: each adds to what the one before gave."""

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + 1
            return x

    with torch.device("meta"):
        plan = pw.compile(Adds(), (torch.empty(64, 64),), mesh={"dp": 2, "tp": 4}, in_strategy=(("dp", "tp"),)).plan
    first, step = plan.operators[0], plan.operators[1]
    made, name = [first], first.name
    for i in range(operators - 1):
        producer = step.producers[0].model_copy(update={"name": name})
        name = f"add_{i}"
        made.append(step.model_copy(update={"name": name, "producers": (producer, *step.producers[1:])}))
    last = plan.outputs[0].producer.model_copy(update={"name": name})
    return plan.model_copy(
        update={"operators": tuple(made), "outputs": (plan.outputs[0].model_copy(update={"producer": last}),)}
    )


@dataclass(frozen=True)
class Opened:
    """One opening of a page: milliseconds until it answers, and those of its longest task."""

    interactive: float
    task: float


WATCH = """window.tasks = [];
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({ entryTypes: ["longtask"] });"""


def opened(browser: Any, path: Path) -> Opened:
    """What one opening of the page takes."""
    window = browser.new_page(viewport=WINDOW)
    window.add_init_script(WATCH)
    window.goto(path.resolve().as_uri())
    window.wait_for_selector("html[data-ready=true]", timeout=120_000)
    window.wait_for_timeout(300)  # what it still does then
    interactive = window.evaluate("performance.getEntriesByName('interactive')[0].startTime")
    task = window.evaluate("Math.max(0, ...window.tasks)")
    window.close()
    return Opened(interactive, task)


def take(browser: Any, path: Path, select: str, shot: Path) -> None:
    """Save a screenshot of the page on which `select` is selected."""
    from PIL import Image

    window = browser.new_page(viewport=WINDOW)
    window.goto(path.resolve().as_uri())
    window.wait_for_selector("html[data-ready=true]", timeout=120_000)
    if select:
        window.fill("#search", select)
        window.press("#search", "Enter")
        window.wait_for_selector("#busy", state="hidden")
        window.fill("#search", "")
    window.wait_for_timeout(500)  # the pictures of nodes are loaded
    Image.open(io.BytesIO(window.screenshot())).convert("RGB").save(shot, lossless=True, method=6)
    window.close()


def main(
    only: Annotated[str, typer.Option(help="cases whose names have this")] = "",
    repeat: Annotated[int, typer.Option(min=1, help="how often to open each")] = 3,
    shots: Annotated[Path | None, typer.Option(help="a folder for a screenshot of each")] = None,
) -> None:
    """Make and open the pages."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        typer.echo("chromium is not installed", err=True)
        raise typer.Exit(2)
    OUT.mkdir(parents=True, exist_ok=True)
    title = f"Pages: bars {BARS['interactive'] / 1000:g} s until interactive, no task above {BARS['task']:g} ms"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for name in ("plan", "operators", "collectives", "MB", "save_html s", "interactive ms", "longest task ms", ""):
        table.add_column(name, justify="left" if name in ("plan", "") else "right", no_wrap=True)
    missed = False
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, make in {**{case.name: case.plan for case in CASES}, "20,000 operators": many}.items():
            if only not in name:
                continue
            plan = _kept(name, make)
            path = OUT / f"{name}.html"
            before = time.perf_counter()
            plan.save_html(path, title=name)
            seconds = time.perf_counter() - before
            found = [opened(browser, path) for _ in range(repeat)]
            if shots and name in SELECTED:
                take(browser, path, SELECTED[name], shots / f"page_{name}.webp")
            ready, tasks = [one.interactive for one in found], [one.task for one in found]
            misses = [
                bar for bar, times in (("interactive", ready), ("task", tasks)) if statistics.median(times) > BARS[bar]
            ]
            missed = missed or bool(misses)
            table.add_row(
                name, f"{len(plan.operators):,}", f"{len(plan.collectives):,}", f"{os.path.getsize(path) / 1e6:.2f}",
                f"{seconds:.2f}", _spread(ready), _spread(tasks), f"misses {', '.join(misses)}" if misses else "holds",
            )  # fmt: skip
        browser.close()
    Console(width=160).print(table)
    raise typer.Exit(1 if missed else 0)


def _kept(name: str, make: Callable[[], pw.Plan]) -> pw.Plan:
    """The plan, from disk where it is there."""
    path = OUT / f"{name}.json"
    if not path.exists():
        make().save(path)
    return pw.Plan.load(path)


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({min(times):.0f}-{max(times):.0f})"


if __name__ == "__main__":
    start(main)
