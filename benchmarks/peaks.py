"""The peak of a training step as its plan predicts it, beside the bytes that live on each rank of gloo processes.

    python benchmarks/peaks.py [--models gpt2,unet] [--ranks 2,4] [--fractions inf,1,0.5] [--quick] [--json FILE]

Each case is a model, a mesh and a memory limit: none, or a fraction of the peak that is predicted without one. Of the
forward and backward of a step, float32, are given

    predicted   what the plan says of its peak: parameters, gradients, inputs and all that the step makes
    program     the same, read off the two graphs of the step
    measured    the most bytes of tensors that live on a rank, the largest of the ranks

The optimizer keeps nothing here (`optimizer_states=0`), as no optimizer takes a step. A row misses, and with it the
command fails (exit status 1), where the prediction is off by more than 5 % of what is measured, or where that is more
than 3 % above the limit. Where no plan fits, the search says so, and the row says what would do. `--quick` runs two
models at a size that says nothing.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PARTWAY_CACHE", "0")  # plans are made by the sources as they are

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from spatial import measured
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

import partway as pw
from partway.measure.contenders import one_rank
from partway.measure.workloads import ResNet50, UNet
from partway.runtime.executors.peak import held_by

MB = 1e6
PREDICTION_BAR = 0.05  # of what is measured
LIMIT_BAR = 0.03  # of the limit
SAMPLES = 16  # of a batch, over all ranks
FRACTIONS = "inf,1,0.7,0.5,0.35"


# -- Models ------------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch."""
        loss: Tensor = self.model(given, labels=labels).loss
        return loss


@dataclass(frozen=True)
class Workload:
    """A model and its batch. `columns`: the layers whose results tensor parallelism splits by their last dim."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    columns: tuple[str, ...] = ()


def _tokens(length: int, vocabulary: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(samples: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (samples, length))
        return ids, ids.clone()

    return batch


def _images(pixels: int, *, classes: int, dense: bool = False) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(samples: int) -> tuple[Tensor, Tensor]:
        target = (samples, pixels, pixels) if dense else (samples,)
        return torch.randn(samples, 3, pixels, pixels), torch.randint(classes, target)

    return batch


def gpt2(layers: int, width: int, length: int, vocabulary: int) -> Workload:
    """GPT-2 with heads of 64, without dropout."""

    def build() -> nn.Module:
        sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "n_positions": length}
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        return WithLoss(GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **quiet)))

    return Workload(build, _tokens(length, vocabulary), ("c_fc",))


def llama(layers: int, width: int, length: int, vocabulary: int) -> Workload:
    """Llama with heads of 64, as many of keys and values as of queries."""

    def build() -> nn.Module:
        return WithLoss(LlamaForCausalLM(LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=vocabulary,
            num_attention_heads=width // 64, max_position_embeddings=length, use_cache=False,
        )))  # fmt: skip

    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return Workload(build, _tokens(length, vocabulary), columns)


def vit(layers: int, width: int, pixels: int) -> Workload:
    """A vision transformer on patches of 16 x 16 pixels, without dropout."""

    def build() -> nn.Module:
        return WithLoss(ViTForImageClassification(ViTConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 64,
            image_size=pixels, num_labels=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )))  # fmt: skip

    return Workload(build, _images(pixels, classes=100))


def workloads(*, quick: bool) -> dict[str, Workload]:
    """The models by name."""
    if quick:
        return {
            "gpt2": gpt2(layers=2, width=128, length=64, vocabulary=256),
            "resnet50": Workload(lambda: ResNet50(width=8, classes=8), _images(32, classes=8)),
        }
    return {
        "gpt2": gpt2(layers=6, width=256, length=256, vocabulary=4096),
        "llama": llama(layers=6, width=256, length=256, vocabulary=4096),
        "vit": vit(layers=6, width=256, pixels=224),
        "resnet50": Workload(lambda: ResNet50(width=32, classes=100), _images(128, classes=100)),
        "unet": Workload(lambda: UNet(width=8, levels=3), _images(128, classes=2, dense=True)),
    }


@dataclass(frozen=True)
class Case:
    """A model on a mesh, with a batch that is split along dp, and layers that are split along tp."""

    model: str
    dp: int
    tp: int

    @property
    def mesh(self) -> dict[str, int]:
        """The axes that have more than one rank."""
        return {axis: size for axis, size in (("dp", self.dp), ("tp", self.tp)) if size > 1}

    @property
    def name(self) -> str:
        """The model and its mesh, in words."""
        return f"{self.model}, {' x '.join(f'{axis} {size}' for axis, size in self.mesh.items())}"


def cases(models: Sequence[str], ranks: Sequence[int], known: Mapping[str, Workload]) -> Iterator[Case]:
    """Each model with its batch split over all ranks and, where layers can be, those over two of them."""
    for model in models:
        for count in ranks:
            yield Case(model, count, 1)
            if known[model].columns:
                yield Case(model, count // 2, 2)


# -- One case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The peaks of a step, in bytes. `enough`: what the search says would do where nothing fits.

    fraction   of the peak that is predicted without a limit; the limit is that of the search
    measured   of each rank
    """

    fraction: float
    limit: float
    predicted: int = 0
    program: int = 0
    measured: tuple[int, ...] = ()
    where: str = ""
    enough: str = ""

    @property
    def most(self) -> int:
        """What the largest rank holds."""
        return max(self.measured)

    @property
    def ratio(self) -> float:
        """The prediction over what is measured."""
        return self.predicted / self.most

    def misses(self) -> tuple[str, ...]:
        """Which of the bars it misses."""
        if self.enough:
            return ()
        off = ("prediction",) if abs(self.ratio - 1) > PREDICTION_BAR else ()
        return (*off, "limit") if self.most > self.limit * (1 + LIMIT_BAR) else off


