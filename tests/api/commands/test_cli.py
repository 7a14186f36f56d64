"""What the `partway` command prints."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from partway.commands.cli import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def doctor() -> dict[str, str]:
    """What `partway doctor` prints, by the name before each fact."""
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code in (0, 1), result.output  # 1: something is wrong with this machine
    lines = (line.split(maxsplit=1) for line in result.output.splitlines())
    return dict(lines)


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version_is_the_installed_one(asked: str) -> None:
    assert run(asked) == f"partway {version('partway')}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "fusion", "--help"]])
def test_what_needs_no_torch_does_not_wait_for_its_import(arguments: list[str]) -> None:
    text = (
        f"import sys\nfrom partway.commands.cli import app\napp({arguments!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, timeout=120)


def test_doctor_names_python_and_torch() -> None:
    facts = doctor()
    assert facts["python"].startswith(platform.python_version())
    assert facts["torch"] == torch.__version__


def test_doctor_lists_every_device() -> None:
    devices = doctor()["devices"].split("; ")
    assert devices[0].startswith("cpu (")
    assert len(devices) == 1 + torch.cuda.device_count()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("available", "said"), [(True, "available"), (False, "missing: ")])
def test_doctor_tells_which_backends_there_are(
    monkeypatch: pytest.MonkeyPatch, backend: str, available: bool, said: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: available == (name == backend))
    assert doctor()[backend].startswith(said)


def test_doctor_says_so_when_torch_was_built_without_distributed_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    facts = doctor()
    assert facts["gloo"].startswith("missing")
    assert facts["nccl"].startswith("missing")


def test_doctor_says_that_no_launcher_means_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert doctor()["launcher"] == "none: models run on virtual devices in this process"


def test_doctor_says_what_is_unclear_about_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "launcher  unclear: torchrun started this process, as RANK=3 says, but the environ" in result.output


def test_an_unknown_command_is_an_error_that_names_it() -> None:
    result = CliRunner().invoke(app, ["docter"])
    assert result.exit_code == 2
    assert "docter" in result.output


def test_the_command_is_installed() -> None:
    command = Path(sysconfig.get_path("scripts")) / "partway"
    printed = subprocess.run([command, "version"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert printed == f"partway {version('partway')}\n"
