"""A server: its pieces, and the steps that it takes. Plain Python: cluster.py runs it as an actor of Ray.

Every call may be repeated, since a process may carry it out and then die: so each is written to the shelf, with its
identity, before it is answered.

    in sync mode     `prepare` keeps a worker's gradients for a step; `apply` takes the step, for the workers that the
                     coordinator decided on, and returns the changes
    in async mode    `push` takes a worker's step at once
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partway.ps.service.job import Job
from partway.ps.service.pieces import Parameter, RowRange
from partway.ps.service.shelf import Record, ShelfSnapshot, open_shelf, viewing
from partway.ps.service.update import OptimizerMaker, ServerShard, Table, is_of_rows
from partway.ps.service.wire import array_of, bytes_of, name_of, tensor_from, tensor_of
from partway.strategy import RuntimeStateError

Values = dict[str, Any]  # arrays by the keys of pieces
_LEAST_JOURNAL = 2**20  # bytes of rows beside a piece of a table before it is rewritten


@dataclass
class StepDecision:
    """A step of sync mode: the workers whose gradients are averaged, the options, and the workers of the next step."""

    version: int
    members: list[int]
    options: list[dict[str, Any]]
    next: list[int]


@dataclass
class PushedGradients:
    """A worker's push to one server.

    dense    arrays by the keys of pieces
    rows     by the keys of pieces of tables: the rows, counted within the piece, and their gradients
    dtype    of all, if it is not the parameter's own
    """

    dense: Values
    rows: dict[str, tuple[Any, Any]]
    dtype: str | None = None

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return int(sum(a.nbytes for a in self.dense.values()) + sum(i.nbytes + g.nbytes for i, g in self.rows.values()))


@dataclass
class Changes:
    """The changes for a worker: the version, the values of pieces that changed since the version that it knows, and, of
    parameters that stay on workers, the mean gradients of this step (their values if more than that changed)."""

    version: int
    values: Values
    means: Values


@dataclass
class Moved:
    """A piece that moves, or starts: its values, its optimizer states, and the steps that it includes.

    state    tensors and numbers; a tensor with an entry for each element is of the piece alone
    seen     the last step of each worker that it has (async mode)
    table    of a table: the last step of each row, how many there were, the options from each on, numbers at the start
    version  that of the server from which it comes
    """

    piece: RowRange
    value: Any
    state: dict[str, Any]
    seen: dict[int, int] | None = None
    table: dict[str, Any] | None = None
    version: int = 0


class Server:
    """The pieces of one server, in `folder`. Raises RuntimeStateError if that has those of another job."""

    def __init__(self, name: str, job: Job, maker: OptimizerMaker, folder: Path | None) -> None:
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        torch.set_num_threads(1)
        self.name, self._job, self._fingerprint = name, job, job.fingerprint
        self._maker = maker
        self._parameters = {parameter.index: parameter for parameter in job.parameters}
        self._shelf = open_shelf(folder, job.durability)
        self._folder = folder
        self._snapshots: dict[str, ShelfSnapshot] = {}
        self._counts = {"prepared": 0, "applied": 0, "repeated": 0}
        self._version = 0
        self._seen: dict[int, int] = {}  # the last step of each worker (async mode)
        self._own_seen: dict[str, dict[int, int]] = {}  # for pieces from a server that had seen other steps
        self._incarnations: dict[int, int] = {}
        self._changed: dict[str, int] = {}
        self._journals: dict[str, int] = {}  # bytes of rows that are kept beside a table
        self._kept_keys: dict[str, list[str]] = {}  # the states that are kept of each row of a table
        self._means: Values = {}
        self._staleness: list[tuple[int, int, int]] = []
        self._load()

    # -- Its state

    def status(self) -> dict[str, Any]:
        """Counts and sizes, for a view."""
        pieces = self._shard.pieces
        size = sum(self._bytes(key) for key in pieces)
        return {
            "name": self.name,
            "version": self._version,
            "pieces": len(pieces),
            "bytes": size,
            **self._counts,
            "seen": dict(self._seen),
            "staleness": list(self._staleness[-1000:]),
        }

    def version(self) -> int:
        """The number of steps that it has taken; in async mode, of pushes."""
        return self._version

    def seen(self, worker: int) -> int:
        """The last step of a worker that all of its pieces have (async mode)."""
        return min((self._seen_of(key).get(worker, 0) for key in self._shard.pieces), default=self._seen.get(worker, 0))

    def staleness(self) -> list[tuple[int, int, int]]:
        """(worker, step, staleness) of each push since this process began."""
        return list(self._staleness)

    def _bytes(self, key: str) -> int:
        piece, parameter = self._shard.pieces[key], self._shard.parameter(key)
        return (piece.stop - piece.start) * parameter.row_bytes

    # -- Pieces

    def give(self, moved: list[Moved]) -> None:
        """Take pieces: the initial ones, or from another server, whose version this one then has too."""
        self._version = max([self._version, *(each.version for each in moved)])
        records: list[Record] = []
        for each in moved:
            if each.piece.key in self._shard.pieces:
                self._shard.remove(each.piece.key)
            self._take(each)
            records += self._records(each.piece.key, whole=True)
        self._commit(records, [b"r/%s/" % each.piece.key.encode() for each in moved])

    def keep(self, keys: list[str], version: int) -> None:
        """Give up all pieces but these, and take over the version, with the pieces that came from elsewhere."""
        gone = [key for key in self._shard.pieces if key not in keys]
        for key in gone:
            self._shard.remove(key)
            self._own_seen.pop(key, None)
        self._version = max(self._version, version)
        self._commit([], [prefix for key in gone for prefix in (b"p/%s/" % key.encode(), b"r/%s/" % key.encode())])

    def take(self, keys: list[str]) -> list[Moved]:
        """Pieces with all their data, for another server, or for a worker those that stay there."""
        return [self._moved(key) for key in keys]

    # -- Sync mode

    def prepare(self, worker: int, incarnation: int, version: int, gradients: PushedGradients) -> int:
        """Keep a worker's gradients for step `version`. Returns this server's version. They are not taken if the step
        is over, or the worker has started over since."""
        if version <= self._version or incarnation < self._incarnations.get(worker, 0):
            return self._version
        self._incarnations[worker] = incarnation
        prefix = _gradients_key(version, worker)
        head = {
            "dense": list(gradients.dense),
            "rows": list(gradients.rows),
            "dtype": gradients.dtype,
            "shapes": [list(each.shape) for each in gradients.dense.values()],
            "kinds": [str(each.dtype) for each in gradients.dense.values()],
            "row_kinds": [str(each.dtype) for _, each in gradients.rows.values()],
        }
        records: list[Record] = [(prefix + b"h", json.dumps(head).encode())]
        records += [(prefix + b"d%06d" % i, _buffer(each)) for i, each in enumerate(gradients.dense.values())]
        for i, (ids, rows) in enumerate(gradients.rows.values()):
            records += [(prefix + b"i%06d" % i, _buffer(ids)), (prefix + b"r%06d" % i, _buffer(rows))]
        self._counts["prepared"] += 1
        self._shelf.commit([*records, self._meta()], gradients.size, [prefix])
        return self._version

    def apply(self, decision: StepDecision, known: int) -> Changes:
        """Take step `decision.version`, if it is not taken yet. Returns the changes since version `known`."""
        if decision.version == self._version + 1:
            self._apply(decision)
        elif decision.version > self._version:
            raise RuntimeStateError(
                f"server {self.name} is at step {self._version} and was asked for {decision.version}: its shard folder "
                f"{self._folder} is of an older state"
            )
        else:
            self._counts["repeated"] += 1
        return self.changed(known)

    def _apply(self, decision: StepDecision) -> None:
        self._shelf.reserve(self._bytes_of_a_step())
        version = decision.version
        with viewing(self._shelf) as view:
            pushed = [self._pushed(view, version, worker) for worker in decision.members]
            dense: dict[str, Tensor] = {}
            for key in self._shard.values:
                parts = [(each.dense[key], each.dtype) for each in pushed if key in each.dense]
                if parts:
                    dense[key] = self._mean(key, parts, len(pushed))
            rows: dict[str, tuple[Tensor, Tensor]] = {}
            for key in self._shard.tables:
                some = [(*each.rows[key], each.dtype) for each in pushed if key in each.rows]
                if some:
                    rows[key] = self._mean_rows(key, some, len(pushed))
        self._step(dense, rows, decision.options, version, [b"g/"])
        self._counts["applied"] += len(decision.members)

    def _pushed(self, view: ShelfSnapshot, version: int, worker: int) -> PushedGradients:
        prefix = _gradients_key(version, worker)
        text = view.get(prefix + b"h")
        if text is None:
            raise RuntimeStateError(f"server {self.name} has no gradients of worker {worker} for step {version}")
        head = json.loads(bytes(text))
        dense = {}
        for i, (key, shape, kind) in enumerate(zip(head["dense"], head["shapes"], head["kinds"], strict=True)):
            dense[key] = np.frombuffer(view.get(prefix + b"d%06d" % i), kind).reshape(shape)
        rows = {}
        for i, (key, kind) in enumerate(zip(head["rows"], head["row_kinds"], strict=True)):
            ids = np.frombuffer(view.get(prefix + b"i%06d" % i), np.int64)
            width = self._shard.parameter(key).shape[1:]
            rows[key] = ids, np.frombuffer(view.get(prefix + b"r%06d" % i), kind).reshape(len(ids), *width)
        return PushedGradients(dense, rows, head["dtype"])

    # -- Async mode

    def push(
        self, worker: int, number: int, read: int, gradients: PushedGradients, options: list[dict[str, Any]], known: int
    ) -> Changes:
        """Take the step `number` of a worker, computed from this server's version `read`. Returns the changes since
        version `known`."""
        skipped = {key for key in self._shard.pieces if self._seen_of(key).get(worker, 0) >= number}
        if self._seen.get(worker, 0) >= number:
            self._counts["repeated"] += 1
            if not (self._shard.pieces.keys() - skipped):
                return self.changed(known)
        self._shelf.reserve(self._bytes_of_a_step())
        stale = self._version - read
        dense = {
            key: self._mean(key, [(array, gradients.dtype)], 1)
            for key, array in gradients.dense.items()
            if key not in skipped
        }
        rows = {
            key: self._mean_rows(key, [(*each, gradients.dtype)], 1)
            for key, each in gradients.rows.items()
            if key not in skipped
        }
        if self._seen.get(worker, 0) < number:
            self._seen[worker] = number
            self._staleness.append((worker, number, stale))
        for key in self._own_seen:
            self._own_seen[key][worker] = max(number, self._own_seen[key].get(worker, 0))
        self._step(dense, rows, options, self._version + 1, [])
        self._counts["applied"] += 1
        return self.changed(known)

    def _seen_of(self, key: str) -> Mapping[int, int]:
        return self._own_seen.get(key, self._seen)

    # -- Both

    def changed(self, known: int) -> Changes:
        """The dense pieces that changed since version `known`."""
        keys = [key for key in self._shard.values if self._changed[key] > known]
        means = {key: self._means[key] for key in keys if key in self._means} if known == self._version - 1 else {}
        return Changes(
            self._version, {key: array_of(self._shard.values[key]) for key in keys if key not in means}, means
        )

    def rows(self, wanted: dict[str, Any]) -> tuple[int, Values]:
        """The rows of tables, counted within their pieces."""
        found: Values = {}
        for key, ids in wanted.items():
            table = self._shard.tables[key]
            own = tensor_of(ids, "int64")
            table.catch_up(self._maker, own)
            found[key] = array_of(table.value[own])
        return self._version, found

    def _step(
        self,
        dense: dict[str, Tensor],
        rows: dict[str, tuple[Tensor, Tensor]],
        options: list[dict[str, Any]],
        version: int,
        done: list[bytes],
    ) -> None:
        """Take a step, and keep it: all, or nothing."""
        self._means = {
            key: array_of(gradient.clone()) for key, gradient in dense.items() if self._shard.parameter(key).on_workers
        }
        self._version = version
        options = [dict(each) for each in options]
        records: list[Record] = []
        try:
            self._shard.step(dense, options)
            for key in dense:
                self._changed[key] = version
                records += self._records(key)
            for key, (ids, gradient) in rows.items():
                table = self._shard.tables[key]
                table.step(self._maker, options[self._shard.parameter(key).group], ids, gradient)
                self._changed[key] = version
                more, gone = self._row_records(key, ids)
                records, done = records + more, done + gone
            self._commit(records, done)
        except BaseException:
            self._load()  # the memory is ahead of the records
            raise

    def _mean(self, key: str, parts: list[tuple[Any, str | None]], count: int) -> Tensor:
        """The mean of arrays, each of a dtype of its own or of the parameter's."""
        kind = self._shard.parameter(key).dtype
        first, *others = (tensor_of(part, sent or kind).to(getattr(torch, kind)) for part, sent in parts)
        for each in others:
            first += each
        return first if count == 1 else first.div_(count)

    def _mean_rows(self, key: str, parts: list[tuple[Any, Any, str | None]], count: int) -> tuple[Tensor, Tensor]:
        parameter = self._shard.parameter(key)
        kind = getattr(torch, parameter.dtype)
        ids = np.unique(np.concatenate([each for each, _, _ in parts]))
        total = torch.zeros(len(ids), *parameter.shape[1:], dtype=kind)
        for each, gradient, sent in parts:
            at = torch.from_numpy(np.searchsorted(ids, each))
            total.index_add_(0, at, tensor_of(gradient, sent or parameter.dtype).to(kind))
        return torch.from_numpy(ids), total if count == 1 else total.div_(count)

    def _bytes_of_a_step(self) -> int:
        return sum(3 * self._bytes(key) for key in self._shard.values) + 2**22

    # -- The cut

    def snapshot(self, name: str) -> int:
        """Keep the present state for `read`, whatever comes later. Returns the version."""
        self.release(name)
        self._snapshots[name] = self._shelf.view()
        return self._version

    def read(self, name: str, key: str) -> Moved:
        """A piece in a snapshot; rows of tables with the steps that they had missed."""
        if name not in self._snapshots:
            raise RuntimeStateError(f"server {self.name} was started again while a checkpoint was written; save again")
        moved = self._kept(self._snapshots[name], key)
        if moved.table is not None:
            table = self._table(moved)
            table.catch_up(self._maker, torch.arange(len(table.value)))
            moved.value, moved.state = array_of(table.value), table.whole_state(self._maker)
        return moved

    def release(self, name: str) -> None:
        """Free a snapshot."""
        if (view := self._snapshots.pop(name, None)) is not None:
            view.close()

    def close(self) -> None:
        """Write the rest, and close the shelf."""
        for name in list(self._snapshots):
            self.release(name)
        self._shelf.close()

    # -- Records

    def _meta(self) -> Record:
        meta = {
            "format": 1,
            "job": self._fingerprint,
            "version": self._version,
            "seen": _texts(self._seen),
            "own_seen": {key: _texts(seen) for key, seen in self._own_seen.items()},
            "incarnations": _texts(self._incarnations),
            "name": self.name,
        }
        return b"meta", json.dumps(meta).encode()

    def _commit(self, records: list[Record], without: Iterable[bytes] = ()) -> None:
        size = sum(len(value) for _, value in records)
        self._shelf.commit(sorted([*records, self._meta()], key=lambda record: record[0]), size, without)

    def _records(self, key: str, whole: bool = False) -> list[Record]:
        """The records of a piece; `whole`: with all rows of a table."""
        prefix, piece = b"p/%s/" % key.encode(), self._shard.pieces[key]
        head: dict[str, Any] = {"piece": asdict(piece), "changed": self._changed.get(key, 0)}
        if key in self._shard.tables:
            table = self._shard.tables[key]
            head |= {"time": table.time, "base": _numbers_out(table.base), "began": list(table.began)}
            head["keys"] = sorted(table.state)
            new = table.runs if whole else table.runs.keys() & {table.time}
            runs = [(prefix + b"o%016d" % time, json.dumps(table.runs[time]).encode()) for time in new]
            base = [(prefix + b"r%04d" % i, bytes_of(each)) for i, each in enumerate(_columns(table))] if whole else []
            return [(prefix + b"h", json.dumps(head).encode()), *runs, *base]
        value, state = self._shard.values[key], self._shard.state(key)
        tensors = {name: kept for name, kept in state.items() if is_of_rows(name, kept, value)}
        head |= {"keys": sorted(tensors), "kinds": {name: name_of(kept.dtype) for name, kept in tensors.items()}}
        head["numbers"] = _numbers_out({name: kept for name, kept in state.items() if name not in tensors})
        return [
            (prefix + b"h", json.dumps(head).encode()),
            (prefix + b"v", bytes_of(value)),
            *((prefix + b"s%04d" % i, bytes_of(tensors[name])) for i, name in enumerate(sorted(tensors))),
        ]

    def _row_records(self, key: str, ids: Tensor) -> tuple[list[Record], list[bytes]]:
        """The records of a step of a table, and the keys to remove: the new content of its rows, in one more record. If
        these have become many, or the states of each row change in kind, the whole piece is written instead."""
        table = self._shard.tables[key]
        rows = _lines([ids, *(each[ids] for each in _columns(table))])
        journal = b"r/%s/" % key.encode()
        whole = sum(each.nbytes for each in _columns(table))
        self._journals[key] = self._journals.get(key, 0) + rows.nbytes
        if self._journals[key] > max(whole, _LEAST_JOURNAL) or self._kept_keys.get(key) != sorted(table.state):
            self._journals[key], self._kept_keys[key] = 0, sorted(table.state)
            return self._records(key, whole=True), [journal]
        return [*self._records(key), (journal + self._version.to_bytes(8, "big"), memoryview(rows.reshape(-1)))], []

    def _kept(self, view: ShelfSnapshot, key: str) -> Moved:
        """A piece from its records."""
        prefix = b"p/%s/" % key.encode()
        head = json.loads(bytes(view.get(prefix + b"h")))
        piece = RowRange(**head["piece"])
        parameter = self._parameters[piece.parameter]
        shape = (piece.stop - piece.start, *parameter.shape[1:]) if parameter.shape else ()
        if parameter.by_rows:
            return self._kept_table(view, piece, parameter, head)
        value = tensor_from(view.get(prefix + b"v"), parameter.dtype, shape)
        state: dict[str, Any] = {
            name: tensor_from(view.get(prefix + b"s%04d" % i), head["kinds"][name], shape)
            for i, name in enumerate(head["keys"])
        }
        return Moved(piece, array_of(value), state | _numbers_in(head["numbers"]))

    def _kept_table(self, view: ShelfSnapshot, piece: RowRange, parameter: Parameter, head: dict[str, Any]) -> Moved:
        prefix, count = b"p/%s/r" % piece.key.encode(), piece.stop - piece.start
        shape = (count, *parameter.shape[1:])
        kinds = ["int64", *[parameter.dtype] * (1 + len(head["keys"]))]
        shapes = [(count,), *[shape] * (len(kinds) - 1)]
        whole = enumerate(zip(kinds, shapes, strict=True))
        columns = [tensor_from(view.get(prefix + b"%04d" % i), *each) for i, each in whole]
        widths = [8, *[parameter.row_bytes] * (len(kinds) - 1)]
        for _, rows in view.items(b"r/%s/" % piece.key.encode()):
            joined = np.frombuffer(rows, np.uint8).reshape(-1, 8 + sum(widths))
            ids = torch.from_numpy(np.ascontiguousarray(joined[:, :8]).view(np.int64).reshape(-1).copy())
            at = 8
            for column, kind, width in zip(columns, kinds, widths, strict=True):
                part = np.ascontiguousarray(joined[:, at : at + width]).reshape(-1).data
                column[ids] = tensor_from(part, kind, (len(ids), *column.shape[1:]))
                at += width
        last, value, *state = columns
        options = view.items(b"p/%s/o" % piece.key.encode())
        table = {
            "last": last,
            "time": head["time"],
            "base": _numbers_in(head["base"]),
            "began": tuple(head["began"]),
            "runs": {int(name[-16:]): json.loads(bytes(text)) for name, text in options},
        }
        return Moved(piece, array_of(value), dict(zip(head["keys"], state, strict=True)), None, table)

    def _moved(self, key: str) -> Moved:
        with viewing(self._shelf) as view:
            moved = self._kept(view, key)
        moved.seen, moved.version = dict(self._seen_of(key)), self._version
        return moved

    def _take(self, moved: Moved) -> None:
        piece = moved.piece
        parameter = self._parameters[piece.parameter]
        if parameter.by_rows:
            table = self._table(moved)
            self._shard.put_table(piece, table)
            self._journals[piece.key], self._kept_keys[piece.key] = 0, sorted(table.state)
        else:
            self._shard.put(piece, tensor_of(moved.value, parameter.dtype), _tensors_own(moved.state))
        self._changed[piece.key] = self._version
        if moved.seen is not None and moved.seen != self._seen:
            self._own_seen[piece.key] = dict(moved.seen)

    def _table(self, moved: Moved) -> Table:
        parameter = self._parameters[moved.piece.parameter]
        value = tensor_of(moved.value, parameter.dtype)
        state = _tensors_own(moved.state)
        tensors = {name: kept for name, kept in state.items() if is_of_rows(name, kept, value)}
        numbers = {name: kept for name, kept in state.items() if name not in tensors}
        if (own := moved.table) is None:
            return Table(value, tensors, numbers, tuple(tensors), torch.zeros(len(value), dtype=torch.int64))
        runs = dict(own["runs"])
        return Table(value, tensors, dict(own["base"]), own["began"], own["last"].clone(), own["time"], runs)

    def _load(self) -> None:
        """Load everything from the records."""
        self._shard = ServerShard(self._maker, self._parameters)
        self._changed, self._means, self._own_seen = {}, {}, {}
        self._version, self._seen, self._incarnations = 0, {}, {}
        with viewing(self._shelf) as view:
            text = view.get(b"meta")
            if text is None:
                return
            meta = json.loads(bytes(text))
            if meta["format"] != 1 or meta["job"] != self._fingerprint:
                raise RuntimeStateError(
                    f"the shard folder {self._folder} holds the parameters of another job ({meta['job'][:12]}, and "
                    f"this is {self._fingerprint[:12]}): of another model, optimizer, mode or version of Partway; "
                    "give this job its own folder"
                )
            self._version = meta["version"]
            self._seen, self._incarnations = _ints(meta["seen"]), _ints(meta["incarnations"])
            keys = [key.split(b"/")[1].decode() for key, _ in view.items(b"p/") if key.endswith(b"/h")]
            for key in keys:
                head = json.loads(bytes(view.get(b"p/%s/h" % key.encode())))
                self._take(self._kept(view, key))
                self._changed[key] = head["changed"]
            self._own_seen = {key: _ints(seen) for key, seen in meta["own_seen"].items()}


