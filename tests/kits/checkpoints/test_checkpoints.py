"""Checkpoints are saved on one mesh and loaded on another, or without Partway; training goes on as if never stopped."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import partway as pw
from partway.checkpoints import saving

Ranks = Callable[..., list[Any]]
EXACT = 0.0


class Net(nn.Module):
    """Tied weights, a buffer, dropout, and dims that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.inner = nn.Linear(10, 7)
        self.norm = nn.BatchNorm1d(7)
        self.outer = nn.Linear(7, 10)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.drop(self.outer(self.norm(self.inner(self.embed(x))).relu()))
        return nn.functional.cross_entropy(self.head(hidden), y)


MESHES: dict[str, dict[str, Any]] = {
    "dp2": {"mesh": {"dp": 2}, "in_strategy": (("dp",), ("dp",))},
    "tp2": {"mesh": {"tp": 2}, "parameter_plan": {"embed.weight": ("tp", None), "inner.weight": ("tp", None)}},
    "tp4": {"mesh": {"tp": 4}, "parameter_plan": {"embed.weight": ("tp", None), "outer.weight": (None, "tp")}},
    "dp2tp2": {
        "mesh": {"dp": 2, "tp": 2}, "in_strategy": (("dp",), ("dp",)), "parameter_plan": {"inner.weight": (None, "tp")},
    },
    "dp8": {"mesh": {"dp": 8}, "in_strategy": (("dp",), ("dp",))},
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def made(mesh: str | None, optimizer: str, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model: Any = Net().double()
    if mesh:
        model = pw.shard(model, **MESHES[mesh])
    return model, OPTIMIZERS[optimizer](model.parameters())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 13, (16,), generator=generator), torch.randint(0, 13, (16,), generator=generator)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(folder: str, mesh: str | None, optimizer: str, asynchronous: bool = False) -> list[float]:
    """Train three steps and save; the losses of the three steps after that."""
    model, stepper = made(mesh, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2)
    train(model, stepper, range(3))
    scheduler.step()
    saving = pw.save(folder, model, stepper, asynchronous=asynchronous, step=3, scheduler=scheduler, name="run")
    losses = train(model, stepper, range(3, 6))
    if asynchronous:
        saving.wait()
    return [*losses, random.random(), np.random.rand()]


def loaded(folder: str, mesh: str | None, optimizer: str, called: bool) -> list[float]:
    """Load into a fresh model, before or after its first call, and train on."""
    model, stepper = made(mesh, optimizer, seed=5)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2)
    if called:
        train(model, stepper, range(7, 8))
    state = pw.load(folder, model, stepper, scheduler=scheduler)
    assert state["step"] == 3
    assert state["name"] == "run"
    assert scheduler.last_epoch == 1
    losses = train(model, stepper, range(3, 6))
    return [*losses, random.random(), np.random.rand()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("one", "other"), [("dp2", "dp2"), ("dp8", "dp2tp2"), ("tp4", None)])
def test_in_one_process(tmp_path: Path, one: str | None, other: str | None, optimizer: str) -> None:
    expected = saved(str(tmp_path), one, optimizer)
    for called in (False, True):
        found = loaded(str(tmp_path), other, optimizer, called)
        tolerance = 0.0 if one == other else 1e-12
        if other is not None:  # a plain model draws dropout's numbers in another way
            assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.gloo
