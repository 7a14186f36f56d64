"""`save`: write a checkpoint of a model, an optimizer and further values of a script."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partway.checkpoints import folder as folders
from partway.checkpoints.contents import MODEL, OPTIMIZER, VALUES, Content, content_of, packed
from partway.checkpoints.manifest import MANIFEST, Manifest, parts_file, state_file
from partway.checkpoints.progress import progress
from partway.checkpoints.ranks import Ranks
from partway.checkpoints.tensor_files import SUFFIX, Slices, TensorFile, arrange, create, synchronize, write_part
from partway.options import current
from partway.runtime import Fact, agree, launched
from partway.runtime.launching import before_shutdown
from partway.runtime.ranks import differing
from partway.strategy import RuntimeStateError, shown
from partway.strategy.basics import write_whole

_LISTED = 8  # tensors that an error lists
LARGEST = 5 * 10**9  # bytes of a file, as in Hugging Face's format
Part = tuple[str, str, Slices, Tensor]  # the stem of its files, the name of its tensor, its slices, the data


class Saving:
    """A checkpoint that is being written while the training goes on."""

    def __init__(self, run: Any) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False  # the error was raised
        self._thread = threading.Thread(target=self._run, args=(run,), name="partway save")
        self._thread.start()

    def _run(self, run: Any) -> None:
        try:
            self._path = run()
        except BaseException as error:  # raised by wait
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is complete, and return its path. Raises the error that made it fail."""
        self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error
        assert self._path is not None
        return self._path

    def end(self) -> None:
        """Wait, and raise the error that made it fail if nobody has seen it."""
        self._thread.join()
        if not self._told:
            self.wait()


_running: Saving | None = None


@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    keep: int | None = None,
    asynchronous: Literal[False] = False,
    **state: Any,
) -> Path: ...
@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    keep: int | None = None,
    asynchronous: Literal[True],
    **state: Any,
) -> Saving: ...
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    **state: Any,
) -> Path | Saving:
    """Write a checkpoint into the folder `path`, from which `load` continues: on any mesh, with any number of
    processes, on virtual devices, or without Partway.

    model          sharded or not; its weights go to safetensors files, whole, in Hugging Face's format
    optimizer      an optimizer of its parameters, or several
    keep           how many checkpoints to keep in the folder, the last ones; None: all
    asynchronous   True: the tensors are copied (to the CPU), and written while the training goes on. Returns a
                   `Saving`, whose `wait()` ends when the checkpoint is complete; the next `save`, `shutdown` and the
                   end of the program wait for it, too
    state          further values to keep: numbers, texts, tensors, lists and dicts of them, or an object with a
                   state_dict() (a scheduler, a GradScaler, a StatefulDataLoader); if ranks differ, each one's is kept

    The states of the random generators are always kept. Under a launcher every rank calls it; the folder must be
    visible to all of them. Returns the path of the checkpoint, `path`/checkpoint-000001 and so on: it appears as a
    whole or not at all, even after a crash at any moment.

    Raises RuntimeStateError if a value cannot be kept or written, and if ranks that hold the same part of a tensor have
    different values of it, unless compare_replicas=False accepts any of them; earlier checkpoints stay as they are.
    """
    check(path, model, keep)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    wait()
    folder = Path(path).absolute()
    if launched():
        names = ", ".join([*model.state_dict(keep_vars=True), *state])
        facts = [Fact("the folder", str(folder)), Fact("what is kept", names), Fact("keep", str(keep))]
        agree(f"save a checkpoint in {folder}", facts)
    ranks = Ranks()
    content = ranks.each("keep what it has", lambda: content_of(model, optimizers, state, ranks.size, ranks.rank))
    check_alike(content, ranks)
    if not asynchronous:
        return _write(content, folder, keep, ranks)
    content = content.copied()
    return in_background(lambda: _write(content, folder, keep, ranks))


_WHOSE = {MODEL: "", OPTIMIZER: "the optimizer's ", VALUES: "the state's "}


