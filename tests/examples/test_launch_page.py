"""The commands of the pages on launching, recovery and security run as they stand there, and all give one loss."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import slurm
from scripts import free_port

import partway as pw
from partway.runtime.launching import security

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.S)


OTHERS = {"mpirun": "mpirun --allow-run-as-root --oversubscribe", "srun": "srun --overcommit"}


def run(page: str, command: str, folder: Path, **more: str) -> str:
    """What a command prints, in a new folder with the page's script; `more`: variables."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.py").write_text("".join(blocks(page, "python")), encoding="utf-8")
    command = command.replace("6667", str(free_port()))
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **more}
    ended = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=found, capture_output=True, text=True, check=False, timeout=250
    )
    assert ended.returncode == 0, ended
    return ended.stdout


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("page", ["launch", "recovery"])
def test_ray_gives_the_loss_of_one_process(page: str, tmp_path: Path) -> None:
    [loss] = re.findall(r"loss \S+", run(page, "python train.py", tmp_path))
    [script] = blocks(page, "py")
    command = f"RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 python -c {shlex.quote(script)} 2>&1"
    assert loss in re.findall(r"loss \S+", run(page, command, tmp_path))


def lines(said: str) -> list[str]:
    return [line.removeprefix("[rank 0] ") for line in said.splitlines()]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("page", "said"), [
    ("launch", r"4 devices, loss 0\.\d{4}"), ("recovery", r"step 99, loss 0\.\d{4}"),
    ("security", r"loss 0\.\d{4}"),
])  # fmt: skip
def test_each_command_gives_the_loss_of_one_process(page: str, said: str, tmp_path: Path) -> None:
    expected = lines(run(page, "python train.py", tmp_path))
    assert re.fullmatch(said, expected[0])
    commands = blocks(page, "sh")
    assert len(commands) == {"launch": 5, "recovery": 3, "security": 1}[page]
    for command in commands:
        said = run(page, command, tmp_path)
        found = lines(said)
        if "doctor" in command:
            assert "4 ranks on 1 host reach each other" in said
        elif "--hosts" in command:
            assert found[-1].strip() == "partway run --workers 4 --nodes 2 --meet node1:29400 train.py"
        else:
            assert found == expected, command


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("program", OTHERS)
def test_mpirun_and_srun_give_it_too(program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "mpirun" and "Open MPI" not in run("launch", "mpirun --version", tmp_path):
        pytest.skip("mpirun is not Open MPI's")
    [command] = [line for line in "".join(blocks("launch", "text")).splitlines() if line.startswith(f"{program} ")]
    command = command.replace(program, OTHERS[program], 1)
    expected = run("launch", "python train.py", tmp_path / "alone")
    with slurm.node(tmp_path / "slurm") if program == "srun" else nullcontext({}) as more:
        assert run("launch", command, tmp_path / program, **more) == expected


@pytest.mark.slow
def test_the_certificates_of_the_page_serve(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    [commands] = [block for block in blocks("security", "text") if block.startswith("openssl ")]
    run("security", commands, tmp_path)
    config = {**{f"{side}_cert_path": f"{side}.pem" for side in ("server", "client")}, "ca_cert_path": "ca.pem"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").chmod(0o600)
    pw.set_ps_context(enable_ssl=True, config_file_path=str(tmp_path / "config.json"))
    try:
        assert security.guard() is not None
    finally:
        pw.set_ps_context()
