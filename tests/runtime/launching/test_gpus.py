"""Which GPU ranks take, and who may share one. The GPUs are pretended here; NCCL itself is in tests/gpu/."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripts import run_ranks

from partway.runtime.launching import gpus
from partway.runtime.launching.process import device_type
from partway.runtime.ranks.watch import Watch
from partway.strategy import Mesh, RuntimeStateError, torch_mesh

NCCL = (
    "NCCL_HOSTID", "NCCL_NET", "NCCL_MAX_CTAS", "NCCL_SOCKET_IFNAME", "NCCL_MULTI_RANK_GPU_ENABLE", gpus.SHARE,
    "LOCAL_WORLD_SIZE",
)  # fmt: skip


class Host:
    """A host with some GPUs, of which a process may see fewer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.seen, self.current, self.store = range(count), -1, dist.HashStore()
        for name in NCCL:
            monkeypatch.setenv(name, "")  # so that it is as before when the test has ended
            monkeypatch.delenv(name)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.seen))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"gpu-{self.seen[i]}"))
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(self, "current", index))

    def take(self, rank: int, local: int | None, one_host: bool = True) -> int:
        index = gpus.take(self.store, rank, local, one_host)
        assert self.current == index
        return self.seen[index]


def test_each_rank_takes_the_gpu_of_its_place_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 4)
    assert [host.take(rank, rank) for rank in (2, 0, 3, 1)] == [2, 0, 3, 1]
    assert not any(name in os.environ for name in NCCL)


def test_without_a_place_ranks_of_one_host_count_by_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 2)
    assert [host.take(rank, None) for rank in (0, 1)] == [0, 1]


