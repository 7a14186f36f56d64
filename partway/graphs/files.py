"""The files of one call: pages and an index, in the folder of each rank that is saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partway.graphs.asked import Asked, Level
from partway.graphs.figures import Figures, changes
from partway.graphs.folders import same_call
from partway.graphs.index import DATA, TEXT, Index, Row
from partway.graphs.stages import Stage
from partway.graphs.text import Page
from partway.strategy.files import write_whole
from partway.strategy.notation import counted

NOTHING_CHANGED = "nothing"


class CallFiles:
    """The files of one call.

    wanted     what the environment asks for
    folders    by rank
    simulates  this process stands for all ranks, and each is to get its files
    """

    def __init__(self, wanted: Asked, folder: Path, rank: int, simulates: bool = False) -> None:
        self.wanted, self.folders, self.simulates = wanted, {rank: folder}, simulates
        self._index = Index(call=folder.name, level=wanted.level)
        self._rows: list[Row] = []
        self._texts: dict[str, str] = {}  # of the files so far; empty where no other rank will want them
        self._ended = False

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """What goes wrong in the block is a warning. Where a file cannot be written, no other is tried."""
        try:
            yield
        except Exception as error:  # a graph that cannot be shown is no reason not to train
            warn(next(iter(self.folders.values())), error)
            self._ended = self._ended or isinstance(error, OSError)

    def write(self, name: str, content: str) -> None:
        """Write a file for every rank."""
        self._texts[name] = content if self.simulates else ""
        for rank in self.folders:
            self.write_for(rank, name, content)

    def write_for(self, rank: int, name: str, content: str) -> None:
        """Write a file that is this rank's own."""
        path = self.folders[rank] / name
        if not self._ended:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, content)

    def save(self, stage: Stage, page: Page, detail: str = "", inside: str = "") -> str:
        """Write what a stage shows, if the level asks for it: `detail` of it, in the folder `inside`. The name of the
        file, or ""."""
        if self.wanted.level < stage.level:
            return ""
        stem = first = f"{inside}{stage.name}{detail and '.'}{detail}"
        number = 1
        while f"{stem}.txt" in self._texts:  # a search is repeated with other settings
            number += 1
            stem = f"{first}_{number}"
        self.write(f"{stem}.txt", "\n".join([*stage.head(), "", *page.lines()]) + "\n")
        if self.wanted.level >= Level.PICTURES and (picture := page.picture()):
            self.write(f"{stem}.dot", picture)
        return f"{stem}.txt"

    def spread(self, count: int) -> None:
        """There are `count` ranks: where this process simulates them, each gets what there is, and what will be."""
        if not self.simulates:
            return
        for rank in range(1, count):
            self.folders[rank] = same_call(self.wanted.folder, rank, self._index.call)
            for name, content in self._texts.items():
                self.write_for(rank, name, content)
        self.simulates, self._texts = False, dict.fromkeys(self._texts, "")

    def add(self, row: Row) -> int:
        """Note what a pass did. The number of the row."""
        self._rows.append(row)
        return len(self._rows) - 1

    def shown_in(self, row: int, file: str) -> None:
        """Note in which file stands what a pass made."""
        self._rows[row] = self._rows[row].model_copy(update={"file": file})

    def tell(self, **fields: Any) -> None:
        """Note what the index says of all passes."""
        self._index = self._index.model_copy(update=fields)

    def write_index(self) -> None:
        """Write the index as far as it is known."""
        index = self._index.model_copy(update={"rows": tuple(self._rows)})
        self.write(TEXT, index.text())
        self.write(DATA, index.model_dump_json(indent=1) + "\n")


class Series:
    """What passes left of one stage, one after another. The last is shown under the name of the stage, those before it
    with the name of the pass that left them."""

    def __init__(self, files: CallFiles, stage: Stage, inside: str = "") -> None:
        self._files, self._stage, self._inside = files, stage, inside
        self._now: tuple[str, int, Page] | None = None
        self._passes = 0

    @property
    def empty(self) -> bool:
        """Whether no pass has left anything yet."""
        return self._now is None

    def left(self, name: str, row: int, page: Page) -> None:
        """The pass `name`, noted in `row`, has changed what there is."""
        if self._now is not None:
            before, its, old = self._now
            if self._files.wanted.level >= Level.PASSES:
                detail = f"{self._passes}_{before}"
                self._files.shown_in(its, self._files.save(self._stage, old, detail, self._inside))
        self._passes += 1
        self._now = name, row, page

    def end(self) -> None:
        """No pass will change it."""
        if self._now is not None:
            _, row, page = self._now
            self._files.shown_in(row, self._files.save(self._stage, page, inside=self._inside))
            self._now = None


def row_of(name: str, before: Figures, after: Figures, seconds: float | None, file: str = "") -> Row:
    """What a pass did that found `before` and left `after`."""
    changed = changes(before, after) if before.operators else counted(after.nodes, "operator")
    return Row(
        file=file, name=name, before=before.nodes, nodes=after.nodes, collectives=after.collectives,
        wire_bytes=after.wire_bytes, seconds=seconds, changed=changed or NOTHING_CHANGED,
    )  # fmt: skip


def warn(where: Path, error: Exception) -> None:
    """Say that graphs cannot be saved."""
    told = isinstance(error, OSError) and error.strerror
    reason = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and told else f"{error!r:.300}"
    warnings.warn(
        f"graphs cannot be saved in {where} ({reason}); planning goes on. Set PARTWAY_SAVE_GRAPHS_PATH to a folder "
        "that can be written, or unset PARTWAY_SAVE_GRAPHS",
        stacklevel=2,
    )
