"""The small model whose graphs are saved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partway as pw

CALL = "000_Net.forward"
MESH = {"dp": 2, "tp": 2}


class Net(nn.Module):
    """Two layers, the second row-parallel, with dropout between them, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        hidden = F.dropout(torch.relu(self.up(x)), 0.5, self.training)
        return F.mse_loss(self.down(hidden), y)


def sharded(**more: object) -> Net:
    """The model with its annotations."""
    torch.manual_seed(0)
    plan = {"up.weight": ("tp", None), "down.weight": (None, "tp")}
    given = {"mesh": MESH, "in_strategy": (("dp", None), ("dp", None)), "parameter_plan": plan, **more}
    return pw.shard(Net(), **given)  # type: ignore[arg-type]


def batch() -> tuple[Tensor, Tensor]:
    """The arguments of its call."""
    return torch.ones(4, 8), torch.zeros(4, 8)


def train(**more: object) -> Net:
    """Run one step."""
    model = sharded(**more)
    model(*batch()).backward()
    return model


def contents(folder: Path) -> dict[str, str]:
    """The contents of the files of a folder, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}
