"""The lines of a training's losses: the global loss on every rank, and an error where it is no number."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partway as pw
from partway import LossError, RuntimeStateError

Ranks = Callable[..., list[Any]]
NAN, INF = math.nan, math.inf


def refused(call: Callable[[], object], error: type[Exception] = RuntimeStateError) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_line_is_the_reference_s(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = pw.LossMonitor()
    monitor(torch.tensor(2.3025851, requires_grad=True))
    monitor(torch.tensor([2.0]))
    monitor(1e-7)
    monitor(torch.tensor(1 / 3, dtype=torch.float64), epoch=1)
    monitor(torch.tensor(0.1, dtype=torch.float16))
    monitor(torch.tensor(0.5, dtype=torch.bfloat16))
    assert printed(capsys) == [
        "epoch: 1 step: 1, loss is 2.3025851",
        "epoch: 1 step: 2, loss is 2.0",
        "epoch: 1 step: 3, loss is 1e-07",
        "epoch: 2 step: 1, loss is 0.3333333333333333",
        "epoch: 2 step: 2, loss is 0.1",
        "epoch: 2 step: 3, loss is 0.5",
    ]


def places(said: list[str]) -> list[tuple[int, ...]]:
    return [tuple(map(int, found.groups())) for line in said if (found := re.match(r"epoch: (\d+) step: (\d+),", line))]


def test_steps_and_epochs_are_counted_as_the_loop_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    by_itself, within, nested = pw.LossMonitor(steps=2), pw.LossMonitor(steps=2), pw.LossMonitor()
    for step in range(3):
        by_itself(1.0)
        within(1.0, step=step + 3)  # as the steps of Resume, which has done three
    for epoch, step in ((0, 0), (0, 1), (1, 0), (3, 5)):
        nested(1.0, epoch=epoch, step=step)
    nested(1.0)
    nested(1.0, epoch=4)
    nested(1.0, step=8)
    counted = places(printed(capsys))
    assert [counted[i] for i in (0, 2, 4)] == [(1, 1), (1, 2), (2, 1)]
    assert [counted[i] for i in (1, 3, 5)] == [(2, 2), (3, 1), (3, 2)]
    assert counted[6:] == [(1, 1), (1, 2), (2, 1), (4, 6), (4, 7), (5, 1), (5, 9)]


def test_a_line_every_so_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = pw.LossMonitor(3)
    for epoch in range(2):
        for _ in range(7):
            monitor(1.0, epoch=epoch)
    assert places(printed(capsys)) == [(1, 3), (1, 6), (2, 3), (2, 6)]


def test_rates_stand_behind_the_loss_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = pw.LossMonitor(2, steps=4, samples=64, rates=True)
    for _ in range(8):
        monitor(1.0)
    said = printed(capsys)
    time = r"[\d.]+ (us|ms|s)"
    rate = rf"{time} a step, [\d.e+]+ samples a second"
    assert len(said) == 6
    for line, place, share in (
        (0, "1 step: 2", 50),
        (1, "1 step: 4", 100),
        (3, "2 step: 2", 50),
        (4, "2 step: 4", 100),
    ):
        assert re.fullmatch(rf"epoch: {place}, loss is 1\.0, {rate}, {share} % of the epoch, {time} left", said[line])
    assert re.fullmatch(rf"epoch: 1, 3 steps in {time}, {rate}", said[2])  # without the first, which plans
    assert re.fullmatch(rf"epoch: 2, 4 steps in {time}, {rate}", said[5])


def test_an_epoch_without_sizes_has_no_rates_of_samples(capsys: pytest.CaptureFixture[str]) -> None:
    monitor, alone = pw.LossMonitor(steps=2), pw.LossMonitor(rates=True)
    for _ in range(2):
        monitor(1.0)
    first, last, epoch = printed(capsys)
    assert (first, last) == ("epoch: 1 step: 1, loss is 1.0", "epoch: 1 step: 2, loss is 1.0")
    assert re.fullmatch(r"epoch: 1, 1 step in [\d.]+ \w+, [\d.]+ \w+ a step", epoch)
    for _ in range(2):
        alone(1.0)
    first, last = printed(capsys)
    assert first == "epoch: 1 step: 1, loss is 1.0"
    assert re.fullmatch(r"epoch: 1 step: 2, loss is 1.0, [\d.]+ \w+ a step", last)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_no_number_is_an_error_that_names_the_step(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = pw.LossMonitor()
    monitor(torch.tensor(1.0), epoch=2)
    assert refused(lambda: monitor(torch.tensor(value)), LossError) == (
        f"the loss of epoch 3, step 2 is {value}; look for values in the batch that are NaN or Inf and for labels that "
        "are not classes, and take a lower learning rate or clip gradients if it has grown before"
    )
    assert issubclass(LossError, ValueError)  # as in the reference
    assert places(printed(capsys)) == [(3, 1)]


def test_steps_without_a_line_are_looked_at_with_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = pw.LossMonitor(5)
    for value in (1.0, NAN, 1.0, 1.0):
        monitor(value)
    assert refused(lambda: monitor(1.0), LossError).startswith("the loss of epoch 1, step 2 is nan;")
    monitor(INF)
    assert refused(monitor.finish, LossError).startswith("the loss of epoch 1, step 6 is inf;")
    monitor.finish()
    of_epochs = pw.LossMonitor(5, steps=2)
    of_epochs(NAN)
    assert refused(lambda: of_epochs(1.0), LossError).startswith("the loss of epoch 1, step 1 is nan;")
    assert printed(capsys) == []


def test_a_loss_is_that_of_its_step_whatever_is_done_with_it_later(capsys: pytest.CaptureFixture[str]) -> None:
    monitor, loss = pw.LossMonitor(2), torch.tensor(NAN)
    monitor(loss)
    loss.zero_()
    assert "step 1 is nan" in refused(monitor.finish, LossError)
    assert printed(capsys) == []


def test_wrong_arguments_are_named() -> None:
    for value in (0, -1, True, 1.5, "1"):
        assert refused(lambda: pw.LossMonitor(value)) == (  # noqa: B023 - called at once
            f"per_print_times is {value!r}; it is a number of steps from one line to the next, an int of 1 or more"
        )
    assert (
        refused(lambda: pw.LossMonitor(steps=0))
        == "steps is 0; it is a number of steps of an epoch, an int of 1 or more"
    )
    assert refused(lambda: pw.LossMonitor(samples=-2)).startswith("samples is -2; it is a number of samples of a step,")
    monitor: Any = pw.LossMonitor(steps=5)
    counted = "it is counted from 0, as range and enumerate count"
    assert refused(lambda: monitor(1.0, step=-1)) == f"step is -1; {counted}"
    assert refused(lambda: monitor(1.0, epoch=True)) == f"epoch is True; {counted}"
    assert refused(lambda: monitor(1.0, epoch=1, step=5)) == (
        "step is 5, and an epoch has 5 steps, counted from 0; give the LossMonitor the steps of an epoch, or leave out "
        "epoch where step counts through all of them"
    )


def test_what_is_no_loss_is_refused() -> None:
    monitor: Any = pw.LossMonitor()
    assert refused(lambda: monitor((torch.ones(()), torch.ones(3)))) == (
        "the loss is a tuple, not a tensor of one element or a float; give the loss alone, as in "
        "loss, logits = model(...)"
    )
    assert refused(lambda: monitor("2.3")) == "the loss is a str, not a tensor of one element or a float; give that"
    mean = "not one real number; give its mean over the batch: loss.mean()"
    assert refused(lambda: monitor(torch.ones(32))) == f"the loss is float32[32], {mean}"
    assert refused(lambda: monitor(torch.tensor(3))) == f"the loss is int64[], {mean}"
    assert refused(lambda: monitor(torch.tensor(1j))) == f"the loss is complex64[], {mean}"


# -- on ranks


def captured(run: Callable[[], object]) -> list[str]:
    """What this rank prints."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        run()
    return out.getvalue().splitlines()


