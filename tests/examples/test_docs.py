"""The code of the pages for users runs as it stands there, in one process and under torchrun."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import partway

ROOT = Path(__file__).parents[2]
RANKS = {  # under torchrun
    "checkpoints": 2, "ema": 2, "evaluation": 2, "huggingface": 2, "inference": 4, "launch": 4, "lightning": 2,
    "options": 2, "recovery": 2, "security": 2,
}  # fmt: skip
PAGES = sorted(RANKS)

Runner = Callable[..., subprocess.CompletedProcess[str]]


def code_of(page: str) -> str:
    """All blocks of Python of a page, in their order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    return "".join(blocks)


def test_each_page_is_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(PAGES)
    assert all(f"(docs/{page}.md)" in readme for page in pages)
    assert partway.load.__doc__


@pytest.mark.parametrize("page", [
    page if page in ("checkpoints", "inference", "options") else pytest.param(page, marks=pytest.mark.slow)
    for page in PAGES
])  # fmt: skip
def test_the_code_of_a_page_runs(page: str, python: Runner, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code_of(page), encoding="utf-8")
    done = python("page.py")
    assert done.returncode == 0, done.stderr
    if page == "checkpoints":
        assert done.stdout.split() == ["3", "checkpoint-000005"]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "ranks"), RANKS.items())
def test_the_code_of_a_page_runs_under_torchrun(page: str, ranks: int, python: Runner, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(code_of(page), encoding="utf-8")
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "page.py")
    assert done.returncode == 0, done.stderr
