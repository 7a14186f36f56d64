"""The seeds' flow: train, keep one file per rank with the strategy file, and run inference on other devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import whole
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import partway as pw
from partway.strategy import RuntimeStateError, StrategyError

Ranks = Callable[..., list[Any]]


class Net(nn.Module):
    def __init__(self, wide: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(15, 12)
        self.inner = nn.Linear(12, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.outer = nn.Linear(wide, 12)
        self.head = nn.Linear(12, 15, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.outer(self.norm(self.inner(self.embed(x))).relu()))


TRAINED: dict[str, dict[str, Any]] = {
    "8": {"mesh": {"dp": 2, "tp": 4}, "in_strategy": (("dp",),), "parameter_plan": {"inner.weight": ("tp", None)}},
    "4": {"mesh": {"dp": 2, "tp": 2}, "in_strategy": (("dp",),), "parameter_plan": {"embed.weight": ("tp", None)}},
}
INFERRED: dict[str, dict[str, Any]] = {
    "4": {"mesh": {"tp": 4}, "parameter_plan": {"embed.weight": (None, "tp"), "inner.weight": (None, "tp")}},
    "2x2": {"mesh": {"dp": 2, "tp": 2}, "in_strategy": (("dp",),), "parameter_plan": {"outer.weight": ("tp", None)}},
    "2": {"mesh": {"tp": 2}, "parameter_plan": {"inner.weight": ("tp", None)}},
}
X = torch.arange(8) % 15


def trained(folder: str, devices: str) -> Tensor:
    """Train two steps, and keep weights and strategy. What the trained model gives in inference."""
    pw.set_auto_parallel_context(strategy_ckpt_config={"save_file": f"{folder}/strategy.json"})
    torch.manual_seed(0)
    model: Any = pw.shard(Net().double(), **TRAINED[devices])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pw.save_checkpoint(model, f"{folder}/rank_{{rank}}/model.safetensors")
    pw.reset_auto_parallel_context()
    model.eval()
    with torch.no_grad():
        result: Tensor = model(X)
    return result


def files_of(folder: str, count: int) -> list[str]:
    return [f"{folder}/rank_{rank}/model.safetensors" for rank in range(count)]


def inferred(folder: str, count: int, devices: str) -> tuple[Tensor, dict[str, str]]:
    """Load what was saved into a network for inference: what it gives, and how its weights lie."""
    torch.manual_seed(9)
    network: Any = pw.shard(Net().double().eval(), **INFERRED[devices])
    layouts = network.infer_predict_layout(X)
    pw.load_distributed_checkpoint(network, files_of(folder, count), layouts, f"{folder}/strategy.json")
    for name, parameter in network.named_parameters():
        weight = layouts[name]
        assert weight.full_shape == tuple(parameter.shape)
        assert weight.mesh == pw.Mesh(INFERRED[devices]["mesh"])
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        assert not hasattr(parameter, "to_local") or tuple(local.shape) == weight.local_shape
    with torch.no_grad():
        return whole(network(X)), {name: str(weight.layout) for name, weight in layouts.items()}


def assert_on_one_device(folder: str, count: int, expected: Tensor) -> None:
    network = Net().double().eval()
    pw.load_distributed_checkpoint(network, files_of(folder, count), train_strategy_filename=f"{folder}/strategy.json")
    with torch.no_grad():
        torch.testing.assert_close(network(X), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("devices", INFERRED)
def test_from_eight_virtual_devices_to_others(tmp_path: Path, devices: str) -> None:
    expected = trained(str(tmp_path), "8")
    assert sorted(os.listdir(tmp_path)) == [*(f"rank_{i}" for i in range(8)), "strategy.json"]
    assert load_file(files_of(str(tmp_path), 8)[5])["inner.weight"].shape == (5, 12)
    found, layouts = inferred(str(tmp_path), 8, devices)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(set(layouts.values())) > 1
    assert_on_one_device(str(tmp_path), 8, expected)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "trained_on", "others", "devices"),
    [(1, "8", 2, "2"), pytest.param(4, "4", 4, "2x2", marks=pytest.mark.slow),
     pytest.param(4, "4", 4, "4", marks=pytest.mark.slow)],
)  # fmt: skip
def test_on_processes(tmp_path: Path, ranks: int, trained_on: str, others: int, devices: str, on_ranks: Ranks) -> None:
    folder, count = str(tmp_path), int(trained_on)
    expected = trained(folder, trained_on) if ranks == 1 else on_ranks(ranks, trained, folder, trained_on)[0]
    for found, _ in on_ranks(others, inferred, folder, count, devices):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert_on_one_device(folder, count, expected)


def test_checkpoints_are_transformed_for_other_ranks(tmp_path: Path) -> None:
    expected = trained(f"{tmp_path}/a", "8")
    trained(f"{tmp_path}/b", "4")
    one, other = f"{tmp_path}/a/strategy.json", f"{tmp_path}/b/strategy.json"
    assert pw.rank_list_for_transform(0, one, None) == list(range(8))
    assert pw.rank_list_for_transform(3, None, other) == [0]
    assert set(pw.rank_list_for_transform(7, other, one)) <= {0, 1, 2, 3}
    pw.transform_checkpoints(f"{tmp_path}/a", f"{tmp_path}/c", "new", one, other)
    assert sorted(os.listdir(f"{tmp_path}/c")) == [f"rank_{i}" for i in range(4)]
    files = [f"{tmp_path}/c/rank_{i}/new{i}.safetensors" for i in range(4)]
    network = Net().double().eval()
    pw.load_distributed_checkpoint(network, files, train_strategy_filename=other)
    torch.testing.assert_close(network(X).detach(), expected, rtol=0, atol=1e-12)
    pw.transform_checkpoints(f"{tmp_path}/a", f"{tmp_path}/d", "whole", one)
    network.load_state_dict(load_file(f"{tmp_path}/d/rank_0/whole0.safetensors"), strict=False)
    torch.testing.assert_close(network(X).detach(), expected, rtol=0, atol=1e-12)
    by_rank = {i: f"{tmp_path}/a/rank_{i}/model.safetensors" for i in pw.rank_list_for_transform(1, one, other)}
    made = pw.transform_checkpoint_by_rank(1, by_rank, f"{tmp_path}/e/one.safetensors", one, other)
    assert all(torch.equal(v, load_file(files[1])[n]) for n, v in load_file(made).items())


def test_files_of_torch_save_are_read(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = trained(folder, "8")
    for file in files_of(folder, 8):
        torch.save(load_file(file), file.replace(".safetensors", ".ckpt"))
    network = Net().double().eval()
    files = [file.replace(".safetensors", ".ckpt") for file in files_of(folder, 8)]
    pw.load_distributed_checkpoint(network, files, train_strategy_filename=f"{folder}/strategy.json")
    torch.testing.assert_close(network(X).detach(), expected, rtol=0, atol=1e-12)
    with open(files[2], "wb") as file:
        file.write(b"nothing")
    with pytest.raises(RuntimeStateError, match=r"rank_2/model\.ckpt holds no weights that can be read"):
        pw.load_distributed_checkpoint(network, files, train_strategy_filename=f"{folder}/strategy.json")


def test_what_cannot_be_loaded_says_what_is_missing_and_changes_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path)
    trained(folder, "8")
    files, strategy = files_of(folder, 8), f"{folder}/strategy.json"
    network = Net().double()
    before = {name: value.clone() for name, value in network.state_dict().items()}

    def refused(kind: type[Exception], text: str, *arguments: Any, model: nn.Module = network, **named: Any) -> None:
        with pytest.raises(kind, match=text):
            pw.load_distributed_checkpoint(model, *arguments, **{"train_strategy_filename": strategy, **named})

    refused(
        RuntimeStateError, r"the strategy is for 8 ranks, and 7 files were given; give one of each rank", files[:-1]
    )
    missing = [*files[:3], f"{folder}/nowhere.safetensors", *files[4:]]
    refused(RuntimeStateError, r"there is no file .*nowhere\.safetensors, the checkpoint of rank 3$", missing)
    refused(StrategyError, r"inner\.weight has shape \[24, 12\] in the network, and was saved with \[20, 12\]", files,
            model=Net(24).double())  # fmt: skip
    refused(StrategyError, r"0\.weight of the network is not in .*rank_0", files, model=nn.Sequential(nn.Linear(2, 2)))
    refused(RuntimeStateError, r"without a strategy the weights are in one file, and 8 files were given", files,
            train_strategy_filename=None)  # fmt: skip
    refused(RuntimeStateError, r"network is 3; it must be an nn.Module", files, model=3)  # type: ignore[arg-type]
    other = f"{folder}/other"
    pw.set_auto_parallel_context(strategy_ckpt_config={"save_file": f"{other}/strategy.json"})
    pw.shard(nn.Linear(4, 4), mesh={"dp": 8})(torch.ones(8, 4))
    pw.reset_auto_parallel_context()
    refused(StrategyError, r"the strategy is of another model: it has 'weight', and .* has '", files,
            train_strategy_filename=f"{other}/strategy.json")  # fmt: skip
    trained(other, "4")
    refused(RuntimeStateError, r"is the file of rank 0 of 8, and was given for rank 0 of 4; give each rank's own, and",
            files[:4], train_strategy_filename=f"{other}/strategy.json")  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    os.remove(files[3])
    with pytest.raises(
        RuntimeStateError, match=r"checkpoint of rank 3 is needed to make that of rank 0, and .* has no file"
    ):
        pw.transform_checkpoints(folder, f"{folder}/new", "x", strategy)
    with pytest.raises(RuntimeStateError, match=r"the checkpoint of rank 1 is needed to make that of rank 0"):
        pw.transform_checkpoint_by_rank(0, {0: files[0]}, f"{folder}/x.safetensors", strategy)
    with pytest.raises(StrategyError, match=r"rank_id is 8; it must be an int from 0 to 7"):
        pw.rank_list_for_transform(8, None, strategy)
    with pytest.raises(
        RuntimeStateError, match=r"filename is 'x'; write where the rank goes in it, as in rank_\{rank\}/x"
    ):
        pw.save_checkpoint(network, "x")
    with pytest.raises(
        StrategyError, match=r"infer_predict_layout plans a sharded module, and Net is not one; call shard"
    ):
        pw.infer_predict_layout(network, X)


def test_a_layout_of_another_network_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    trained(folder, "8")
    layouts = pw.infer_predict_layout(pw.shard(Net(24).double().eval(), **INFERRED["2"]), X)
    network = pw.shard(Net().double().eval(), **INFERRED["2"])
    with pytest.raises(
        StrategyError, match=r"predict_strategy has inner\.weight of shape \[24, 12\], and the network of"
    ):
        pw.load_distributed_checkpoint(network, files_of(folder, 8), layouts, f"{folder}/strategy.json")
    extra = {"more": layouts["embed.weight"]}
    with pytest.raises(StrategyError, match=r"predict_strategy has more, which the network lacks; infer it for this"):
        pw.load_distributed_checkpoint(network, files_of(folder, 8), extra, f"{folder}/strategy.json")


def test_files_are_given_in_any_order_or_are_refused(tmp_path: Path) -> None:
    def kept(name: str, mesh: dict[str, int], split: Any) -> tuple[nn.Module, list[str], str]:
        strategy = f"{tmp_path}/{name}.json"
        pw.set_auto_parallel_context(strategy_ckpt_config={"save_file": strategy})
        torch.manual_seed(0)
        network: Any = pw.shard(nn.Linear(32, 32).double(), mesh=mesh, parameter_plan={"weight": (split, None)})
        network(torch.ones(16, 32).double()).sum().backward()
        pw.reset_auto_parallel_context()
        files = pw.save_checkpoint(network, tmp_path / name / "rank_{rank}" / "x.safetensors")
        return network, [str(file) for file in files], strategy

    trained, files, strategy = kept("a", {"tp": 16}, "tp")
    for given in (sorted(files), files[::-1]):
        assert given != files
        network = nn.Linear(32, 32).double()
        pw.load_distributed_checkpoint(network, given, train_strategy_filename=strategy)
        assert torch.equal(network.weight, trained.weight)

    def refused(text: str, given: list[str], strategy: str) -> None:
        network = nn.Linear(32, 32).double()
        before = network.weight.clone()
        with pytest.raises(RuntimeStateError, match=text):
            pw.load_distributed_checkpoint(network, given, train_strategy_filename=strategy)
        assert torch.equal(network.weight, before)

    refused(r"rank_0/x\.safetensors and .*rank_0/x\.safetensors are both the file of rank 0; give one of each",
            [files[0], *files[:-1]], strategy)  # fmt: skip
    foreign = tmp_path / "foreign.safetensors"
    save_file(load_file(files[15]), foreign)
    refused(r"foreign\.safetensors does not say whose file it is, and others do; give the files of one checkpoint",
            [*files[:15], str(foreign)], strategy)  # fmt: skip
    _, by_rows, _ = kept("b", {"a": 2, "b": 2}, "a")
    _, _, turned = kept("c", {"a": 2, "b": 2}, "b")  # parts of the same shapes, of other rows
    refused(r"rank_1/x\.safetensors holds \[0:16, 0:32\] of weight, and the strategy gives rank 1 \[16:32, 0:32\]",
            by_rows, turned)  # fmt: skip
    with pytest.raises(RuntimeStateError, match=r"is the file of rank 3 of 16, and was given for rank 1 of 16; give"):
        pw.transform_checkpoint_by_rank(
            0, {i: files[3 if i == 1 else i] for i in range(16)}, f"{tmp_path}/new.safetensors", strategy
        )


def test_a_file_that_is_no_rank_s_is_not_written_over_and_nothing_is_left_beside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Linear(2, 2)
    torch.save({"mine": torch.ones(1)}, tmp_path / "rank_0.safetensors")
    before = (tmp_path / "rank_0.safetensors").read_bytes()
    text = r"rank_0\.safetensors cannot be written: it is there already, and Partway did not write it; give another"
    with pytest.raises(RuntimeStateError, match=text):
        pw.save_checkpoint(network, tmp_path / "rank_{rank}.safetensors")
    assert (tmp_path / "rank_0.safetensors").read_bytes() == before
    save_file({"mine": torch.ones(1)}, tmp_path / "rank_0.safetensors")
    with pytest.raises(RuntimeStateError, match=text):
        pw.save_checkpoint(network, tmp_path / "rank_{rank}.safetensors")
    (tmp_path / "rank_0.safetensors").unlink()
    mine = tmp_path / f".rank_0.safetensors.{os.getpid()}.saving"
    mine.write_text("mine")
    for _ in range(2):  # its own it replaces
        pw.save_checkpoint(network, tmp_path / "rank_{rank}.safetensors")
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [mine.name, "rank_0.safetensors"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeStateError, match=r"file/0\.safetensors cannot be written: .*"):
        pw.save_checkpoint(network, tmp_path / "file" / "{rank}.safetensors")
    with pytest.raises(RuntimeStateError, match=r"^filename is .*; write where the rank goes in it, as in rank_"):
        pw.save_checkpoint(network, "a\0{rank}")


def test_files_say_under_which_strategy_they_were_saved(tmp_path: Path) -> None:
    network: Any = pw.shard(nn.Linear(4, 4, bias=False), mesh={"a": 2, "b": 2}, parameter_plan={"weight": (None, None)})
    network(torch.ones(4, 4))
    network.plan.save(tmp_path / "strategy.json")
    files = pw.save_checkpoint(network, tmp_path / "rank_{rank}.safetensors")
    other: Any = pw.shard(nn.Linear(4, 4, bias=False), mesh={"a": 4}, parameter_plan={"weight": (None, None)})
    other(torch.ones(4, 4))
    other.plan.save(tmp_path / "other.json")
    pw.load_distributed_checkpoint(nn.Linear(4, 4, bias=False), files[::-1], None, tmp_path / "strategy.json")
    with pytest.raises(RuntimeStateError, match=r"rank_0\.safetensors was saved under another strategy than"):
        pw.load_distributed_checkpoint(nn.Linear(4, 4, bias=False), files, None, tmp_path / "other.json")
    with pytest.raises(RuntimeStateError, match=r"^checkpoint_filenames is 'x'; write a list of paths$"):
        pw.load_distributed_checkpoint(network, "x", None, tmp_path / "strategy.json")
