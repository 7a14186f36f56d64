"""The commands of docs/launch.md run as they stand there, and all give one loss."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
SCRIPT = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
OTHERS = {"mpirun": "mpirun --allow-run-as-root --oversubscribe", "srun": "srun --overcommit"}


def run(command: str, folder: Path) -> str:
    """What a command prints, in a folder with the page's script."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = command.replace("6667", str(free.getsockname()[1]))
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=found, capture_output=True, text=True, check=False, timeout=250
    )
    assert ended.returncode == 0, ended
    return ended.stdout


def lines(said: str) -> list[str]:
    return [line.removeprefix("[rank 0] ") for line in said.splitlines()]


@pytest.mark.slow
@pytest.mark.gloo
def test_each_command_gives_the_loss_of_one_process(tmp_path: Path) -> None:
    expected = lines(run("python train.py", tmp_path))
    assert re.fullmatch(r"4 devices, loss 0\.\d{4}", expected[0])
    assert [command.split()[0] for command in COMMANDS] == ["partway", "partway", "torchrun", "export"]
    for command in COMMANDS:
        said = lines(run(command, tmp_path))
        if "--hosts" in command:
            assert said[-1].strip() == "partway run --workers 4 --nodes 2 --meet node1:29400 train.py"
        else:
            assert said == expected, command


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("program", OTHERS)
def test_mpirun_and_srun_give_it_too(program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None or (program == "srun" and subprocess.run(["sinfo"], check=False).returncode):
        pytest.skip(f"there is no {program} here, or no cluster that it reaches")
    [command] = [line for line in PAGE.splitlines() if line.startswith(f"{program} ")]
    if program == "mpirun" and "Open MPI" not in run("mpirun --version", tmp_path):
        pytest.skip("mpirun is not Open MPI's")
    expected = run("python train.py", tmp_path)
    assert run(command.replace(program, OTHERS[program], 1), tmp_path) == expected
