"""A long run whose ranks are killed at random: does it end with the numbers of one that was left alone?

    python benchmarks/soak.py [--processes 8] [--steps 20000] [--kills 20]

A perceptron with dropout, on half of the processes for the batch and two for the weights, with AdamW and a schedule, in
a loop of `pw.Resume` under torchrun, which starts all ranks again when one ends. While it goes on, one rank drawn at
random is killed (SIGKILL) whenever a random number of steps has passed; then the same script runs without that. Printed
is the largest difference between the two models and their optimizers, which must be 0.0, and what every rank had of
file descriptors, threads and resident memory after the first tenth and at the end of the run that was left alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from script import start

import partway as pw

EVERY, BARS = 200, {"descriptors": 0, "threads": 0, "MB": 8.0}  # steps of a checkpoint; what may be more at the end


def main(
    processes: Annotated[int, typer.Option(help="ranks")] = 8,
    steps: Annotated[int, typer.Option(help="of the training")] = 20_000,
    kills: Annotated[int, typer.Option(help="ranks that are killed")] = 20,
    work: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure."""
    if work:
        _train(Path(work), steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        killed, alone = Path(folder) / "killed", Path(folder) / "alone"
        seconds = [_run(killed, processes, steps, kills), _run(alone, processes, steps, 0)]
        difference = _difference(killed, alone)
        more = [_more(alone / f"facts{rank}") for rank in range(processes)]
    failed = difference > 0
    print(f"{steps} steps on {processes} processes: {seconds[0]:.0f} s with {kills} kills, {seconds[1]:.0f} s without")
    print(f"largest difference: {difference}")
    for name, bar in BARS.items():
        print(f"more {name} at the end: {min(m[name] for m in more):+.1f} to {max(m[name] for m in more):+.1f}")
        failed |= max(m[name] for m in more) > bar
    raise typer.Exit(failed)


def _run(folder: Path, processes: int, steps: int, kills: int) -> float:
    """The seconds of a run, of which ranks are killed so many times."""
    folder.mkdir()
    begin, moments = time.monotonic(), random.Random(0)
    left = sorted(moments.sample(range(EVERY, steps - EVERY), kills))
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--max-restarts=1000",
        "--monitor-interval=0.5", __file__, f"--work={folder}", f"--steps={steps}",
    ]  # fmt: skip
    with open(folder / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while job.poll() is None:
        time.sleep(0.02)
        facts = _last(folder / "facts0")
        if left and facts.get("step", -1) >= left[0]:
            left.pop(0)
            rank = moments.randrange(processes)
            os.kill(_last(folder / f"facts{rank}")["pid"], signal.SIGKILL)
            while _last(folder / "facts0").get("pid") == facts["pid"] and job.poll() is None:
                time.sleep(0.02)  # until they have begun again
    assert job.returncode == 0 and not left, (folder / "log").read_text()[-3000:]
    return time.monotonic() - begin


def _last(path: Path) -> dict[str, Any]:
    """What a rank has written last."""
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        facts: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:  # it is writing
        return {}
    return facts


def _made() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4), torch.nn.LogSoftmax(1)
    )
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def _train(folder: Path, steps: int) -> None:
    pw.init(backend="gloo")
    net, optimizer = _made()
    model = pw.shard(
        net, mesh={"dp": pw.get_group_size() // 2, "tp": 2}, in_strategy=(("dp", None),),
        parameter_plan={"0.weight": ("tp", None), "0.bias": ("tp",), "3.weight": (None, "tp")},
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    inputs = torch.randn(64, 32, 16)
    training = pw.Resume(folder / "checkpoints", model, optimizer, every=EVERY, schedule=schedule)
    with open(folder / f"facts{pw.get_rank()}", "a", buffering=1) as facts:
        for step in training.steps(steps):
            x = inputs[step % len(inputs)]
            loss = torch.nn.functional.nll_loss(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 0 or step == steps - 1:
                facts.write(json.dumps({"step": step, "pid": os.getpid(), **_held()}) + "\n")
    pw.save(folder / "last", model, optimizer)
    pw.shutdown()


def _held() -> dict[str, float]:
    """What this process has: open file descriptors, threads, resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    }  # fmt: skip


def _more(path: Path) -> dict[str, float]:
    """How much more of each a rank had at the end than after a tenth of its steps."""
    facts = [json.loads(line) for line in path.read_text().splitlines()]
    return {name: facts[-1][name] - facts[len(facts) // 10][name] for name in BARS}


def _difference(one: Path, other: Path) -> float:
    """The largest between what two runs have saved: weights and states of the optimizer."""
    loaded = [_made(), _made()]
    for path, (model, optimizer) in zip((one, other), loaded, strict=True):
        pw.load(path / "last", model, optimizer)
    tensors = [
        [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
        for model, optimizer in loaded
    ]
    return max((a - b).abs().max().item() for a, b in zip(*tensors, strict=True))


if __name__ == "__main__":
    start(main)