def test_a_rank_that_sees_one_gpu_of_its_own_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tasks of Slurm do with --gpus-per-task=1."""
    host = Host(monkeypatch, 4)
    for rank in range(4):
        host.seen = range(rank, rank + 1)
        assert host.take(rank, rank) == rank


def test_a_rank_without_a_gpu_is_told_of_who_has_it_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 2)
    host.take(0, 0)
    host.take(1, 1)
    with pytest.raises(RuntimeStateError) as error:
        host.take(3, 3)
    assert str(error.value) == (
        "rank 3 has no GPU of its own: this process sees 2, and rank 1 has number 1, which rank 3 would take, too, as "
        "process 3 of its host (LOCAL_RANK); start no more than a process for each GPU, use backend='gloo', or set "
        "PARTWAY_SHARE_GPU=1 to have ranks share, which shows numbers and says nothing of times"
    )
    with pytest.raises(
        RuntimeStateError, match=r"rank 2 would take, too, since nothing says which process of its host"
    ):
        host.take(2, None, one_host=False)


def test_ranks_that_may_share_are_hosts_of_their_own_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 1)
    monkeypatch.setenv(gpus.SHARE, "1")
    names = []
    for rank in range(3):
        assert host.take(rank, rank) == 0
        names.append(os.environ.pop("NCCL_HOSTID"))
    assert len(set(names)) == 3
    assert (os.environ["NCCL_NET"], os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_MAX_CTAS"]) == (
        "Socket",
        "lo",
        "2",
    )


def test_ranks_that_have_a_gpu_each_share_none_though_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 2)
    monkeypatch.setenv(gpus.SHARE, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [host.take(rank, rank) for rank in range(2)] == [0, 1]
    assert "NCCL_HOSTID" not in os.environ  # NCCL would send over sockets
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    host.take(2, 2)
    assert "NCCL_HOSTID" in os.environ


def test_what_the_environment_says_of_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 1)
    for name, text in ((gpus.SHARE, "1"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "4")):
        monkeypatch.setenv(name, text)
    host.take(0, 0)
    assert os.environ["NCCL_MAX_CTAS"] == "4"
    assert "NCCL_HOSTID" not in os.environ  # which would hide from NCCL that they share
    assert "NCCL_NET" not in os.environ


def test_ranks_of_several_hosts_keep_the_network_that_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 1)
    monkeypatch.setenv(gpus.SHARE, "1")
    host.take(0, 0, one_host=False)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_the_variable_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.SHARE, "yes")
    with pytest.raises(RuntimeStateError, match=r"^PARTWAY_SHARE_GPU is 'yes'; it must be 1 \(ranks may share a GPU\)"):
        gpus.may_share()


def test_processes_that_measure_share_only_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 2)
    gpus.take_of(1, 2)
    assert (host.current, "NCCL_HOSTID" in os.environ) == (1, False)
    with pytest.raises(
        RuntimeStateError, match=r"^4 processes need a GPU each, and there are 2; use fewer processes, "
    ):
        gpus.take_of(3, 4)
    monkeypatch.setenv(gpus.SHARE, "1")
    gpus.take_of(2, 4)
    assert (host.current, "NCCL_HOSTID" in os.environ) == (0, True)


# -- Groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_that_has_nccl_beside_gloo_computes_on_gpus(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert torch_mesh.has_nccl()
    assert device_type() == "cuda"


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_a_group_that_was_made_with_whatever_name_is_the_gloo_that_it_is(backend: str | None) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if not torch.cuda.is_available():
            import partway as pw

            assert pw.init(backend="gloo") == 1
            assert device_type() == "cpu"
    finally:
        dist.destroy_process_group()


def test_groups_of_nccl_are_connected_when_they_are_made_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch_mesh, "has_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: made.append(how) or tuple(ranks))
    assert torch_mesh.own_group(Mesh({"dp": 2, "tp": 2}), ("tp",), None, "tp") == (2, 3)
    how = {"timeout": None, "group_desc": "partway: tp", "device_id": torch.device("cuda", 3)}
    assert made == [{**how, "use_local_synchronization": False}] * 2
    made.clear()
    part = Mesh({"tp": 2}, ranks=(2, 3))
    assert torch_mesh.own_group(part, ("tp",), None, "tp") == (2, 3)
    assert made == [{**how, "use_local_synchronization": True}]  # others are not asked


def test_a_thread_that_makes_groups_has_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first GPU."""
    gpu = threading.local()
    gpu.index = 5
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(gpu, "index", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(gpu, "index", index))
    own = object.__new__(Watch)
    own._nccl = True
    assert own.together("make a group", torch.cuda.current_device) == 5


# -- Two processes ----------------------------------------------------------------------------------------------------

PRETENDS = """
import os, types
import torch
import torch.distributed as dist
import partway as pw

plain = dist.init_process_group
torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
torch.cuda.set_device = lambda gpu: None
torch.cuda.get_device_properties = lambda gpu: types.SimpleNamespace(uuid="the one")
dist.is_nccl_available = lambda: True
dist.init_process_group = lambda backend, **how: plain("gloo", **how)
barrier, dist.barrier = dist.barrier, lambda device_ids: barrier()
pw.init(backend="nccl", timeout=10)
x = torch.ones(2)
dist.all_reduce(x)
print(x.tolist(), os.environ.get("NCCL_HOSTID", "").rpartition("/")[2])
pw.shutdown()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("shares", ["0", "1"])
def test_two_ranks_share_a_gpu_where_they_may(tmp_path: Path, shares: str) -> None:
    """gloo sends what NCCL would."""
    (tmp_path / "run.py").write_text(PRETENDS)
    ended = run_ranks(["run.py"], tmp_path, {gpus.SHARE: shares})
    if shares == "1":
        assert [(each.returncode, each.stdout) for each in ended] == [(0, "[2.0, 2.0] 0\n"), (0, "[2.0, 2.0] 1\n")]
    else:  # whichever comes last
        (text,) = [
            each.stderr for each in ended if "has no GPU of its own: this process sees 1, and rank " in each.stderr
        ]
        assert "set PARTWAY_SHARE_GPU=1 to have ranks share" in text
        assert all(each.returncode for each in ended)
