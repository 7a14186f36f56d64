"""Completion in shells: what the scripts that `partway --install-completion` writes ask for, and get at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partway.commands import cli
from partway.measure.bench import MODELS, policies
from partway.propagation.cost.profile import presets
from partway.propagation.search.search import SearchMode

COMPLETE = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("torch" if "torch" in sys.modules else "quick"))
from partway.commands.cli import app
app(prog_name="partway")
"""


def offered(shell: str, line: str) -> list[str]:
    """What completion offers at the end of `line`, without having imported torch."""
    words = line.split()
    position = len(words) if line.endswith(" ") else len(words) - 1
    asked = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(position)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment = {**os.environ, "_PARTWAY_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_TESTING": "True", **asked}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.endswith("quick"), done.stderr
    if shell == "zsh":  # one for each line: "fusion":"Train a model ..."
        return re.findall(r'^(?:_arguments .*\(\()?"([^"]+)"', done.stdout.replace('\\"', '"'), re.MULTILINE)
    return [row.split("\t")[0] for row in done.stdout.splitlines() if row.strip()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("partway bench f", ["fusion"]),
        ("partway plan --se", ["--search-mode"]),
        ("partway calibrate --device c", ["cpu", "cuda"]),
        ("partway plan --profile h", ["h100", "h200"]),
    ],
)
def test_commands_options_and_values_are_offered_at_once(shell: str, line: str, words: list[str]) -> None:
    assert offered(shell, line) == words


def test_all_commands_are_offered() -> None:
    assert {"bench", "calibrate", "diff", "doctor", "operator", "plan", "ps", "run", "version"} <= set(
        offered("bash", "partway ")
    )
    assert {"run", "scale"} <= set(offered("bash", "partway ps "))


def test_contenders_models_and_modes_are_offered() -> None:
    assert offered("bash", "partway bench fusion --of o") == ["overlap"]
    assert offered("bash", "partway bench fusion --model ") == ["gpt2", "mlp", "resnet50"]
    assert offered("bash", "partway plan --search-mode s") == ["sharding_propagation"]


def test_what_is_offered_is_what_there_is() -> None:
    assert presets() == cli.PROFILES
    assert tuple(sorted(mode.value for mode in SearchMode)) == cli.SEARCH_MODES
    assert tuple(sorted(MODELS)) == cli.MODELS
    assert tuple(sorted(name for name in policies(36) if "[" not in name)) == cli.CONTENDERS


def test_a_script_is_installed_for_bash(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    environment = {**os.environ, "HOME": str(tmp_path)}
    install = "from partway.commands.cli import app\napp(['--install-completion', 'bash'], prog_name='partway')"
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    subprocess.run([sys.executable, "-c", install], env=environment, check=True, capture_output=True, timeout=120)
    (script,) = tmp_path.glob(".bash_completions/partway.sh")
    asked = (
        f"source {script}; complete -p partway; COMP_WORDS=(partway ver); COMP_CWORD=1; declare -F _partway_completion"
    )
    done = subprocess.run(
        ["bash", "-c", asked], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["complete -o default -F _partway_completion partway", "_partway_completion"]
