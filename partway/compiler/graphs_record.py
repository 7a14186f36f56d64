"""The record of one planned call: listens to the passes and, on request, writes `str()` of the result of each.

Each call has its own folder, such as `rank_0/000_Net.forward`. Folders are always new, so that no file is overwritten
and no link is followed: if `rank_0` exists, a new process uses `rank_0.1`.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch import fx

from partway.compiler.graphs_asked import asked
from partway.compiler.passes import Around, Draft, Pass, applied
from partway.propagation.capture import capture
from partway.propagation.graph.port import Port
from partway.propagation.graph.printer import calls_in, named, text_of
from partway.propagation.plan import report
from partway.propagation.plan.plan import Plan
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.program import Program
from partway.runtime.launching.job import JOB
from partway.runtime.launching.launchers import launch
from partway.strategy import RuntimeStateError
from partway.strategy.basics.files import reason
from partway.strategy.notation import counted

HEAD = "partway graphs 2"  # the first words of an index
INDEX, PLAN, ERROR = "index.txt", "plan.json", "error"
_MAIN = ("trace", "prune", "lower", "make_plan", "fuse", ERROR)  # the passes of level 1
_LOADED = "loaded from the cache: "


class Record:
    """Listens to the passes of one call. `folder`: for the files, None for no files; `level`: see `asked`."""

    def __init__(self, folder: Path | None = None, level: int = 0) -> None:
        self.hears = folder is not None  # a capture that is loaded has no passes
        self._folder, self._level = folder, level
        self._count = itertools.count()
        self._known: tuple[int, Counter[str]] = (0, Counter())  # of the last graph: its text, hashed, and operators
        self._made_plan = self._planned = False
        self._write(INDEX, f"{HEAD}, level {level}: {folder.name if folder else ''}\n")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block that contains all of planning, to record its error."""
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self.left(ERROR, lambda: said)
            raise

    def capturing(self, each: capture.Pass, module: fx.GraphModule, inputs: Sequence[Port]) -> None:
        """Run a pass of capture, which changes `module` in place, and record its result."""
        if not self._known[0]:
            self.left("trace", lambda: text_of(module.graph, named(inputs)))
        capture.applied(each, module, inputs)
        self.left(each.__name__, lambda: text_of(module.graph, named(inputs)))

    def planning(self, around: Around) -> Around:
        """`around` for the passes of PLANNING, and records their results."""

        def heard(each: Pass, draft: Draft) -> Draft:
            if self._planned:  # a later search, for an explanation
                return around(each, draft)
            try:
                after = around(each, draft)
            except Exception as error:  # there may be other meshes
                said = f"{type(error).__name__}: {error}"
                self.left(each.name, lambda: said, f"on {draft.mesh}: ")
                raise
            text = report.text if each.makes == "plan" else str  # printing a plan shows less
            self.left(each.name, lambda: text(getattr(after, each.makes)), f"on {draft.mesh}: ")
            self._made_plan = self._made_plan or each.makes == "plan"
            return after

        return heard if self.hears else around

    def planned(self, plan: Plan, local: Program) -> None:
        """Record the plan of the call, whether made or loaded."""
        if not self.hears:
            return
        self._planned = True
        if not self._made_plan:
            self.left("lower", lambda: str(local), _LOADED)
            self.left("make_plan", lambda: report.text(plan), _LOADED)
        with self._unharmed():
            self._write(PLAN, plan.model_dump_json(indent=1) + "\n")

    def of_program(self, name: str) -> ProgramRecord:
        """The record of the passes of one program; `name`: "" for that of a usual call."""
        return ProgramRecord(self, name)

    def left(self, name: str, text: Callable[[], str], note: str = "") -> None:
        """Record that the pass `name` made a value with this text: note the changes, and write it if the level asks
        for it."""
        with self._unharmed():
            if self._folder is None:
                return
            written, file = text(), f"{next(self._count):03d}_{name}"
            changed = self._changed(name, written)
            if name.rpartition(".")[2] in _MAIN or (self._level > 1 and changed):
                self._write(file := f"{file}.txt", written + "\n")
            self._write(INDEX, f"{file:<28}  {note}{changed or 'nothing changed'}\n", "a")

    def _changed(self, name: str, text: str) -> str:
        """The changes by a pass: the operators added to and removed from a graph; of other values the first line."""
        (known, before), after = self._known, calls_in(text)
        if name == "make_plan" or not after:
            return text.partition("\n")[0]
        self._known = hash(text), after
        if self._known[0] == known:
            return ""
        signed = {"-": before - after, "+": after - before} if before else {}
        what = ", ".join(f"{sign}{n} {name}" for sign, counts in signed.items() for name, n in counts.most_common())
        return counted(after.total(), "operator") + (f": {what}" if what else "")

    def _write(self, name: str, text: str, mode: str = "x") -> None:
        if self._folder is not None:
            with open(self._folder / name, mode, encoding="utf-8") as file:
                file.write(text)

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """A block whose exceptions become warnings. If a file cannot be written, no other one is tried."""
        try:
            yield
        except Exception as error:  # a graph that cannot be printed must not stop training
            assert self._folder is not None
            _warn(self._folder, error)
            self._folder = None if isinstance(error, OSError) else self._folder