def peaks(case: Case, fractions: Sequence[float], *, quick: bool) -> list[Peak]:
    """Run a case in processes of its own, one after another with each limit."""
    ranks = case.dp * case.tp
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (case, fractions, quick, folder), nprocs=ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return [
        Peak(**{**rows[0], "measured": tuple(size for row in rows for size in row["measured"])})
        for rows in zip(*found, strict=True)
    ]


def _rank(rank: int, case: Case, fractions: Sequence[float], quick: bool, folder: str) -> None:
    ranks = case.dp * case.tp
    with one_rank(rank, ranks, folder), pw.auto_parallel_context(device_profile="cpu"):
        rows, unlimited = [], math.inf
        for fraction in fractions:
            row = _step(case, quick, fraction, math.inf if math.isinf(fraction) else fraction * unlimited)
            rows.append(asdict(row))
            if math.isinf(fraction):
                unlimited = row.predicted
        Path(folder, f"{rank}.json").write_text(json.dumps(rows))


def _step(case: Case, quick: bool, fraction: float, limit: float) -> Peak:
    """A step under this limit, as this rank sees it."""
    work = workloads(quick=quick)[case.model]
    torch.manual_seed(0)
    pw.set_algo_parameters(optimizer_states=0.0, memory_limit=limit)
    along = "dp" if case.dp > 1 else None
    batch = work.batch(SAMPLES)
    by = tuple((along, *(None,) * (tensor.dim() - 1)) for tensor in batch)
    split = {f"*.{name}": {"out_strategy": ((along, None, "tp"),)} for name in work.columns}
    model: Any = pw.shard(work.build(), mesh=case.mesh, in_strategy=by, module_plan=split if case.tp > 1 else None)
    mine = tuple(pw.data.to_global(_part(t, case), how, case.mesh) for t, how in zip(batch, by, strict=True))
    try:
        found = measured(model, mine)
    except pw.StrategyError as error:
        return Peak(fraction, limit, enough=_enough(str(error)))
    memory = model.plan.memory
    made = round(held_by(model.program).peak)
    return Peak(
        fraction, limit, memory.total, memory.parameters + memory.inputs + made, (found.rest + found.peak,),
        f"{memory.phase} of {memory.at}",
    )  # fmt: skip


