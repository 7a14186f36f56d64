"""Images that are split: what their halos cost, what a device holds of a step, and what a rank reads of a file.

    python benchmarks/spatial.py [--only plans|memory|reading] [--small] [--json FILE] [--plot FILE]

plans     on the meta device, for the profile `cpu`: the bytes that the busiest rank sends in exchanges of halos, their
          number (as collectives, and as the permutes between neighbours that a compiler without them runs), all that
          one rank sends in a step, FLOPs, and the most bytes that live beyond those before the step, beside XLA's
          GSPMD (jax 0.10.2) and the best by hand
memory    a step (forward and backward, float32) on gloo processes with one thread each, of an image split along W: the
          most bytes of tensors alive beyond those there before the step, beside an equal share of the same of PyTorch
          on one device
reading   8192 x 8192 pixels in tiles of 256: the bytes that each rank reads for its columns and 32 more on each side

A row fails, and with it the command (exit status 1), where halos or wire are more than the best of its peers, where a
rank of the U-Net holds more than 1.15 times an equal share, or where one reads more than a fifth of a file. `--small`
runs all of it at a size that says nothing.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from script import WRITE, save, start, write_figures

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tifffile
import torch
import typer
import zarr
from live_bytes import LiveBytes, storages
from peer_models import ConvStack
from program_figures import exchanges, flops, memory, wire
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import partway as pw
from partway.measure.contenders import one_rank
from partway.measure.workloads import ResNet50, UNet

RANKS = 8
SHARE_BAR = 1.15  # of an equal share of what one device holds
READ_BAR = 1 / 5  # of a file
SLACK = 0.005  # relative: the peers' figures have three digits
LOSS = 1e-3  # relative: float32, sums in another order
TILE, HALO = 256, 32  # of the files that are read
MB = 1e6

Strategy = tuple[str | None, ...]
COLUMNS: Strategy = (None, None, None, "w")


# -- Plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """What another compiler, or a person, makes of a row. None: not known, or not of this row's kind."""

    by: str
    halo: float | None = None
    permutes: int | None = None
    wire: float | None = None
    flops: float | None = None
    temporary: float | None = None


@dataclass(frozen=True)
class Case:
    """A model with an image that is split. `kept`: every block's result is annotated to be split so, too."""

    name: str
    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    target: tuple[int, ...]
    mesh: Mapping[str, int]
    strategy: tuple[Strategy, ...]
    peers: tuple[Peer, ...] = ()
    kept: bool = False

    def batch(self) -> tuple[Tensor, Tensor]:
        """An image, and a target: of the image's kind, or classes."""
        like = torch.float32 if len(self.target) == len(self.image) else torch.long
        return torch.empty(self.image), torch.zeros(self.target, dtype=like)

    def alone(self) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """The model and its batch on the meta device."""
        with torch.device("meta"):
            return self.build(), self.batch()


def resnet(batch: int, *, kept: bool = False, peers: tuple[Peer, ...] = ()) -> Case:
    """ResNet-50 on images of 256 x 256 pixels whose W is split."""
    name = f"resnet50, W split 8, batch {batch}{', W kept' if kept else ''}"
    return Case(
        name, ResNet50, (batch, 3, 256, 256), (batch,), {"w": RANKS}, (COLUMNS, (None,)), peers, kept
    )  # fmt: skip


