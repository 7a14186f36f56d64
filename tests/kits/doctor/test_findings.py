"""What `partway doctor` finds wrong with a machine, and what it says to do."""

from __future__ import annotations

import collections
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from partway import versions
from partway.commands.cli import app
from partway.doctor import findings as found
from partway.doctor.findings import EXTRAS, VARIABLES, DoctorFinding, findings

OPTIONS = Path(__file__).parents[3] / "docs" / "options.md"


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with nothing wrong: what the host of the tests has is made so."""
    for name in [name for name in os.environ if name.startswith("PARTWAY_")]:
        monkeypatch.delenv(name)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PARTWAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(found, "_DEVICES", tmp_path / "none")
    monkeypatch.setattr(found, "SHARED", 0.0)
    monkeypatch.setattr(found, "requires", lambda name: [])
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert findings() == []


def only(text: str, *, wrong: bool, processes: int = 1, profile: str | None = None) -> None:
    assert findings(processes, profile) == [DoctorFinding(text, wrong)]


def test_a_version_of_pytorch_that_is_not_tested_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "installed_torch", lambda: "2.3.0")
    (finding,) = findings()
    assert not finding.wrong
    assert finding.text.startswith("PyTorch 2.3.0 is older than the versions that Partway is tested with, 2.11 to ")
    assert f"pip install 'torch=={versions.NEWEST[0]}.{versions.NEWEST[1]}.*'" in finding.text


def test_a_pytorch_without_gloo_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "gloo")
    only(
        "this build of PyTorch has no gloo, so that processes cannot talk on the CPU: install one from pytorch.org",
        wrong=True,
    )


def test_gpus_without_nccl_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "nccl")
    only("there are GPUs, and this build of PyTorch has no NCCL: install one for CUDA from pytorch.org", wrong=True)


def test_fewer_gpus_than_processes_are_wrong_unless_these_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    only(
        "2 processes need a GPU each, and there is 1; use fewer processes, or set PARTWAY_SHARE_GPU=1 to have them "
        "share, which shows numbers and says nothing of times",
        wrong=True,
        processes=2,
    )
    monkeypatch.setenv("PARTWAY_SHARE_GPU", "1")
    assert findings(2) == []
    monkeypatch.setenv("PARTWAY_SHARE_GPU", "yes")
    only("PARTWAY_SHARE_GPU is 'yes'; it must be 1 (ranks may share a GPU) or 0", wrong=True)


@pytest.mark.parametrize(
    ("cuda", "hidden", "says"),
    [
        (None, None, "PyTorch 2.13.0 is built without CUDA: install one for CUDA from pytorch.org"),
        (
            "13.0",
            None,
            "PyTorch sees none (it cannot start CUDA): see what nvidia-smi says of the driver, and in a container "
            "whether it was given the GPUs",
        ),
        ("13.0", "", "PyTorch sees none (CUDA_VISIBLE_DEVICES='' hides them): unset it"),
    ],
)
def test_gpus_that_pytorch_does_not_see_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, hidden: str | None, says: str
) -> None:
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
    monkeypatch.setattr(found, "_DEVICES", tmp_path / "gpus")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    only(f"this host has 2 NVIDIA GPUs, and {says}", wrong=True)


@pytest.mark.parametrize(
    ("name", "value", "says", "wrong"),
    [
        ("PARTWAY_CACHE_DRI", "x", "nothing reads the variable PARTWAY_CACHE_DRI: did you mean 'PARTWAY_CACHE_", False),
        ("PARTWAY_QQQQQQQQ", "x", "nothing reads the variable PARTWAY_QQQQQQQQ: docs/options.md has those that", False),
        ("PARTWAY_CACHE", "off", "PARTWAY_CACHE is 'off', which changes nothing: write 0 for no cache, or unset", True),
        ("PARTWAY_VERIFY", "yes", "PARTWAY_VERIFY is 'yes', which changes nothing: write 1 to check every pass", True),
        ("PARTWAY_CACHE_MB", "1 GB", "PARTWAY_CACHE_MB is '1 GB'; write how many megabytes of plans", True),
        ("PARTWAY_LOG", "loud", "PARTWAY_LOG is 'loud'; write one of debug, info, warning, error", True),
        ("PARTWAY_SIMULATE", "many", "PARTWAY_SIMULATE", True),
        ("PARTWAY_SAVE_GRAPHS", "9", "PARTWAY_SAVE_GRAPHS is '9'; write 1 for the graphs of the main stages", True),
        ("PARTWAY_JOB_SECRET", "short", "PARTWAY_JOB_SECRET", True),
    ],
)  # fmt: skip
def test_variables_that_mean_nothing_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str, wrong: bool
) -> None:
    monkeypatch.setenv(name, value)
    (finding,) = findings()
    assert finding.text.startswith(says)
    assert finding.wrong == wrong


def test_the_variables_are_those_of_the_options_page() -> None:
    assert set(re.findall(r"`(PARTWAY_[A-Z_]+)`", OPTIONS.read_text(encoding="utf-8"))) == set(VARIABLES)


def test_a_cache_that_others_may_write_to_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (finding,) = findings()
    assert finding.wrong
    assert f"run chmod 700 '{tmp_path}/cache'" in finding.text


def test_a_cache_that_cannot_be_made_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    (finding,) = findings()
    assert finding.wrong
    assert finding.text.startswith(f"a plan cannot be kept in {tmp_path}/cache (")
    assert "set compile_cache_path or PARTWAY_CACHE_DIR to a folder of your own" in finding.text


def test_a_cache_that_this_user_may_not_write_to_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    only(
        f"a plan cannot be kept in {os.path.realpath(tmp_path)}/cache, where this user may not write: set "
        "PARTWAY_CACHE_DIR to a folder of your own, or PARTWAY_CACHE=0",
        wrong=True,
    )


Usage = collections.namedtuple("Usage", "total free")


def test_a_full_disk_and_little_shared_memory_are_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64e6, 5e6))
    monkeypatch.setattr(found, "SHARED", 256e6)
    monkeypatch.setattr(Path, "is_dir", lambda self: stat.S_ISDIR(os.stat(self).st_mode) if self.exists() else False)
    full, *shared = findings()
    assert full == DoctorFinding(
        f"the disk of {tmp_path}/cache has 5 MB left, and plans are kept there: make room, or set PARTWAY_CACHE_DIR "
        "to a folder on another",
        wrong=False,
    )
    if Path("/dev/shm").exists():
        assert shared == [
            DoctorFinding(
                "/dev/shm has 64 MB, in which workers of a DataLoader and NCCL pass tensors: give the container "
                "more, as docker run --shm-size=2g does",
                wrong=False,
            )
        ]


@pytest.mark.parametrize(
    ("processes", "threads", "says"),
    [
        (4, 8, "OMP_NUM_THREADS is not set, so that each of 4 processes computes on 8 threads, and there are 8 "
               "cores: set "
         "it to 2"),
        (1, 16, "PyTorch computes on 16 threads, and this process has 8 cores: set OMP_NUM_THREADS=8"),
    ],
)  # fmt: skip
def test_more_threads_than_cores_are_advice(
    monkeypatch: pytest.MonkeyPatch, processes: int, threads: int, says: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    only(says, wrong=False, processes=processes)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert findings(processes) == []


def test_a_host_whose_name_has_no_address_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, port: None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    only(
        "the name of this host, 'nowhere', has no address ([Errno -2] Name or service not known), and gloo asks for "
        "one: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface, such as eth0",
        wrong=False,
    )


def test_a_clock_that_is_behind_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "strftime", lambda form: "1970-01-01")
    only(
        "the clock says 1970-01-01, before Partway was installed: set it; certificates and what is kept on disk go "
        "by it",
        wrong=False,
    )


def test_a_library_of_an_extra_that_is_too_old_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        'zarr>=3.1.3; extra == "data"',
        'ray[train]>=2.51.1; extra == "ray"',
        'mypy>=99; extra == "test"',
        "torch>=99",
    ]
    there = {"zarr": "2.18.1", "ray": "2.52.0", "mypy": "1.0"}
    monkeypatch.setattr(found, "requires", lambda name: lines)
    monkeypatch.setattr(found, "version", there.__getitem__)
    only("zarr is 2.18.1, and Partway needs 3.1.3: pip install '.[data]' in Partway's checkout", wrong=True)


def test_the_extras_are_those_of_the_package() -> None:
    import importlib.metadata

    extras = set(importlib.metadata.metadata("partway").get_all("Provides-Extra") or ())
    assert set(EXTRAS) == extras - {"test", "docs"}


def test_a_profile_that_cannot_be_read_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}", encoding="utf-8")
    (finding,) = findings(profile=str(tmp_path / "mine.json"))
    assert finding.wrong
    assert "mine.json" in finding.text
    assert "\n" not in finding.text
    assert findings(profile="h100") == []


def test_the_exit_status_is_1_for_what_is_wrong_and_0_for_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARTWAY_CACHE_DRI", "x")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].startswith("advice    nothing reads the variable PARTWAY_CACHE_DRI: did you")
    monkeypatch.setenv("PARTWAY_CACHE", "off")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "\nwrong     PARTWAY_CACHE is 'off', which changes nothing: " in result.output


def test_half_of_a_launchers_variables_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "launcher  unclear: WORLD_SIZE=4 is set, but the environment has no RANK" in result.output
