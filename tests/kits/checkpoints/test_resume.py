"""A training that was ended goes on from its last checkpoint, with the losses of one that never was."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, WeightedRandomSampler

import partway as pw
from partway.strategy import RuntimeStateError

TRAIN = """
    import os, signal, sys, time, warnings
    import torch
    from torch import nn
    import partway as pw
    from partway.checkpoints.resume import _STOP
    from partway.runtime.torch_internals import default_store

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    from torchdata.stateful_dataloader import StatefulDataLoader

    folder, fault, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    devices = pw.init(simulate=2, timeout=20)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)).double()
    model = pw.shard(net, mesh={"dp": devices}, in_strategy=(("dp", None),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(40, 8, dtype=torch.float64)
    loader = StatefulDataLoader(data, batch_size=8, shuffle=True)
    training = pw.Resume(folder, model, optimizer, loader=loader, every=3)
    last = pw.get_rank() == pw.get_group_size() - 1
    for epoch, batch in training.batches(epochs=3):
        if fault == "ahead" and last and training.step == at + 1 and not training.resumed:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if pw.get_rank() == 0:
            sys.stdout.write(f"{epoch} {training.step} {loss.item().hex()}\\n")
            sys.stdout.flush()
        if fault == "ahead" and not last and training.step == at and not training.resumed:
            while not default_store().check([_STOP]):  # the other rank is in the next step already
                time.sleep(0.01)
        elif fault != "ahead" and last and training.step == at and not training.resumed:
            if fault == "raise":
                raise ValueError("a bad batch")
            os.kill(os.getpid(), getattr(signal, fault))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN), encoding="utf-8")
    return path


def run(
    script: Path, ranks: int, *arguments: object, launcher: tuple[str, ...] = ()
) -> tuple[int, dict[str, str], str]:
    """The exit status, the losses by epoch and step (the last, where a step was done twice), and stderr."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *launcher] if ranks > 1 else []
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = {**kept, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PARTWAY_CACHE": "0"}
    command = [sys.executable, *start, script.name, *map(str, arguments)]
    ended = subprocess.run(
        command, cwd=script.parent, env=found, capture_output=True, text=True, check=False, timeout=200
    )
    return ended.returncode, dict(re.findall(r"^(\d+ \d+) (\S+)$", ended.stdout, re.M)), ended.stderr


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["raise", "SIGKILL", "SIGTERM"])
def test_a_training_that_was_ended_has_the_losses_of_one_that_was_not(script: Path, fault: str, ranks: int) -> None:
    _, expected, _ = run(script, ranks, "whole", "none", -1)
    assert list(expected) == [f"{step // 5} {step}" for step in range(15)]
    status, before, said = run(script, ranks, "ended", fault, 7)
    assert status != 0, said
    assert len(before) < 15
    if fault == "SIGTERM" and ranks == 1:
        assert status == 143
    status, after, said = run(script, ranks, "ended", "none", -1)
    assert status == 0, said
    assert before | after == expected
    first = int(next(iter(after)).split()[1])
    assert first == (6 if fault != "SIGTERM" else len(before)), "it went on from another step than the last saved"


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_end_after_the_same_step_where_one_is_told_before_another_has_ended_the_step_before(
    script: Path,
) -> None:
    _, expected, _ = run(script, 2, "whole", "none", -1)
    status, before, said = run(script, 2, "ended", "ahead", 7)
    assert (status != 0, len(before)) == (True, 10), said
    status, after, said = run(script, 2, "ended", "none", -1)
    assert (status, len(after)) == (0, 5), said
    assert before | after == expected


@pytest.mark.slow
@pytest.mark.gloo
def test_restarts_of_the_launcher_go_on(script: Path) -> None:
    _, expected, _ = run(script, 2, "whole", "none", -1)
    status, found, said = run(script, 2, "ended", "SIGKILL", 7, launcher=("--max-restarts=1",))
    assert status == 0, said
    assert found == expected


@pytest.mark.slow
@pytest.mark.gloo
def test_fewer_processes_go_on(script: Path) -> None:
    _, expected, _ = run(script, 2, "whole", "none", -1)
    _, before, _ = run(script, 2, "ended", "SIGKILL", 7)
    status, after, said = run(script, 1, "ended", "none", -1)
    assert status == 0, said
    found = before | after
    assert list(found) == list(expected)
    for step, loss in expected.items():
        assert float.fromhex(found[step]) == pytest.approx(float.fromhex(loss), abs=1e-12)


def trained(folder: Path, total: int, stop: int | None = None, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    training = pw.Resume(folder, model, optimizer, every=2, schedule=schedule, **options)
    for step in training.steps(total):
        loss = model(torch.ones(2, 4, dtype=torch.float64)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
    return losses


def test_steps_go_on_in_one_process(tmp_path: Path, handler: None) -> None:
    whole = trained(tmp_path / "whole", 9)
    assert len(trained(tmp_path / "parts", 5)) == 5
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path / "parts", 9, stop=6, asynchronous=True)
    assert ended.value.code == 143
    assert trained(tmp_path / "parts", 9) == whole[7:]
    assert trained(tmp_path / "parts", 9) == []


@pytest.fixture
def handler() -> Any:
    """What SIGTERM does is left as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_wrong_arguments_are_named(tmp_path: Path, handler: None) -> None:
    model = nn.Linear(2, 2)
    for options, text in (
        ({"every": 0}, r"^every is 0; it is a number of steps, an int of 1 or more$"),
        ({"every": True}, r"^every is True; it is a number"),
        ({"loader": [1]}, r"^loader has no state_dict\(\) and load_state_dict\(\) .*; use torchdata's Stateful"),
        ({"step": model}, r"^Resume keeps step itself; give your own values other names$"),
        ({"step": model, "epoch": model}, r"^Resume keeps epoch and step itself; give your"),
        ({"count": 3}, r"^count has no state_dict\(\) and load_state_dict\(\) to go on with; give what has a state"),
    ):
        with pytest.raises(RuntimeStateError, match=text):
            pw.Resume(tmp_path, model, **options)
    with pytest.raises(RuntimeStateError, match=r"^path is 3; write the path of a folder as a str or a Path$"):
        pw.Resume(3, model)  # type: ignore[arg-type]
    with pytest.raises(RuntimeStateError, match=r"^there is no loader to take batches from; give Resume one$"):
        next(pw.Resume(tmp_path, model).batches(1))


