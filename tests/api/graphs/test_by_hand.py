"""The graphs of collectives that ranks call by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saving_processes import in_processes

import partway as pw
from partway import ops
from partway.graphs import by_hand
from partway.graphs.saved import saved_calls
from partway.strategy import OperatorError

PAGE = Path(__file__).parents[3] / "docs" / "graphs.md"
SCRIPT = """
import os

import torch

import partway as pw
from partway import ops

pw.init(backend="gloo", timeout=60)
pw.create_group("pair", [0, 1])
loss = torch.nn.Parameter(torch.ones(2, 3))
reduce = ops.AllReduce(ops.ReduceOp.MAX, "pair")
for step in range(2):
    total = reduce(loss)
    total.sum().backward()
gathered = ops.all_gather(torch.arange(4), group="hccl_world_group")
images = ops.NeighborExchangeV2([-1] * 8, [0] * 4, [-1] * 8, [0] * 4)(torch.ones(1, 1, 2, 2))
print(pw.get_rank(), gathered.tolist(), loss.grad.tolist())
pw.shutdown()
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process writes its graphs."""
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "1")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path / "graphs"))
    monkeypatch.setattr(by_hand, "_written", {})
    return tmp_path / "graphs" / "rank_0" / "by_hand"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.gloo
def test_each_rank_writes_its_calls_and_their_gradients(tmp_path: Path) -> None:
    ended = in_processes(tmp_path, SCRIPT, PARTWAY_SAVE_GRAPHS_RANKS="all")
    assert [process.stdout.split()[0] for process in ended] == ["0", "1"], ended
    for rank in range(2):
        folder = tmp_path / f"rank_{rank}" / "by_hand"
        assert names(folder) == [
            "000_all_reduce.dot", "000_all_reduce.gradient.dot", "000_all_reduce.gradient.txt", "000_all_reduce.txt",
            "001_all_gather.dot", "001_all_gather.txt",
            "002_neighbor_exchange_v2.dot", "002_neighbor_exchange_v2.txt",
        ]  # fmt: skip
        forward = (folder / "000_all_reduce.txt").read_text()
        assert forward in PAGE.read_text(encoding="utf-8")
        assert "\n# of ranks 0, 1, over pair\n" in forward
        gradient = (folder / "000_all_reduce.gradient.txt").read_text()
        assert "float32[1, 2, 3] = partway.reduce_scatter.default(" in gradient
        assert "'sum', 0, ['pair'], [1, 1], 1)" in gradient
        gathered = (folder / "001_all_gather.txt").read_text()
        assert "all_gather: int64[8] = partway.all_gather.default(arg0_1, 0, ['world'], [4, 4])    # 64 B" in gathered
        assert saved_calls(tmp_path / f"rank_{rank}") == []  # planned ones


def test_a_call_is_written_once_for_each_kind_of_operand(written: Path) -> None:
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        ops.all_reduce(x)
    assert names(written) == ["000_all_reduce.gradient.txt", "000_all_reduce.txt"]
    for size in (2, 3, 3):
        with torch.no_grad():
            ops.AllReduce("max")(torch.ones(size))
    assert names(written)[2:] == ["001_all_reduce.txt", "002_all_reduce.txt"]
    text = (written / "000_all_reduce.txt").read_text()
    assert "# of rank 0, over world" in text
    assert "aten.clone.default" in text  # one rank sends nothing
    with pytest.raises(OperatorError, match="all_reduce: op is 'average'; write one of"):  # and no warning
        ops.all_reduce(x, "average")
    assert len(names(written)) == 4


def test_no_more_than_so_many_are_written(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_hand, "_MOST", 3)
    for size in range(5):
        ops.broadcast(torch.ones(size))
    assert names(written) == [f"{i:03d}_broadcast.txt" for i in range(3)]


def test_what_an_island_calls_is_in_its_graphs_alone(written: Path) -> None:
    pw.manual(ops.all_reduce, mesh={"tp": 2})(torch.ones(2))
    assert not written.exists()
    assert list(written.parent.glob("000_*"))


def test_a_folder_that_cannot_be_written_is_a_warning(written: Path) -> None:
    written.parent.parent.write_text("no folder")
    with pytest.warns(UserWarning, match="graphs cannot be saved in"):
        total: Any = ops.all_reduce(torch.ones(2))
    assert total.tolist() == [1, 1]
