"""The search for any min-sum problem beside toulbar2 and HiGHS: cost, bound, gap, seconds and memory.

    python benchmarks/min_sum.py [--group random|foreign|resources] [--only "width 3"] [--seconds 30]
    python benchmarks/min_sum.py --quick                # the small ones, 5 seconds each

Problems are drawn by a seed (min_sum_problems.py): random graphs; graphs of 800 to 65,000 vertices, most of which
follow from others; and graphs with two to four limits, one of them for a time. Each solver has each problem in a
process of its own, and so many seconds of it. "ours" is `solve` (min_sum_solve.py); toulbar2 solves as its package does
unasked (`pip install pytoulbar2`; where it is absent it is left out, with the reason); "HiGHS" is the integer program
with a variable for each option and each pair of options that have a table, by `scipy.optimize.milp`.

A case fails, and with it the command (exit status 1), where ours claims less than a judge proves or more than a judge
finds; where on a random graph toulbar2 proves an optimum that ours does not prove in toulbar2's time or in 2 CPU
seconds; or where HiGHS proves the optimum of a problem with limits and ours is more than 2 % above it, or above its own
bound.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import typer
from min_sum_problems import CASES, Case, Problem, drawn
from min_sum_solve import solve
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

QUICKLY = 2.0  # CPU seconds in which a proof is quick, whatever toulbar2 takes
WITHIN = 0.02  # of the cost: how large the gap may be where resources are limited
MANY_VARIABLES = 1_500_000  # of an integer program that is not even tried
LIMIT_BYTES = 8 * 10**9  # a process that asks for more is ended
SLACK = 60.0  # seconds beyond its time after which a process is ended


@dataclass(frozen=True)
class Run:
    """What one solver found: `skipped` says why it found nothing. Seconds are of its process, CPU and wall."""

    cost: float | None = None
    bound: float | None = None
    cpu: float = 0.0
    wall: float = 0.0
    peak: float = 0.0
    skipped: str = ""

    @property
    def gap(self) -> float:
        """How far above its bound its cost may lie, relative to the cost."""
        if self.cost is None or self.bound is None:
            return math.inf
        return (self.cost - self.bound) / max(abs(self.cost), 1e-12)

    @property
    def proven(self) -> bool:
        """Whether it says that nothing costs less; costs are whole numbers."""
        return self.cost is not None and self.bound is not None and self.cost - self.bound < 1 - 1e-6


# -- The solvers -------------------------------------------------------------------------------------------------------

Result = tuple[float | None, float | None]  # cost and bound


def ours(problem: Problem, seconds: float) -> Result:
    """Partway's."""
    found = solve(problem.costs, resources=problem.resources, seconds=seconds)
    return found.cost, found.bound


def toulbar2(problem: Problem, seconds: float) -> Result:
    """toulbar2 with what it does unasked: hybrid best-first search with existential directional arc consistency."""
    from pytoulbar2 import CFN

    costs = problem.costs
    most = 1 + sum(_largest(array) for array in (*costs.unary, *costs.pairs.values()))
    model = CFN(most, resolution=0)
    for v, own in enumerate(costs.unary):
        model.AddVariable(f"x{v}", range(len(own)))
        model.AddFunction([v], np.where(np.isfinite(own), own, most).tolist())
    for ends, table in costs.pairs.items():
        model.AddFunction(list(ends), np.where(np.isfinite(table), table, most).ravel().tolist())
    found = model.Solve(timeLimit=math.ceil(seconds))
    return (found[1], min(model.GetDDualBound(), found[1])) if found else (None, model.GetDDualBound())


