"""A U-Net learns what stands out in a picture of which no device has more than its part: rows, columns, or both.

    python examples/large_images.py                                        # 8 virtual devices in this process
    torchrun --nproc-per-node 4 examples/large_images.py --split hw        # 4 processes, on NCCL or gloo
    python examples/large_images.py --picture retina --size 512 --steps 40

The picture is a tiled TIFF file. A step takes a random crop, mirrored or not, drawn alike on every rank; a rank reads
its part of it, and so much around it as the classes of its pixels need. What its convolutions need of its neighbours'
pixels they exchange. The same training on one device runs afterwards, and the losses must agree.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import partway as pw
from partway.measure.workloads import UNet

try:
    import matplotlib as mpl
    from pictures import HALO, PICTURES, TILE, Picture, available, classes, picture_of, pixels_of, write_tiles

    mpl.use("Agg")
    import matplotlib.pyplot as plt
except ModuleNotFoundError as missing:
    sys.exit(
        f"this example needs {missing.name}; install what it needs with\n"
        "    python -m pip install -c constraints.txt '.[demo,data]'"
    )

LEVELS = 3  # of the U-Net: 3 times half the height and the width
SEED = 1000
ROWS = 24  # of the plan, on the screen; the whole is in plan.txt

Batch = tuple[Tensor, Tensor]  # images [1, 3, H, W] and classes [1, H, W]


class Split(StrEnum):
    W = "w"
    H = "h"
    HW = "hw"


class Segmenter(nn.Module):
    """A U-Net, with the cross-entropy of every pixel's class and the dice loss of class 1; returns the logits too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(width=8, levels=LEVELS)

    def forward(self, images: Tensor, target: Tensor) -> Batch:
        logits = self.net.logits(images)
        found, there = logits.softmax(1)[:, 1], target.to(logits.dtype)
        dice = 1 - (2 * (found * there).sum() + 1) / (found.sum() + there.sum() + 1)
        return F.cross_entropy(logits, target) + dice, logits


# -- What a rank reads -------------------------------------------------------------------------------------------------


class Crops:
    """A rank's part of a random crop of the picture for each step, and the classes of its pixels."""

    def __init__(self, path: Path, picture: Picture, size: int, part: pw.data.Part) -> None:
        self.image, self.picture, self.part = pw.data.WindowReader(path), picture, part
        self.crop, self.flip = pw.data.RandomCrop(size, SEED), pw.data.RandomFlip(SEED, 0.5, 0.5)

    def view(self, step: int) -> pw.data.View:
        """The rank's window of the picture: that of a crop which all ranks draw alike."""
        view = self.crop(pw.data.View.of(self.image), epoch=0, index=step)
        return self.flip(view, epoch=0, index=step).part(self.part)

    def __call__(self, step: int) -> Batch:
        """Pixels from -1 to 1, and their classes: of its part, as a batch of one."""
        pixels = self.view(step).read(self.image, halo=HALO, mode="reflect")
        own = torch.from_numpy(pixels[HALO:-HALO, HALO:-HALO].copy()).movedim(-1, 0)
        scaled = own.to(torch.get_default_dtype()) / 127.5 - 1
        return scaled[None], classes(pixels, self.picture)[None]


