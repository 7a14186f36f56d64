"""The code of the pages for users runs as it stands there, in one process and under torchrun."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import partway
from partway.cli import app

ROOT = Path(__file__).parents[2]
RANKS = {  # under torchrun
    "checkpoints": 2, "ema": 2, "evaluation": 2, "graphs": 4, "huggingface": 2, "inference": 4, "launch": 4,
    "lightning": 2, "manual": 4, "options": 2, "parameter_server": 2, "recovery": 2,
    "security": 2,
}  # fmt: skip
PAGES = sorted(RANKS)
COMMANDS = {"kubernetes"}  # no Python: tests/ecosystem/test_kubernetes.py runs what stands there

Runner = Callable[..., subprocess.CompletedProcess[str]]


def code_of(page: str) -> str:
    """All blocks of Python of a page, in their order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    return "".join(blocks)


def test_each_page_is_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == {*PAGES, *COMMANDS}
    assert all(f"(docs/{page}.md)" in readme for page in pages)
    assert partway.load.__doc__


@pytest.mark.parametrize("page", [
    page if page in ("checkpoints", "inference", "manual", "options") else pytest.param(page, marks=pytest.mark.slow)
    for page in PAGES
])  # fmt: skip
def test_the_code_of_a_page_runs(page: str, python: Runner, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code_of(page), encoding="utf-8")
    done = python("page.py")
    assert done.returncode == 0, done.stderr
    if page == "checkpoints":
        assert done.stdout.split() == ["3", "checkpoint-000005"]
    if page == "manual":
        report = (ROOT / "docs" / "manual.md").read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
        mistake = report[report.index("a gradient that") :]
        assert mistake in done.stdout.replace(f"{tmp_path}/", "")


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
    written = {without_seconds(line) for text in texts for line in text.splitlines()}
    page = (ROOT / "docs" / "graphs.md").read_text(encoding="utf-8")
    shown = [line for block in re.findall(r"```text\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(shown) > 50
    assert [line for line in shown if line != "..." and without_seconds(line) not in written] == []
    files = {path.name.partition(".")[0] for path in tmp_path.glob("annotated/rank_0/000_Net.forward/*")}
    assert [name for name in sorted(files) if f"`{name}" not in page] == []


def without_seconds(line: str) -> str:
    """A line of an index without the seconds of its pass."""
    return re.sub(r"\b\d+\.\d{3}\b", "0.000", line)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "ranks"), RANKS.items())
def test_the_code_of_a_page_runs_under_torchrun(page: str, ranks: int, python: Runner, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code_of(page), encoding="utf-8")
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "page.py")
    assert done.returncode == 0, done.stderr
