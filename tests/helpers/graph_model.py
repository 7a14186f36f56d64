"""The small model whose saved graphs are kept in tests/api/graphs/golden, and what saves them.

    python tests/helpers/graph_model.py --write

Its lines are in those graphs: one that moves changes them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import partway as pw
from partway.cli import app

GOLDEN = Path(__file__).parents[1] / "api" / "graphs" / "golden"
CALL = "000_Net.forward"
MESH = {"dp": 2, "tp": 2}
ANNOTATIONS: dict[str, dict[str, object]] = {"tp": {}, "dp": {"parameter_plan": {}}}  # what `train` gets beside its own


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
    """What it is called with."""
    return torch.ones(4, 8), torch.zeros(4, 8)


def train(**more: object) -> Net:
    """One step."""
    model = sharded(**more)
    model(*batch()).backward()
    return model


def contents(folder: Path) -> dict[str, str]:
    """The files of a folder by their paths in it, without the seconds of passes and the lines of data."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
    return {path.relative_to(folder).as_posix(): without_seconds(path) for path in files}


def without_seconds(path: Path) -> str:
    """The text of a file; of an index without the column of seconds."""
    text = path.read_text(encoding="utf-8")
    if path.name != "index.txt":
        return text
    head, table, foot = re.split(r"\n\n", text.rstrip("\n"))
    lines = table.splitlines()
    end = lines[0].index("seconds") + len("seconds")
    cut = (f"{line[: end - 7]}{re.sub('[0-9.]', '0', line[end - 7 : end])}{line[end:]}".rstrip() for line in lines)
    return "\n".join([head, "", *cut, "", foot, ""])


def compare(a: Path, b: Path) -> str:
    """What `partway diff` says of two runs, in folders next to each other."""
    said = CliRunner().invoke(app, ["diff", str(a), str(b)]).output
    return said.replace(str(a.parent), "RUNS")


def write_difference() -> None:
    """Make the golden comparison of two annotations."""
    with tempfile.TemporaryDirectory() as path:
        for name, more in ANNOTATIONS.items():
            os.environ.update(PARTWAY_SAVE_GRAPHS="1", PARTWAY_SAVE_GRAPHS_PATH=f"{path}/{name}", PARTWAY_CACHE="0")
            train(**more)
        (GOLDEN / "diff.txt").write_text(compare(*(Path(path, name) for name in ANNOTATIONS)), encoding="utf-8")


def write(level: int, folder: Path) -> None:
    """Make the golden files of a level; those that a lower level has are kept there."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as path:
        os.environ.update(PARTWAY_SAVE_GRAPHS=str(level), PARTWAY_SAVE_GRAPHS_PATH=path, PARTWAY_CACHE="0")
        train()
        for name, text in contents(Path(path, "rank_0", CALL)).items():
            lower = any((GOLDEN / str(below) / name).exists() for below in range(1, level))
            if name == "index.txt" or not lower:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__" and "--write" in sys.argv:
    for number in (1, 2, 3):
        write(number, GOLDEN / str(number))
    write_difference()
