"""The script of which parameter_server.py starts several workers: a small model, and how many steps a second it takes.

    FOUND=folder partway ps run --workers 2 --servers 2 benchmarks/parameter_server_train.py

MODE is sync or async. Each worker writes when its steps ended into a file of its own in FOUND.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import partway as pw

STEPS = int(os.environ.get("STEPS", "100"))


def main() -> None:
    """Train, as one of the workers."""
    torch.set_num_threads(1)
    pw.set_ps_context(enable_ps=True, mode=os.environ.get("MODE", "sync"))
    pw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    pw.set_param_ps(model)
    optimizer: Any = pw.ps.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    ended = []
    for step in pw.ps.steps(STEPS):
        generator = torch.Generator().manual_seed(step)
        index, count = pw.ps.share()
        images, labels = torch.randn(64, 256, generator=generator), torch.randint(0, 10, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[index::count]), labels[index::count])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended.append(time.time())
    size = sum(each.nbytes for each in model.parameters())
    path = Path(os.environ["FOUND"]) / f"worker.{optimizer.worker}"
    path.write_text(json.dumps({"ended": ended, "bytes": size}))


if __name__ == "__main__" and "FOUND" in os.environ:
    main()