def _columns(table: Table) -> list[Tensor]:
    """The columns of a table, with an entry for each row: the last step, the values, the optimizer states."""
    return [table.last, table.value, *(table.state[name] for name in sorted(table.state))]


def _lines(columns: list[Tensor]) -> Any:
    """Rows as bytes, one line each; there may be none."""
    parts = [array_of(each) for each in columns]
    return np.concatenate([p.reshape(len(p), math.prod(p.shape[1:])).view(np.uint8) for p in parts], axis=1)


def _buffer(array: Any) -> Any:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat).cast("B") if array.size else b""


def _gradients_key(version: int, worker: int) -> bytes:
    return b"g/" + version.to_bytes(8, "big") + worker.to_bytes(4, "big") + b"/"


def _texts(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(key): value for key, value in numbers.items()}


def _ints(texts: Mapping[str, int]) -> dict[int, int]:
    return {int(key): value for key, value in texts.items()}


def _tensors_own(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kept.clone() if isinstance(kept, Tensor) else kept for name, kept in state.items()}


def _numbers_out(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as JSON values: tensors of one number or of a few with their dtypes."""
    return {
        name: {"tensor": kept.tolist(), "dtype": name_of(kept.dtype)} if isinstance(kept, Tensor) else kept
        for name, kept in numbers.items()
    }


def _numbers_in(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.tensor(kept["tensor"], dtype=getattr(torch, kept["dtype"])) if isinstance(kept, dict) else kept
        for name, kept in texts.items()
    }
