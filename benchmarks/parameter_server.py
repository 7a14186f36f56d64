"""What a step with the parameter server takes, beside plain Ray, torch rpc, data parallelism and the local optimizer.

    python benchmarks/parameter_server.py [--rounds 3] [--quick]

Dense parameters of 25 and 250 MB on one server, with one worker; where the time of such a step goes; a table of 1
million rows of 64, of which some are pulled and pushed; two workers and two servers of `partway ps`. A step is
`optimizer.step()`: the gradients pushed, SGD with momentum taken, the parameters pulled, on one thread in each process.
Each case runs in processes of its own, and the ways take turns; a ratio is that of the medians of one round. The plain
Ray peer keeps nothing of what it holds; ours commits each step to LMDB, except where "memory" is said. Ray frees memory
in batches, and ours has it do so at once; the peer is shown both ways. No time is asserted.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from script import start

HERE = Path(__file__).parent
BAR_DENSE, BAR_SPARSE = 60.0, 5.0  # ms: a step of 25 MB; the push of 1,000 rows
ROWS = (100, 1_000, 10_000)
OURS: dict[str, dict[str, Any]] = {
    "partway, sync": {"way": "partway"},
    "partway, async": {"way": "partway", "mode": "async"},
    "partway, sync, memory": {"way": "partway", "durability": "memory"},
}
PEERS: dict[str, dict[str, Any]] = {
    "plain Ray": {"way": "ray"},
    "plain Ray, memory freed at once": {"way": "ray", "at_once": True},
    "torch rpc": {"way": "rpc"},
    "data parallel, 2 processes": {"way": "parallel"},
    "local SGD": {"way": "local"},
}
Found = dict[str, Any]


def run(spec: dict[str, Any], folder: Path) -> Found:
    """A case, in a process of its own. What fails is told in place of its times."""
    command = [sys.executable, str(HERE / "parameter_server_cases.py"), json.dumps(spec)]
    return _ended(command, folder, {})


def _ended(command: list[str], folder: Path, more: dict[str, str]) -> Found:
    environment = {
        **os.environ, "TMPDIR": str(folder), "PARTWAY_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1", **more
    }  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        end(folder)
        process.kill()
        process.communicate()
        return {"error": "it did not end in 600 s"}
    lines = (out if process.returncode == 0 else errors).strip().splitlines() or [""]
    if process.returncode:
        return {"error": lines[-1]}
    return dict(json.loads(lines[-1])) if lines[-1].startswith("{") else {}


def left(folder: Path) -> list[int]:
    """The processes that name our folder, or have it as theirs, and are not this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            said = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in said and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def end(folder: Path) -> int:
    """End the processes that a case has left. Returns how many there were."""
    stop = time.monotonic() + 15
    while (there := left(folder)) and time.monotonic() < stop:
        time.sleep(0.2)
    for process in there:
        os.kill(process, signal.SIGKILL)
    return len(there)


# -- Numbers


def spread(values: Iterable[float], form: str = ".1f") -> str:
    """min / median / max."""
    kept = list(values)
    return " / ".join(f"{each:{form}}" for each in (min(kept), statistics.median(kept), max(kept)))


