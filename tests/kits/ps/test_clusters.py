"""Real clusters of Ray, a quick slice: a job of `partway ps` in which a server and a worker are killed, and a cluster
of one process. (tests/kits/ps/test_parameter_server.py has all faults.)"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import difference, job
from served_script import one_device

import partway as pw

pytest.importorskip("ray")
pytest.importorskip("lmdb")
pytestmark = [pytest.mark.gloo, pytest.mark.xdist_group("ranks 0"), pytest.mark.timeout(300)]


def test_two_workers_and_two_servers_of_which_some_die_are_one_device(tmp_path: Path) -> None:
    with job(tmp_path / "job", 2, 2, steps=25, optimizer="adamw", nap=0.05, die_in_forward="1:6") as own:
        own.until(3)
        os.kill(own.server(), signal.SIGKILL)
        own.end()
        assert difference(one_device(25, "adamw")[0], own.final()) < 1e-12
        status = json.loads((own.folder / "status.json").read_text())
        assert [report["version"] for report in status["reports"]] == [25, 25]
        assert sum(event.startswith("worker 1 came") for event in status["events"]) == 2
        said = (own.folder / "said").read_text().splitlines()
        assert "partway ps: worker 1 ended with status -9, and is started again" in said
        assert [line for line in said if not line.startswith("partway ps: ")] == [], "lines of Ray's"


ALONE = """
import json, sys, torch
from torch import nn
import partway as pw

folder = sys.argv[1]
torch.set_default_dtype(torch.float64)

def made():
    torch.manual_seed(0)
    return nn.ModuleDict({"table": nn.Embedding(50, 4, sparse=True), "net": nn.Linear(8, 3)})

def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (6, 2), generator=generator)
    labels = torch.randint(0, 3, (6,), generator=generator)
    return nn.functional.cross_entropy(model["net"](model["table"](ids).flatten(1)), labels)

def refused(call):
    try:
        call()
    except pw.PartwayError as error:
        said.append(str(error))

said = []
mode = "async"
plain, model = made(), made()
plain["table"].sparse = False
pw.set_ps_context(enable_ps=True, mode=mode, max_staleness=0)
pw.init()
pw.set_param_ps(model)
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
own = pw.ps.optimizer(inner)
other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (own, other)]
for step in pw.ps.steps(8):
    for each, optimizer, schedule in zip((model, plain), (own, other), schedules):
        loss = loss_of(each, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
refused(lambda: pw.ps.optimizer(inner))
refused(lambda: pw.set_param_ps(nn.Linear(2, 2)))
refused(lambda: own.load_state_dict({}))
refused(lambda: own.state_dict())
kept = model["net"].weight.detach().clone()
with torch.no_grad():
    model["net"].weight.clamp_(-0.01, 0.01)
refused(own.step)
with torch.no_grad():
    model["net"].weight.copy_(kept)
saved = pw.ps.save(f"{folder}/{mode}", model, epoch=3)
assert pw.ps.save(f"{folder}/{mode}", model, asynchronous=True, keep=1).wait().name == "checkpoint-000002"
torch.save([parameter.detach() for parameter in plain.parameters()], f"{folder}/{mode}.pt")
assert pw.get_rank() == 0 and pw.get_group_size() == 1
pw.shutdown()
pw.set_ps_context()
json.dump(said, open(f"{folder}/said.json", "w"))
"""


def test_one_process_with_servers_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "MS_SERVER_NUM": "2", "OMP_NUM_THREADS": "1"}
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script), str(tmp_path)], env=environment, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said.json").read_text())
    assert said[0].startswith("pw.ps.optimizer was called before; a job has one optimizer")
    assert said[1].startswith("set_param_ps comes before pw.ps.optimizer(...)")
    assert said[2].startswith("the servers keep what the optimizer has; load into the optimizer before")
    assert said[3].startswith("the states of tables by rows are large; write a checkpoint with pw.ps.save")
    assert said[4].startswith("net.weight changed since the last step, and the servers hold other values; a parameter ")
    # a checkpoint is read without servers
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(50, 4), "net": torch.nn.Linear(8, 3)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    pw.load(tmp_path / "async", model, optimizer)
    plain = torch.load(tmp_path / "async.pt", weights_only=True)
    for one, other in zip(model.parameters(), plain, strict=True):
        assert torch.allclose(one.detach(), other, rtol=0, atol=1e-12)
        assert "momentum_buffer" in optimizer.state[one]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**8)
