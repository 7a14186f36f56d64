"""How good plans are: our plans beside those that other compilers make of the same models and annotations.

    python benchmarks/plan_quality.py [--only gpt] [--json out/plan_quality.json]

Suite A is XLA's (GSPMD and Shardy), suite B MindSpore's; `peers.json` holds their figures and where they come from.
Models stand on the meta device; nothing runs. A row fails, and with it the command (exit status 1), when

    wire        one rank sends more than the best of the peers that share the work as evenly
    flops       one device does more than 1.05 times an eighth of what one device alone would do
    claim       the plan, the program's list of collectives and the program's graphs disagree on the bytes sent

What a tensor that a row does not annotate looks like at rest is the search's choice, as everything else.
The two cases of suite A that split the image are in spatial.py: resnet50 with W split 8, and a stack of convolutions
with H split 2 and W split 4.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from script import WRITE, start, write_figures

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
import typer
from peer_models import GPT, MLP, Encoder
from program_figures import flops, memory, wire
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import partway as pw
from partway.measure.workloads import Linear, ResNet50
from partway.propagation.program.collective import Collective

DEVICES = 8
EVEN = 1.05  # of an eighth of the work: still even
LARGEST = 6  # collectives that a row that misses names
EXACT = 1e-9  # relative: sums of the same bytes in another order
SLACK = 0.005  # relative: the peers' figures have three digits
PEERS = Path(__file__).with_name("peers.json")

Batch = dict[str, Tensor]
Build = Callable[[Linear], nn.Module]


@dataclass(frozen=True)
class Model:
    """A model, which takes the linear operator that a case annotates, and a batch for it."""

    build: Build
    batch: Callable[[], Batch]


@dataclass(frozen=True)
class Case:
    """One row: a model and exactly the annotations that the peers were given.

    name        as in peers.json
    mesh        names and sizes of axes; None: 8 devices, of which the annotations make a mesh
    batch       how the first dim of every input is split at rest: by an axis, or into so many; None: the search decides
    parameters  strategies by pattern
    operator    the strategies of the annotated linear operator's input and weight, as `shard` takes them
    """

    name: str
    model: str
    mesh: Mapping[str, int] | None
    batch: str | int | None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    operator: tuple[tuple[int, ...], ...] | None = None


def _pairs(*shape: int) -> Callable[[], Batch]:
    """An input and a target of one shape."""
    return lambda: {"x": torch.empty(shape), "target": torch.empty(shape)}


def _tokens(batch: int, sequence: int) -> Callable[[], Batch]:
    return lambda: {name: torch.empty(batch, sequence, dtype=torch.long) for name in ("ids", "target")}


def _images(batch: int, size: int) -> Callable[[], Batch]:
    return lambda: {
        "images": torch.empty(batch, 3, size, size),
        "target": torch.empty(batch, dtype=torch.long),
    }


MODELS = {
    "mlp": Model(lambda _: MLP(), _pairs(512, 1024)),
    "gpt": Model(lambda _: GPT(), _tokens(8, 512)),
    "gpt fused": Model(lambda _: GPT(fused=True), _tokens(8, 512)),
    "resnet50": Model(lambda _: ResNet50(), _images(8, 256)),
    "mlp 256": Model(lambda first: MLP(first=first), _pairs(256, 1024)),
    "enc1": Model(lambda first: Encoder(1, first=first), _pairs(32, 128, 1024)),
    "enc4": Model(lambda first: Encoder(4, first=first), _pairs(32, 128, 1024)),
    "enc1 width 4096": Model(lambda first: Encoder(1, 4096, first=first), _pairs(8, 128, 4096)),
    "resnet50 256": Model(lambda first: ResNet50(first=first), _images(256, 224)),
}

# -- The annotations. A Linear's weight is [out, in]: a column split of its transpose is a split of dim 0. ------------

FLAT = {"devices": 8}
GRID = {"dp": 2, "tp": 4}
COLUMN, ROW = ("tp", None), (None, "tp")
MEGATRON = {"q.weight": COLUMN, "k.weight": COLUMN, "v.weight": COLUMN, "w1.weight": COLUMN,
            "o.weight": ROW, "w2.weight": ROW}  # fmt: skip
FUSED = {"qkv.weight": COLUMN, "w1.weight": COLUMN, "o.weight": ROW, "w2.weight": ROW}
A1, A1_ENCODER = ((2, 1), (4, 1)), ((2, 1, 1), (4, 1))


def _of(prefix: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: strategy for name, strategy in plan.items()}


CASES = (
    Case("mlp, batch split 8", "mlp", FLAT, "devices"),
    Case("mlp, only w1 column-split 8", "mlp", {"tp": 8}, None, {"w1.weight": COLUMN}),
    Case("mlp, 2x4, batch on 2, w1 col", "mlp", GRID, "dp", {"w1.weight": COLUMN}),
    Case("mlp, 2x4, w1 col, w2 row, w3 col", "mlp", GRID, "dp",
         {"w1.weight": COLUMN, "w2.weight": ROW, "w3.weight": COLUMN}),
    Case("gpt, batch split 8", "gpt", FLAT, "devices"),
    Case("gpt, 2x4, batch on 2, q k v w1 column only", "gpt", GRID, "dp",
         _of("blocks.*.", {name: COLUMN for name in MEGATRON if MEGATRON[name] is COLUMN})),
    Case("gpt, 2x4, full Megatron + split vocab", "gpt", GRID, "dp",
         {"wte.weight": COLUMN, **_of("blocks.*.", MEGATRON)}),
    Case("gpt, 2x4, first layer's weights only + batch", "gpt", GRID, "dp", _of("blocks.0.", MEGATRON)),
    Case("gpt, fused qkv, Megatron", "gpt fused", GRID, "dp", _of("blocks.*.", FUSED)),
    Case("gpt, weights split on dim 0 over 8 (FSDP)", "gpt", FLAT, "devices", {"*": [pw.Shard(0)]}),
    Case("resnet50, batch split 8", "resnet50", FLAT, "devices"),
    Case("mlp 256, none", "mlp 256", None, 8),
    Case("mlp 256, none, full_batch", "mlp 256", None, 1),
    Case("mlp 256, a1", "mlp 256", None, 8, operator=A1),
    Case("enc1, none", "enc1", None, 8),
    Case("enc1, none, full_batch", "enc1", None, 1),
    Case("enc1, a1", "enc1", None, 8, operator=A1_ENCODER),
    Case("enc1, a1, full_batch", "enc1", None, 1, operator=A1_ENCODER),
    Case("enc4, a1", "enc4", None, 8, operator=A1_ENCODER),
    Case("enc1 width 4096, batch 8, none", "enc1 width 4096", None, 8),
    Case("resnet50 256, none", "resnet50 256", None, 8),
    Case("resnet50 256, a1", "resnet50 256", None, 8, operator=A1),
)  # fmt: skip


# -- One plan, measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """One plan. Bytes and FLOPs are those of one device and one step.

    claimed, listed, wire   bytes sent: by the plan, by the program's list of collectives, by the program's graphs
    even                    an eighth of the FLOPs of the same model on one device
    peak, temporary         the most that lives at any time, and how much of it is not there before the step
    seconds                 CPU seconds from the model to the program
    largest                 the collectives that send most
    """

    claimed: float
    listed: float
    wire: float
    flops: int
    even: float
    parameters: int
    gradients: int
    peak: int
    temporary: int
    predicted: float
    certificate: str
    proven: bool
    seconds: float
    largest: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether all three counts of the bytes sent are one."""
        return all(abs(count - self.wire) <= EXACT * self.wire for count in (self.claimed, self.listed))