class ProgramRecord:
    """Listens to the passes of one program. `name`: the prefix of its files."""

    def __init__(self, record: Record, name: str) -> None:
        self._record, self._prefix, self._note = record, name and f"{name}.", _LOADED

    def around(self, each: Pass, draft: Draft) -> Draft:
        """Run a pass and record its result."""
        after = applied(each, draft)
        self._note = ""
        if each.name != "fuse":  # it may make one of several programs, which `made` records together
            self._record.left(self._prefix + each.name, lambda: str(after.program))
        return after

    def made(self, made: Program | Accumulation | None) -> None:
        """Record the result of the passes, whether made or loaded."""
        if made is not None:
            self._record.left(f"{self._prefix}fuse", lambda: str(made), self._note)


def record(name: str) -> Record:
    """The record of the next call, of the function `name`, by the environment. Raises ContextError for variables with
    invalid values."""
    if (wanted := asked()) is None or ((rank := _own_rank()) and not wanted.every_rank):
        return Record()
    try:
        return Record(_call_folder(wanted.folder / f"rank_{rank}", name), wanted.level)
    except OSError as error:
        _warn(wanted.folder, error)
        return Record()


def _own_rank() -> int:
    """The rank of this process; before the process group exists, that by its launcher."""
    if dist.is_initialized():
        return dist.get_rank()
    with suppress(RuntimeStateError):  # others report it
        return (found.rank or 0) if (found := launch()) else 0
    return 0


def _call_folder(path: Path, name: str) -> Path:
    """A new folder for the next call of this process, in the folder `path` or, if that exists, in a new one beside
    it."""
    with JOB.lock:
        key = os.getpid(), path
        if key not in JOB.folders or not JOB.folders[key][0].is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                folder = path.with_name(f"{path.name}.{number}") if number else path
                with suppress(FileExistsError):
                    folder.mkdir()
                    break
            JOB.folders[key] = folder, itertools.count()
        folder, numbers = JOB.folders[key]
        call = folder / (f"{next(numbers):03d}_" + re.sub(r"[^\w.-]+", "_", name)[:80])
        call.mkdir()
        return call


def _warn(where: Path, error: Exception) -> None:
    """Warn that graphs cannot be saved."""
    why = reason(error) if isinstance(error, OSError) else f"{error!r:.300}"
    warnings.warn(
        f"graphs cannot be saved in {where} ({why}); planning goes on. Set PARTWAY_SAVE_GRAPHS_PATH to a folder that "
        "can be written, or unset PARTWAY_SAVE_GRAPHS",
        stacklevel=2,
    )
