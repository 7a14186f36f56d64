"""What planning tells: lines of logging, and a live line in a terminal alone."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import partway as pw
from partway.requests import planning_log as told
from partway.strategy.basics.blocks import listening, tell

SCRIPT = """
import importlib, sys
import torch
from torch import nn
import partway as pw

told = importlib.import_module("partway.requests.planning_log")
told.PATIENCE = 0.02  # a screen is painted every 0.08 s, and 40 layers take ten times that
model = pw.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))), mesh={"dp": 2})
for rows in (4, 6):
    model(torch.ones(rows, 8)).sum().backward()
print("done")
"""


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines of level INFO that Partway logs."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.name}: {record.getMessage()}")

    logger, handler = logging.getLogger("partway"), Kept()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def without_seconds(lines: list[str]) -> list[str]:
    return [re.sub(r"\d+\.\d+ s", "_ s", line) for line in lines]


def test_what_was_planned_why_again_and_how_long_it_took(logged: list[str]) -> None:
    with pw.auto_parallel_context(enable_compile_cache=False):
        model = pw.shard(nn.Linear(8, 4), mesh={"dp": 2}, dynamic=False)
        for rows in (4, 6, 6):
            model(torch.ones(rows, 8)).sum().backward()
    lines = without_seconds(logged)
    plans = [line for line in lines if "planning Linear.forward took _ s" in line]
    assert len(plans) == 2
    assert re.fullmatch(
        r"partway.planning: planning Linear.forward took _ s \(capture _ s.*\): \d+ operators? on dp=2, "
        r"dynamic_programming: the optimum, proven",
        plans[0],
    )
    assert [line for line in lines if "is planned for" in line] == [
        "partway.planning: Linear is planned for call 2: dim 0 of 'input' is 6, and was 4"
    ]
    assert sum("making a program of Linear.forward took _ s (differentiate _ s" in line for line in lines) == 2


def test_what_came_from_the_cache(
    logged: list[str], tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARTWAY_CACHE", raising=False)
    monkeypatch.delenv("PARTWAY_VERIFY", raising=False)  # which plans anew
    os.chmod(tmp_path, 0o700)
    for _ in range(2):
        with pw.auto_parallel_context(enable_compile_cache=True, compile_cache_path=str(tmp_path)):
            pw.shard(nn.Linear(8, 4), mesh={"dp": 2})(torch.ones(4, 8)).sum().backward()
    taken = [line.split(" from ")[0] for line in logged if line.startswith("partway.cache: took the ")]
    assert taken == [f"partway.cache: took the {name}" for name in ("capture", "plan", "forward", "program")]


def test_stages_are_of_what_is_told_of(logged: list[str]) -> None:
    with told.stage("of nothing"):
        pass
    with told.telling("planning it") as telling:
        for _ in range(2):
            with told.stage("search"):
                pass
        with contextlib.suppress(ValueError), told.stage("lower"):
            raise ValueError
        telling.made = "a plan"
    assert list(telling.seconds) == ["search", "lower"]
    assert without_seconds(logged) == ["partway.planning: planning it took _ s: a plan"]


@pytest.mark.parametrize(
    ("cost", "bound", "said"),
    [
        (1.05, 1.0, "bound 1, gap 5 %"),
        (1.0, 1.0, "bound 1, gap 0 %"),
        (1.0, 1.0 + 1e-12, "bound 1, gap 0 %"),
        (float("inf"), 1.0, ""),
        (1.0, 0.0, ""),
        (1.0, float("-inf"), ""),
        (50.0, 1.0, ""),
    ],
)
def test_how_far_a_search_has_come(cost: float, bound: float, said: str) -> None:
    with told.telling("planning it") as telling:
        with told.stage("search"):
            tell(cost, bound)
            assert telling.found == said
        assert telling.found == ""
    tell(1.0, 1.0)
    assert telling.found == ""


def test_a_search_within_a_memory_limit_tells_how_far_it_has_come() -> None:
    heard: list[tuple[float, float]] = []
    pw.set_algo_parameters(memory_limit=2e6)
    with listening(lambda cost, bound: heard.append((cost, bound))), torch.device("meta"):
        module, x = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True), torch.empty(64, 16, 64)
        plan = pw.compile(module, (x,), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None, None),)).plan
    assert plan.certificate.binding
    assert heard[0][0] == float("inf")
    assert plan.certificate.cost == pytest.approx(heard[-1][0])
    assert plan.certificate.bound in [bound for _, bound in heard]  # of the first search; the last has less room
    assert all(bound <= plan.certificate.cost * (1 + 1e-9) for _, bound in heard)


def test_what_fails_is_not_said_to_be_done(logged: list[str]) -> None:
    with contextlib.suppress(ValueError), told.telling("planning it"):
        raise ValueError
    assert not logged


def ran(**environment: str) -> tuple[str, str]:
    """What the script writes to a terminal that is its stderr, and to stderr where it is a pipe."""
    variables = {**os.environ, "PARTWAY_CACHE": "0", "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=theirs, env=variables, text=True
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert child.communicate()[0] == "done\n"
    piped = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, env=variables, text=True, check=True)
    return shown.decode(), piped.stderr


def test_a_terminal_shows_what_is_done_and_a_pipe_does_not() -> None:
    shown, piped = ran()
    assert re.search(r"planning Sequential.forward: (capture|formulate|search|lower)", shown)
    assert not piped


def test_the_environment_asks_for_the_log() -> None:
    _, piped = ran(PARTWAY_LOG="info")
    assert re.search(r"INFO partway.planning: planning Sequential.forward took \d", piped)


def test_a_level_that_there_is_not_is_a_warning_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "PARTWAY_LOG is 'loud'; write one of debug, info, warning, error"
    monkeypatch.setenv("PARTWAY_LOG", "loud")
    with pytest.warns(UserWarning, match=re.escape(message)):
        told.log_to_stderr()
    with pytest.raises(pw.ContextError, match=re.escape(message)):
        told.level_asked()
