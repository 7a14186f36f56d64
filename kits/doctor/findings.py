"""The problems of this machine, with their fixes: the lines of `partway doctor` below its facts.

Each function checks one topic and yields its findings; `findings` calls all of them. The code that reads an option or
an environment variable knows its valid values: that code is called, and its message is the finding. None of them starts
a process or talks to another one.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from partway.compiler import asked
from partway.propagation.cost import profile_of
from partway.requests import level_asked
from partway.reuse import cache_folder, cache_limit, folder_named
from partway.runtime.launching import gpus, secret, simulated
from partway.strategy import PartwayError, UntestedTorchWarning, shown
from partway.strategy.basics import did_you_mean, install_extra
from partway.versions import installed_torch, warn_if_untested

# docs/options.md describes each; a test compares the two
VARIABLES = (
    "PARTWAY_CACHE", "PARTWAY_CACHE_DIR", "PARTWAY_CACHE_MB", "PARTWAY_JOB_SECRET", "PARTWAY_JOB_SECRET_FILE",
    "PARTWAY_LOG", "PARTWAY_PS_FOLDER", "PARTWAY_PS_LOCAL_SERVERS", "PARTWAY_PS_RAY", "PARTWAY_READY_FILE",
    "PARTWAY_SAVE_GRAPHS", "PARTWAY_SAVE_GRAPHS_PATH", "PARTWAY_SAVE_GRAPHS_RANKS", "PARTWAY_SHARE_GPU",
    "PARTWAY_SIMULATE", "PARTWAY_SSL_PASSWORD", "PARTWAY_VERIFY",
)  # fmt: skip
SWITCHES = {"PARTWAY_CACHE": "0 for no cache", "PARTWAY_VERIFY": "1 to check every pass and tensor"}
EXTRAS = ("data", "demo", "k8s", "ps", "ray", "serve", "ssl")
SHARED = 256e6  # bytes of /dev/shm; Docker gives 64 MB
_DEVICES = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU, whatever torch is built with
_REQUIRED = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([\d.]+).*extra\s*==\s*['\"]([\w-]+)['\"]")


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line, "problem: fix". `wrong`: something fails because of it; else it is advice."""

    text: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{'wrong' if self.wrong else 'advice':<8}  {self.text}"


def findings(processes: int = 1, profile: str | None = None) -> list[DoctorFinding]:
    """All findings, for one of `processes` on this machine; `profile`: a device profile to check, too."""
    parts = (
        of_torch(),
        of_variables(os.environ),
        of_cache(),
        of_threads(processes, os.environ),
        of_gpus(processes),
        of_host(),
        of_extras(),
    )
    return [finding for part in (*parts, of_profile(profile)) for finding in part]


def of_torch() -> Iterator[DoctorFinding]:
    """PyTorch: its version, its backends, and GPUs that it does not see."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntestedTorchWarning)
        warn_if_untested(installed_torch())
    yield from (DoctorFinding(str(each.message), wrong=False) for each in caught)
    if not has_backend("gloo"):
        yield DoctorFinding(
            "this build of PyTorch has no gloo, so that processes cannot talk on the CPU: install one from pytorch.org"
        )
    gpus = len(list(_DEVICES.iterdir())) if _DEVICES.is_dir() else 0
    if torch.cuda.is_available():
        if not has_backend("nccl"):
            yield DoctorFinding(
                "there are GPUs, and this build of PyTorch has no NCCL: install one for CUDA from pytorch.org"
            )
    elif gpus and torch.version.cuda is None:
        yield DoctorFinding(
            f"this host has {gpus} NVIDIA GPUs, and PyTorch {torch.__version__} is built without CUDA: install one "
            "for CUDA from pytorch.org"
        )
    elif gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them" if hidden is not None else "it cannot start CUDA"
        yield DoctorFinding(
            f"this host has {gpus} NVIDIA GPUs, and PyTorch sees none ({why}): "
            + (
                "unset it"
                if hidden is not None
                else "see what nvidia-smi says of the driver, and in a container whether it was given the GPUs"
            )
        )


def has_backend(name: str) -> bool:
    """Whether this build of torch has the backend; a build without distributed support has none."""
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)


def of_variables(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Unknown variables that begin like Partway's, and invalid values."""
    for name in sorted(environment):
        if name.startswith("PARTWAY_") and name not in VARIABLES:
            meant = did_you_mean(name, VARIABLES, "docs/options.md has those that there are", most=1)
            yield DoctorFinding(f"nothing reads the variable {name}: {meant}", wrong=False)
    for name, use in SWITCHES.items():
        value = environment.get(name, "")
        if value not in ("", "0", "1"):
            yield DoctorFinding(f"{name} is {shown(value)}, which changes nothing: write {use}, or unset it")
    readers: tuple[Callable[[], Any], ...] = (cache_limit, simulated, asked, secret, level_asked, gpus.may_share)
    yield from (DoctorFinding(problem) for read in readers if (problem := _problem(read)))


