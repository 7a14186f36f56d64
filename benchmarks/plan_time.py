"""How long a plan takes, and how much memory: CPU seconds of each pass, for GPT-2 124M and for Llama-3 shapes, for
loops over time that are unrolled, and for a number of devices without a mesh.

    python benchmarks/plan_time.py [--only 8x8] [--quick] [--repeat 3] [--json out/plan_time.json]

Models stand on the meta device, the batch over the first axis is annotated, everything else is inferred. Every run is a
process of its own, so caches are cold and the peak of its memory is its own. The passes:

    capture        torch.export and what follows it, to the graph of ATen operators
    search         annotations, formulating the problem (rules, options, all costs), and the exact search
    lower          the program of one rank, and the plan as it is printed and saved
    differentiate  the forward and backward graphs, and what is done to them before collectives are fused

A case fails, and with it the command (exit status 1), when the search takes more than 2 CPU seconds, everything but
capture more than 10 (each of both: of loops, and without a mesh 5, of 128k tokens 10), or the process more than 1.5
GB. A case that runs out of time or memory is shown as "over", and fails. `AUTOPARALLEL` holds what another planner
needs for the same shapes. The growth with depth and with devices is plotted to out/plan_time.png where matplotlib is
installed.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from script import WRITE, save, start, write_figures

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from partway.compiler.driver import device_profile
from partway.compiler.meshes import meshes_to_try
from partway.compiler.passes import DIFFERENTIATING, differentiated_program, lowered, search_on_cheapest_mesh, timed
from partway.measure.workloads import ResNet50
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.capture.capture import capture
from partway.propagation.graph.graph import differentiated
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import Request
from partway.strategy import Mesh

PASSES = ("capture", "annotate", "formulate", "search", "lower", "make_plan", *(each.name for each in DIFFERENTIATING))
SEARCH = ("annotate", "formulate", "search")
LOWER = ("lower", "make_plan")
BARS = {"search": 2.0, "beside capture": 10.0, "peak": 1.5e9}  # CPU seconds, CPU seconds, bytes
LIMIT_BYTES = 6 * 10**9  # a process that asks for more is ended
OUT_OF_MEMORY = 3  # the exit status of such a one
DEEP = 16  # layers from which on a case runs once


@dataclass(frozen=True)
class Shapes:
    """A model without its depth, and its inputs: those of so many sequences, the first of them split."""

    build: Callable[[int], torch.nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]


def _tokens(sequence: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def inputs(batch: int) -> dict[str, torch.Tensor]:
        tokens = torch.empty(batch, sequence, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return inputs


def _images(batch: int) -> dict[str, torch.Tensor]:
    return {"images": torch.empty(32 * batch, 3, 224, 224), "target": torch.empty(32 * batch, dtype=torch.long)}


def _gpt2(layers: int) -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def _llama(hidden: int, ffn: int, heads: int) -> Callable[[int], torch.nn.Module]:
    def build(layers: int) -> torch.nn.Module:
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(torch.bfloat16)

    return build


def _qwen3_moe(layers: int) -> torch.nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        max_position_embeddings=40960, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def _deepseek_v3(layers: int) -> torch.nn.Module:
    """With 256 experts of which a token chooses 8, of at most 4 of 8 groups (the defaults)."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=layers, use_cache=False)).to(torch.bfloat16)


def _rwkv(layers: int) -> torch.nn.Module:
    """Whose time mixing is a loop over tokens where its kernel for CUDA is not at hand."""
    config = RwkvConfig(
        vocab_size=4096, context_length=1024, hidden_size=256, num_hidden_layers=layers, use_cache=False
    )
    return RwkvForCausalLM(config)


class _Loop(torch.nn.Module):
    """A language model that goes through its tokens with a cell."""

    def __init__(self, cell: type[torch.nn.LSTMCell | torch.nn.GRUCell]) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(8192, 1024), torch.nn.Linear(1024, 8192)
        self.cell = cell(1024, 1024)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        hidden = x.new_zeros(x.shape[0], x.shape[2])
        memory, found = hidden, []
        for t in range(x.shape[1]):
            if isinstance(self.cell, torch.nn.LSTMCell):
                hidden, memory = self.cell(x[:, t], (hidden, memory))
            else:
                hidden = self.cell(x[:, t], hidden)
            found.append(hidden)
        logits = self.head(torch.stack(found, 1))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


