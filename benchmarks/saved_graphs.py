"""What PARTWAY_SAVE_GRAPHS adds to the planning of GPT-2 124M: CPU seconds of each level, beside those of the planning.

    python benchmarks/saved_graphs.py [--rounds 5]

The model stands on the meta device, 8 sequences of 1024 tokens, forward and backward. It is planned on 2 x 4 devices
with the batch split, and on 8 devices with no mesh given, where each mesh is searched and, from level 2 on, saved. Each
round is a process of its own, in which every level plans once before it is measured; the levels take turns. What a
level adds is its time less that of planning without it in the same round. The command fails (exit status 1) if level 2
adds as much as the planning takes.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PARTWAY_CACHE"] = "0"

import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel

import partway as pw

LEVELS = (0, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    "2 x 4, batch split": {"mesh": {"dp": 2, "tp": 4}, "in_strategy": {"input_ids": ("dp", None)}},
    "8, every mesh tried": {},
}
BAR = 1.0  # what level 2 adds, over the planning


def seconds(case: str, level: int) -> tuple[float, int]:
    """CPU seconds of planning and saving, and the bytes that were saved."""
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        os.environ.update(PARTWAY_SAVE_GRAPHS=str(level), PARTWAY_SAVE_GRAPHS_PATH=folder)
        model = GPT2LMHeadModel(GPT2Config(use_cache=False))
        tokens = torch.empty(8, 1024, dtype=torch.long)
        gc.collect()  # what the level before has left is not this one's
        began = time.process_time()
        with pw.auto_parallel_context(device_num=8):
            compiled = pw.compile(model, (), {"input_ids": tokens, "labels": tokens}, **CASES[case])
        assert compiled.program.backward is not None
        took = time.process_time() - began
        return took, sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def measured(case: str, number: int) -> dict[int, tuple[float, int]]:
    """One round: every level once."""
    for level in (0, 2):
        seconds(case, level)
    first = number % len(LEVELS)
    return {level: seconds(case, level) for level in (*LEVELS[first:], *LEVELS[:first])}


def round_of(case: str, number: int) -> dict[int, tuple[float, int]]:
    """A round in a process of its own."""
    command = [sys.executable, __file__, "--one", case, "--number", str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {int(level): tuple(found) for level, found in json.loads(done.stdout.splitlines()[-1]).items()}


def spread(values: list[float], form: str) -> str:
    """The median and the range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="processes for each case; the medians count")] = 5,
    one: Annotated[str, typer.Option(hidden=True)] = "",
    number: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure the cases, print a table in Markdown, and exit with status 1 if one fails."""
    if one:
        print(json.dumps(measured(one, number)))
        return
    worst = 0.0
    print("| case | level | CPU seconds | added | added, over the planning | saved |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        found = [round_of(case, i) for i in range(rounds)]
        for level in LEVELS:
            took = [each[level][0] for each in found]
            added = [each[level][0] - each[0][0] for each in found]
            ratios = [more / each[0][0] for more, each in zip(added, found, strict=True)]
            if level == 2:
                worst = max(worst, statistics.median(ratios))
            cells = [case, str(level or "none"), spread(took, ".2f")]
            cells += [spread(added, ".2f"), spread(ratios, ".2f"), f"{found[0][level][1] / 1e6:.1f} MB"]
            print(f"| {' | '.join(cells if level else [*cells[:3], '', '', ''])} |")
    print(f"level 2 adds {worst:.2f} of the planning at most; the bar is {BAR}")
    raise typer.Exit(0 if worst < BAR else 1)


if __name__ == "__main__":
    start(main)