def highs(problem: Problem, seconds: float) -> Result:
    """The integer program: one of the options of each vertex; of the pairs of options of each table one, which agrees
    with both."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    costs = problem.costs
    firsts = np.cumsum([0, *(len(own) for own in costs.unary)])
    weights, rows, columns, values = [np.concatenate(costs.unary)], [], [], []
    for v, first in enumerate(firsts[:-1]):
        for i in range(len(costs.unary[v])):
            rows.append(v), columns.append(first + i), values.append(1.0)
    row, column = len(costs.unary), int(firsts[-1])
    for (a, b), table in costs.pairs.items():
        seats = np.arange(table.size).reshape(table.shape) + column
        for v, lines in ((a, seats), (b, seats.T)):
            for i, line in enumerate(lines):
                rows += [row] * (len(line) + 1)
                columns += [*line.tolist(), firsts[v] + i]
                values += [1.0] * len(line) + [-1.0]
                row += 1
        weights.append(table.ravel())
        column += table.size
    weight = np.concatenate(weights)
    upper = np.where(np.isfinite(weight), 1.0, 0.0)
    right = np.concatenate([np.ones(len(costs.unary)), np.zeros(row - len(costs.unary))])
    constraints = [LinearConstraint(sparse.csr_matrix((values, (rows, columns)), shape=(row, column)), right, right)]
    for limited in problem.resources:
        use = np.concatenate([*limited.uses, np.zeros(column - firsts[-1])])
        constraints.append(LinearConstraint(use[None], -np.inf, limited.limit))
    whole = np.arange(column) < firsts[-1]
    found = milp(
        np.where(np.isfinite(weight), weight, 0.0), integrality=whole.astype(int), bounds=Bounds(0.0, upper),
        constraints=constraints, options={"time_limit": seconds, "mip_rel_gap": 1e-7},
    )  # fmt: skip
    return (None if found.fun is None else float(found.fun)), found.mip_dual_bound


SOLVERS: Mapping[str, Callable[[Problem, float], Result]] = {"ours": ours, "toulbar2": toulbar2, "HiGHS": highs}
NEEDS = {"toulbar2": "pytoulbar2", "HiGHS": "scipy"}


def _largest(array: Any) -> float:
    return float(array[np.isfinite(array)].max(initial=0.0))


def _unable(solver: str, case: Case) -> str:
    """Why a solver does not take a case."""
    if solver in NEEDS and importlib.util.find_spec(NEEDS[solver]) is None:
        return f"{NEEDS[solver]} is not installed"
    if solver == "toulbar2" and case.resources:
        return "no limits"
    pairs = sum(table.size for table in drawn(case).costs.pairs.values()) if solver == "HiGHS" else 0
    return f"{pairs} pairs of options" if pairs > MANY_VARIABLES else ""


# -- One run, in a process of its own ----------------------------------------------------------------------------------


def _run_here(number: tuple[str, int], solver: str, seconds: float) -> Run:
    case = CASES[number[0]][number[1]]
    if reason := _unable(solver, case):
        return Run(skipped=reason)
    problem = drawn(case)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    cpu, wall = time.process_time(), time.perf_counter()
    cost, bound = SOLVERS[solver](problem, seconds)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Run(cost, bound, cpu, wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def run(group: str, number: int, solver: str, seconds: float) -> Run:
    """One solver on one case."""
    command = [sys.executable, __file__, "--one", f"{group},{number},{solver}", "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * seconds + SLACK, check=False)
    except subprocess.TimeoutExpired:
        return Run(skipped="out of time")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Run(skipped="out of memory" if "MemoryError" in lines[-1] or done.returncode < 0 else lines[-1])
    return Run(**json.loads(done.stdout.splitlines()[-1]))


# -- All runs ----------------------------------------------------------------------------------------------------------


def misses(group: str, runs: Mapping[str, Run]) -> list[str]:
    """What ours misses beside the judges."""
    own, found = runs["ours"], []
    if own.cost is None or own.bound is None:
        return [own.skipped or "nothing found"]
    for name, judge in runs.items():
        if name == "ours" or judge.skipped:
            continue
        if judge.cost is not None and own.bound > judge.cost + 1e-6 * abs(judge.cost):
            found.append(f"bound above the cost of {name}")
        if judge.bound is not None and own.cost < judge.bound - 1e-6 * abs(judge.bound):
            found.append(f"cost below the bound of {name}")
    judge = runs.get("toulbar2", Run(skipped="not asked"))
    if group == "random" and judge.proven and not (own.proven and own.cpu <= max(judge.cpu, QUICKLY)):
        found.append("slower than toulbar2" if own.proven else "not proven")
    judge = runs.get("HiGHS", Run(skipped="not asked"))
    if group == "resources" and judge.proven and judge.cost is not None:
        far = own.cost > judge.cost * (1 + WITHIN)
        if far or own.gap > WITHIN:
            found.append(f"gap over {100 * WITHIN:g} %")
    return found


def _said(runs: Mapping[str, Run]) -> str:
    """Figures of one case in a line."""
    said = []
    for name, one in runs.items():
        gap = "proven" if one.proven else f"gap {100 * one.gap:.2g} %"
        figures = f"{one.cost} {gap} {one.cpu:.2f} CPU s {one.peak / 1e6:.0f} MB"
        said.append(f"{name} {one.skipped or ('found none' if one.cost is None else figures)}")
    return "; ".join(said)


def _cells(case: Case, runs: Mapping[str, Run], missed: Sequence[str]) -> list[str]:
    cells = [case.name]
    for one in runs.values():
        if one.skipped or one.cost is None:
            cells += [one.skipped or "none found", "", "", ""]
        else:
            gap = "proven" if one.proven else f"{100 * one.gap:.2g} %"
            cells += [f"{one.cost:.0f}", gap, f"{one.cpu:.2f}", f"{one.peak / 1e6:.0f}"]
    return [*cells, ", ".join(missed) or "holds"]


def main(
    group: Annotated[str, typer.Option(help=f"which problems: {', '.join(CASES)}; all of them if left out")] = "",
    only: Annotated[str, typer.Option(help="run the cases whose name contains this")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="problems of at most 500 vertices, 5 seconds each")] = False,
    seconds: Annotated[float, typer.Option(help="that each solver has for each problem")] = 30.0,
    solvers: Annotated[str, typer.Option(help="which ones, ours among them")] = ",".join(SOLVERS),
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/min_sum.json"),
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run the cases, print a row for each, and exit with status 1 if one misses its bar."""
    if one:
        where, number, solver = one.split(",")
        print(json.dumps(asdict(_run_here((where, int(number)), solver, seconds))))
        return
    seconds = min(seconds, 5.0) if quick else seconds
    figures, failed = [], 0
    for name, cases in CASES.items():
        if group not in ("", name):
            continue
        table = Table(title=f"{name}: CPU seconds and MB of {seconds:g} s", box=SIMPLE_HEAD, title_justify="left")
        table.add_column("case", no_wrap=True)
        for solver in solvers.split(","):
            for column in (solver, "gap", "CPU s", "MB"):
                table.add_column(column, justify="right", no_wrap=True)
        table.add_column("")
        for number, case in enumerate(cases):
            if only not in case.name or (quick and case.nodes > 500):
                continue
            runs = {solver: run(name, number, solver, seconds) for solver in solvers.split(",")}
            missed = misses(name, runs)
            failed += bool(missed)
            print(f"{case.name}: {_said(runs)}: {', '.join(missed) or 'holds'}", file=sys.stderr, flush=True)
            table.add_row(*_cells(case, runs, missed))
            figures.append({"group": name, "case": asdict(case), "runs": {k: asdict(r) for k, r in runs.items()},
                            "misses": missed})  # fmt: skip
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(figures, indent=1) + "\n")
        Console(width=200).print(table)
    print(f"{len(figures) - failed} of {len(figures)} cases hold; wrote {out}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    start(main)