GRID: Strategy = (None, None, "h", "w")
GSPMD = Peer("GSPMD", None, 97, 181 * MB, 32.6e9, 355 * MB)
CASES = (
    Case(
        "convstack, H split 2, W split 4", ConvStack, (1, 3, 2048, 2048), (1, 3, 512, 512), {"h": 2, "w": 4},
        (GRID, GRID),
        (Peer("GSPMD", 2.25 * MB, 56, 2.0 * MB, 23.6e9, 221 * MB), Peer("by hand", 1.43 * MB, 36)),
    ),
    resnet(8, peers=(GSPMD,)),
    resnet(8, kept=True, peers=(GSPMD,)),
    resnet(1),
    resnet(1, kept=True),
    Case(
        "unet, W split 8", lambda: UNet(width=8, levels=3), (1, 3, 2048, 2048), (1, 2048, 2048), {"w": RANKS},
        (COLUMNS, COLUMNS[1:]),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """What the plan of a case costs. Bytes and FLOPs are those of one rank and one step.

    halo, exchanged, permutes   of exchanges: bytes that the busiest ranks send; how many collectives; how many permutes
    wire       all that one rank sends
    claimed    of that, what the plan says
    even       an equal share of the FLOPs of one device
    temporary  the most bytes that live at any time beyond those before the step, by liveness on the graphs
    """

    name: str
    halo: float
    exchanged: int
    permutes: int
    wire: float
    claimed: float
    flops: int
    even: float
    temporary: int
    certificate: str

    def misses(self, peers: Sequence[Peer]) -> tuple[str, ...]:
        """What is worse than the best of the peers, or not what the plan says."""
        limits = {
            "halo": (self.halo, [p.halo for p in peers if p.halo]),
            "wire": (self.wire, [p.wire for p in peers if p.wire]),
        }
        found = [name for name, (own, bars) in limits.items() if bars and own > min(bars) * (1 + SLACK)]
        return (*found, "claim") if abs(self.claimed - self.wire) > 1e-9 * self.wire else tuple(found)


def planned(case: Case) -> Planned:
    """Plan a case, and count on its graphs."""
    module, batch = case.alone()
    with pw.auto_parallel_context(device_profile="cpu", comm_fusion={"openstate": False}):
        single = flops(pw.compile(module, batch, mesh={"alone": 1}).program)
        if case.kept:
            keep_columns(module)
        found = pw.compile(module, batch, mesh=case.mesh, in_strategy=case.strategy)
    sent, ranks = exchanges(found.program), pw.Mesh(case.mesh).device_num
    return Planned(
        case.name, sent.sent, sent.count, sent.permutes, wire(found.program), found.plan.wire_bytes,
        flops(found.program), single / ranks, memory(found.program).beyond_rest,
        str(found.plan.certificate),
    )  # fmt: skip


def keep_columns(model: nn.Module) -> None:
    """Annotate the result of each block of a ResNet: split along W, as the image is."""
    same = pw.shard(_same, out_strategy=(COLUMNS,))
    for block in model.get_submodule("blocks").children():
        block.register_forward_hook(lambda _module, _given, result: same(result))


def _same(x: Tensor) -> Tensor:
    return x


def plans_table(found: Sequence[Planned], cases: Sequence[Case]) -> Table:
    table = _table(
        "one rank, one step; MB of 10^6 bytes", "case", "halo MB", "exchanges", "permutes", "wire MB", "GFLOP", "even",
        "temp MB",
    )  # fmt: skip
    table.add_column("peers: halo MB, permutes; wire MB; GFLOP; temp MB")
    table.add_column("search")
    table.add_column("")
    for row, case in zip(found, cases, strict=True):
        missed = row.misses(case.peers)
        table.add_row(
            row.name, f"{row.halo / MB:.3f}", str(row.exchanged), str(row.permutes), f"{row.wire / MB:.3f}",
            f"{row.flops / 1e9:.4g}", f"{row.even / 1e9:.4g}",
            f"{row.temporary / MB:.1f}", "\n".join(map(_words, case.peers)),
            row.certificate.partition(": ")[2], _verdict(missed) if case.peers else "",
        )  # fmt: skip
    return table


def _words(peer: Peer) -> str:
    halo = f"{peer.halo / MB:g}, {peer.permutes}" if peer.halo else f"{peer.permutes} permutes"
    known = ((peer.wire, MB), (peer.flops, 1e9), (peer.temporary, MB))
    return "; ".join([f"{peer.by} {halo}", *(f"{amount / unit:g}" for amount, unit in known if amount)])


# -- Memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A step of one process: `peak`, the most bytes that were alive beyond `rest`, the parameters, buffers and batch;
    and its loss. `halo`: what the busiest rank sends in exchanges."""

    rest: int
    peak: int
    loss: float
    halo: float = 0.0


@dataclass(frozen=True)
class Step:
    """A model whose step is measured on `ranks` processes. `bar`: the most that a rank may hold, in equal shares."""

    name: str
    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    target: tuple[int, ...]
    classes: int
    bar: float | None

    @property
    def strategy(self) -> tuple[Strategy, Strategy]:
        """Images along W, and classes of pixels with them."""
        return COLUMNS, COLUMNS[1:] if len(self.target) == 3 else (None,)

    def part(self, index: int, parts: int) -> tuple[Tensor, Tensor]:
        """Part `index` of the batch, which every process that asks makes alike."""
        generator = torch.Generator().manual_seed(index)
        images = torch.randn((*self.image[:-1], self.image[-1] // parts), generator=generator)
        if len(self.target) == 1:
            return images, torch.arange(self.target[0]) % self.classes
        return images, torch.randint(self.classes, (*self.target[:-1], self.target[-1] // parts), generator=generator)

    def whole(self, parts: int) -> tuple[Tensor, Tensor]:
        """All parts together."""
        images, targets = zip(*(self.part(i, parts) for i in range(parts)), strict=True)
        return torch.cat(images, -1), torch.cat(targets, -1) if len(self.target) > 1 else targets[0]


def steps(pixels: int, *, small: bool) -> tuple[Step, ...]:
    """The models whose memory is measured: the U-Net on images of `pixels` along each side, ResNet-50 of half as
    many."""
    half = pixels // 2
    unet = Step(f"unet, {pixels} x {pixels}", _small_unet if small else _unet, (1, 3, pixels, pixels),
                (1, pixels, pixels), 2, SHARE_BAR)  # fmt: skip
    return unet, Step(
        f"resnet50, {half} x {half}", _small_resnet if small else ResNet50, (1, 3, half, half), (1,), 8, None
    )


def _unet() -> nn.Module:
    return UNet(width=8, levels=3)


def _small_unet() -> nn.Module:
    return UNet(width=4, levels=2)


def _small_resnet() -> nn.Module:
    return ResNet50(width=4, classes=8)


def held(step: Step, ranks: int) -> tuple[Held, ...]:
    """One device's step, and then that of each of `ranks` processes. Raises ValueError if their losses differ."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_alone, (step, ranks, folder), nprocs=1)
        spawn(_rank, (step, ranks, folder), nprocs=ranks)
        found = [
            Held(**json.loads(Path(folder, f"{name}.json").read_text())) for name in ("alone", *map(str, range(ranks)))
        ]
    wrong = [rank for rank in found[1:] if abs(rank.loss - found[0].loss) > LOSS * abs(found[0].loss)]
    if wrong:
        raise ValueError(f"{step.name}: the loss is {wrong[0].loss} on {ranks} ranks, {found[0].loss} on one device")
    return tuple(found)


def _alone(_: int, step: Step, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = step.build(), step.whole(ranks)
    Path(folder, "alone.json").write_text(json.dumps(asdict(measured(model, batch))))


def _rank(rank: int, step: Step, ranks: int, folder: str) -> None:
    with one_rank(rank, ranks, folder), pw.auto_parallel_context(device_profile="cpu"):
        torch.manual_seed(0)
        mesh = {"w": ranks}
        model: Any = pw.shard(step.build(), mesh=mesh, in_strategy=step.strategy)
        batch = tuple(
            pw.data.to_global(part, strategy, mesh)
            for part, strategy in zip(step.part(rank, ranks), step.strategy, strict=True)
        )
        found = measured(model, batch)
        halo = exchanges(model.program).sent
        Path(folder, f"{rank}.json").write_text(json.dumps(asdict(found) | {"halo": halo}))


def measured(model: Any, batch: tuple[Tensor, ...]) -> Held:
    """A step's memory. The step before it, which plans, is not looked at; what it leaves behind is."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ValueError(f"{name} has a gradient already; call zero_grad() first")
    before = {id(s): s for s in storages(_tensors_alive())}  # of others
    _stepped(model, batch)
    gc.collect()
    resting = {id(s): s.nbytes() for s in storages((list(model.state_dict().values()), batch))}  # parts may be new
    alive = {id(s): s.nbytes() for s in storages(_tensors_alive()) if id(s) not in before}
    rest, kept = sum(resting.values()), sum(size for key, size in alive.items() if key not in resting)
    with LiveBytes() as live:
        loss = _stepped(model, batch)
    return Held(rest, live.peak + kept, loss)


def _stepped(model: Any, batch: tuple[Tensor, ...]) -> float:
    loss = model(*batch)
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def _tensors_alive() -> list[Tensor]:
    """All tensors that Python knows of."""
    return [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]


def memory_table(found: Mapping[str, tuple[Held, ...]], todo: Sequence[Step]) -> Table:
    title = "MB of 10^6 bytes; peak: the most alive beyond parameters, buffers and batch"
    table = _table(title, "case", "one device", "equal share", "largest rank", "ratio", "bar", "halo MB")
    table.add_column("peaks of the ranks")
    table.add_column("")
    for step in todo:
        one, *ranks = found[step.name]
        share, most = one.peak / len(ranks), max(rank.peak for rank in ranks)
        table.add_row(
            step.name,
            *(f"{size / MB:.1f}" for size in (one.peak, share, most)),
            f"{most / share:.3f}",
            f"{step.bar:.2f}" if step.bar else "",
            f"{max(rank.halo for rank in ranks) / MB:.3f}",
            ", ".join(f"{rank.peak / MB:.1f}" for rank in ranks),
            _verdict(above(step, found[step.name])) if step.bar else "",
        )
    return table


def above(step: Step, found: Sequence[Held]) -> tuple[str, ...]:
    """Whether a rank holds more than its bar of an equal share."""
    one, *ranks = found
    most = max(rank.peak for rank in ranks) * len(ranks) / one.peak
    return ("memory",) if step.bar is not None and most > step.bar else ()


# -- Reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """What one rank reads of a file, and how much there is."""

    format: str
    rank: int
    tiles: int
    bytes: int
    stored: int

    @property
    def fraction(self) -> float:
        return self.bytes / self.stored


def reading(pixels: int, tile: int, halo: int, ranks: int, folder: Path) -> Iterator[Read]:
    """Write an image as TIFF and as Zarr, and read each rank's columns of it with a halo."""
    ramp = np.arange(pixels, dtype=np.uint32) // 32
    noise = np.random.default_rng(0).integers(0, 16, (pixels, pixels), np.uint8)
    image = ((ramp[:, None] + ramp) % 240).astype(np.uint8) + noise  # compresses to about half, as pictures do
    tifffile.imwrite(folder / "image.tif", image, tile=(tile, tile), compression="zlib", compressionargs={"level": 1})
    zarr.create_array(folder / "image.zarr", data=image, chunks=(tile, tile))
    for name in ("image.tif", "image.zarr"):
        path = folder / name
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        for rank in range(ranks):
            part = pw.data.part_of((1, 1, 1, ranks), rank, devices=ranks)
            with pw.data.WindowReader(path) as reader:
                own = part.window(pixels, pixels)
                reader.read(own, halo=halo)
                yield Read(
                    path.suffix[1:], rank, reader.tiles_read, reader.bytes_read, sum(p.stat().st_size for p in files)
                )


def reading_table(found: Sequence[Read]) -> Table:
    table = _table("read of a file by each rank", "file", "rank", "tiles", "MB", "of the file", "bar")
    table.add_column("")
    for row in found:
        table.add_row(
            row.format,
            str(row.rank),
            str(row.tiles),
            f"{row.bytes / MB:.3f}",
            f"{row.fraction:.1%}",
            f"{READ_BAR:.0%}",
            _verdict(("reading",) if row.fraction > READ_BAR else ()),
        )
    return table


# -- All of it ---------------------------------------------------------------------------------------------------------


def main(
    only: Annotated[str, typer.Option(help="plans, memory or reading")] = "",
    small: Annotated[bool, typer.Option("--small", help="small images, few ranks: no figures")] = False,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/spatial.json"),
    plot: Annotated[Path, typer.Option(help="where to draw them")] = Path("out/spatial.png"),
    write: Annotated[str, WRITE] = "",
) -> None:
    """Measure, print the tables, and exit with status 1 if a row misses its bar."""
    if only not in ("", "plans", "memory", "reading"):
        raise typer.BadParameter(f"there are no {only!r}; take plans, memory or reading", param_hint="--only")
    torch.set_num_threads(1)
    console, failed = Console(width=190), []
    quotable: dict[str, str] = {}
    data: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "small": small}
    ranks = 2 if small else RANKS
    if only in ("", "plans"):
        cases = CASES[:1] if small else CASES
        plans = [planned(case) for case in cases]
        console.print(plans_table(plans, cases))
        failed += [p.name for p, case in zip(plans, cases, strict=True) if p.misses(case.peers)]
        quotable |= {f"{p.name}: wire": f"{p.wire / MB:.3g}" for p in plans}
        data["plans"] = [asdict(p) for p in plans]
    if only in ("", "memory"):
        todo = steps(128 if small else 2048, small=small)
        memory = {step.name: held(step, ranks) for step in todo}
        console.print(memory_table(memory, todo))
        failed += [step.name for step in todo if above(step, memory[step.name])]
        shares = {name: max(r.peak for r in found) * len(found) / one.peak for name, (one, *found) in memory.items()}
        quotable |= {f"{name}: memory": f"{share:.3f}" for name, share in shares.items()}
        data["memory"] = {name: [asdict(rank) for rank in found] for name, found in memory.items()}
    if only in ("", "reading"):
        sizes = (512, 64, 8) if small else (8192, TILE, HALO)
        with tempfile.TemporaryDirectory() as folder:
            read = list(reading(*sizes, ranks, Path(folder)))
        console.print(reading_table(read))
        failed += [f"reading of {row.format}" for row in read if row.fraction > READ_BAR]
        data["reading"] = [asdict(row) for row in read]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {out}{f' and {plot}' if drawn(data, plot) else ''}")
    write_figures("" if small else write, quotable)
    print(f"missed: {', '.join(dict.fromkeys(failed))}" if failed else "all rows hold")
    raise typer.Exit(1 if failed and not small else 0)


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _verdict(missed: Sequence[str]) -> str:
    return f"misses {', '.join(missed)}" if missed else "holds"


def drawn(data: Mapping[str, Any], path: Path) -> bool:
    """Draw what each rank holds and reads, as far as it was measured; False without matplotlib, which only the demo
    needs otherwise, and where there is nothing to draw."""
    bars = {
        f"{name}: peak of each rank, MB (dashed: {SHARE_BAR} equal shares)": (
            [rank["peak"] / MB for rank in ranks], SHARE_BAR * one["peak"] / MB / len(ranks),
        )
        for name, (one, *ranks) in data.get("memory", {}).items()
    }  # fmt: skip
    for format_ in dict.fromkeys(row["format"] for row in data.get("reading", ())):
        values = [100 * row["bytes"] / row["stored"] for row in data["reading"] if row["format"] == format_]
        bars[f"{format_}: read by each rank, % of the file (dashed: a fifth)"] = (values, 100 * READ_BAR)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not bars:
        return False
    drawing = Figure(figsize=(8, 0.6 + 1.5 * len(bars)), layout="constrained")
    for axes, (title, (values, bar)) in zip(
        drawing.subplots(len(bars), 1, squeeze=False)[:, 0], bars.items(), strict=True
    ):
        axes.bar([str(rank) for rank in range(len(values))], values, color="tab:orange")
        axes.axhline(bar, color="grey", linewidth=0.8, linestyle="--")
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
    save(drawing, path)
    return True


if __name__ == "__main__":
    start(main)
