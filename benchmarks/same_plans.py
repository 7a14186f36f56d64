"""Are the plans of two installs of Partway the same, bit for bit?

    python benchmarks/same_plans.py --before OLD/.venv/bin/python

Plans the models of tests/models/zoo.py on five meshes, each without annotations, with its batch split and with a block
split: 101 plans. Both interpreters run this file. Printed are the plans whose JSON differs, and the CPU seconds of all
captures and plans; with a plan that differs the exit status is 1.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ |= {"OMP_NUM_THREADS": "1", "PARTWAY_CACHE": "0", "ZOO_LAYERS": "2"}
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

import torch
import typer
from zoo import CASES, Case

import partway as pw

MESHES: list[dict[str, int]] = [
    {"dp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 2, "cp": 2, "tp": 2},
]  # fmt: skip


def annotations(case: Case, mesh: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The arguments of `compile`, by what they annotate."""
    found: dict[str, dict[str, Any]] = {"nothing": {}}
    if "dp" in mesh:
        found["batch"] = {"in_strategy": case.batch_split("dp")}
    if "tp" in mesh:
        found["block"] = {"parameter_plan": case.block_split("tp")}
    return found


def plans() -> tuple[dict[str, str], float]:
    """The JSON of every plan, or the error that it was, and the CPU seconds of all."""
    found, seconds = dict[str, str](), 0.0
    for (name, case), mesh in itertools.product(CASES.items(), MESHES):
        if name == "resnet50" and len(mesh) == 3:  # minutes
            continue
        for what, arguments in annotations(case, mesh).items():
            torch.manual_seed(0)
            model, batch = case.build(torch.float32), case.batch(torch.float32)
            began = time.process_time()
            try:
                text = pw.compile(model, (), batch, mesh=mesh, **arguments).plan.model_dump_json()
            except pw.PartwayError as error:
                text = str(error)
            seconds += time.process_time() - began
            found[f"{name} on {mesh}, {what} annotated"] = text
    return found, seconds


def main(before: Annotated[str, typer.Option(help="the interpreter of the other install")] = "") -> None:
    """Compare with another install; without one, print the plans as JSON."""
    ours, seconds = plans()
    if not before:
        print(json.dumps([ours, seconds]))
        return
    said = subprocess.run([before, __file__], capture_output=True, text=True, check=True).stdout
    theirs, earlier = json.loads(said.splitlines()[-1])
    different = [name for name in ours if ours[name] != theirs.get(name)]
    print("\n".join([f"differs: {name}" for name in different]))
    print(f"{len(ours)} plans, {len(different)} differ; {seconds:.1f} CPU s, {earlier:.1f} before")
    raise typer.Exit(bool(different))


if __name__ == "__main__":
    typer.run(main)
