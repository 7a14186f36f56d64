"""MindSpore's example of data set slicing: ResNet-50 on CIFAR-10, of whose images every rank is given an eighth.

    python examples/cifar_slices.py                                      # 8 virtual devices in this process
    torchrun --nproc-per-node 8 examples/cifar_slices.py                 # 8 processes, on NCCL or gloo
    DATA_PATH=cifar-10-batches-bin python examples/cifar_slices.py       # or --data

Every process reads the same images in the same order with the same crops and flips, cuts each into as many slices as
there are devices, and keeps one; `dataset_strategy` says so, and Partway chooses how everything else is split. Without
CIFAR-10 it makes a small set of the same format: stripes in ten directions and colours.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cifar10.cifar import CLASSES, Cifar10, make_files
from torch import Tensor
from torch.utils.data import DataLoader

import partway as pw
from partway.measure.workloads import ResNet50

SEED = 1000  # the same on every rank, so that all read the same data


class Slices(Cifar10):
    """CIFAR-10, each image augmented as a whole; of that the slice of this rank."""

    def __init__(self, folder: Path, size: int, part: pw.data.Part) -> None:
        super().__init__(folder, size, SEED)
        self.part, self.slices = part, pw.data.SlicePatches(1, part.splits[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        patches = self.slices(image.movedim(0, -1))  # [H, W, C], which SlicePatches takes
        own = patches if isinstance(patches, Tensor) else patches[self.part.patch()]
        return own.movedim(-1, 0).contiguous(), label


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
            make_files(Path(made), batch)
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
