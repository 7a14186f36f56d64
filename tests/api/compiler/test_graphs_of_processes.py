"""Graphs of processes that run together, and of threads: who writes, and that all write the same."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import graph_model
import pytest
import torch
from graph_model import contents, train
from scripts import free_port, run_script
from torch import Tensor

import partway as pw

SCRIPT = """
import os
import warnings

import torch.distributed as dist

import partway as pw

if __name__ == "__main__":
    import graph_model

    pw.init(backend="gloo", timeout=60)
    rank, root = pw.get_rank(), os.environ["PARTWAY_SAVE_GRAPHS_PATH"]
    for ranks in ("", "all"):
        os.environ["PARTWAY_SAVE_GRAPHS_RANKS"] = ranks
        os.environ["PARTWAY_SAVE_GRAPHS_PATH"] = f"{root}/{ranks or 'first'}"
        graph_model.train(mesh={"dp": 1, "tp": 2})
    os.environ["PARTWAY_SAVE_GRAPHS_PATH"] = f"{root}/{rank}.txt/inside"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = graph_model.train(mesh={"dp": 1, "tp": 2})
    warned = any("graphs cannot be saved" in str(each.message) for each in caught)
    print(rank, warned, model.up.weight.grad is not None)
"""


@pytest.mark.gloo
def test_the_ranks_of_a_launcher_write_what_one_process_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.txt").write_text("no folder")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = {**os.environ, **meet, "PYTHONPATH": str(Path(graph_model.__file__).parent), "PARTWAY_SAVE_GRAPHS": "2",
             "PARTWAY_SAVE_GRAPHS_PATH": str(tmp_path)}  # fmt: skip
    every = [{**given, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda environment: run_script(["script.py"], tmp_path, environment), every))
    # Only rank 0 would have written at the path that is no folder, and training went on
    assert [process.stdout.split() for process in ended] == [["0", "True", "True"], ["1", "True", "True"]], ended
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["rank_0"]
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["rank_0", "rank_1"]
    zero, one = (contents(tmp_path / "all" / f"rank_{rank}") for rank in range(2))
    assert zero == contents(tmp_path / "first" / "rank_0")
    assert zero == one

    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path / "alone"))
    train(mesh={"dp": 1, "tp": 2})
    assert contents(tmp_path / "alone" / "rank_0") == zero


def test_two_threads_that_plan_at_once_have_a_folder_for_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path))

    def double(x: Tensor) -> Tensor:
        return 2 * x

    def plan(size: int) -> None:
        made = pw.compile(double, (torch.ones(size),), mesh={"d": 2}, in_strategy=(("d",),))
        assert "forward" in str(made.program)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(plan, [2, 4, 6, 8, 10, 12]))
    folders = sorted(path for path in (tmp_path / "rank_0").iterdir() if path.is_dir())
    assert [folder.name[:3] for folder in folders] == [f"{i:03d}" for i in range(6)]
    sizes = {(folder / "000_trace.txt").read_text().split("input x: float32[")[1].split("]")[0] for folder in folders}
    assert sizes == {"2", "4", "6", "8", "10", "12"}
    assert all(list(folder.glob("*_fuse.txt")) for folder in folders)


def test_a_rank_that_has_not_met_the_others_is_who_its_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path))
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    pw.compile(torch.relu, (torch.ones(4),), mesh={"d": 2}, in_strategy=(("d",),))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_RANKS", "all")
    pw.compile(torch.relu, (torch.ones(4),), mesh={"d": 2}, in_strategy=(("d",),))
    assert [path.name for path in tmp_path.iterdir()] == ["rank_1"]
