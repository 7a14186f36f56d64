"""The reference's distributed training on CPUs: ResNet-50 on CIFAR-10, data parallel. README.md says how to start it.

One script serves the scheduler, its workers, torchrun, one device and virtual devices; nothing in it asks which it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cifar import CLASSES, Cifar10, Shares
from torch import Tensor
from torch.utils.data import DataLoader

import partway as pw
from partway.measure.workloads import ResNet50

Batch = tuple[Tensor, Tensor]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # the last line of a log says what failed


@app.command()
def train(
    data: Annotated[Path, typer.Option(envvar="DATA_PATH", help="the folder cifar-10-batches-bin")],
    epochs: Annotated[int, typer.Option(min=1, help="how often all images are seen")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="images that a worker has in a step")] = 32,
    size: Annotated[int, typer.Option(min=32, help="height and width that images are resized to")] = 224,
    width: Annotated[int, typer.Option(min=1, help="channels of the first layer; 64 is ResNet-50")] = 64,
    rate: Annotated[float, typer.Option(help="the learning rate")] = 0.01,
    momentum: Annotated[float, typer.Option(help="of the gradients")] = 0.9,
    per_print_times: Annotated[int, typer.Option(min=1, help="steps from one line to the next")] = 1,
    rates: Annotated[bool, typer.Option("--rates", help="each line says how fast it is")] = False,
    seed: Annotated[int, typer.Option(min=0, help="of weights, order, crops and flips")] = 0,
    loaders: Annotated[int, typer.Option(min=0, help="processes that read images, for each worker")] = 0,
    double: Annotated[bool, typer.Option("--double", help="compute in float64")] = False,
    simulate: Annotated[int, typer.Option(min=1, help="virtual devices, where there is no launcher")] = 1,
    checkpoints: Annotated[Path | None, typer.Option(help="a folder: save here, and go on from here")] = None,
    every: Annotated[int, typer.Option(min=1, help="steps from one checkpoint to the next")] = 100,
) -> None:
    """Train a ResNet-50 on CIFAR-10, and print the loss of each step."""
    devices = pw.init(simulate, backend="gloo")  # the scheduler trains nothing: it ends here, when its workers have
    pw.set_auto_parallel_context(
        device_num=devices, parallel_mode="data_parallel", gradients_mean=True, dataset_strategy="data_parallel"
    )
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    torch.manual_seed(seed)

    images = Cifar10(data, size, seed)
    shares = Shares(images, batch * devices, seed)
    if not len(shares):
        text = f"{devices} times {batch} images are more than the {len(images)} that there are"
        raise typer.BadParameter(text, param_hint="--batch")
    loading = {"batch_size": shares.batch // shares.processes, "sampler": shares, "num_workers": loaders}
    model: Any = pw.shard(ResNet50(width, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    if checkpoints is None:
        loader: Any = DataLoader(images, **loading)
        first, batches = 0, epochs_of(loader, epochs)
    else:
        from torchdata.stateful_dataloader import StatefulDataLoader  # which knows where it is

        loader = StatefulDataLoader(images, **loading)
        training = pw.Resume(checkpoints, model, optimizer, loader=loader, every=every)
        first, batches = training.step, training.batches(epochs)

    monitor = pw.LossMonitor(per_print_times, steps=len(loader), samples=shares.batch, rates=rates)
    for step, (_, (pixels, labels)) in enumerate(batches, first):
        loss = model(pixels, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor(loss, step=step)
    pw.shutdown()


def epochs_of(loader: DataLoader[Batch], epochs: int) -> Iterator[tuple[int, Batch]]:
    """The batches of all epochs, each with its epoch."""
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            yield epoch, batch


if __name__ == "__main__":
    app()