def check_alike(content: Content, ranks: Ranks) -> None:
    """Raise RuntimeStateError, on every rank, unless ranks that hold the same part of a tensor have the same values,
    and all have the same settings of optimizers: a checkpoint has those of one of them."""
    if ranks.size == 1 or current().look_every is None:
        return
    copies = {
        f"{_WHOSE[stem]}{name}": (kept.holders, kept.part)
        for stem, group in content.tensors.items()
        for name, kept in group.items()
    }
    every = tuple(range(ranks.size))
    copies |= {
        f"the settings of {name}": (every, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for name, data in content.values.items()
        if name.startswith(f"{OPTIMIZER}.")
    }
    where = "compare what the ranks hold"
    if found := differing(copies, lambda own: ranks.together(where, lambda: own)):
        lines = [f"  - {name}: rank {rank} has other values than rank {first}" for name, first, rank in found]
        more = [f"  - and {len(lines) - _LISTED} more"] if lines[_LISTED:] else []
        raise RuntimeStateError(
            "the ranks do not hold the same, and what is saved would be what one of them holds; see what only one of "
            "them did, or set compare_replicas=False to save it as it is:\n" + "\n".join([*lines[:_LISTED], *more])
        )


def in_background(run: Callable[[], Path]) -> Saving:
    """Write a checkpoint on another thread; the next one, `shutdown` and the end of the program wait for it."""
    global _running  # noqa: PLW0603 - one at a time
    _running = Saving(run)
    before_shutdown(wait)
    _at_exit()
    return _running


def wait() -> None:
    """Wait for the checkpoint that is written during the training, if there is one. Raises the error that made it fail,
    once."""
    global _running
    if _running is not None:
        waited, _running = _running, None
        waited.end()


@functools.cache
def _at_exit() -> None:
    atexit.register(wait)  # Python prints its error


def check(path: Any, model: Any, keep: Any) -> None:
    """Raise RuntimeStateError for invalid arguments of `save`."""
    folders.check_path(path)
    if not isinstance(model, nn.Module):
        raise RuntimeStateError(f"model is {shown(model)}; it must be an nn.Module")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise RuntimeStateError(f"keep is {shown(keep)}; it is how many checkpoints to keep, an int of 1 or more")
    if os.path.lexists(path) and not Path(path).is_dir():
        what = "a file" if Path(path).exists() else "a link to what is not there"
        raise RuntimeStateError(f"{path} is {what}; checkpoints are saved into a folder")
    if (Path(path) / MANIFEST).exists():
        raise RuntimeStateError(f"{path} is a checkpoint; give the folder that contains it, to add another one")


def _write(content: Content, folder: Path, keep: int | None, ranks: Ranks) -> Path:
    where = f"write a checkpoint in {folder}"
    with ExitStack() as held:
        fresh = ranks.first(where, lambda: held.enter_context(folders.begun(folder)))
        files = {
            stem: arrange({name: (kept.dtype, kept.shape) for name, kept in group.items()}, stem, LARGEST)
            for stem, group in content.tensors.items()
        }
        ranks.first(where, lambda: create_files(fresh, files))
        digests = ranks.together(where, lambda: write_parts(content, fresh, files, ranks.rank))
        differ = {name for name in digests[0] if len({digest[name] for digest in digests}) > 1}
        ranks.together(where, lambda: write_values(content.values, differ, fresh, ranks.rank))
        return ranks.first(where, lambda: complete(content, fresh, files, differ, keep, ranks.size))


def create_files(fresh: Path, files: Mapping[str, Mapping[str, TensorFile]]) -> None:
    """Create all files of tensors, with their headers."""
    for group in files.values():
        create(fresh, group)


def write_parts(
    content: Content,
    fresh: Path,
    files: Mapping[str, Mapping[str, TensorFile]],
    rank: int,
    others: Iterable[Part] = (),
    size: int = 0,
) -> dict[str, str]:
    """Write this process's parts, and their checksums. Returns a digest of each value that it would keep.

    others, size    further parts, and their size in bytes; an iterator may make each when its turn comes
    """
    mine = [(stem, n, kept) for stem, group in content.tensors.items() for n, kept in group.items() if kept.writes]
    places = {stem: {n: p for file in group.values() for n, p in file.places.items()} for stem, group in files.items()}
    parts, written = [], set()
    with progress("saving", sum(kept.part.nbytes for *_, kept in mine) + size, rank) as report:
        for stem, name, slices, part in chain(((s, n, kept.slices, kept.part) for s, n, kept in mine), others):
            checksum = write_part(fresh, places[stem][name], slices, part, report)
            parts.append([stem, name, [[s.start, s.stop] for s in slices], checksum])
            written.add(places[stem][name].file)
    write_whole(fresh / parts_file(rank), json.dumps(parts))
    synchronize(fresh, sorted(written))
    return {name: hashlib.sha256(data).hexdigest() for name, data in content.values.items()}


def write_values(values: Mapping[str, bytes], differ: set[str], fresh: Path, rank: int) -> None:
    """Write the values: rank 0 all, the others their differing ones."""
    own = {name: data for name, data in values.items() if rank == 0 or name in differ}
    if own:
        file = state_file(rank)
        write_whole(
            fresh / file,
            packed("the state", {name: torch.frombuffer(bytearray(d), dtype=torch.uint8) for name, d in own.items()}),
        )
        synchronize(fresh, [file])


def write_index(folder: Path, weights: Mapping[str, TensorFile]) -> None:
    """Write the index of weights in several files, in Hugging Face's format."""
    if len(weights) > 1:
        index = {
            "metadata": {"total_size": sum(place.size for file in weights.values() for place in file.places.values())},
            "weight_map": {name: file for file, made in weights.items() for name in made.places},
        }
        write_whole(folder / "model.safetensors.index.json", json.dumps(index, indent=1))


def complete(
    content: Content,
    fresh: Path,
    files: Mapping[str, Mapping[str, TensorFile]],
    differ: set[str],
    keep: int | None,
    processes: int,
) -> Path:
    """Write the index and the manifest, and give the checkpoint its name. Returns its path."""
    write_index(fresh, files.get(MODEL, {}))
    entries = [entry for entry in sorted(fresh.iterdir()) if entry.name != MANIFEST]
    manifest = Manifest(
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        processes=processes,
        aliases=dict(content.aliases),
        differ=tuple(sorted(differ)),
        sizes={entry.name: entry.stat().st_size for entry in entries},
        checksums={entry.name: zlib.crc32(entry.read_bytes()) for entry in entries if entry.suffix != SUFFIX},
        headers={name: zlib.crc32(file.header) for group in files.values() for name, file in group.items()},
    )
    write_whole(fresh / MANIFEST, manifest.text())
    synchronize(fresh, [MANIFEST])
    return folders.finish(fresh, keep)