SHAPES = {
    "GPT-2 124M": Shapes(_gpt2, _tokens(1024)),
    "Llama-3-8B": Shapes(_llama(4096, 14336, 32), _tokens(8192)),
    "Llama-3-8B of 128k tokens": Shapes(_llama(4096, 14336, 32), _tokens(131072)),
    "Llama-3-405B": Shapes(_llama(16384, 53248, 128), _tokens(8192)),
    "Qwen3-30B-A3B": Shapes(_qwen3_moe, _tokens(4096)),
    "DeepSeek-V3": Shapes(_deepseek_v3, _tokens(4096)),
    "RWKV of 32 tokens": Shapes(_rwkv, _tokens(32)),
    "LSTMCell over 128 tokens": Shapes(lambda _: _Loop(torch.nn.LSTMCell), _tokens(128)),
    "GRUCell over 128 tokens": Shapes(lambda _: _Loop(torch.nn.GRUCell), _tokens(128)),
    "ResNet-50": Shapes(lambda _: ResNet50(), _images),
}


@dataclass(frozen=True)
class Case:
    """A model of so many layers on a mesh.

    limit    the CPU seconds after which a run of it is ended
    mode     how it is searched; in another mode than the exact one, on all meshes of as many devices
    within   the CPU seconds of everything but capture that it may take, if they are not those of all
    each     sequences for each device, with the batch over all axes; 0: the batch is over the first axis
    profile  the device profile, if not that of an H100
    """

    model: str
    layers: int
    sizes: tuple[int, ...]
    limit: int = 300
    mode: str = "dynamic_programming"
    within: float | None = None
    each: int = 0
    profile: str | None = None

    @property
    def mesh(self) -> str:
        return "x".join(map(str, self.sizes)) + ("" if self.mode == "dynamic_programming" else f" {self.mode}")

    @property
    def name(self) -> str:
        return f"{self.model}, {self.layers} layer{'s' * (self.layers > 1)}, {self.mesh}"

    @property
    def devices(self) -> int:
        return Mesh.of_sizes(self.sizes).device_num

    @property
    def batch(self) -> int:
        """Sequences: one for each rank of the first axis, and no less than 8, or `each` for each device."""
        return self.each * self.devices or max(8, self.sizes[0])

    def repeats(self, asked: int) -> int:
        """How often it runs: a deep one once."""
        return asked if self.layers < DEEP else 1


DEPTHS = (1, 2, 4, 8, 16, 32)
MESHES = ((8,), (8, 8), (32, 8), (64, 32, 8))
CASES = (
    *(Case("GPT-2 124M", 12, sizes) for sizes in ((8,), (2, 4))),
    *(Case("Llama-3-8B", layers, sizes) for sizes in MESHES for layers in DEPTHS),
    Case("Llama-3-8B of 128k tokens", 32, (8, 8), within=10.0),  # its cheapest plan does not fit
    Case("Llama-3-405B", 126, (64, 32, 8)),
    *(Case("Qwen3-30B-A3B", 48, sizes, within=3.0, each=1) for sizes in ((8, 8), (32, 64))),
    Case("DeepSeek-V3", 61, (8, 8), within=10.0, each=1, profile="h200"),  # 64 of 80 GB are too few for its states
    Case("DeepSeek-V3", 61, (32, 64), within=10.0, each=1),
    *(Case("Llama-3-8B", 1, sizes, limit=120) for sizes in ((2, 2, 2), (4, 4, 4), (8, 4, 4, 2))),
    Case("RWKV of 32 tokens", 2, (2, 4), within=5.0),
    *(Case(f"{cell} over 128 tokens", 1, (2, 4), within=5.0) for cell in ("LSTMCell", "GRUCell")),
    Case("ResNet-50", 1, (8,), mode="sharding_propagation", within=5.0),
)
QUICK = tuple(c for c in CASES if c.layers in (1, 8) and c.sizes in ((8,), (8, 8), (2, 2, 2)))


@dataclass(frozen=True)
class Peer:
    """What autoparallel needs: CPU seconds for its trace, options and costs, solver, and applying; peak bytes."""

    trace: float
    options: float
    solve: float
    apply: float
    peak: float

    @property
    def search(self) -> float:
        return self.options + self.solve


