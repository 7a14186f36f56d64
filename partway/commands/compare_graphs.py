"""`partway diff`: the differences of two planned calls, by the saved texts of their passes.

Texts are compared operator by operator: a line with those indented below it. Locations in the source are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from partway.compiler.graphs_record import ERROR, HEAD, INDEX, PLAN
from partway.propagation.graph.printer import operators_in
from partway.propagation.plan.plan import Plan
from partway.propagation.plan.report import text
from partway.strategy.basics.files import read
from partway.strategy.errors import StrategyError, shown

_PLAN: tuple[str, int] = ("make_plan", 0)  # a name, and how many files of that name come before
_NAMED = 6  # operators that a verdict names
_RANK = re.compile(r"rank_(\d+)(?:\.(\d+))?")
_WANTED = (
    "give a folder that PARTWAY_SAVE_GRAPHS has written (that of PARTWAY_SAVE_GRAPHS_PATH, a rank's or a call's), or a "
    "file that plan.save has written"
)


@dataclass(frozen=True)
class SavedCall:
    """A planned call. `path`: its folder, or the file of its plan; `head`: the first words of its folder's index."""

    path: Path
    head: str = ""

    @property
    def plan(self) -> Plan:
        """Its plan. Raises StrategyError if there is none."""
        if self.head and (failed := self.texts().get((ERROR, 0))):
            why = failed.partition("\n")[0]
            raise StrategyError(f"the call in {shown(str(self.path))} has no plan, since planning it failed: {why}")
        return Plan.load(self.path / PLAN if self.head else self.path)

    def texts(self) -> dict[tuple[str, int], str]:
        """The text after each pass, in order. Raises StrategyError for a file that cannot be read."""
        files = sorted(self.path.glob("[0-9]*_*.txt"))
        keys = _numbered(file.stem for file in files)
        return {key: read("a graph from", file).decode(errors="replace") for key, file in zip(keys, files, strict=True)}


def saved_calls(path: Path) -> list[SavedCall]:
    """The calls at `path`, in order: one for a plan's file or a call's folder; for a run, those of its first rank's
    last process. Raises StrategyError if there are none."""
    if path.is_file():
        return [SavedCall(path)]
    if not path.is_dir():
        raise StrategyError(f"there is nothing at {shown(str(path))}; {_WANTED}")
    ranks = {(int(f[1]), -int(f[2] or 0)): f[0] for each in path.iterdir() if (f := _RANK.fullmatch(each.name))}
    of_rank = path / ranks[min(ranks)] if ranks else path
    found = [path / INDEX] if (path / INDEX).is_file() else of_rank.glob(f"[0-9]*_*/{INDEX}")
    folders = sorted((index.parent for index in found), key=lambda call: (len(call.name.partition("_")[0]), call.name))
    if not folders:
        raise StrategyError(f"{shown(str(path))} holds no graphs that Partway saved; {_WANTED}")
    return [SavedCall(folder, _head(folder / INDEX)) for folder in folders]


def _head(index: Path) -> str:
    head = read("an index from", index).decode(errors="replace").partition(":")[0]
    if not head.startswith(f"{HEAD}, level "):
        raise StrategyError(f"{shown(str(index))} is of another version of Partway; save the graphs again")
    return head


def _numbered(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each name without its leading number, with the count of its earlier occurrences."""
    counts = Counter[str]()
    for name in (name.partition("_")[2] for name in names):
        yield name, counts[name]
        counts[name] += 1


def compared(a: Sequence[SavedCall], b: Sequence[SavedCall], rows: int = 20) -> tuple[bool, str]:
    """Whether the calls of two runs are the same, and their differences, with the first `rows` lines of each pass (0:
    all). The first call of a name in A is compared with the first in B, and so on; if both runs have one call, names
    are ignored."""
    if len(a) == len(b) == 1:
        return _compared(a[0], b[0], rows)
    ours, theirs = (dict(zip(_numbered(call.path.name for call in side), side, strict=True)) for side in (a, b))
    found = [_compared(ours[key], theirs[key], rows) for key in ours if key in theirs]
    alone = [f"only A has {call.path.name}" for key, call in ours.items() if key not in theirs]
    alone += [f"only B has {call.path.name}" for key, call in theirs.items() if key not in ours]
    same, every = sum(same for same, _ in found), len(found) + len(alone)
    lines = [*(f"{said}\n" for _, said in found), *alone, f"{same} of {every} calls are the same"]
    return same == every, "\n".join(lines)


def _compared(a: SavedCall, b: SavedCall, rows: int) -> tuple[bool, str]:
    # a plan's file has only the plan, and level 1 saves fewer passes than level 2
    ours, theirs = (call.texts() if a.head and b.head else {_PLAN: text(call.plan)} for call in (a, b))
    lines, verdict = [f"A  {a.path}", f"B  {b.path}", ""], ""
    for key in ours | theirs:
        if a.head != b.head and (key not in ours or key not in theirs):
            continue
        if changed := differences(ours.get(key, ""), theirs.get(key, "")):
            verdict = verdict or f"they differ first in what {key[0]} left"
            if rows and len(changed) > rows:
                changed[rows:] = [f"... and {len(changed) - rows} more lines; --rows 0 shows all"]
            lines += [key[0], *(f"  {line}" for line in changed), ""]
    if names := strategies(ours.get(_PLAN, ""), theirs.get(_PLAN, "")):
        verdict += f"; another strategy: {', '.join(names[:_NAMED])}" + f" and {len(names) - _NAMED} more" * (
            len(names) > _NAMED
        )
    return not verdict, "\n".join([*lines, verdict or "the plans are the same"])


def differences(a: str, b: str) -> list[str]:
    """The operators that differ in two texts, with "-" before those of the first and "+" before those of the second."""
    found = list(unified_diff(operators_in(a), operators_in(b), n=0, lineterm=""))[2:]  # without a head
    return [line for each in found if not each.startswith("@@") for line in each.splitlines()]


def strategies(a: str, b: str) -> list[str]:
    """The operators in both of two plans' texts that have different strategies."""
    ours, theirs = (dict(re.findall(r"^(\S+): .*\n    # (splits .*?);", of, re.MULTILINE)) for of in (a, b))
    return [name for name, strategy in ours.items() if theirs.get(name, strategy) != strategy]