class Regression(nn.Module):
    """A loss beside what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = (self.linear(x).squeeze(-1) - y).square().mean()
        return out


def sharded_and_plain() -> tuple[list[str], list[str]]:
    """The lines of a training whose ranks have a part of the batch each, and those of one device."""
    torch.manual_seed(3)
    plain, x, y = Regression().double(), torch.randn(8, 4).double(), torch.randn(8).double()
    with pw.auto_parallel_context(parallel_mode="data_parallel", dataset_strategy="data_parallel"):
        twin = Regression().double()
        twin.load_state_dict(plain.state_dict())
        model, rank = pw.shard(twin), dist.get_rank()
        own = slice(4 * rank, 4 * rank + 4)
        split = captured(lambda: pw.LossMonitor()(model(x[own], y[own])))
    with torch.no_grad():
        return split, [f"epoch: 1 step: 1, loss is {plain(x, y).item()!r}"]


@pytest.mark.gloo
def test_the_loss_of_a_sharded_model_is_that_of_one_device_on_every_rank(on_ranks: Ranks) -> None:
    (first, expected), (second, _) = on_ranks(2, sharded_and_plain)
    assert first == second
    (line,), (wanted,) = first, expected
    start, _, value = line.rpartition(" ")
    assert wanted.startswith(f"{start} ")
    np.testing.assert_allclose(float(value), float(wanted.rpartition(" ")[2]), rtol=1e-14)


def own_losses() -> list[str]:
    rank = dist.get_rank()
    return captured(lambda: pw.LossMonitor()(torch.tensor(2.0 + rank)))


@pytest.mark.gloo
def test_losses_of_parts_are_averaged_and_the_line_says_so(on_ranks: Ranks) -> None:
    assert on_ranks(2, own_losses) == [
        ["epoch: 1 step: 1, loss is 2.5 (the mean of 2 ranks' own, from 2.0 to 3.0)"]
    ] * 2  # fmt: skip


def dtensors() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    part = torch.tensor(1.0 + dist.get_rank())
    loss = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Partial()])
    return captured(lambda: pw.LossMonitor()(loss))


@pytest.mark.gloo
def test_a_dtensor_is_the_whole_loss(on_ranks: Ranks) -> None:
    assert on_ranks(2, dtensors) == [["epoch: 1 step: 1, loss is 3.0"]] * 2


def not_numbers() -> list[str]:
    rank = dist.get_rank()
    monitor, seldom = pw.LossMonitor(), pw.LossMonitor(2, steps=3)
    seldom(INF if rank else 1.0)
    return [
        refused(lambda: monitor(NAN if rank else 1.0), LossError),
        refused(lambda: monitor(NAN), LossError),
        refused(lambda: seldom(1.0), LossError),
        *captured(lambda: monitor(1.0)),  # all are at one step still
    ]


@pytest.mark.gloo
def test_nan_on_one_rank_is_an_error_on_every_rank_that_names_it(on_ranks: Ranks) -> None:
    fix = (
        "are NaN or Inf and for labels that are not classes, and take a lower learning rate or clip gradients if it has"
    )
    of = f"that {fix} grown before"
    said = [
        f"the loss of epoch 1, step 1 is nan on rank 1; look for values in the batch of rank 1 {of}",
        f"the loss of epoch 1, step 2 is nan on every rank; look for values in the batch {of}",
        f"the loss of epoch 1, step 1 is inf on rank 1; look for values in the batch of rank 1 {of}",
        "epoch: 1 step: 3, loss is 1.0",
    ]
    assert on_ranks(2, not_numbers) == [said] * 2


def apart() -> str:
    rank = dist.get_rank()
    monitor = pw.LossMonitor(2)
    if rank:
        monitor(1.0)
    return refused(lambda: monitor(1.0, step=1) if rank else monitor(1.0, epoch=2, step=3))


@pytest.mark.gloo
def test_ranks_at_different_steps_are_told(on_ranks: Ranks) -> None:
    points = "the ranks are at different points of the program; run the same program on every rank:\n"
    points += "  rank 0 would look at the loss of epoch 3, step 4\n"
    points += "  rank 1 would look at the losses of 2 steps up to epoch 1, step 2"
    assert on_ranks(2, apart) == [points] * 2


ALONE = """
import torch
import partway as pw

pw.init(timeout=60)
torch.manual_seed(0)
model, monitor = pw.shard(torch.nn.Linear(4, 1), mesh={"dp": 2}, in_strategy=(("dp", None),)), pw.LossMonitor()
for step in range(3):
    loss = model(torch.ones(4, 4)).mean()
    if step == 0 or pw.get_rank() == 0:
        monitor(loss)
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_a_rank_that_calls_it_alone_is_told_where_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE, encoding="utf-8")
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "alone.py"]
    done = subprocess.run(
        start,
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout.count("epoch: 1 step: 1, loss is ") == 2
    assert (
        "rank 0 would look at the loss of epoch 1, step 2, and rank 1 waits in a collective that needs all of its "
        "ranks; run the same program on every rank:"
    ) in done.stderr
