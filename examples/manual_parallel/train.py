"""The reference's manual parallelism: data parallel training that a person writes. README.md says how to start it.

Every rank has the whole batch, takes its slice, sums its loss with those of the others, and averages the gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from data import batches, load
from torch import Tensor, nn
from torch.func import functional_call

import partway as pw
from partway import ops

# the last line of a log says what failed
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def own_slice(x: Tensor) -> Tensor:
    """This rank's samples of a whole batch."""
    size = len(x) // pw.axis_size()
    return x[pw.axis_index() * size :][:size]


class Network(nn.Module):
    """The network of one rank: its logits of its slice of the batch."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1, self.layer2, self.layer3 = nn.Linear(pixels, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.flatten(own_slice(x))
        x = torch.relu(self.layer1(x))
        x = torch.relu(self.layer2(x))
        logits: Tensor = self.layer3(x)
        return logits


class ReduceLoss(nn.Module):
    """The mean loss of the whole batch, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        self.all_reduce = ops.AllReduce()

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        loss = self.loss(logits, own_slice(label))
        return self.all_reduce(loss) / pw.axis_size()


def average_gradients(net: nn.Module) -> None:
    """The gradient of the mean loss is the mean of the ranks' gradients."""
    for parameter in net.parameters():
        parameter.grad = ops.all_reduce(parameter.grad, "mean")


@app.command()
def train(
    data: Annotated[Path | None, typer.Option(envvar="DATA_PATH", help="the folder of MNIST's files")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="how often all images are seen")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="images of a step, on all ranks together")] = 32,
    rate: Annotated[float, typer.Option(help="the learning rate")] = 1e-2,
    per_print_times: Annotated[int, typer.Option(min=1, help="steps from one line to the next")] = 20,
    double: Annotated[bool, typer.Option("--double", help="compute in float64")] = False,
    manual: Annotated[int, typer.Option(help="no launcher: a manual function on so many virtual devices")] = 0,
) -> None:
    """Train a network of three layers, and print its loss."""
    if not manual:
        pw.init(backend="gloo")  # where a launcher started several processes
    ranks = manual or pw.get_group_size()
    if batch % ranks:
        raise typer.BadParameter(f"{ranks} ranks cannot share {batch} images evenly", param_hint="--batch")
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    torch.manual_seed(1)
    images, labels = load(data)
    net, loss_fn = Network(images[0].numel()), ReduceLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)

    def loss_of(images: Tensor, labels: Tensor, parameters: dict[str, Any]) -> Tensor:
        loss: Tensor = loss_fn(functional_call(net, parameters, images), labels)
        return loss

    whole_loss = pw.manual(loss_of, mesh={"dp": manual}) if manual else loss_of
    monitor = pw.LossMonitor(per_print_times)
    for epoch in range(epochs):
        for pixels, label in batches(images, labels, batch, epoch):
            loss = whole_loss(pixels, label, dict(net.named_parameters()))
            optimizer.zero_grad()
            loss.backward()
            if not manual:  # whose gradients are those of the whole
                average_gradients(net)
            optimizer.step()
            monitor(loss, epoch=epoch)
    if not manual:
        pw.shutdown()


if __name__ == "__main__":
    app()
