"""`partway run`: processes, their logs, and what is said when one fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import partway as pw
from partway.commands.cli import app
from partway.commands.jobs import LocalJob, commands, run, simulate
from partway.strategy import RuntimeStateError

SCRIPT = """
    import os, sys, time
    import torch.distributed as dist
    import partway as pw

    devices = pw.init(simulate=1)
    sys.stdout.write(f"rank {pw.get_rank()} of {devices}: {' '.join(sys.argv[1:])}\\n")
    if "fail" in sys.argv and pw.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("a bad batch")
    if "wait" in sys.argv:
        time.sleep(60)
    if dist.is_initialized():
        dist.barrier()
"""
COMMAND = [sys.executable, "-c", "from partway.commands.cli import app; app()"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


@pytest.fixture
def partway(script: Path) -> Run:
    """`partway(*arguments)`: the command, in a process of its own, in the folder of the script."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=script.parent,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


def logs(script: Path) -> dict[str, str]:
    """What is in the logs of the last run, by rank.N/stdout and so on."""
    folder = max((script.parent / "log_output").iterdir())
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("std*")}


@pytest.mark.slow
@pytest.mark.gloo
def test_each_rank_has_its_log_and_a_prefix_here(partway: Run, script: Path) -> None:
    ended = partway("run", "--workers", "2", "script.py", "--lr", "3")
    assert ended.returncode == 0, ended.stderr
    said = [f"rank {rank} of 2: --lr 3" for rank in (0, 1)]
    assert sorted(ended.stdout.splitlines()) == [f"[rank {rank}] {said[rank]}" for rank in (0, 1)]
    found = logs(script)
    assert [found[f"rank.{rank}/stdout"].strip() for rank in (0, 1)] == said


@pytest.mark.slow
@pytest.mark.gloo
def test_the_first_that_failed_is_named_and_a_restart_goes_on(partway: Run, script: Path) -> None:
    ended = partway("run", "--workers", "2", "--tail", "0", "script.py", "fail")
    assert ended.returncode == 1
    where = r"partway run: rank 1 failed first, with exit status 1 \(log_output/.*/rank\.1/stderr\)"
    assert re.search(where, ended.stderr), ended.stderr
    assert ended.stderr.rstrip().endswith("ValueError: a bad batch")
    assert "[rank 1]" not in ended.stdout + ended.stderr
    ended = partway("run", "--workers", "2", "--restarts", "1", "script.py", "fail")
    assert ended.returncode == 0, ended.stderr
    assert {"rank.0/stdout", "rank.0/stdout.1", "rank.1/stderr", "rank.1/stdout.1"} <= set(logs(script))


@pytest.mark.slow
@pytest.mark.gloo
def test_an_interrupt_ends_all(script: Path) -> None:
    command = [*COMMAND, "run", "--workers", "2", "script.py", "wait", str(script.parent)]
    process = subprocess.Popen(command, cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (script.parent / "log_output").exists() or not all(logs(script).get(f"rank.{r}/stdout") for r in (0, 1)):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    left = subprocess.run(["pgrep", "-f", f"wait {script.parent}"], capture_output=True, text=True, check=False)
    assert not left.stdout


@pytest.mark.slow
def test_a_script_runs_alone_on_virtual_devices(partway: Run) -> None:
    ended = partway("run", "--simulate", "8", "script.py", "a", "--b")
    assert (ended.returncode, ended.stdout) == (0, "rank 0 of 8: a --b\n"), ended.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the launcher leaves files open
def test_the_launcher_has_the_logs_of_ranks_and_the_status_of_the_first_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of scripts without PyTorch, which start at once."""
    for name in ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "1")  # the launcher sets them for its processes
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('rank ' + os.environ['RANK'] + sys.argv[1])\nsys.exit(3)")
    assert run(LocalJob(script, ("!",), workers=1, logs=tmp_path / "logs")) == 3
    said = capfd.readouterr()
    assert said.out == "[rank 0] rank 0!\n"
    assert f"partway run: rank 0 failed first, with exit status 3 ({tmp_path}/logs/" in said.err
    [log] = (tmp_path / "logs").glob("*/rank.0/stdout")
    assert log.read_text(encoding="utf-8") == "rank 0!\n"
    script.write_text("import os, sys\nsys.stdout.write(os.environ['PARTWAY_SIMULATE'])\nsys.exit(4)")
    assert simulate(LocalJob(script), 8) == 4
    assert capfd.readouterr().out == "8"


@pytest.mark.parametrize("wrong", ["0", "many"])
def test_a_number_of_virtual_devices_is_a_number(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_SIMULATE", wrong)
    with pytest.raises(RuntimeStateError, match=f"PARTWAY_SIMULATE is '{wrong}'; it must be an int of 1 or more"):
        pw.init()


def test_what_to_start_on_each_host() -> None:
    said = commands(LocalJob(Path("train.py"), ("--lr", "1"), workers=4, restarts=2), ["a", "b"])
    expected = "partway run --workers 4 --nodes 2 --meet a:29400 --restarts 2 train.py --lr 1"
    assert said == f"start this on each of a, b:\n\n    {expected}"
    shown = CliRunner().invoke(app, ["run", "--hosts", "a, b", "--workers", "4", "train.py", "--lr", "1"])
    assert shown.output == f"start this on each of a, b:\n\n    {expected.replace(' --restarts 2', '')}\n"


@pytest.mark.parametrize(("options", "text"), [
    ({"script": Path("none.py")}, r"^there is no script 'none.py'; give the path of a Python file$"),
    ({"workers": 0}, r"^workers is 0; it must be 1 or more$"),
    ({"hosts": 0}, r"^hosts is 0; it must be 1 or more$"),
    ({"restarts": -1}, r"^restarts is -1; it must be 0 or more$"),
    ({"hosts": 2}, r"^meet is ''; with 2 hosts it is where they find each other, such as .*:29400$"),
    ({"hosts": 2, "meet": "a:x"}, r"^meet is 'a:x'; with 2 hosts"),
    ({"workers": 2, "tail": [2]}, r"^there is no rank 2 to show; ranks are 0 to 1$"),
    ({"logs": Path(__file__)}, r"test_jobs.py is a file; logs go into a folder$"),
])  # fmt: skip
def test_what_cannot_be_run_says_so(options: dict[str, Any], text: str, script: Path) -> None:
    with pytest.raises(RuntimeStateError, match=text):
        LocalJob(**({"script": script} | options)).check()


def test_the_command_says_so_too(script: Path) -> None:
    shown = CliRunner().invoke(app, ["run", "--simulate", "0", str(script)])
    assert shown.exit_code == 2
    assert shown.output == "partway run: simulate is 0; it must be 1 or more\n"
