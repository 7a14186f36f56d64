"""One training script for virtual devices and for processes: nothing in it asks which of the two it is.

    python examples/train.py                                   # 8 virtual devices in this process
    torchrun --nproc-per-node 4 examples/train.py              # 4 processes, on NCCL or gloo

Every process reads whole batches; the sharded model takes its part. The loss is the same in each case, and that of
one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from digits import batches, load_digits
from models import VisionTransformer

import partway as pw


def train(
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int | None, typer.Option(min=1, help="stop after so many")] = None,
    out: Annotated[Path, typer.Option(help="the folder to write to")] = Path("out/train"),
) -> None:
    """Train a small vision transformer on digits and write its loss curve."""
    devices = pw.init(simulate=8)  # the number of processes, if a launcher started us
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model = pw.shard(
        VisionTransformer(),
        mesh={"dp": 2, "tp": devices // 2},
        in_strategy=(("dp", None, None, None),),
        parameter_plan={"blocks.0.up.weight": ("tp", None)},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    curve: list[float] = []
    for images, labels in list(batches(load_digits(), 64, epochs))[:steps]:
        loss, _ = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        if pw.get_rank() == 0 and len(curve) % 10 == 1:
            print(f"step {len(curve):3}  loss {curve[-1]:.6f}", flush=True)

    if pw.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "loss.csv"
        path.write_text("step,loss\n" + "".join(f"{i},{loss!r}\n" for i, loss in enumerate(curve, 1)))
        print(f"{len(curve)} steps on {devices} devices; the loss curve is in {path}")
    pw.shutdown()


if __name__ == "__main__":
    typer.run(train)
