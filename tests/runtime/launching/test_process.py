import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from scripts import free_port

from partway.runtime import get_group_size, get_local_rank, get_rank, init, launched, shutdown
from partway.runtime.executors.execute import device_mesh, process_group
from partway.runtime.torch_internals import timeout_of
from partway.strategy import Mesh, RuntimeStateError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MS_NODE_ID")
VARIABLES += ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, **variables):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def test_without_a_launcher_one_process_stands_for_all_devices():
    assert not launched()
    assert (init(), init(simulate=8)) == (1, 8)
    assert (get_rank(), get_local_rank(), get_group_size()) == (0, 0, 1)
    assert not dist.is_initialized()
    shutdown()


def test_a_group_that_torchrun_cannot_start_again_is_warned_of(monkeypatch):
    set_all(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_MAX_RESTARTS="3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match=r"torchrun starts the processes of .* again .*: call pw.init\(\) before"):
            init()
    finally:
        shutdown()


def test_variables_that_a_shell_has_left_over_are_an_error_and_no_simulation(monkeypatch):
    set_all(monkeypatch, MS_WORKER_NUM="8", MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT="6667")
    assert launched()
    with pytest.raises(RuntimeStateError, match=r"MS_WORKER_NUM=8 is set, but the environment has no MS_ROLE, so that"):
        init(simulate=4)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "2"])
def test_a_number_of_devices_is_an_int_of_1_or_more(wrong):
    with pytest.raises(RuntimeStateError, match=f"simulate is {wrong!r}; it is a number of devices, an int of 1 or mo"):
        init(simulate=wrong)


def test_an_unknown_backend_is_rejected():
    with pytest.raises(RuntimeStateError, match=r"backend is 'mpi'; it must be 'gloo' \(CPU\) or 'nccl' \(CUDA\)"):
        init(backend="mpi")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_nccl_needs_cuda():
    with pytest.raises(RuntimeStateError, match=r"'nccl', which needs CUDA, .* use backend='gloo'"):
        init(backend="nccl")


def test_missing_variables_of_a_launcher_are_named(monkeypatch):
    set_all(monkeypatch, RANK="3", MASTER_ADDR="127.0.0.1")
    assert launched()
    expected = r"torchrun started this process, as RANK=3 says, but .* no WORLD_SIZE, MASTER_PORT; set .* or unset RANK"
    with pytest.raises(RuntimeStateError, match=expected):
        init()
    for ask in (get_rank, get_local_rank):
        with pytest.raises(RuntimeStateError, match=r"there is no process group yet; call init\(\) first"):
            ask()
    monkeypatch.delenv("RANK")
    set_all(monkeypatch, MS_ROLE="MS_WORKER", MS_SCHED_HOST="127.0.0.1")
    with pytest.raises(RuntimeStateError, match=r"the scheduler started .* no MS_WORKER_NUM, MS_SCHED_PORT; set"):
        init()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("MS_WORKER_NUM", "0", "MS_WORKER_NUM is '0'; it must be an int of 1 or more"),
        ("MS_SCHED_PORT", "http", "MS_SCHED_PORT is 'http'; it must be an int of 1 or more"),
        ("MS_ROLE", "MS_SERVER", "MS_ROLE is 'MS_SERVER'; it must be MS_WORKER or MS_SCHED"),
    ],
)
def test_wrong_variables_of_the_scheduler_are_rejected(monkeypatch, name, text, said):
    set_all(monkeypatch, MS_ROLE="MS_WORKER", MS_WORKER_NUM="2", MS_SCHED_HOST="127.0.0.1", MS_SCHED_PORT="6667")
    set_all(monkeypatch, **{name: text})
    with pytest.raises(RuntimeStateError, match=said):
        init()


@pytest.mark.parametrize("wrong", [0, -1, True, "30", float("nan"), 1e9, timedelta(days=100), timedelta(0)])
def test_a_timeout_is_a_time(wrong):
    with pytest.raises(RuntimeStateError, match=r"timeout is .*; it is a timedelta or a number of seconds, from 0.001"):
        init(timeout=wrong)
    assert init(timeout=5) == init(timeout=timedelta(seconds=5)) == 1  # there is nobody to wait for


def test_the_timeout_of_a_process_group_reaches_the_groups_of_axes_and_cannot_be_changed(monkeypatch):
    set_all(monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        init(backend="gloo", timeout=7.5)
        groups = [
            dist.group.WORLD,
            process_group(Mesh({"a": 1, "b": 1}), ("a", "b")),
            process_group(Mesh({"a": 1}), ("a",)),
        ]
        groups += [device_mesh(Mesh({"a": 1, "b": 1})).get_group("b")]
        assert [timeout_of(group) for group in groups] == [timedelta(seconds=7.5)] * 4
        assert init(timeout=7.5) == init() == 1
        with pytest.raises(
            RuntimeStateError, match=r"the process group there wait 7.5 s, not 8; give the timeout where"
        ):
            init(timeout=8)
    finally:
        shutdown()


def test_a_process_group_that_is_there_already_is_used(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert launched()
        assert init(simulate=8, backend="gloo") == 1
        assert (get_rank(), get_group_size()) == (0, 1)
        with pytest.raises(RuntimeStateError, match=r"^nothing says which of its host's processes this is; give each"):
            get_local_rank()
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert get_local_rank() == 3
        monkeypatch.setenv("LOCAL_RANK", "-3")
        with pytest.raises(RuntimeStateError, match=r"^LOCAL_RANK is '-3'; it must be an int of 0 or more$"):
            get_local_rank()
    finally:
        shutdown()
    assert not dist.is_initialized()
    shutdown()


# -- With processes ---------------------------------------------------------------------------------------------------


def who(backend):
    assert init(backend=backend) == init(simulate=99) == dist.get_world_size()
    return get_rank(), get_group_size(), dist.get_backend()


@pytest.mark.gloo
def test_ranks_of_torchrun_have_gloo_on_the_cpu(on_ranks):
    assert on_ranks(2, who, None if not torch.cuda.is_available() else "gloo") == [(0, 2, "gloo"), (1, 2, "gloo")]


DIFFERS = """
import atexit, sys
atexit.register(sys.stderr.write, "earlier handlers run too")
from partway.runtime import get_rank, init
from partway.runtime.ranks.watch import watch
init(backend="gloo")
watch().ledger("ledger", range(2)).ran(1 + get_rank(), "a loss", False)
"""


@pytest.mark.gloo
def test_a_difference_that_is_found_at_exit_is_in_the_status():
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DIFFERS], env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [120, 120], said
    for text in said:
        assert "partway: rank 1 ran another program (or left out a step) than rank 0, at a loss; make the" in text
        assert text.endswith("earlier handlers run too")


AGAIN = """
import sys, torch, torch.distributed as dist
import partway as pw

for _ in range(3):
    pw.init(backend="gloo", timeout=30)
    x = torch.ones(1) * (pw.get_rank() + 1)
    dist.all_reduce(x)
    sys.stdout.write(f"rank {pw.get_rank()} has {x.item()}\\n")
    pw.shutdown()
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_a_second_group_does_not_read_where_the_first_listened(tmp_path):
    (tmp_path / "again.py").write_text(AGAIN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "again.py"]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False, timeout=120)
    assert sorted(ended.stdout.splitlines()) == ["rank 0 has 3.0"] * 3 + ["rank 1 has 3.0"] * 3, ended
