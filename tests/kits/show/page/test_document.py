"""The file of a page: complete, closed to the network, the plan in it as it is saved, and nothing that names break."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.plan.data import PlanData
from partway.show.page.document import PART, asset, compact
from partway.strategy import StrategyError

ASSETS = files("partway.show.page") / "assets"
VOID = {"meta", "input", "br", "img"}
HOSTILE = "</script><img src=x onerror=alert(1)><!--"


class Page(HTMLParser):
    """What is in a page: its scripts, its tags, whether they close."""

    def __init__(self, text: str):
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data

    def json(self, kind: str) -> list:
        return [json.loads(text) for attrs, text in self.scripts if attrs.get("class") == kind]


def test_the_plan_is_in_it_as_it_is_saved(plan, page_of):
    page = Page(page_of(plan, alternatives=0))
    (head,) = page.json("plan-head")
    head["operators"] = [*chain(*page.json("plan-operators"))]
    head["collectives"] = [*chain(*page.json("plan-collectives"))]
    assert head == json.loads(plan.model_dump_json())
    assert PlanData.model_validate(head) == PlanData.model_validate(plan.model_dump())


def test_a_large_plan_is_in_parts(plan, page_of):
    many = tuple(plan.operators[0].model_copy(update={"name": f"op_{i}"}) for i in range(PART + 1))
    large = plan.model_copy(update={"operators": many, "collectives": (), "outputs": ()})
    assert [len(part) for part in Page(page_of(large, alternatives=0)).json("plan-operators")] == [PART, 1]


def test_all_tags_close_and_nothing_is_fetched(plan, page_of):
    text = page_of(plan, alternatives=2)
    page = Page(text)
    assert page.open == []
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
        assert not any(name.startswith("on") for name in attrs)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style


def test_the_browser_may_run_these_scripts_only(plan, page_of):
    page = Page(page_of(plan, alternatives=0))
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    run = [text for attrs, text in page.scripts if "type" not in attrs]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_names_cannot_end_the_data(plan, page_of):
    operators = tuple(
        o.model_copy(update={"name": f"{HOSTILE}{i}", "module": HOSTILE, "source": HOSTILE, "producers": None})
        for i, o in enumerate(plan.operators)
    )
    inputs = tuple(t.model_copy(update={"name": f"{HOSTILE}\u2028{i}"}) for i, t in enumerate(plan.inputs))
    hostile = plan.model_copy(update={"operators": operators, "inputs": inputs})
    text = page_of(hostile, alternatives=0, title=HOSTILE)
    page = Page(text)
    assert page.open == []
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert [o["name"] for part in page.json("plan-operators") for o in part] == [o.name for o in operators]


def test_the_code_is_less_than_a_megabyte(plan, page_of):
    data = sum(
        len(text)
        for attrs, text in Page(page_of(plan, alternatives=0)).scripts
        if attrs.get("type") == "application/json"
    )
    assert len(page_of(plan, alternatives=0)) - data < 1_000_000


def test_a_plan_of_an_earlier_version_has_a_page(of_the_version_before, page_of):
    page = Page(page_of(of_the_version_before))
    assert "plan the call again with this version" in page.json("plan-facts")[0]["graph"]


def test_a_plan_of_nothing_has_a_page(plan, page_of):
    empty = plan.model_copy(update={"operators": (), "collectives": (), "inputs": (), "outputs": ()})
    page = Page(page_of(empty))
    assert page.open == []
    assert page.json("plan-operators") == []


def test_a_page_that_cannot_be_written_is_an_error(plan, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StrategyError, match="could not write the page to"):
        plan.save_html(tmp_path / "file" / "plan.html", alternatives=0)
    with pytest.raises(StrategyError, match="alternatives is -1"):
        plan.save_html(tmp_path / "plan.html", alternatives=-1)
    assert os.listdir(tmp_path) == ["file"]


def test_what_the_program_is_predicted_to_do_is_on_the_page_of_a_live_plan(tmp_path, page_of):
    torch.manual_seed(0)
    pw.init(simulate=4)
    model = pw.shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), mesh={"dp": 4}, in_strategy=(("dp", None),))
    with pw.record_timeline() as spans:
        model(torch.randn(8, 8)).sum().backward()
    text = page_of(model.plan, alternatives=1, timelines={"measured": spans})
    assert "One step, predicted" in text
    assert "One step, measured" in text
    assert text.index("One step, predicted") < text.index("One step, measured")
    model.plan.save(tmp_path / "plan.json")
    assert "One step" not in page_of(pw.Plan.load(tmp_path / "plan.json"))


def pages_of_ranks(folder):
    """The page that this rank writes, without the times."""
    torch.manual_seed(0)
    model = pw.shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), mesh={"dp": 2}, in_strategy=(("dp", None),))
    with pw.record_timeline() as spans:
        model(torch.randn(8, 8)).sum().backward()
    own, shared = f"{folder}/rank{pw.get_rank()}.html", f"{folder}/shared.html"
    model.plan.save_html(own, alternatives=2, timelines={"measured": spans})
    model.plan.save_html(shared, alternatives=0)  # at once by all: it is written whole
    text = Path(own).read_text(encoding="utf-8")
    assert "One step, predicted" in text
    assert "One step, measured" in text
    assert Path(shared).read_text(encoding="utf-8").endswith("</html>\n")
    page = Page(text)
    return page.json("plan-head"), page.json("plan-operators"), page.json("plan-facts")


@pytest.mark.gloo
def test_each_process_writes_the_page_of_the_same_plan(on_ranks, tmp_path):
    one, other = on_ranks(2, pages_of_ranks, str(tmp_path))
    assert one == other
    assert sorted(os.listdir(tmp_path)) == ["rank0.html", "rank1.html", "shared.html"]


def test_a_notebook_shows_a_compact_form_without_scripts(plan):
    shown = plan._repr_html_()
    page = Page(shown)
    assert page.open == []
    assert shown == compact(plan)
    assert "<script" not in shown
    assert len(shown) < 60_000
    assert "plan on dp=2, tp=4" in shown


def test_what_is_vendored_is_what_is_written_down():
    listed = dict(
        reversed(line.split()) for line in re.findall(r"^[0-9a-f]{64}  \S+$", asset("VENDORED.md"), re.MULTILINE)
    )
    assert sorted(listed) == ["cytoscape.min.js", "dagre.min.js", "dagre.min.js.LEGAL.txt"]
    for name, digest in listed.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
    for name in ("cytoscape.min.js", "dagre.min.js.LEGAL.txt"):
        assert "Permission is hereby granted, free of charge" in asset(name)
    for name in ("cytoscape.min.js", "dagre.min.js", "page.js", "page.css"):
        assert "</script" not in asset(name)
        assert "</style" not in asset(name)