SOURCE = (
    "meta-pytorch/autoparallel (an integer program over the joint graph), torch 2.13 on the CPU with "
    "pretend H100s, bfloat16, sequence 8192; CPU seconds on a machine like this one, not in the same run. On 2x2x2 one "
    "layer has 14,148,516 variables, and the options alone take 793 CPU seconds."
)
AUTOPARALLEL = {
    ("Llama-3-8B", 8, (8,)): Peer(5.9, 2.2, 1.1, 12, 0.6e9),
    ("Llama-3-8B", 32, (8,)): Peer(25, 3.8, 1.2, 53, 2.1e9),
    ("Llama-3-8B", 8, (8, 8)): Peer(5.2, 33, 60, 12, 2.5e9),
    ("Llama-3-8B", 32, (8, 8)): Peer(21, 42, 56, 48, 4.4e9),
    ("Llama-3-8B", 32, (32, 8)): Peer(18, 36, 53, 47, 4.3e9),
    ("GPT-2 124M", 12, (2, 4)): Peer(6.7, 25, 49, 13, 1.6e9),
}


# -- One run, in a process of its own ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one run of a case gave: CPU seconds of each pass, the peak of the process in bytes, what the plan is.

    gap    how far above the optimum the plan may be, relative; 0 where it is proven
    """

    seconds: Mapping[str, float]
    peak: float
    operators: int
    vertices: int
    width: int
    gap: float
    wire: float

    @property
    def search(self) -> float:
        """Seconds of annotations, formulating, all costs and the search."""
        return self.of(SEARCH)

    @property
    def beside_capture(self) -> float:
        """Seconds of everything but capture."""
        return self.of(PASSES) - self.seconds["capture"]

    def of(self, passes: Iterable[str]) -> float:
        """Seconds of `passes` together."""
        return sum(self.seconds[name] for name in passes)


def inputs_of(case: Case, seconds: dict[str, float] | None = None, **asked: Any) -> PlanInputs:
    """All that a plan of `case` depends on. `seconds` gets the CPU seconds of the capture; `asked`: further fields of
    the request. Costs are those of an H100 machine unless the case says otherwise, whatever this one has."""
    shapes, mesh = SHAPES[case.model], Mesh.of_sizes(case.sizes)
    with torch.device("meta"):
        model = shapes.build(case.layers)
        batch = shapes.inputs(case.batch)
    several = case.mode != "dynamic_programming"
    context = ParallelContext(device_num=case.devices, search_mode=case.mode, device_profile=case.profile)
    first = next(iter(batch))
    split = (mesh.axes if case.each else mesh.axes[0], *[None] * (batch[first].ndim - 1))
    counts = (case.devices, *[1] * (batch[first].ndim - 1))
    request = Request(in_strategy={first: counts if several else split}, mesh=None if several else mesh, **asked)
    start = time.process_time()
    graph = capture(model, (), batch)
    if seconds is not None:
        seconds["capture"] = time.process_time() - start
    return PlanInputs(graph, model, request, context, AlgoParameters(), device_profile(graph, request, context))


def measure(case: Case) -> Run:
    """Plan `case` here and now."""
    seconds: dict[str, float] = {}
    inputs = inputs_of(case, seconds)
    around: Any = timed(seconds, clock=time.process_time)
    draft = search_on_cheapest_mesh(inputs, meshes_to_try(inputs), around)
    draft = lowered(draft, around)
    differentiated_program(inputs, draft.program, differentiated(inputs.graph), around)
    solution = draft.solution
    return Run(
        seconds=seconds,
        peak=_peak(),
        operators=len(draft.plan.operators),
        vertices=len(draft.problem.vertices),
        width=solution.width,
        gap=0.0 if solution.proven else solution.cost / solution.bound - 1,
        wire=draft.plan.wire_bytes,
    )


def _peak() -> float:
    """The most memory that this process has held, in bytes."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def measured(case: Case) -> Run | str:
    """A run of `case` in a process of its own, or what it ran out of."""
    command = [sys.executable, __file__, "--one", case.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return f"over {case.limit} CPU s"
    if done.returncode == OUT_OF_MEMORY:
        return f"over {LIMIT_BYTES / 1e9:.0f} GB"
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit status {done.returncode}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def _run_here(name: str) -> None:
    """What the process of one run does: print its figures as JSON."""
    case = next(case for case in CASES if case.name == name)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    until = math.ceil(time.process_time()) + case.limit  # not of the imports
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    try:
        print(json.dumps(asdict(measure(case))))
    except MemoryError:
        raise typer.Exit(OUT_OF_MEMORY) from None


# -- All runs, beside the peer -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """The runs of one case: medians, and what it misses."""

    case: Case
    runs: tuple[Run, ...]
    over: str = ""

    def median(self, of: Callable[[Run], float]) -> float:
        return statistics.median(map(of, self.runs))

    def misses(self) -> tuple[str, ...]:
        """The bars that it is above."""
        if self.over:
            return (self.over,)
        found = {
            "search": self.median(lambda run: run.search),
            "beside capture": self.median(lambda run: run.beside_capture),
            "peak": self.median(lambda run: run.peak),
        }
        within = self.case.within
        bars = BARS if within is None else BARS | {"search": within, "beside capture": within}
        return tuple(name for name, bar in bars.items() if found[name] >= bar)


def figures(case: Case, repeat: int, run: Callable[[Case], Run | str] = measured) -> Figures:
    """`case` as often as it runs."""
    runs: list[Run] = []
    for _ in range(case.repeats(repeat)):
        found = run(case)
        if isinstance(found, str):
            return Figures(case, tuple(runs), found)
        runs.append(found)
    return Figures(case, tuple(runs))


def chosen(only: str, quick: bool) -> tuple[Case, ...]:
    """The cases whose name contains `only`, of all or of the quick ones."""
    cases = tuple(case for case in (QUICK if quick else CASES) if only in case.name)
    if not cases:
        names = "; ".join(case.name for case in (QUICK if quick else CASES))
        raise typer.BadParameter(f"no case contains {only!r}; the cases are: {names}")
    return cases


def main(
    only: Annotated[str, typer.Option(help="run the cases whose name contains this")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="only 1 and 8 layers, on small meshes")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="runs of a case of less than 16 layers; the median counts")] = 3,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/plan_time.json"),
    plot: Annotated[Path, typer.Option(help="where to draw the growth")] = Path("out/plan_time.png"),
    write: Annotated[str, WRITE] = "",
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure the cases, print them beside autoparallel's figures, and exit with status 1 if one fails."""
    if one:
        _run_here(one)
        return
    cases, found = chosen(only, quick), []
    for i, case in enumerate(cases):
        found.append(figures(case, repeat))
        print(f"{i + 1} of {len(cases)}: {case.name}: {_verdict(found[-1])}", file=sys.stderr, flush=True)
    Console(width=200).print(_table(found))
    print(f"autoparallel: CPU s of its search; of all but its trace; peak MB. {SOURCE}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_as_data(found), indent=1) + "\n")
    print(f"wrote {out}{f' and {plot}' if _drawn(found, plot) else ''}")
    write_figures(write, {name: value for f in found if f.runs for name, value in _quotable(f).items()})
    failed = [f for f in found if f.misses()]
    print(f"{len(found) - len(failed)} of {len(found)} cases hold: {_bars()}")
    raise typer.Exit(1 if failed else 0)


def _quotable(found: Figures) -> dict[str, str]:
    """What pages may quote of a case, by its name in figures.json."""
    name = found.case.name
    return {
        f"{name}: capture": f"{found.median(lambda run: run.of(('capture',))):.1f}",
        f"{name}: search": f"{found.median(lambda run: run.search):.2f}",
        f"{name}: all": f"{found.median(lambda run: run.of(PASSES)):.1f}",
        f"{name}: gap": f"{100 * found.runs[-1].gap:.2g}",
    }


def _bars() -> str:
    search, beside, peak = BARS.values()
    return f"search under {search:g} CPU s, everything but capture under {beside:g}, peak under {peak / 1e9:g} GB"


def _verdict(found: Figures) -> str:
    return f"misses {', '.join(found.misses())}" if found.misses() else "holds"


def _as_data(found: Iterable[Figures]) -> dict[str, Any]:
    cases = [
        {
            "name": f.case.name, "model": f.case.model, "layers": f.case.layers, "mesh": f.case.sizes,
            "runs": [asdict(run) for run in f.runs], "misses": f.misses(),
        }
        for f in found
    ]  # fmt: skip
    peers = [
        {"model": model, "layers": layers, "mesh": sizes, **asdict(peer)}
        for (model, layers, sizes), peer in AUTOPARALLEL.items()
    ]
    return {
        "torch": torch.__version__,
        "bars": BARS,
        "cases": cases,
        "autoparallel": {"source": SOURCE, "cases": peers},
    }


def _table(found: Iterable[Figures]) -> Table:
    title = f"CPU seconds to plan, medians (and the spread of the search), torch {torch.__version__}\n{_bars()}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("case", no_wrap=True)
    names = ("capture", "search", "lower", "differentiate", "beside capture", "peak MB")
    for name in (*names, "vertices", "width", "optimum", "sent MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("autoparallel", no_wrap=True)
    table.add_column("")
    for f in found:
        table.add_row(*_cells(f))
    return table


def _cells(found: Figures) -> tuple[str, ...]:
    case = found.case
    peer = AUTOPARALLEL.get((case.model, case.layers, case.sizes))
    beside = f"{peer.search:.3g}; {peer.search + peer.apply:.3g}; {peer.peak / 1e6:.0f}" if peer else ""
    if not found.runs:
        return (case.name, *[""] * 10, beside, _verdict(found))

    def spread(of: Callable[[Run], float]) -> str:
        low, high = min(map(of, found.runs)), max(map(of, found.runs))
        more = f" ({low:.2f}-{high:.2f})" if len(found.runs) > 1 else ""
        return f"{found.median(of):.2f}{more}"

    def median(*passes: str) -> str:
        return f"{found.median(lambda run: run.of(passes)):.2f}"

    last = found.runs[-1]
    return (
        case.name, median("capture"), spread(lambda run: run.search), median(*LOWER),
        median(*(each.name for each in DIFFERENTIATING)), f"{found.median(lambda run: run.beside_capture):.2f}",
        f"{found.median(lambda run: run.peak) / 1e6:.0f}", str(last.vertices), str(last.width),
        f"gap {100 * last.gap:.2g} %" if last.gap else "proven", f"{last.wire / 1e6:.0f}", beside, _verdict(found),
    )  # fmt: skip


# -- The growth --------------------------------------------------------------------------------------------------------


def _drawn(found: Iterable[Figures], path: Path) -> bool:
    """Draw the seconds by depth and by devices; False without matplotlib, which only the demo needs otherwise."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    llama = [f for f in found if f.case.model == "Llama-3-8B" and f.case.sizes in MESHES and f.runs]
    drawing = Figure(figsize=(11, 4.5), layout="constrained")
    by_depth, by_devices = drawing.subplots(1, 2)
    for sizes in MESHES:
        here = [f for f in llama if f.case.sizes == sizes]
        _lines(by_depth, here, lambda f: f.case.layers, f"on {'x'.join(map(str, sizes))}")
    for layers in (1, 8, 32):
        here = [f for f in llama if f.case.layers == layers]
        _lines(by_devices, here, lambda f: f.case.devices, f"{layers} layer{'s' * (layers > 1)}")
    for axes, key, label in ((by_depth, 1, "layers"), (by_devices, 2, "devices")):
        peers = [(c, p) for c, p in AUTOPARALLEL.items() if c[0] == "Llama-3-8B"]
        xs = [Mesh.of_sizes(c[2]).device_num if key == 2 else c[1] for c, _ in peers]
        axes.plot(xs, [p.search for _, p in peers], "kx", label="autoparallel, search")
        axes.axhline(BARS["search"], color="grey", linewidth=0.8)
        axes.set(xlabel=label, ylabel="CPU seconds", xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    drawing.suptitle("Llama-3-8B shapes: search (solid), everything but capture (dashed)")
    save(drawing, path)
    return True


def _lines(axes: Any, found: list[Figures], x: Callable[[Figures], int], label: str) -> None:
    """Two lines of one colour: the search, and everything but capture."""
    if found:
        xs = list(map(x, found))
        (line,) = axes.plot(xs, [f.median(lambda run: run.search) for f in found], "o-", label=label, markersize=3)
        beside = [f.median(lambda run: run.beside_capture) for f in found]
        axes.plot(xs, beside, "o--", color=line.get_color(), markersize=3)


if __name__ == "__main__":
    start(main)