def _part(tensor: Tensor, case: Case) -> Tensor:
    """This rank's part of a tensor of the batch."""
    return tensor.chunk(case.dp)[torch.distributed.get_rank() // case.tp].clone()


def _enough(error: str) -> str:
    """The limit that would do, of an error that says so."""
    return error.partition("a limit of ")[2].partition(" would do")[0] or error.splitlines()[0]


# -- All of it ---------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Sequence[Peak]]) -> Table:
    """A row for each case and limit, in MB."""
    result = Table(title="the peak of a rank, MB of 10^6 bytes", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("case", no_wrap=True)
    for name in ("limit", "MB", "predicted", "program", "measured", "predicted/measured", "measured/limit"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("predicted in the", no_wrap=True)
    result.add_column("")
    for case, rows in found.items():
        for row in rows:
            limit = "none" if math.isinf(row.limit) else f"{row.limit / MB:.1f}"
            first = (case, f"{row.fraction:.0%}" if math.isfinite(row.fraction) else "", limit)
            if row.enough:
                result.add_row(*first, *[""] * 5, f"nothing fits; {row.enough} would")
                continue
            over = f"{row.most / row.limit:.3f}" if math.isfinite(row.limit) else ""
            sizes = (f"{size / MB:.1f}" for size in (row.predicted, row.program, row.most))
            missed = row.misses()
            verdict = f"misses {', '.join(missed)}" if missed else "holds"
            result.add_row(*first, *sizes, f"{row.ratio:.3f}", over, row.where, verdict)
    return result


def main(
    models: Annotated[str, typer.Option(help="their names, with commas")] = "",
    ranks: Annotated[str, typer.Option(help="how many, with commas")] = "2,4,8",
    fractions: Annotated[str, typer.Option(help="of the peak without a limit, inf first")] = FRACTIONS,
    quick: Annotated[bool, typer.Option("--quick", help="two small models on 2 ranks: no figures")] = False,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/peaks.json"),
) -> None:
    """Measure, print the table, and exit with status 1 if a row misses a bar."""
    console, known = Console(width=190), workloads(quick=quick)
    names = models.split(",") if models else list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"there are no {', '.join(unknown)}; take {', '.join(known)}", param_hint="--models")
    shares = [float(text) for text in fractions.split(",")]
    if not math.isinf(shares[0]):
        raise typer.BadParameter("the first is inf, of whose peak the others are fractions", param_hint="--fractions")
    counts = [2] if quick else [int(text) for text in ranks.split(",")]
    found: dict[str, list[Peak]] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    for case in cases(names, counts, known):
        found[case.name] = peaks(case, shares, quick=quick)
        console.print(table({case.name: found[case.name]}))
        data = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        out.write_text(json.dumps({"torch": torch.__version__, "quick": quick, "peaks": data}, indent=1) + "\n")
    rows = [(name, row) for name, each in found.items() for row in each if not row.enough]
    ratios = [row.ratio for _, row in rows]
    over = [row.most / row.limit for _, row in rows if math.isfinite(row.limit)]
    print(f"predicted/measured from {min(ratios):.3f} to {max(ratios):.3f}; bars 0.95 to 1.05")
    print(f"measured/limit at most {max(over, default=0.0):.3f}; bar 1.03")
    missed = [f"{name} at {row.fraction:g}" for name, row in rows if row.misses()]
    print(f"missed: {'; '.join(missed)}" if missed else "all rows hold")
    print(f"wrote {out}")
    raise typer.Exit(1 if missed and not quick else 0)


if __name__ == "__main__":
    start(main)