@pytest.mark.parametrize(("one", "ranks", "other", "others"), [
    ("dp2", 2, "dp2", 2), ("tp2", 2, "dp8", 1), ("dp8", 1, "tp2", 2),
    pytest.param("dp2tp2", 4, "tp2", 2, marks=pytest.mark.slow),
    pytest.param("tp2", 2, "tp4", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_between_numbers_of_processes(
    tmp_path: Path, one: str, ranks: int, other: str, others: int, on_ranks: Ranks
) -> None:
    expected = on_ranks(ranks, saved, str(tmp_path), one, "adam") if ranks > 1 else [saved(str(tmp_path), one, "adam")]
    for called in (False, True):
        arguments = str(tmp_path), other, "adam", called
        found = on_ranks(others, loaded, *arguments) if others > 1 else [loaded(*arguments)]
        tolerance = 0.0 if (one, ranks) == (other, others) else 1e-12
        for rank, values in enumerate(found):
            assert values[:3] == pytest.approx(expected[0][:3], abs=tolerance)
            if ranks == others:
                assert values[3:] == expected[rank][3:]


def saved_average(folder: str, mesh: str) -> list[float]:
    model, stepper = made(mesh, "sgd")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        train(model, stepper, range(step, step + 1))
        average.update_parameters(model)
    notes = {"weights": [model.inner.weight.detach()], 1: (model.inner.weight.detach(), "text")}
    pw.save(folder, model, average=average, notes=notes)
    return losses_of(average, model)


def loaded_average(folder: str, mesh: str | None, called: bool) -> list[float]:
    model, _ = made(mesh, "sgd", seed=5)
    if called:
        model(*batch(0))
    average = AveragedModel(model)
    notes = pw.load(folder, model, average=average)["notes"]
    (weight,) = notes["weights"]
    assert torch.equal(weight, whole(model.inner.weight))
    assert torch.equal(notes[1][0], weight)
    assert notes[1][1] == "text"
    assert int(average.n_averaged) == 3
    plain = AveragedModel(made(None, "sgd")[0])
    assert "notes" not in pw.load(folder, average=plain, skip=("notes",))
    for name, value in plain.module.state_dict().items():
        assert torch.equal(value, whole(average.module.state_dict()[name]))
    return losses_of(average, model)


def losses_of(*models: nn.Module) -> list[float]:
    return [model.eval()(*batch(9)).item() for model in models]


@pytest.mark.gloo
@pytest.mark.parametrize(("one", "ranks", "other", "others"), [
    ("dp2", 1, "tp2", 1), ("tp2", 2, "tp2", 2), ("tp2", 2, "dp8", 1), ("dp8", 1, "tp2", 2), ("tp2", 2, None, 1),
    pytest.param("dp2tp2", 4, "tp2", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_averages_that_are_given_by_name(
    tmp_path: Path, one: str, ranks: int, other: str | None, others: int, on_ranks: Ranks
) -> None:
    """What has DTensors in its state_dict: each rank writes its parts, and they load on any number of processes."""
    arguments = str(tmp_path), one
    expected = on_ranks(ranks, saved_average, *arguments)[0] if ranks > 1 else saved_average(*arguments)
    for called in (False, True):
        loads = str(tmp_path), other, called
        found = on_ranks(others, loaded_average, *loads) if others > 1 else [loaded_average(*loads)]
        for losses in found:
            assert losses == pytest.approx(expected, abs=1e-12)
    if ranks > 1:
        file = tmp_path / "checkpoint-000001" / "state.safetensors"
        file.write_bytes(flipped_at_end(file.read_bytes()))
        with pytest.raises(pw.RuntimeStateError, match=r"state\.safetensors is damaged: the values of \S+ are not"):
            pw.load(tmp_path)


def flipped_at_end(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


# -- what goes wrong on one rank of several


def split() -> Any:
    torch.manual_seed(0)
    model = pw.shard(nn.Linear(8, 8).double(), mesh={"tp": 2}, parameter_plan={"weight": ("tp", None)})
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    return model


def values_of(model: Any) -> list[Tensor]:
    return [whole(parameter).clone() for parameter in model.parameters()]


def goes_wrong(folder: str) -> list[str]:
    """What every rank is told, of what goes wrong on rank 1 alone; then all is as before."""
    rank, model, said = pw.get_rank(), split(), []

    def refused(run: Callable[[], object]) -> None:
        with pytest.raises((pw.RuntimeStateError, OSError)) as error:
            run()
        said.append(str(error.value).replace(folder, "FOLDER"))

    first = pw.save(folder, model, step=1)
    before, plain = values_of(model), saving.write_part

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    saving.write_part = full if rank else plain
    refused(lambda: pw.save(folder, model, step=2))
    saving.write_part = plain
    refused(lambda: pw.save(folder, model, keep=1 + rank))
    refused(lambda: pw.load(folder, model, skip=("x",) * rank))
    second = pw.save(folder, model, step=3, rank=rank)
    torch.distributed.barrier()
    if rank:
        content = bytearray((second / "model.safetensors").read_bytes())
        content[-5] ^= 1
        (second / "model.safetensors").write_bytes(content)
    torch.distributed.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1)
    changed = values_of(model)
    refused(lambda: pw.load(folder, model))
    assert all(map(torch.equal, values_of(model), changed))
    assert pw.load(first, model) == {"step": 1}
    assert all(map(torch.equal, values_of(model), before))
    assert pw.load(second) == {"step": 3, "rank": rank}
    later = pw.save(folder, model, asynchronous=True, step=4)
    split()
    assert later.wait().name == "checkpoint-000003"
    refused(lambda: copy_of(model))
    return said


def copy_of(model: Any) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.gloo
def test_what_goes_wrong_on_one_rank_is_told_to_all_and_changes_nothing(tmp_path: Path, on_ranks: Ranks) -> None:
    first, second = on_ranks(2, goes_wrong, str(tmp_path))
    assert second[0] == "[Errno 28] No space left on device"
    text = "rank 1 could not write a checkpoint in FOLDER: OSError: [Errno 28] No space left on device"
    assert first[0] == text
    assert first[1] == second[1] == "keep is 1 on rank 0 and 2 on rank 1; run the same program on every rank"
    assert first[2] == second[2] == "skip is nothing on rank 0 and x on rank 1; run the same program on every rank"
    damaged = "checkpoint-000002/model.safetensors is damaged: the values of"
    assert damaged in first[3]
    assert damaged in second[3]
    assert first[4] == second[4]
    assert "is not pickled as a whole, since each process has parts of it; keep it with partway.save" in first[4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"checkpoint-00000{i}" for i in (1, 2, 3)]
