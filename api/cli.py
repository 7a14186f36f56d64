"""The `partway` command."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version as installed_version

import torch
import typer

app = typer.Typer(
    name="partway",
    help="Plan how a PyTorch model is split over devices.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def version() -> None:
    """Print the version of Partway."""
    typer.echo(f"partway {installed_version('partway')}")


@app.command()
def doctor() -> None:
    """Print what this machine offers: versions, devices, backends and the launcher, if one started us."""
    facts = {
        "partway": installed_version("partway"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "devices": "; ".join(_devices()),
        "gloo": "available" if _has_backend("gloo") else "missing: processes cannot talk on the CPU",
        "nccl": "available" if _has_backend("nccl") else "missing: processes cannot talk on GPUs",
        "launcher": _launcher(),
    }
    width = max(map(len, facts))
    for name, fact in facts.items():
        typer.echo(f"{name:<{width}}  {fact}")


def _devices() -> list[str]:
    """The CPU with its threads, then each GPU with its memory."""
    found = [f"cpu ({torch.get_num_threads()} threads)"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)")
    return found


def _has_backend(name: str) -> bool:
    """Whether this build of torch has the backend; one made without distributed support has none."""
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)


def _launcher() -> str:
    """Which rank of how many we are, by the variables that torchrun sets."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    return "none: models run on virtual devices in this process"
