"""MindSpore's example of data set slicing: ResNet-50 on CIFAR-10, of whose images every rank is given an eighth.

    python examples/cifar_slices.py                                      # 8 virtual devices in this process
    torchrun --nproc-per-node 8 examples/cifar_slices.py                 # 8 processes, on NCCL or gloo
    DATA_PATH=cifar-10-batches-bin python examples/cifar_slices.py       # or --data

Every process reads the same images in the same order with the same crops and flips, cuts each into as many slices as
there are devices, and keeps one; `dataset_strategy` says so, and Partway chooses how everything else is split. Without
CIFAR-10 it makes a small set of the same format: stripes in ten directions.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import partway as pw
from partway.measure.workloads import ResNet50

SIDE, CLASSES = 32, 10
RECORD = 1 + 3 * SIDE * SIDE  # bytes of an image: its label, then its red, green and blue pixels
SEED = 1000  # the same on every rank, so that all read the same data
# the example's numbers, in its order
MEAN, DEVIATION = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)


# -- The files ---------------------------------------------------------------------------------------------------------


def read_records(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All training images uint8 [n, 3, 32, 32] and labels [n] of a folder in CIFAR-10's binary format.

    Raises ValueError where there are none, and for a file that is no whole number of records.
    """
    paths = sorted(folder.glob("data_batch_*.bin"))
    if not paths:
        raise ValueError(f"{folder} has no data_batch_*.bin; give the folder cifar-10-batches-bin")
    records = []
    for path in paths:
        data = np.fromfile(path, np.uint8)
        if data.size == 0 or data.size % RECORD:
            raise ValueError(f"{path} has {data.size} bytes, no multiple of the {RECORD} of an image: it is incomplete")
        records.append(data.reshape(-1, RECORD))
    whole = np.concatenate(records)
    return whole[:, 1:].reshape(-1, 3, SIDE, SIDE), whole[:, 0].astype(np.int64)


def write_records(path: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    """Write images uint8 [n, 3, 32, 32] and their labels in that format."""
    np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1).tofile(path)


def stripes(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """So many images of noisy stripes, whose direction is their label."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % CLASSES
    angle = (labels * math.pi / CLASSES)[:, None, None]
    rows, columns = np.mgrid[:SIDE, :SIDE]
    waves = np.sin((np.cos(angle) * columns + np.sin(angle) * rows) * 0.8 + generator.uniform(0, 6, (count, 1, 1)))
    noisy = 128 + 70 * waves[:, None] + generator.normal(0, 20, (count, 3, SIDE, SIDE))
    return noisy.clip(0, 255).astype(np.uint8), labels


# -- What a rank is given ----------------------------------------------------------------------------------------------


class Slices(Dataset[tuple[Tensor, Tensor]]):
    """CIFAR-10, each image cropped, perhaps mirrored, resized and normalized; of that the slice of this rank."""

    def __init__(self, folder: Path, size: int, part: pw.data.Part) -> None:
        self.images, self.labels = read_records(folder)
        self.size, self.part, self.epoch = size, part, pw.data.Epoch()
        self.crop = pw.data.RandomCrop(SIDE, SEED, padding=4)
        self.flip = pw.data.RandomFlip(SEED)
        self.slices = pw.data.SlicePatches(1, part.splits[-1])
        self.mean, self.deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        view, sample = pw.data.View.whole(SIDE, SIDE), {"epoch": int(self.epoch), "index": index}
        view = self.flip(self.crop(view, **sample), **sample)
        pixels = view.read(pw.data.WindowReader(self.images[index], axes="CYX"))
        large = F.interpolate(torch.from_numpy(pixels)[None].to(self.mean), (self.size, self.size), mode="bilinear")[0]
        image = (large.movedim(0, -1) / 255 - self.mean) / self.deviation  # [H, W, C], which SlicePatches takes
        patches = self.slices(image)
        own = image if isinstance(patches, Tensor) else patches[self.part.patch()]
        return own.movedim(-1, 0).contiguous(), torch.tensor(self.labels[index])


# -- Training ----------------------------------------------------------------------------------------------------------


def train(
    data: Annotated[Path | None, typer.Option(envvar="DATA_PATH", help="the folder cifar-10-batches-bin")] = None,
    size: Annotated[int, typer.Option(min=32, help="height and width that images are resized to")] = 224,
    batch: Annotated[int, typer.Option(min=1, help="images in a batch, the same for all ranks")] = 8,
    width: Annotated[int, typer.Option(min=1, help="channels of the first layer; 64 is ResNet-50")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="of training")] = 4,
    search: Annotated[str, typer.Option(help="search_mode: how the plan is found")] = "dynamic_programming",
    devices: Annotated[int, typer.Option(min=1, help="virtual devices; a launcher's processes come first")] = 8,
    double: Annotated[bool, typer.Option("--double", help="compute in float64")] = False,
) -> None:
    """Train a ResNet-50 on slices of CIFAR-10's images and print the loss of each step."""
    devices = pw.init(simulate=devices)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    torch.manual_seed(SEED)
    if size % devices:
        raise typer.BadParameter(
            f"images of {size} columns cannot be cut into {devices} equal slices; take a multiple of {devices}",
            param_hint="--size",
        )
    pw.set_auto_parallel_context(
        device_num=devices,
        parallel_mode="auto_parallel",
        search_mode=search,
        gradients_mean=True,
        dataset_strategy=((1, 1, 1, devices), (1,)),
    )
    first = pw.get_rank() == 0
    with tempfile.TemporaryDirectory() as made:
        if data is None:
            write_records(Path(made, "data_batch_1.bin"), *stripes(batch * min(steps, 4)))
            if first:
                print("no --data and no DATA_PATH: training on stripes, in CIFAR-10's format")
        slices = Slices(data or Path(made), size, pw.data.part_of((1, 1, 1, devices)))  # of a rank its slice
    model: Any = pw.shard(ResNet50(width, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shuffled = torch.Generator().manual_seed(SEED)
    loader = DataLoader(slices, batch_size=batch, shuffle=True, drop_last=True, generator=shuffled)
    if not len(loader):
        raise typer.BadParameter(f"there are only {len(slices)} images; take at most as many", param_hint="--batch")
    for step in range(steps):
        epoch, position = divmod(step, len(loader))
        if position == 0:
            slices.epoch.set(epoch)
            batches = iter(loader)
        images, labels = next(batches)
        loss = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if first:
            print(f"step {step + 1}  loss {loss.item():.9f}", flush=True)
    if first:
        print(f"a rank was given images of {list(images.shape[1:])}; {model.plan.summary()}")
    pw.shutdown()


if __name__ == "__main__":
    typer.run(train)