@dataclass(frozen=True)
class Layout:
    """Which dims of the images and of the classes are split, over the axes h and w of a mesh."""

    mesh: dict[str, int]

    @classmethod
    def of(cls, split: Split, devices: int) -> Layout:
        """All devices along one dim, or as square a grid of them as can be."""
        if split is not Split.HW:
            return cls({split.value: devices})
        rows = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
        return cls({"h": rows, "w": devices // rows})

    @property
    def images(self) -> tuple[str | None, ...]:
        return None, *self.classes

    @property
    def classes(self) -> tuple[str | None, ...]:
        return None, *(name if name in self.mesh else None for name in "hw")

    def part(self, rank: int) -> pw.data.Part:
        """What `rank` holds of the images."""
        return pw.data.part_of(self.images, rank, mesh=self.mesh)

    def batch(self, ranks: list[Crops], size: int, step: int) -> Batch:
        """What the model is given: in a process of its own a rank's part, for the whole; else the parts of all virtual
        ranks, each of which has read its own."""
        if dist.is_initialized():
            images, target = ranks[0](step)
            return (
                pw.data.to_global(images, self.images, self.mesh),
                pw.data.to_global(target, self.classes, self.mesh),
            )
        whole = torch.empty(1, 3, size, size), torch.empty(1, size, size, dtype=torch.long)
        for rank, crops in enumerate(ranks):
            entries = (self.images, self.classes)
            for all_of_it, own, entry in zip(whole, crops(step), entries, strict=True):
                all_of_it[pw.data.part_of(entry, rank, mesh=self.mesh).slices(all_of_it.shape)] = own
        return whole


# -- Training ----------------------------------------------------------------------------------------------------------


def train(model: Any, batches: Any) -> tuple[list[float], Batch, Tensor]:
    """The loss of each step; the last batch, and its logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve: list[float] = []
    for batch in batches:
        loss, logits = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve, batch, whole(logits.detach())


def whole(tensor: Any) -> Tensor:
    """A tensor that is a DTensor in a group of processes. Every rank calls it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main(
    picture: Annotated[str, typer.Option(help=f"{', '.join(PICTURES)}, or the path of an image")] = "",
    size: Annotated[int, typer.Option(min=16, help="height and width of a crop, in pixels")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="of training")] = 20,
    split: Annotated[Split, typer.Option(help="what is split: columns, rows, or both")] = Split.W,
    devices: Annotated[int, typer.Option(min=1, help="virtual devices; a launcher's processes come first")] = 8,
    out: Annotated[Path, typer.Option(help="the folder to write to")] = Path("out/large_images"),
) -> None:
    """Train on crops that are split, and on one device; show the plan, the losses, and who read what."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # an error of the split cannot pass for rounding
    devices = pw.init(simulate=devices)
    layout, first = Layout.of(split, devices), pw.get_rank() == 0
    console = Console(highlight=False, quiet=not first)
    if not console.is_terminal:  # a log file is as wide as its lines
        console.width = 150
    name = picture or available()
    sought, pixels = picture_of(name), pixels_of(name)
    check(size, layout, pixels.shape)
    path = out / "picture.tif"
    if first:
        write_tiles(path, pixels)
    if dist.is_initialized():
        dist.barrier()
    console.print(
        f"[bold]{sought.title}[/]: {pixels.shape[0]} x {pixels.shape[1]} pixels in tiles of {TILE}, crops of {size} x "
        f"{size} over {devices} {'processes' if dist.is_initialized() else 'virtual devices'}, {pw.Mesh(layout.mesh)}"
    )
    if not picture and name != next(iter(PICTURES)):
        console.print("(scikit-image, which has Hubble's deep field, is not installed: pip install scikit-image)")

    mine = [pw.get_rank()] if dist.is_initialized() else range(devices)
    ranks = [Crops(path, sought, size, layout.part(rank)) for rank in mine]
    torch.manual_seed(0)
    model: Any = pw.shard(Segmenter(), mesh=layout.mesh, in_strategy=(layout.images, layout.classes))
    curve, batch, logits = train(model, (layout.batch(ranks, size, step) for step in range(steps)))
    images, target = map(whole, batch)
    read = tiles_of(ranks)
    if first:
        torch.manual_seed(0)
        alone = Crops(path, sought, size, pw.data.Part.whole(4))
        expected, _, _ = train(Segmenter(), map(alone, range(steps)))
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.txt").write_text(f"{model.plan.table(every=True)}\n")
        rows = enumerate(zip(expected, curve, strict=True), 1)
        head = f"step,1 device,{devices} devices\n"
        (out / "loss.csv").write_text(head + "".join(f"{i},{a!r},{b!r}\n" for i, (a, b) in rows))
        draw_picture(out / "prediction.png", layout, images[0], target[0], logits[0].argmax(0))
        draw_losses(out / "loss.png", expected, curve, layout)
        console.print(model.plan.table(rows=ROWS, width=console.width), markup=False, soft_wrap=True)
        console.print(losses(expected, curve, devices))
        gap = max(abs(a - b) for a, b in zip(expected, curve, strict=True))
        console.print(f"  largest difference of the two losses in {steps} steps: [bold]{gap:.1e}[/]")
        console.print(f"  intersection over union of class 1 in the last crop: {overlap(logits, target):.2f}\n")
        console.print(reading(read, alone.image.tiles_read, layout, size, steps, pixels.shape))
        for file in ("prediction.png", "loss.png", "loss.csv", "plan.txt", "picture.tif"):
            console.print(f"  {out / file}", soft_wrap=True)
    pw.shutdown()


def check(size: int, layout: Layout, shape: tuple[int, ...]) -> None:
    """Raise BadParameter for crops that do not fit into the picture, the network or the mesh."""
    step = math.lcm(2**LEVELS, *layout.mesh.values())
    if size % step or size > min(shape[:2]):
        raise typer.BadParameter(
            f"crops of {size} x {size}: their size must be a multiple of {step} (of {2**LEVELS}, for the network, and "
            f"of the parts, {pw.Mesh(layout.mesh)}), up to the {min(shape[:2])} pixels of the picture",
            param_hint="--size",
        )


def tiles_of(ranks: list[Crops]) -> list[int]:
    """How many tiles each rank has read. Every process calls it."""
    mine = [crops.image.tiles_read for crops in ranks]
    if not dist.is_initialized():
        return mine
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine[0])
    return found


def overlap(logits: Tensor, target: Tensor) -> float:
    """Of the pixels that are found or there: the fraction that is both."""
    found, there = logits.argmax(1) == 1, target == 1
    return ((found & there).sum() / (found | there).sum().clamp(min=1)).item()


# -- What is shown -----------------------------------------------------------------------------------------------------


def losses(one: list[float], split: list[float], devices: int) -> Table:
    """Some steps of both loss curves, side by side."""
    table = Table(title="loss", title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    for column in ("step", "1 device", f"{devices} devices", "difference"):
        table.add_column(column, justify="right")
    for i in sorted({round(k * (len(one) - 1) / 5) for k in range(6)}):
        table.add_row(str(i + 1), f"{one[i]:.6f}", f"{split[i]:.6f}", f"{abs(one[i] - split[i]):.1e}")
    return table


def reading(tiles: list[int], alone: int, layout: Layout, size: int, steps: int, shape: tuple[int, ...]) -> Table:
    """The pixels that each rank reads of the file in a step: whole tiles, its part and the halo in them."""
    title = f"read from disk in a step, halo of {HALO} pixels and whole tiles included"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    for column in ("rank", "part of the crop", "pixels read", "of the picture", "of what 1 device reads"):
        table.add_column(column, justify="right")
    for rank, count in enumerate(tiles):
        window = layout.part(rank).window(size, size)
        table.add_row(
            str(rank),
            f"{window.height} x {window.width} at {window.y0}, {window.x0}",
            f"{count * TILE**2 / steps:,.0f}",
            f"{count * TILE**2 / steps / math.prod(shape[:2]):.1%}",
            f"{count / alone:.1%}",
        )
    return table


def draw_picture(path: Path, layout: Layout, image: Tensor, target: Tensor, found: Tensor) -> None:
    """The last crop, its classes, and what was found; lines where one rank's part ends and another's begins."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.4), layout="constrained")
    shown = ((image.movedim(0, -1) + 1) / 2).clamp(0, 1)
    parts = ("input", shown), ("label", target), ("prediction", found)
    for axes, (title, values) in zip(panels, parts, strict=True):
        axes.imshow(values.numpy(), cmap="gray", interpolation="nearest")
        for name, draw in (("h", axes.axhline), ("w", axes.axvline)):
            count = layout.mesh.get(name, 1)
            for i in range(1, count):
                draw(i * target.shape[0] / count - 0.5, color="#fdae6b", linewidth=0.7)
        axes.set(title=title, xticks=(), yticks=())
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_losses(path: Path, one: list[float], split: list[float], layout: Layout) -> None:
    """Both loss curves, one on the other."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    steps = range(1, len(one) + 1)
    axes.plot(steps, one, color="#9ecae1", linewidth=5, label="1 device")
    axes.plot(steps, split, color="#08306b", linewidth=1.2, label=f"split over {pw.Mesh(layout.mesh)}")
    axes.set(xlabel="step", ylabel="cross-entropy and dice loss", title="the loss does not depend on the split")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