def compiled(case: Case, model: Model) -> pw.Compiled:
    """The plan of `case` for `model`, on the meta device."""
    with torch.device("meta"):
        module, batch = model.build(linear_of(case)), model.batch()
    # the peers were measured on CPUs, where bytes count and no kind of collective is faster than another; what a plan
    # holds at most is compared, and groups of gradients would add to it what they wait for
    with pw.auto_parallel_context(device_num=DEVICES, device_profile="cpu", comm_fusion={"openstate": False}):
        return pw.compile(module, (), batch, **arguments(case, batch))


def arguments(case: Case, batch: Batch) -> dict[str, Any]:
    """What `case` says, as keyword arguments of `pw.compile` and `pw.shard`."""
    return {
        "mesh": case.mesh,
        "in_strategy": _of_inputs(case.batch, batch),
        "parameter_plan": dict(case.parameters) or None,
    }


def linear_of(case: Case) -> Linear:
    """The linear operator, with the annotation of `case` if it has one for it."""
    if case.operator is None:
        return F.linear
    annotated: Linear = pw.shard(_linear, in_strategy=(*case.operator, None))
    return annotated


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` as a function with named arguments, which `shard` can annotate."""
    return F.linear(x, weight, bias)


def _of_inputs(first: str | int | None, batch: Batch) -> dict[str, Any] | None:
    """The strategy of every input whose first dim is split as `first` says, and no other."""
    if first is None:
        return None
    rest = 1 if isinstance(first, int) else None
    return {name: (first, *[rest] * (tensor.ndim - 1)) for name, tensor in batch.items()}


def alone(model: Model) -> int:
    """The FLOPs of one step on one device."""
    with torch.device("meta"):
        module, batch = model.build(F.linear), model.batch()
    return flops(pw.compile(module, (), batch, mesh={"alone": 1}).program)


def figures(case: Case, model: Model, single: int) -> Figures:
    """What the plan of `case` costs. `single`: the FLOPs of the model on one device."""
    start = time.process_time()
    found = compiled(case, model)
    plan, program = found.plan, found.program
    seconds = time.process_time() - start
    held = memory(program)
    return Figures(
        claimed=plan.wire_bytes,
        listed=sum(c.wire_bytes for c in program.collectives),
        wire=wire(program),
        flops=flops(program),
        even=single / DEVICES,
        parameters=plan.memory.parameters,
        gradients=plan.memory.gradients,
        peak=held.peak,
        temporary=held.beyond_rest,
        predicted=plan.predicted_time,
        certificate=str(plan.certificate),
        proven=plan.certificate.proven,
        seconds=seconds,
        largest=tuple(map(_sentence, sorted(plan.collectives, key=lambda c: -c.wire_bytes)[:LARGEST])),
    )


def _sentence(c: Collective) -> str:
    where = f"{c.phase} {c.kind} over {','.join(c.axes)} of {c.tensor}"
    return f"{c.wire_bytes / 1e6:.3g} MB {where}: {c.producer} -> {c.consumer}"


# -- Beside the peers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """What another compiler, or a person, makes of a row. Bytes; FLOPs where they are known.

    must    counts as a bar although the work is uneven
    """

    by: str
    wire: float
    flops: float | None
    temporary: float | None
    parameters: float | None
    must: bool


@dataclass(frozen=True)
class Suite:
    """The rows of one source, with the unit (`size` bytes) that it reports in."""

    name: str
    source: str
    unit: str
    size: int
    rows: Mapping[str, tuple[Peer, ...]]


def suites(path: Path = PEERS) -> tuple[Suite, ...]:
    """What peers.json holds."""
    found = []
    for suite in json.loads(path.read_text(encoding="utf-8"))["suites"]:
        size = suite["unit_bytes"]
        rows = {name: tuple(_peer(entry, size) for entry in entries) for name, entries in suite["rows"].items()}
        found.append(Suite(suite["name"], suite["source"], suite["unit"], size, rows))
    return tuple(found)


def _peer(entry: Mapping[str, Any], size: int) -> Peer:
    def scaled(key: str, by: float) -> float | None:
        return entry[key] * by if key in entry else None

    return Peer(
        entry["by"], entry["wire"] * size, scaled("gflops", 1e9), scaled("temporary", size), scaled("parameters", size),
        entry.get("must", False),
    )  # fmt: skip


def bar(peers: tuple[Peer, ...], even: float) -> Peer:
    """The peer to be no worse than: that sends least, of those that share the work evenly (or do not say)."""
    fair = [peer for peer in peers if peer.must or peer.flops is None or peer.flops <= EVEN * even]
    return min(fair or peers, key=lambda peer: peer.wire)


def misses(found: Figures, best: Peer) -> tuple[str, ...]:
    """Why a row fails: `wire`, `flops`, `claim`, or nothing."""
    checks = {
        "wire": found.wire <= best.wire * (1 + SLACK),
        "flops": found.flops <= EVEN * found.even,
        "claim": found.agrees,
    }
    return tuple(name for name, held in checks.items() if not held)


def main(
    only: Annotated[str, typer.Option(help="run the rows whose name contains this")] = "",
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/plan_quality.json"),
    write: Annotated[str, WRITE] = "",
) -> None:
    """Plan every row, print it beside the peers', and exit with status 1 if one fails."""
    chosen = [case for case in CASES if only in case.name]
    if not chosen:
        raise typer.BadParameter(f"no row contains {only!r}; the rows are: {'; '.join(c.name for c in CASES)}")
    singles: dict[str, int] = {}
    quotable: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for suite in suites():
        table = _table(suite)
        for case in (case for case in chosen if case.name in suite.rows):
            if case.model not in singles:
                singles[case.model] = alone(MODELS[case.model])
            found = figures(case, MODELS[case.model], singles[case.model])
            peers = suite.rows[case.name]
            best = bar(peers, found.even)
            quotable[case.name] = f"{found.wire / suite.size:.4g}"
            missed = misses(found, best)
            table.add_row(*_cells(case, suite, found, peers, best, missed))
            rows.append(
                {"suite": suite.name, "case": case.name, "bar": asdict(best), "misses": missed, **asdict(found)}
            )
        if table.row_count:
            Console(width=180).print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"torch": torch.__version__, "devices": DEVICES, "rows": rows}, indent=1) + "\n")
    write_figures(write, quotable)
    failed = [row for row in rows if row["misses"]]
    for row in failed:
        print(f"\n{row['case']} misses {', '.join(row['misses'])}; what sends most:")
        print("\n".join(f"    {line}" for line in row["largest"]))
    print(f"{len(rows) - len(failed)} of {len(rows)} rows hold; wrote {out}")
    raise typer.Exit(1 if failed else 0)


def _table(suite: Suite) -> Table:
    title = f"suite {suite.name}: one device, one step; wire and memory in {suite.unit}\n{suite.source}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("case", max_width=34)
    table.add_column("peers: wire; GFLOP; temp or (parameters)", max_width=52)
    for name in ("bar", "wire", "GFLOP", "even", "params", "grads", "peak", "temp", "pred. ms", "CPU s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("search")
    table.add_column("")
    return table


def _cells(
    case: Case, suite: Suite, found: Figures, peers: tuple[Peer, ...], best: Peer, missed: tuple[str, ...]
) -> tuple[str, ...]:
    def amount(size: float) -> str:
        return f"{size / suite.size:.4g}" if size < 1000 * suite.size else f"{size / suite.size:.0f}"

    def words(peer: Peer) -> str:
        beside = [f"{peer.flops / 1e9:g}"] if peer.flops else []
        beside += [amount(peer.temporary)] if peer.temporary else []
        held = f" ({amount(peer.parameters)})" if peer.parameters else ""
        return f"{peer.by} {'; '.join([amount(peer.wire), *beside])}{held}"

    return (
        case.name,
        "\n".join(dict.fromkeys(map(words, peers))),
        amount(best.wire),
        amount(found.wire),
        f"{found.flops / 1e9:.4g}",
        f"{found.even / 1e9:.4g}",
        amount(found.parameters),
        amount(found.gradients),
        amount(found.peak),
        amount(found.temporary),
        f"{found.predicted * 1e3:.3g}",
        f"{found.seconds:.1f}",
        "proven" if found.proven else found.certificate.partition(": ")[2],
        f"misses {', '.join(missed)}" if missed else "holds",
    )


if __name__ == "__main__":
    start(main)