def own(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader_of(kind: str, stateful: Any) -> Any:
    data = torch.arange(10)
    sampler = {
        "weighted": lambda: WeightedRandomSampler(torch.ones(10).tolist(), 10),
        "weighted, its own generator": lambda: WeightedRandomSampler(torch.ones(10).tolist(), 10, generator=own(2)),
        "PyTorch's": lambda: RandomSampler(data),  # type: ignore[arg-type]
        "PyTorch's, with replacement": lambda: RandomSampler(data, True, 70, generator=own(3)),  # type: ignore[arg-type]
        "with replacement": lambda: stateful.sampler.RandomSampler(data, True, 70, generator=own(3)),
        "Python's": Shuffled,
    }.get(kind)
    if sampler is not None:
        return stateful.StatefulDataLoader(data, batch_size=2, sampler=sampler(), generator=own(4))
    options = {"workers": {"num_workers": 2}, "a generator": {"generator": own(1)}, "shuffled": {}}[kind]
    return stateful.StatefulDataLoader(data, batch_size=2, shuffle=True, **options)  # type: ignore[arg-type]


class Shuffled:
    """A sampler without a state, which draws from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(10), 10)

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("kind", [
    "shuffled", "a generator", "workers", "weighted", "weighted, its own generator", "PyTorch's",
    "PyTorch's, with replacement", "with replacement", "Python's",
])  # fmt: skip
@pytest.mark.parametrize("stop", [3, 5, 7])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_every_epoch_is_shuffled_as_it_would_have_been(kind: str, stop: int, tmp_path: Path, handler: None) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def read(folder: str, seed: int, most: int | None = None) -> list[Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        model = nn.Linear(2, 2)
        training = pw.Resume(tmp_path / folder, model, loader=loader_of(kind, stateful))
        found = []
        for epoch, batch in training.batches(epochs=3):
            found.append((epoch, batch.tolist(), torch.rand(()).item()))
            if len(found) == most:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
        return found

    whole = read("whole", 0)
    at = stop if len(whole) == 15 else stop + 20
    with pytest.raises(SystemExit):
        read("parts", 0, at)
    assert read("parts", 99) == whole[at:]
    assert len({str([batch for epoch, batch, _ in whole if epoch == i]) for i in range(3)}) == 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_that_cannot_go_on_within_an_epoch_is_named(tmp_path: Path, handler: None) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    generator = own(1)
    data = torch.arange(10)
    sampler = stateful.sampler.RandomSampler(data, replacement=True, generator=generator)
    loader = stateful.StatefulDataLoader(data, sampler=sampler, generator=generator)
    with pytest.raises(RuntimeStateError, match=r"draw from one generator, .*; give the sampler its own generator"):
        pw.Resume(tmp_path, nn.Linear(2, 2), loader=loader)
