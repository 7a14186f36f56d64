"""A job of two workers, or more, in which a fault occurs: its outcome, and the time that it takes.

The script trains with `pw.Resume` over a shuffled loader, with dropout, in float64, and records each loss. The file
`fault` has the fault that occurs in the script. A fault from outside occurs after rank 0 has done step 12.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts import free_port

STEP, STEPS = 12, 24
SCRIPT = """
import os, pathlib, sys, time
number = os.environ.get("RANK", os.environ.get("MS_NODE_ID", "scheduler"))
pathlib.Path(f"pid.{number}").write_text(str(os.getpid()))

def reach(phase):
    fault = pathlib.Path("fault")
    if number == "1" and fault.exists():
        wanted, _, code = fault.read_text().partition(": ")
        if wanted == phase:
            fault.unlink()
            pathlib.Path("happened").touch()
            exec(code, {"os": os, "sys": sys, "time": time})

reach("before init")
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
import partway as pw

limit = {} if torch.distributed.is_initialized() else {"timeout": float(os.environ.get("LIMIT", "20"))}
pw.init(backend="gloo", **limit)
reach("after init")

class Reach(nn.Module):
    def forward(self, x):
        reach("planning")
        return x

class State:
    def state_dict(self):
        if STEP < training.step < STEPS:
            reach("saving")
        return {}
    def load_state_dict(self, state):
        pass

