"""`partway show`: pages of plans that were saved, and which of two is better."""

from __future__ import annotations

import json
import re
import webbrowser
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import partway as pw
from partway.commands.cli import app
from partway.show.pages import page, page_path, verdict
from partway.strategy import StrategyError


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()


def planned(**annotated):
    with torch.device("meta"):
        return pw.compile(MLP(), (torch.empty(16, 64),), mesh={"dp": 2, "tp": 2}, **annotated).plan


@pytest.fixture(scope="module")
def plans() -> tuple[pw.Plan, pw.Plan]:
    """One that has to gather its weight, and one without annotations."""
    return planned(in_strategy=(("dp", None),), parameter_plan={"up.weight": ("tp", "dp")}), planned()


@pytest.fixture
def files(plans, tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    return paths


def run(*arguments: object):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_the_page_of_one_plan_has_it_and_says_what_needs_the_model(files, plans):
    text = page([files[0]])
    assert "<h1>Plan on dp=2, tp=2: a.json</h1>" in text
    assert text.count('class="plan-data"') == 1
    assert "What caused it" not in text
    assert "The plan was read from a file: what caused a collective" in text


def test_the_page_of_two_says_which_is_better_and_where_they_differ(files, plans):
    text = page(list(files))
    assert text.count('class="plan-data"') == 2
    assert verdict(*plans) in text
    assert "What differs" in text
    assert re.search(r'Another strategy: .*data-find="linear">linear<', text)
    assert "<pre>-a step is predicted to take " in text


def test_the_verdict_is_what_the_plans_say(plans):
    slow, fast = plans
    assert fast.predicted_time < slow.predicted_time
    saved = slow.predicted_time - fast.predicted_time
    text = verdict(slow, fast)
    assert text.startswith("B is predicted to be faster: by ")
    assert f"{100 * saved / slow.predicted_time:.1f} % of what A takes" in text
    assert verdict(fast, slow) == text.replace("B is", "A is").replace("what A", "what B").replace("of B", "of A")
    assert verdict(fast, fast) == "A and B are predicted to take the same time."


def test_the_same_plan_twice_does_not_differ(files):
    assert "Nothing: the plans are the same." in page([files[0], files[0]])


def test_the_command_writes_beside_the_plan(files):
    result = run(files[0])
    assert result.exit_code == 0
    assert result.output == f"wrote {files[0].with_suffix('.html')}\n"
    assert files[0].with_suffix(".html").read_text(encoding="utf-8") == page([files[0]])
    assert run(*files).output == f"wrote {files[0].parent / 'a_and_b.html'}\n"
    assert run(files[0], "--out", files[0].parent / "other.html").exit_code == 0
    assert (files[0].parent / "other.html").exists()


def test_a_page_of_another_program_is_not_written_over(files):
    page = files[0].with_suffix(".html")
    page.write_text("<p>mine</p>")
    refused = run(files[0])
    assert refused.exit_code == 2
    assert f"cannot write {str(page)!r}: it is there already, and Partway did not write it" in refused.output
    assert page.read_text() == "<p>mine</p>"
    page.unlink()
    assert [run(files[0]).exit_code for _ in range(2)] == [0, 0]


def test_where_a_page_goes():
    assert page_path(Path("runs/plan.json"), None) == Path("runs/plan.html")
    assert page_path(Path("runs/rank_0"), None) == Path("runs/rank_0.html")
    assert page_path(Path("runs/v1.2"), Path("b.json")) == Path("runs/v1.2_and_b.html")


def test_open_starts_a_browser_or_says_that_there_is_none(files, monkeypatch):
    asked = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: asked.append(uri) or True)
    assert run(files[0], "--open").exit_code == 0
    assert asked == [files[0].with_suffix(".html").as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda uri: False)
    result = run(files[0], "--open")
    assert result.exit_code == 1
    assert "there is no browser here that can be started; open the file in one" in result.stderr


def test_what_is_no_plan_is_an_error(tmp_path, files):
    result = run(tmp_path / "nothing.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("partway show: there is nothing at")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    result = run(tmp_path / "other.json")
    assert result.exit_code == 2
    assert "holds no plan of this version" in result.stderr
    result = run(files[0], "--out", tmp_path / "no" / "folder.html")
    assert result.exit_code == 2
    assert "give the path of a file in a folder that exists" in result.stderr


def test_a_run_with_several_calls_is_asked_for_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path / "graphs"))
    pw.init(simulate=2)
    for function in (torch.relu, torch.sigmoid):
        pw.shard(lambda x, f=function: f(x).sum(), mesh={"dp": 2}, in_strategy=(("dp", None),))(torch.ones(4, 4))
    with pytest.raises(StrategyError, match="has 2 calls; give the folder of one of them: "):
        page([tmp_path / "graphs"])
    folder = next(path.parent for path in sorted((tmp_path / "graphs").rglob("plan.json")))
    assert "<h1>Plan on dp=2: " in page([folder])