def of_cache() -> Iterator[DoctorFinding]:
    """The folder of plans: whether it is usable, on a disk with room."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = cache_folder("")
    yield from (DoctorFinding(str(each.message)) for each in caught)
    if folder is not None and not os.access(folder, os.W_OK):
        yield DoctorFinding(
            f"a plan cannot be kept in {folder}, where this user may not write: set PARTWAY_CACHE_DIR to a folder of "
            "your own, or PARTWAY_CACHE=0"
        )
    elif folder is not None and (free := shutil.disk_usage(folder).free) < 100e6:
        yield DoctorFinding(
            f"the disk of {folder_named('')} has {free / 1e6:.0f} MB left, and plans are kept there: make room, or "
            "set PARTWAY_CACHE_DIR to a folder on another",
            wrong=False,
        )


def of_gpus(processes: int) -> Iterator[DoctorFinding]:
    """The number of GPUs, compared with the processes of this host."""
    there = has_backend("nccl") and torch.cuda.is_available() and torch.cuda.device_count()
    if there and (problem := _problem(lambda: gpus.check_enough(processes))):
        yield DoctorFinding(problem)


def of_threads(processes: int, environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """The number of threads, compared with the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if processes > 1 and "OMP_NUM_THREADS" not in environment and threads * processes > cores:
        fair = max(1, cores // processes)
        yield DoctorFinding(
            f"OMP_NUM_THREADS is not set, so that each of {processes} processes computes on {threads} threads, and "
            f"there are {cores} cores: set it to {fair}",
            wrong=False,
        )
    elif threads > cores:
        yield DoctorFinding(
            f"PyTorch computes on {threads} threads, and this process has {cores} cores: set OMP_NUM_THREADS={cores}",
            wrong=False,
        )


def of_host() -> Iterator[DoctorFinding]:
    """The host: its name, its shared memory, its clock."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        yield DoctorFinding(
            f"the name of this host, {name!r}, has no address ({error}), and gloo asks for one: add it to "
            "/etc/hosts, or set GLOO_SOCKET_IFNAME to an interface, such as eth0",
            wrong=False,
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < SHARED:
        yield DoctorFinding(
            f"/dev/shm has {size / 1e6:.0f} MB, in which workers of a DataLoader and NCCL pass tensors: give the "
            "container more, as docker run --shm-size=2g does",
            wrong=False,
        )
    installed = Path(__file__).stat().st_mtime
    if time.time() < installed - 86400:
        yield DoctorFinding(
            f"the clock says {time.strftime('%Y-%m-%d')}, before Partway was installed: set it; certificates and "
            "what is kept on disk go by it",
            wrong=False,
        )


def of_extras() -> Iterator[DoctorFinding]:
    """Installed libraries of the optional extras that are too old."""
    for line in requires("partway") or ():
        found = _REQUIRED.match(line)
        if found is None or found[3] not in EXTRAS:
            continue
        name, least, extra = found.groups()
        try:
            there = version(name)
        except PackageNotFoundError:
            continue
        if _release(there) < _release(least):
            yield DoctorFinding(f"{name} is {there}, and Partway needs {least}: {install_extra(extra)}")


def _release(text: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def of_profile(profile: str | None) -> Iterator[DoctorFinding]:
    """The device profile, if one is named."""
    if profile is not None and (problem := _problem(lambda: profile_of(profile))):
        yield DoctorFinding(problem)


def _problem(read: Callable[[], Any]) -> str:
    """The error of `read`; "" if it succeeds."""
    try:
        read()
    except PartwayError as error:
        return " ".join(str(error).split())
    return ""