def ratio(values: list[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def milliseconds(seconds: Iterable[float]) -> list[float]:
    return [each * 1e3 for each in seconds]


def table(title: str, columns: list[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n")
    print(f"| {' | '.join(columns)} |")
    print(f"|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def holds(value: float, bar: float) -> str:
    return f"{'holds' if value < bar else 'missed'} (under {bar:g})"


# -- The tables


def dense(megabytes: float, rounds: int, steps: int, folder: Path) -> None:
    """A step of dense parameters, by every way in turn."""
    ways = {**OURS, **PEERS}
    found: dict[str, list[Found]] = {name: [] for name in ways}
    for i in range(rounds):
        names = list(ways)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            found[name].append(run({**ways[name], "megabytes": megabytes, "steps": steps}, folder))
    rows = []
    for name, all_rounds in found.items():
        if errors := [each["error"] for each in all_rounds if "error" in each]:
            rows.append([name, f"does not work: {errors[0]}", *[""] * 4])
            continue
        took = milliseconds(each for one in all_rounds for each in one["seconds"])
        size = 2 * all_rounds[0]["bytes"] / 1e6
        middle = statistics.median(took)
        rate = "" if name == "local SGD" else f"{size / middle * 1e3:.0f}"
        rows.append([name, spread(took), rate, *(_over(found[ours], all_rounds) for ours in list(OURS)[:2])])
        rows[-1].append(holds(middle, BAR_DENSE) if (name, megabytes) == ("partway, sync", 25) else "")
    columns = ["", "ms of a step: min / median / max", "MB/s pushed and pulled", "sync over it", "async over it", "bar"]
    table(f"{megabytes:g} MB of dense float32, 1 worker, 1 server", columns, rows)


def _over(ours: list[Found], theirs: list[Found]) -> str:
    if ours is theirs:
        return ""
    return ratio(
        [
            statistics.median(one["seconds"]) / statistics.median(two["seconds"])
            for one, two in zip(ours, theirs, strict=True)
            if "seconds" in one
        ]
        or [float("nan")]
    )


def where(megabytes: float, rounds: int, steps: int, folder: Path) -> None:
    """Where the time of a step goes, in sync mode."""
    found = [
        run({"way": "partway", "where": True, "megabytes": megabytes, "steps": steps}, folder) for _ in range(rounds)
    ]
    if errors := [each["error"] for each in found if "error" in each]:
        print(f"\nwhere the time of {megabytes:g} MB goes: {errors[0]}")
        return
    step = [statistics.mean(each["seconds"]) for each in found]
    worker, server, coordinator = (
        [each["clocks"][side] for each in found] for side in ("worker", "server", "coordinator")
    )

    def row(name: str, of: list[Found], *keys: str) -> list[str]:
        took = [sum(each.get(key, 0.0) for key in keys) for each in of]
        return [name, spread(milliseconds(took)), f"{statistics.median(took) / statistics.median(step) * 100:.0f} %"]

    def rest(name: str, keys: tuple[str, ...], of: list[Found], less: list[Found], minus: tuple[str, ...]) -> list[str]:
        took = [
            {"": sum(a.get(key, 0.0) for key in keys) - sum(b.get(key, 0.0) for key in minus)}
            for a, b in zip(of, less, strict=True)
        ]
        return row(name, took, "")

    asked = ("apply: send", "apply: wait")
    parts = ("prepare: send", "prepare: wait", "arrive: ask", *asked, "_put", "_sent")
    inside = ("_pushed", "_mean", "Shard.step", "_records", "changed", "shelf.view")
    table(
        f"Where the time of {megabytes:g} MB goes, sync (means of {steps} steps; min / median / max of {rounds} runs)",
        ["", "ms", "of the step"],
        [
            ["**the step**", spread(milliseconds(step)), "100 %"],
            row("**prepare**: the worker sends (copies into Ray's store)", worker, "prepare: send"),
            row("prepare: the worker waits", worker, "prepare: wait"),
            row("... in the server: all (gradients into LMDB)", server, "prepare"),
            row("**arrive**: the coordinator decides", worker, "arrive: ask"),
            row("... in the coordinator: all", coordinator, "arrive"),
            row("... ... its record", coordinator, "_keep"),
            row("**apply**: the worker sends and waits", worker, *asked),
            row("... in the server: all", server, "apply"),
            row("... ... mean (a copy of the gradients)", server, "_mean"),
            row("... ... optimizer", server, "Shard.step"),
            row("... ... records", server, "_records"),
            rest("... ... commit to LMDB, and the rest", ("apply",), server, server, inside),
            rest("... beyond the server: the values through Ray's store", asked, worker, server, ("apply",)),
            row("the worker copies the values into its parameters", worker, "_put"),
            row("the worker divides the gradients", worker, "_sent"),
            rest("the rest: its random states, its options", ("",), [{"": each} for each in step], worker, parts),
        ],
    )  # fmt: skip


def sparse(rounds: int, steps: int, folder: Path, names: tuple[tuple[str, str], ...]) -> None:
    """Rows of a table, by how many there are."""
    lines = []
    for optimizer, mode in names:
        spec = {"way": "sparse", "optimizer": optimizer, "mode": mode, "rows": ROWS, "steps": steps}
        found = [run(spec, folder) for _ in range(rounds)]
        if errors := [each["error"] for each in found if "error" in each]:
            lines.append([optimizer, mode, "", f"does not work: {errors[0]}", *[""] * 4])
            continue
        for rows in ROWS:
            key, base = str(rows), str(ROWS[0])
            pushed, pulled = (milliseconds(s for each in found for s in each[what][key]) for what in ("push", "pull"))
            more = [statistics.median(each["push"][key]) / statistics.median(each["push"][base]) for each in found]
            middle = statistics.median(pushed)
            lines.append(
                [
                    optimizer, mode, f"{rows:,}", spread(pushed, ".2f"), spread(pulled, ".2f"),
                    f"{rows // ROWS[0]}: {ratio(more)}", f"{middle / rows * 1e3:.1f}",
                    holds(middle, BAR_SPARSE) if rows == 1_000 else "",
                ]
            )  # fmt: skip
    columns = ["optimizer", "mode", "rows", "push", "pull"]
    columns += [f"rows over {ROWS[0]}: push over that", "us of push a row", "bar"]
    table("A table of 1,000,000 rows of 64 float32, 1 worker, 1 server: ms, min / median / max", columns, lines)


def where_sparse(rows: int, rounds: int, steps: int, folder: Path) -> None:
    """Where the time of a push and a pull of rows goes, in sync mode."""
    spec = {"way": "sparse", "optimizer": "sgd", "where": True, "rows": [rows], "steps": steps}
    found = [run(spec, folder) for _ in range(rounds)]
    if errors := [each["error"] for each in found if "error" in each]:
        print(f"\nwhere the time of {rows:,} rows goes: {errors[0]}")
        return
    clocks = [each["clocks"][str(rows)] for each in found]
    lines = [
        [side, name, spread((each[side].get(name, 0.0) * 1e3 for each in clocks), ".2f")]
        for side in clocks[0]
        for name in clocks[0][side]
        if name != "beat: ask"
    ]
    title = (
        f"Where the time of {rows:,} rows goes, SGD, sync (means of {steps} steps; min / median / max of {rounds} runs)"
    )
    table(title, ["in", "what", "ms"], lines)


def several(rounds: int, steps: int, folder: Path) -> None:
    """Two workers and two servers."""
    rates: dict[str, list[float]] = {"sync": [], "async": []}
    size = 0
    for i in range(rounds):
        for mode in list(rates)[:: -1 if i % 2 else 1]:
            with tempfile.TemporaryDirectory(dir=folder) as where_found:
                command = [
                    sys.executable, "-m", "partway.commands.cli", "ps", "run", "--workers", "2", "--servers", "2",
                    "--quiet", "--logs", f"{where_found}/logs", str(HERE / "parameter_server_train.py"),
                ]  # fmt: skip
                said = _ended(command, folder, {"MODE": mode, "STEPS": str(steps), "FOUND": where_found})
                files = [json.loads(each.read_text()) for each in Path(where_found).glob("worker.*")]
                if "error" in said or len(files) != 2:
                    print(f"\ntwo workers, {mode}: {said.get('error', 'a worker wrote nothing')}")
                    continue
            size = files[0]["bytes"]
            began = max(each["ended"][steps // 10] for each in files)  # after what is slow at first
            ended = min(each["ended"][-1] for each in files)
            pushes = sum(began < at <= ended for each in files for at in each["ended"])
            if ended > began:
                rates[mode].append(pushes / (ended - began))
    rows = [
        [mode, spread(each), f"{statistics.median(each) * 2 * size / 1e6:.0f}"] for mode, each in rates.items() if each
    ]
    if all(rates.values()):
        over = [b / a for a, b in zip(rates["sync"], rates["async"], strict=False)]
        rows[-1].append(ratio(over))
        rows[0].append("")
    table(
        f"2 workers, 2 servers (`partway ps`), a model of {size / 1e6:.1f} MB, each step with its forward and backward",
        ["mode", "pushes/s: min / median / max", "MB/s pushed and pulled", "over sync"], rows,
    )  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option(min=1, help="processes for each case; they take turns")] = 3,
    quick: Annotated[bool, typer.Option(help="one round of 25 MB and fewer steps")] = False,
) -> None:
    """Measure, and print tables in Markdown."""
    rounds, steps = (1, 6) if quick else (rounds, 15)
    sizes = (25,) if quick else (25, 250)
    with tempfile.TemporaryDirectory(prefix="pwb-") as name:
        folder = Path(name)
        try:
            for megabytes in sizes:
                dense(megabytes, rounds, steps, folder)
            for megabytes in sizes:
                where(megabytes, rounds, steps, folder)
            kinds = tuple((optimizer, mode) for mode in ("sync", "async") for optimizer in ("sgd", "adagrad"))
            sparse(rounds, steps, folder, kinds[:2] if quick else kinds)
            where_sparse(1_000, rounds, steps, folder)
            several(rounds, 60 if quick else 300, folder)
        finally:
            stayed = end(folder)
    print(f"\nprocesses that the cases left, and that were ended: {stayed}")


if __name__ == "__main__":
    start(main)
