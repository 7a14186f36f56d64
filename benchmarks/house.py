"""How large the house is, and how many rooms a call of a three-layer MLP on 2x2 virtual devices goes through.

    python benchmarks/house.py

A move is a call of a function of another file of Partway than the one that was called last, as `sys.setprofile`
tells; files and moves are of the first call with its backward, and of a later one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import partway as pw

ROOT = os.path.dirname(str(pw.__file__)) + os.sep
KITS = {path.name for path in (Path(__file__).parents[1] / "kits").iterdir()}


def visited(step: Callable[[], object]) -> tuple[set[str], int]:
    """The files of Partway that `step` runs code of, and the moves between them."""
    files, moves, last = set[str](), 0, ""

    def event(frame: FrameType, kind: str, _: Any) -> None:
        nonlocal moves, last
        name = frame.f_code.co_filename
        if kind == "call" and name.startswith(ROOT):
            files.add(name)
            moves += last not in ("", name)
            last = name

    sys.setprofile(event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return files, moves


def sizes() -> Counter[tuple[str, str]]:
    """Modules and lines of the core and of kits."""
    found = Counter[tuple[str, str]]()
    for folder, _, names in os.walk(ROOT, followlinks=True):
        inside = Path(folder).relative_to(ROOT).parts
        whose = "kits" if inside and inside[0] in KITS else "core"
        for name in names:
            if name.endswith(".py"):
                found[whose, "modules"] += 1
                found[whose, "lines"] += len(Path(folder, name).read_text(encoding="utf-8").splitlines())
    return found


def main() -> None:
    """Print the figures."""
    os.environ["PARTWAY_CACHE"] = "0"
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
    model = pw.shard(layers, mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),))
    x = torch.randn(16, 64)

    def step() -> None:
        model(x).sum().backward()

    for (whose, what), count in sorted(sizes().items()):
        print(f"{whose} {what}: {count:,}")
    for which in ("first call", "second call", "later call"):
        began = time.process_time()
        files, moves = visited(step)
        print(
            f"{which}: {len(files)} files, {moves:,} moves, {time.process_time() - began:.3f} CPU s while it is watched"
        )


if __name__ == "__main__":
    main()
