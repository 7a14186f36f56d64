"""The code of the pages for users runs as it stands there, in one process and under torchrun."""

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
from typer.testing import CliRunner

import partway as pw
from partway.commands.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RANKS = {  # under torchrun
    "annotations": 4, "checkpoints": 2, "ema": 2, "evaluation": 2, "first_plan": 4, "graphs": 4, "huggingface": 2,
    "inference": 4, "launch": 4, "lightning": 2, "manual": 4, "options": 2, "parameter_server": 2, "recovery": 2,
    "security": 2, "training": 4, "tutorials/data_parallel": 4, "tutorials/dtensor": 2, "tutorials/experts": 4,
    "tutorials/fsdp2": 2, "tutorials/gpt": 4, "tutorials/images": 2, "tutorials/memory": 4, "tutorials/mindspore": 4,
}  # fmt: skip
ALONE = {"data", "own_operators", "see"}  # what they show has no ranks, or the example scripts show it on some
PAGES = sorted({*RANKS, *ALONE})
SLOW = {"ema", "evaluation", "graphs", "huggingface", "launch", "lightning", "parameter_server", "recovery", "security"}

Runner = Callable[..., subprocess.CompletedProcess[str]]


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def code_of(page: str) -> str:
    """All blocks of Python of a page, in their order."""
    blocks = re.findall(r"```python\n(.*?)```", text_of(page), re.S)
    assert blocks
    return "".join(blocks)


def test_each_page_with_code_is_run() -> None:
    pages = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in DOCS.rglob("*.md")}
    with_code = {page for page, path in pages.items() if "```python\n" in path.read_text(encoding="utf-8")}
    assert with_code == set(PAGES)
    fragments = {page for page, path in pages.items() if "```py\n" in path.read_text(encoding="utf-8")}
    assert fragments == {"launch", "recovery"}  # test_launch_page.py runs them


def slides(folder: Path) -> None:
    """What the page on data reads."""
    (folder / "slides").mkdir()
    for i in range(4):
        image = (np.arange(1024 * 1024) * (i + 1) % 256).astype(np.uint8).reshape(1024, 1024)
        tifffile.imwrite(folder / "slides" / f"{i}.tif", image, tile=(256, 256))


def losses(printed: str, of: str = "") -> list[str]:
    return re.findall(rf"^{of}loss (\S+)$", printed, re.M)


def check(page: str, printed: str, folder: Path) -> None:
    """What a page says of its output."""
    match page:
        case "checkpoints":
            assert printed.split() == ["3", "checkpoint-000005"]
        case "manual":
            report = text_of("manual").split("```text\n")[1].split("```")[0]
            mistake = report[report.index("a gradient that") :]
            assert mistake in printed.replace(f"{folder}/", "")
        case "data":
            assert len(re.findall(r"^loss 0\.\d{4}$", printed, re.M)) == 2
        case "own_operators":
            assert re.search(r"^ *project +dp:b tp:m ", printed, re.M)
        case "see":
            sizes = [float(size) for size in re.findall(r"^(?:\w+ )+ *(\d+\.\d\d) MB$", printed, re.M)]
            part, whole = re.findall(r"(\d+\.\d\d) of (\d+\.\d\d) MB$", printed, re.M)[0]
            assert part == whole
            assert re.search(r"^input \S+ -> .*linear_1 -> output result$", printed, re.M)
            assert 0 < sum(sizes) == pytest.approx(float(whole), abs=0.05)
        case "first_plan":
            assert "plan on dp=2, tp=4" in printed
            assert "because parameter up.weight" in printed
            assert "tensor([64., 64., 64., 64.]" in printed
            assert "on tp=8" in printed
            assert pw.Plan.load(folder / "plan.json").mesh == pw.Mesh({"dp": 2, "tp": 4})
        case "tutorials/dtensor" | "tutorials/fsdp2":
            theirs = losses(printed, "FSDP2 " if "fsdp2" in page else "DTensor ")
            assert len(theirs) == 3
            assert theirs == losses(printed, "Partway ")
        case _:
            pass


def shown(page: str) -> list[str]:
    """The lines of output that a tutorial shows."""
    return [line for block in re.findall(r"```text\n(.*?)```", text_of(page), re.S) for line in block.splitlines()]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES]
)
def test_the_code_of_a_page_runs(page: str, python: Runner, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code_of(page), encoding="utf-8")
    if page == "data":
        slides(tmp_path)
    done = python("page.py")
    assert done.returncode == 0, done.stderr
    check(page, done.stdout, tmp_path)
    if page.startswith("tutorials/") and torch.__version__.startswith("2.13."):
        printed = [figures_aside(line) for line in done.stdout.splitlines()]
        assert [line for line in shown(page) if not any(one.startswith(figures_aside(line)) for one in printed)] == []


def figures_aside(line: str) -> str:
    """A line without how wide its columns are, and the last digit of a loss, which a machine may round otherwise."""
    return re.sub(r"(\d\.\d{5})\d", r"\1", " ".join(line.split()))


@pytest.mark.parametrize("page", ["dtensor", "fsdp2", "mindspore"])
def test_each_line_beside_another_stands_in_the_code_that_runs(page: str) -> None:
    code = " ".join(code_of(f"tutorials/{page}").split())
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \|$", text_of(f"tutorials/{page}"), re.M)
    assert len(rows) >= 5
    ours = [" ".join(row[1].split()) for row in rows]
    theirs = [] if page == "mindspore" else [" ".join(row[0].split()) for row in rows]
    assert [line for line in (*theirs, *ours) if line not in code] == []


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
    (shown,) = re.findall(r"begins:\n\n(.*?)\n\n", text_of("see"), re.S)
    first, second = (re.sub(r"at \w+\.py:\d+, .*", "", text) for text in (shown, str(plan.explain("up.weight"))))
    assert " ".join(second.split()).startswith(" ".join(first.split()))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch writes other operators")
def test_the_graphs_in_the_guide_are_those_that_its_program_saves(
    python: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of("graphs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    for name, text in (("annotated", code), ("free", re.sub(r"train\(parameter_plan=.*\)", "train()", code))):
        monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", name)
        (tmp_path / "net.py").write_text(text, encoding="utf-8")
        done = python("net.py")
        assert done.returncode == 0, done.stderr
    texts = [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("annotated/**/*.txt"))]
    texts.append(CliRunner().invoke(app, ["diff", "annotated", "free"]).output)
    written = {line for text in texts for line in text.splitlines()}
    page = text_of("graphs")
    shown = [line for block in re.findall(r"```text\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(shown) > 50
    assert [line for line in shown if line != "..." and line not in written] == []
    files = {path.name.partition(".")[0] for path in tmp_path.glob("annotated/rank_0/000_Net.forward/*")}
    assert [name for name in sorted(files) if f"`{name}" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize(("page", "ranks"), RANKS.items())
def test_the_code_of_a_page_runs_under_torchrun(page: str, ranks: int, python: Runner, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code_of(page), encoding="utf-8")
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "page.py")
    assert done.returncode == 0, done.stderr
