"""All that a borrowed GPU is needed for, in one go, in minutes: what `make gpu` runs.

    make gpu OUT=folder                       on a machine with one GPU (its Python by PYTHON=, which has PyTorch)
    make gpu OUT=folder DRY=1                 the same way without one: gloo, and collectives that are late
    make gpu-wheels                           where there is a network: what else that Python lacks, into wheels/

Stages are in order of worth, each with its own limit of time; the last ones may not get their turn. Into the folder go
a log of each, the figures, and `summary.md`, a page of what passed, what failed, and what did not get its turn. It ends
with status 1 where something has failed. Nothing is fetched.

This file needs nothing but Python until it has prepared what the stages import.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = "PARTWAY_GPU_REPORT"  # where the tests of a stage write how each went
NEEDED = (
    "torch",
    "networkx",
    "numpy",
    "pydantic",
    "rich",
    "typer",
    "pytest",
    "xdist",
    "hypothesis",
    "transformers",
    "expecttest",
)
LEAST = 10  # seconds that a stage is begun with
SHOWN = 6  # failed tests, and lines of figures, that the page has of a stage
LINES = 60  # of the page
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "partway_gpu_report",
    "--dist",
    "loadgroup",
]
RANKS = [
    "runtime/executors/test_execute.py", "runtime/test_races.py", "models/test_gloo.py", "models/test_gloo_values.py",
    "models/test_gloo_dtensors.py", "models/test_gloo_features.py", "runtime/tensors/test_gather.py",
    "models/test_own_parts.py", "ecosystem/test_around.py", "models/test_second_derivatives.py",
    "runtime/tensors/test_split_tensor.py", "models/test_accumulation.py", "models/test_experts.py",
    "models/test_inductor.py",
]  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One of the things to do.

    seconds    its limit
    tests      whether it is pytest, which tells how each test went
    figures    how many of its last lines are figures for the page
    """

    name: str
    command: Sequence[str]
    seconds: float
    tests: bool = False
    figures: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a stage went: `word` is passed, failed, ran out of time, or not its turn."""

    stage: Stage
    word: str
    seconds: float = 0.0
    says: str = ""
    lines: Sequence[str] = ()


def stages(out: Path, dry: bool, workers: int) -> list[Stage]:
    """All, in order of worth."""
    device, share = "cpu" if dry else "cuda", {"PARTWAY_SHARE_GPU": "1"}
    python, gloo = sys.executable, "gloo and not slow and not gpu"
    many = ["-n", str(workers)]
    on = [] if dry else ["--device", "cuda"]
    two = ["-k", "not 4"] if dry else []
    probe = str(ROOT / "tests" / "gpu" / "probe.py")
    own = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **share}
    few = RANKS[:2] if dry else RANKS
    quick = ["--small", "--rounds", "2", "--model", "vit"] if dry else ["--rounds", "11"]
    return [
        Stage("two ranks", [python, probe, device, "2"], 60, environment=share),
        Stage("two ranks, shared by NCCL itself", [python, probe, device, "2"], 45, environment=own),
        Stage("tests of a GPU", [*PYTEST, *many, "-m", "gpu", *tests("gpu")], 100, tests=True),
        Stage("launched tests", [*PYTEST, *many, *on, "-m", gloo, *two, *tests(*few)], 170, tests=True),
        Stage(
            "steps on one device",
            [python, "benchmarks/one_device.py", "--device", device, *quick, "--out", str(out / "one_device.json")],
            150, figures=40,
        ),
        Stage("four ranks", [python, probe, device, "4"], 45, environment=share),
        Stage(
            "calibration",
            [python, "benchmarks/calibration.py", "--world", "1", "--device", device, "--steps", "2" if dry else "7",
             *(["--only", "mlp, data, 1", "--profile", "cpu"] if dry else ["--times", "8"])],
            120, figures=14,
        ),
        Stage(
            "grouping, two ranks",
            [python, "-c", "from partway.commands.cli import app; app()", "bench", "fusion", "--quick",
             "--model", "mlp", "--world", "2", "--device", device, "--profile", "cpu" if dry else "h100"],
            60, figures=14, environment=share,
        ),
        Stage(
            "operators on split tensors",
            [python, "tests/conformance/eager.py", "--only", "^a", "--samples", "1", "--ranks", "2",
             "--device", device],
            90, figures=3, environment=share,
        ),
    ]  # fmt: skip


def tests(*names: str) -> list[str]:
    return [str(Path("tests", name)) for name in names]


# -- Running them ------------------------------------------------------------------------------------------------------


def run(stage: Stage, number: int, out: Path, environment: Mapping[str, str], limit: float) -> Outcome:
    """Run a stage for `limit` seconds at most; whatever it has started ends with it."""
    log, report = (
        out / f"{number:02}-{stage.name.replace(' ', '-').replace(',', '')}.log",
        out / f"{number:02}-tests.jsonl",
    )
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**environment, **stage.environment, REPORT: str(report)},
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - began
    word = "ran out of time" if status is None else "passed" if status == 0 else "failed"
    said = log.read_text(errors="replace").rstrip().splitlines()
    if stage.tests:
        return told_by_tests(stage, word, seconds, read_report(report), said)
    last = said[-1][:200] if said else ""
    return Outcome(stage, word, seconds, last if word != "passed" or not stage.figures else "", figures_of(stage, said))


def figures_of(stage: Stage, said: Sequence[str]) -> list[str]:
    return [line for line in said[-stage.figures :] if line.strip()] if stage.figures else []


def read_report(path: Path) -> list[dict[str, str]]:
    """How each test went that has ended. The last line may be half written."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def told_by_tests(
    stage: Stage, word: str, seconds: float, reports: Sequence[Mapping[str, str]], said: Sequence[str]
) -> Outcome:
    """What became of the tests of a stage."""
    count = {kind: sum(each["outcome"] == kind for each in reports) for kind in ("passed", "failed", "skipped")}
    failed = [each["test"] for each in reports if each["outcome"] == "failed"]
    says = f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"
    if not reports:
        says = f"no test has ended; {said[-1][:150] if said else 'it says nothing'}"
    more = [f"and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
    if failed and word == "ran out of time":
        word = "failed, and ran out of time"
    return Outcome(stage, word, seconds, says, [*failed[:SHOWN], *more])


def run_all(
    every: Sequence[Stage], out: Path, environment: Mapping[str, str], minutes: float, facts: Sequence[str]
) -> list[Outcome]:
    """All stages, as far as the time goes. The page is written after each."""
    end, outcomes = time.monotonic() + 60 * minutes, list[Outcome]()
    for number, stage in enumerate(every, 1):
        left = end - time.monotonic()
        if left < LEAST:
            outcomes.append(Outcome(stage, "not its turn"))
        else:
            outcomes.append(run(stage, number, out, environment, min(stage.seconds, left)))
            last = outcomes[-1]
            say(f"{last.word:>16} {last.seconds:5.0f} s  {stage.name}  {last.says}")
        (out / "summary.md").write_text(page(facts, outcomes))
    return outcomes


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def page(facts: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """The summary. It is cut to a page, figures first."""
    head = ["# What ran on the GPU", "", *(f"* {fact}" for fact in facts), ""]
    head += ["| stage | outcome | seconds | |", "| --- | --- | --- | --- |"]
    for each in outcomes:
        time_taken = f"{each.seconds:.0f} of {each.stage.seconds:.0f}" if each.seconds else ""
        head.append(f"| {each.stage.name} | {each.word} | {time_taken} | {each.says.replace('|', '/')} |")
    more = list[str]()
    for each in outcomes:
        if each.lines:
            more += ["", f"{each.stage.name}:", "", *(f"    {line}" for line in each.lines)]
    left = LINES - len(head)
    cut = ["", f"and {len(more) - left} more lines, in the logs"] if len(more) > left else []
    return "\n".join([*head, *more[:left], *cut]) + "\n"


# -- Preparing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(wheels: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment in which partway and all else can be imported, and facts about it."""
    with tempfile.TemporaryDirectory() as place:
        site = Path(place, "site")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PARTWAY_CHECKOUT": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(site), str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
        )
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps",
               "--target", str(site)]  # fmt: skip
        if importlib.util.find_spec("partway") is None:
            subprocess.run([*pip, "--no-build-isolation", str(ROOT)], check=True)
        if lacking(environment) and wheels.is_dir():
            subprocess.run([*pip, "--upgrade", *map(str, sorted(wheels.glob("*.whl")))], check=True)
        if lacks := lacking(environment):
            raise SystemExit(
                f"{sys.executable} has no {', '.join(lacks)}; `make gpu-wheels` fetches what it can into {wheels}, "
                "where there is a network"
            )
        told = subprocess.run(
            [sys.executable, "-c", FACTS], env=environment, capture_output=True, text=True, check=False
        )
        yield (
            environment,
            [*(told.stdout or told.stderr).splitlines()[-6:], f"{platform.platform()}, {os.cpu_count()} cores"],
        )


def lacking(environment: Mapping[str, str]) -> list[str]:
    """What the stages import and cannot."""
    code = f"import importlib.util as u; print(*[name for name in {NEEDED!r} if u.find_spec(name) is None])"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return found.stdout.split()


FACTS = """
import torch
print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    print(gpu.name, f"{gpu.total_memory / 2**30:.0f} GiB, NCCL", ".".join(map(str, torch.cuda.nccl.version())))
if not torch.cuda.is_available():
    print("no GPU")
"""


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for logs, figures and the summary")
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it [9]")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="what to install, where it is there")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out, began = given.out.resolve(), time.monotonic()
    workers = min(8, max(2, (os.cpu_count() or 2) // 2))
    with prepared(given.wheels) as (environment, facts):
        left = given.minutes - (time.monotonic() - began) / 60
        outcomes = run_all(stages(out, given.dry, workers), out, environment, left, facts)
    say("\n" + (out / "summary.md").read_text())
    return int(any("failed" in each.word for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
