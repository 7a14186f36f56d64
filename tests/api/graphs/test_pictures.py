"""The pictures are dot that Graphviz reads, and show what the text does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from graph_model import CALL, train

import partway as pw
from partway.graphs.pictures import of_plan


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "3")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path))
    train()
    return {path.stem: path.read_text() for path in (tmp_path / "rank_0" / CALL).glob("*.dot")}


def test_each_graph_has_a_picture(pictures: dict[str, str]) -> None:
    assert sorted(pictures) == [
        "00_captured", "01_expanded", "02_absorbed", "03_pruned", "06_searched", "07_lowered",
        "08_forward", "08_forward.1_differentiate", "09_backward", "09_backward.1_differentiate", "10_fused",
    ]  # fmt: skip


@pytest.mark.skipif(not shutil.which("dot"), reason="Graphviz is not installed")
def test_graphviz_draws_them(pictures: dict[str, str]) -> None:
    for name, text in pictures.items():
        done = subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name
        assert done.stdout.count("<g id=") > 10


def test_every_edge_joins_nodes_that_are_there(pictures: dict[str, str]) -> None:
    for text in pictures.values():
        nodes = set(re.findall(r'^ *("[^"]+") \[label', text, re.M))
        edges = re.findall(r'^ *("[^"]+") -> ("[^"]+")', text, re.M)
        assert len(edges) >= len(nodes) - 10 > 0
        assert {end for edge in edges for end in edge} <= nodes
        assert text.count("{") == text.count("}")


def test_collectives_stand_out_with_what_they_send(pictures: dict[str, str]) -> None:
    assert pictures["10_fused"].count('fillcolor="#ffb84d"') == 3
    assert '"all_reduce over tp\\nP -> R\\nfloat32[2, 8]\\nsends 64 B, 70.1 us"' in pictures["10_fused"]
    assert pictures["06_searched"].count("penwidth=2") == 6
    assert "forward all_reduce over tp, 64 B" in pictures["06_searched"]


def test_operators_are_in_the_boxes_of_their_modules(pictures: dict[str, str]) -> None:
    box = pictures["03_pruned"].split('subgraph "cluster up" {')[1].split("}")[0]
    assert "aten.linear.default" in box
    assert "mse_loss" not in box


def test_what_stands_in_a_name_is_escaped() -> None:
    plan = pw.compile(lambda x: x.sum(), (torch.ones(2),), mesh={"d": 2}).plan
    odd = plan.model_copy(update={"operators": (plan.operators[0].model_copy(update={"operator": 'a"\\\nb'}),)})
    assert 'a\\"\\\\ b' in of_plan(odd)