STEP, STEPS = @
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
net = nn.Sequential(nn.Linear(16, 32), Reach(), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
model = pw.shard(net, mesh={"dp": pw.get_group_size()}, in_strategy=(("dp", None),))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 16)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = StatefulDataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
training = pw.Resume("kept/checkpoints", model, optimizer, loader=loader, every=5, state=State())
resumed = training.step
with open(f"losses.{number}", "a") as losses:
    for epoch, (images, labels) in training.batches(epochs=STEPS // 4):
        step = training.step
        if step == STEP:
            reach("forward")
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        if step == STEP:
            list(model.parameters())[0].register_hook(lambda grad: reach("backward"))
        loss.backward()
        optimizer.step()
        losses.write(f"{step} {loss.detach().item()!r}\\n")
        losses.flush()
        if step == STEP:
            reach("between steps")
        pathlib.Path(f"step.{number}").write_text(str(step))
        time.sleep(float(os.environ.get("PAUSE", "0.05")))
reach("the end")
""".replace("STEP, STEPS = @", f"STEP, STEPS = {STEP}, {STEPS}")


RAY = """
import os, runpy
from pathlib import Path
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

folder = Path.cwd()

def train():
    os.chdir(folder)
    runpy.run_path("train.py")

ray.init(num_cpus=2, include_dashboard=False)
failures = FailureConfig(max_failures=int(os.environ["AGAIN"]))
run = RunConfig(name="run", storage_path=str(folder / "ray"), failure_config=failures)
gloo = TorchConfig(backend="gloo", timeout_s=20)
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run, torch_config=gloo).fit()
"""


@dataclass
class Outcome:
    """The outcome of a job. `seconds`: the time from the fault to the end of all processes or, if the job goes on, the
    longest time between two new steps after it; `codes`: the exit status of each process, by its name; `said`: the
    stderr of each process."""

    seconds: float
    codes: dict[str, int]
    said: dict[str, str]
    goes_on: bool
    losses: dict[int, set[str]]
    left: list[str]


@dataclass
class Job:
    """Processes in `folder`, which are restarted as often as `again` says.

    start      the commands by name, with the variables of each
    patience   seconds after which all processes started by them have to have ended
    """

    folder: Path
    start: Mapping[str, tuple[list[str], Mapping[str, str]]]
    again: int = 0
    ports: tuple[int, ...] = ()
    patience: float = 3
    mark: str = field(default_factory=lambda: f"{os.getpid()}-{time.monotonic_ns()}")
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[str, list[int]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def run(
        self, happens: Callable[[Job], None] | None = None, later: tuple[float, Callable[[Job], None]] | None = None,
        limit: float = 120, until: Callable[[Job], bool] | None = None,
    ) -> Outcome:  # fmt: skip
        """Start all processes, cause the fault, and wait for the end. `until`: the condition to wait for before the
        fault, if not step 12."""
        for name in self.start:
            self.begin(name)
        end, when, new, best, longest = time.monotonic() + limit, None, time.monotonic(), -1, 0.0
        while self.running and time.monotonic() < end:
            self.look()
            if when is None and (self.has_happened() if happens is None else (until or Job.at_the_step)(self)):
                when = new = time.monotonic()
                if happens is not None:
                    happens(self)
            if when is not None and later is not None and time.monotonic() > when + later[0]:
                later[1](self)
                later = None
            if self.step() > best:
                longest = max(longest, time.monotonic() - new) if when is not None else 0.0
                best, new = self.step(), time.monotonic()
            time.sleep(0.02)
        over = time.monotonic()
        left = [*self.end(), *(f"port {port}" for port in self.ports if listens(port))]
        goes_on = all(codes[-1] == 0 for codes in self.codes.values()) and not left
        seconds = longest if goes_on else over - (when if when is not None else over)
        return Outcome(
            seconds, {name: codes[-1] for name, codes in self.codes.items()},
            {name: self.log(name).read_text(errors="replace") for name in self.start}, goes_on, self.losses(), left,
        )  # fmt: skip

    def begin(self, name: str) -> None:
        command, own = self.start[name]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MS_", "RANK", "WORLD_SIZE", "MASTER_"))}
        self.left.setdefault(name, self.again)
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, cwd=self.folder, env={**kept, "OMP_NUM_THREADS": "1", "FAULT_TEST": self.mark, **own},
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip

    def look(self) -> None:
        """Record the processes that have ended, and restart them."""
        for name, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[name]
                self.codes.setdefault(name, []).append(code)
                if code != 0 and self.left[name] > 0:
                    self.left[name] -= 1
                    self.begin(name)

    def end(self) -> list[str]:
        """End the processes that still run. Return their names, and those of other processes with the job's mark."""
        names = [*self.running]
        for name, process in self.running.items():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.codes.setdefault(name, []).append(-99)
        self.running.clear()
        deadline = time.monotonic() + self.patience
        while (found := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return [*names, *found.values()]

    def kill(self, number: int, *names: str) -> None:
        """Send a signal to the processes of the script with these numbers ("0", "1"), or to one of `start`."""
        for name in names:
            running = self.running.get(name)
            process = running.pid if running else int((self.folder / f"pid.{name}").read_text())
            os.kill(process, number)

    def step(self) -> int:
        try:
            return int((self.folder / "step.0").read_text() or -1)
        except FileNotFoundError:
            return -1

    def at_the_step(self) -> bool:
        return self.step() >= STEP

    def has_happened(self) -> bool:
        return (self.folder / "happened").exists()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def losses(self) -> dict[int, set[str]]:
        """The losses of each step, from any rank in any attempt."""
        found: dict[int, set[str]] = {}
        for path in self.folder.glob("losses.*"):
            for line in path.read_text().splitlines():
                step, _, loss = line.partition(" ")
                found.setdefault(int(step), set()).add(loss)
        return found


def marked(mark: str) -> dict[int, str]:
    """The processes that have a job's mark in their environment, with their commands."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with suppress(OSError):
                if f"FAULT_TEST={mark}".encode() in (place / "environ").read_bytes():
                    found[int(place.name)] = (place / "cmdline").read_text(errors="replace").replace("\0", " ")
    return found


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def by_the_scheduler(folder: Path, again: int, port: int | None = None, workers: int = 2, **variables: str) -> Job:
    """A scheduler and its workers; with `again`, MS_ENABLE_RECOVERY=1."""
    port = port or free_port()
    common = {
        "MS_WORKER_NUM": str(workers), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), "MS_NODE_TIMEOUT": "6",
        "MS_TOPO_TIMEOUT": "40", "MS_ENABLE_RECOVERY": str(int(again > 0)), **variables,
    }  # fmt: skip
    command = [sys.executable, "train.py"]
    names = map(str, range(workers))
    own = {name: (command, {**common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": name}) for name in names}
    prepare(folder)
    return Job(folder, {"scheduler": (command, {**common, "MS_ROLE": "MS_SCHED"}), **own}, again, (port,))


def by_torchrun(folder: Path, again: int, **variables: str) -> Job:
    """torchrun with two workers; with `again`, it restarts them this often."""
    port = free_port()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(again),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "train.py",
    ]  # fmt: skip
    prepare(folder)
    return Job(folder, {"agent": (command, variables)}, 0, (port,))


def by_ray(folder: Path, again: int, **variables: str) -> Job:
    """Ray Train with two workers; with `again`, it restarts them this often. Its agents end some time after a driver
    that was killed."""
    prepare(folder)
    (folder / "by_ray.py").write_text(RAY, encoding="utf-8")
    own = {"AGAIN": str(again), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **variables}
    return Job(folder, {"driver": ([sys.executable, "by_ray.py"], own)}, patience=120)


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kept").mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
