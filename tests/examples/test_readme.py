"""The README's code runs as it stands there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

import partway as pw

README = Path(__file__).parents[2] / "README.md"


Runner = Callable[..., subprocess.CompletedProcess[str]]


def code_under(title: str) -> str:
    """The one block of Python in a section of the README."""
    (section,) = re.findall(rf"^## {title}\n(.*?)^## ", README.read_text(encoding="utf-8"), re.S | re.M)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    return str(code)


def test_every_block_of_python_is_run_here() -> None:
    assert README.read_text(encoding="utf-8").count("```python\n") == 4


def test_the_data_that_is_split_runs(python: Runner, tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    for i in range(4):
        image = (np.arange(1024 * 1024) * (i + 1) % 256).astype(np.uint8).reshape(1024, 1024)
        tifffile.imwrite(tmp_path / "slides" / f"{i}.tif", image, tile=(256, 256))
    (tmp_path / "data.py").write_text(code_under("Data that is split"), encoding="utf-8")
    done = python("-W", "error", "data.py")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^loss 0\.\d{4}$", done.stdout, re.M)) == 2


def test_an_operator_of_ones_own_runs(python: Runner, tmp_path: Path) -> None:
    (tmp_path / "operators.py").write_text(code_under("Operators of your own"), encoding="utf-8")
    done = python("-W", "error", "operators.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *project +dp:b tp:m ", done.stdout, re.M)


def test_the_plan_as_a_graph_runs(python: Runner, tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(code_under("The plan as a graph"), encoding="utf-8")
    done = python("-W", "error", "graph.py")
    assert done.returncode == 0, done.stderr
    sizes = [float(size) for size in re.findall(r"^(?:\w+ )+ *(\d+\.\d\d) MB$", done.stdout, re.M)]
    part, whole = re.findall(r"(\d+\.\d\d) of (\d+\.\d\d) MB$", done.stdout, re.M)[0]
    assert part == whole
    assert re.search(r"^input \S+ -> .*linear_1 -> output result$", done.stdout, re.M)
    assert 0 < sum(sizes) == pytest.approx(float(whole), abs=0.05)


def test_the_quick_start_runs(python: Runner, tmp_path: Path) -> None:
    (tmp_path / "quick_start.py").write_text(code_under("Quick start"), encoding="utf-8")
    done = python("-W", "error", "quick_start.py")
    assert done.returncode == 0, done.stderr
    assert "plan on dp=2, tp=4" in done.stdout
    assert "because parameter up.weight" in done.stdout
    assert "tensor([64., 64., 64., 64.]" in done.stdout
    assert "on tp=8" in done.stdout
    assert pw.Plan.load(tmp_path / "plan.json").mesh == pw.Mesh({"dp": 2, "tp": 4})


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def test_the_explanation_is_what_is_printed() -> None:
    with torch.device("meta"):
        plan = pw.compile(
            Perceptron(),
            (torch.empty(8192, 1024),),
            mesh={"dp": 2, "tp": 4},
            in_strategy=(("dp", None),),
            parameter_plan={"up.weight": (None, "tp")},
        ).plan
    (shown,) = re.findall(r"begins:\n\n(.*?)\n\n", README.read_text(encoding="utf-8"), re.S)
    first, second = (re.sub(r"at \w+\.py:\d+, .*", "", text) for text in (shown, str(plan.explain("up.weight"))))
    assert " ".join(second.split()).startswith(" ".join(first.split()))
