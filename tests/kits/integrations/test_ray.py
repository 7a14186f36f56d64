"""Ray Train's workers are ranks, a failed one goes on from its checkpoint, and other processes of Ray are alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gloo,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

START = """
    import json, os, signal, sys
    from pathlib import Path
    import ray, torch, ray.train.torch
    from torch import nn
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    import partway as pw

    HERE = Path.cwd()

    def tell(name, value):
        with open(HERE / f"{name}.json", "a") as file:
            file.write(json.dumps(value) + "\\n")

    def fit(function, workers=2, trainer=TorchTrainer, failures=0, **more):
        run = RunConfig(name="run", storage_path=str(HERE / "ray"), failure_config=FailureConfig(max_failures=failures))
        return trainer(function, scaling_config=ScalingConfig(num_workers=workers), run_config=run, **more).fit()

    ray.init(num_cpus=4, include_dashboard=False)
"""


def run(text: str, folder: Path, *arguments: str) -> dict[str, list[Any]]:
    """What the workers of a script told, by name."""
    (folder / "script.py").write_text(textwrap.dedent(START) + textwrap.dedent(text), encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = {**kept, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    for told in folder.glob("*.json"):
        told.unlink()
    ended = subprocess.run(
        [sys.executable, "script.py", *arguments], cwd=folder, env=found, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.json")}


def test_what_ray_started_is_understood(tmp_path: Path) -> None:
    """A task and an actor are alone, workers of a trainer without a process group an error, those of TorchTrainer
    ranks of the group that it made."""
    told = run("""
        @ray.remote
        def task():
            return pw.init(simulate=3)

        @ray.remote
        class Actor:
            def devices(self):
                import ray.train
                return pw.init(simulate=3), pw.get_group_size()

        tell("alone", [ray.get(task.remote()), *ray.get(Actor.remote().devices.remote())])

        def bare():
            try:
                tell("bare", pw.init(simulate=3))
            except pw.RuntimeStateError as error:
                tell("bare", str(error))
            try:
                pw.get_rank()
            except pw.RuntimeStateError as error:
                tell("bare", str(error))

        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
        fit(bare, trainer=DataParallelTrainer)

        def group():
            context = ray.train.get_context()
            mine = pw.init(simulate=7), pw.get_rank(), pw.get_group_size()
            device = ray.train.torch.get_device()
            torch.manual_seed(0)
            model = pw.shard(nn.Linear(4, 4).to(device), mesh={"tp": 2}, parameter_plan={"weight": ("tp", None)})
            out = model(torch.ones(2, 4, device=device))
            tell("group", [*mine, context.get_world_rank(), context.get_local_rank(), os.environ["LOCAL_RANK"],
                           str(device), str(out.device)])
            try:
                pw.init(timeout=7)
            except pw.RuntimeStateError as error:
                tell("timeout", str(error))

        fit(group, torch_config=TorchConfig(backend="gloo", timeout_s=90))
        fit(lambda: tell("tcp", [pw.init(), pw.get_rank()]), torch_config=TorchConfig(init_method="tcp"))
    """, tmp_path)  # fmt: skip
    assert told["alone"] == [[3, 3, 1]]
    texts = sorted(told["bare"])
    for rank in (0, 1):
        wrong = f"this is worker {rank} of 2 of Ray Train, whose trainer has made no process group; train with its Tor"
        assert sum(text.startswith(wrong) for text in texts) == 1
    assert sum(text.startswith("a launcher started this process, but there is no process group yet") for text in texts)
    assert len(texts) == 4
    assert sorted(told["group"]) == [[2, rank, 2, rank, rank, str(rank), "cpu", "cpu"] for rank in (0, 1)]
    assert told["timeout"] == ["collectives of the process group there wait 90 s, not 7; give the timeout where the "
                               "group is made, or call shutdown() first"] * 2  # fmt: skip
    assert sorted(told["tcp"]) == [[2, 0], [2, 1]]


TRAIN = """
    fault, at = sys.argv[1], int(sys.argv[2])

    def train():
        devices = pw.init()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)).double()
        model = pw.shard(net, mesh={"dp": devices}, in_strategy=(("dp", None),))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        training = pw.Resume(HERE / "checkpoints" / fault, model, optimizer, every=3)
        for step in training.steps(12):
            loss = model(torch.randn(8, 8, dtype=torch.float64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if pw.get_rank() == 0:
                tell("losses", [step, loss.item().hex()])
            if step == at and not training.resumed and pw.get_rank() == 1:
                if fault == "raise":
                    raise ValueError("a bad batch")
                os.kill(os.getpid(), signal.SIGKILL)

    fit(train, failures=1)
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The losses of a training that nothing ended, by step."""
    found = run(TRAIN, tmp_path_factory.mktemp("whole"), "none", "-1")["losses"]
    assert [step for step, _ in found] == list(range(12))
    return found


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_a_worker_that_failed_goes_on_with_the_losses_of_one_that_did_not(
    fault: str, expected: list[Any], tmp_path: Path
) -> None:
    found = run(TRAIN, tmp_path, fault, "7")["losses"]
    steps = [step for step, _ in found]
    assert steps[:7] == list(range(7))
    assert steps[steps.index(7, 0) + 1 if 7 in steps else 7] == 6, "it went on from another step than the last saved"
    assert sorted(set(map(tuple, found))) == sorted(map(tuple, expected))


def test_a_sharded_model_that_is_sent_to_workers_is_sharded_there(tmp_path: Path) -> None:
    """It is pickled with the arguments of its shard; a mesh of another size than the workers is an error."""
    told = run("""
        pw.init(simulate=2)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        model = pw.shard(net, mesh={"dp": 2}, in_strategy=(("dp", None),))

        def trained(model):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(4):
                loss = model(torch.ones(8, 8, dtype=torch.float64)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss.item()

        def train():
            pw.init()
            try:
                tell("loss", trained(model))
            except Exception as error:
                tell("error", f"{type(error).__name__}: {error}")

        fit(train)
        fit(train, workers=3)
        tell("here", trained(model))
    """, tmp_path)  # fmt: skip
    assert told["loss"] == [pytest.approx(told["here"][0], abs=1e-12)] * 2
    assert len(told["error"]) == 3
    assert set(told["error"]) == {
        "RuntimeStateError: the mesh (dp=2) has 2 devices, but there are 3 ranks; start 2 processes or use a mesh of 3 "
        "devices"
    }
