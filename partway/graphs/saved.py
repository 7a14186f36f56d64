"""What was saved of planned calls, read again: folders of PARTWAY_SAVE_GRAPHS, and files of `plan.save`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from partway.graphs.folders import CALLS, HEAD
from partway.graphs.index import DATA, PLAN, Index
from partway.propagation.plan.plan import Plan
from partway.strategy.errors import StrategyError, shown
from partway.strategy.files import first_problem, json_of, read


@dataclass(frozen=True)
class SavedCall:
    """A planned call. `path`: where it was read; `index`: of a folder; `plan`: None where planning failed."""

    path: Path
    index: Index | None
    plan: Plan | None

    @property
    def name(self) -> str:
        """The name without the number of the call."""
        return re.sub(r"^\d+_", "", self.path.name)


def saved_calls(path: Path) -> list[SavedCall]:
    """The calls at `path`, in order: of a plan's file and of a call's folder one, of a run those of its first rank.
    Raises StrategyError where there are none."""
    if path.is_file():
        return [SavedCall(path, None, Plan.load(path))]
    if not path.is_dir():
        raise StrategyError(f"there is nothing at {shown(str(path))}; {_WANTED}")
    if (path / DATA).is_file():
        return [_of_folder(path)]
    ranks = [folder for folder in path.glob("rank_*") if re.fullmatch(r"rank_\d+", folder.name)]
    of_rank = min(ranks, key=lambda folder: int(folder.name[5:]), default=path)
    if not (of_rank / CALLS).is_file():
        raise StrategyError(f"{shown(str(path))} holds no graphs that Partway saved; {_WANTED}")
    head, _, calls = read("the calls in", of_rank / CALLS).decode(errors="replace").partition("\n")
    if not head.startswith(f"{HEAD}:"):
        raise StrategyError(f"{shown(str(of_rank / CALLS))} is of another version of Partway; save the graphs again")
    return [_of_folder(of_rank / call) for call in calls.splitlines()]


_WANTED = (
    "give a folder that PARTWAY_SAVE_GRAPHS has written (that of PARTWAY_SAVE_GRAPHS_PATH, a rank's or a call's), or a "
    "file that plan.save has written"
)


def _of_folder(path: Path) -> SavedCall:
    where = shown(str(path / DATA))
    try:
        data = read("an index from", path / DATA)
        json_of(data)
        index = Index.model_validate_json(data, strict=True)
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else f"it {error}"
        raise StrategyError(f"{where} is no index of this version of Partway ({why}); save the graphs again") from error
    return SavedCall(path, index, None if index.failed else Plan.load(path / PLAN))
