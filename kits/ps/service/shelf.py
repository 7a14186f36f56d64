"""The records of a server, in LMDB, in a folder of its own. One transaction writes all of a step, or nothing.

    "memory"     in this process only
    "process"    survives the death of processes, at any moment: written records are the system's
    "disk"       survives the machine's: they are on the disk before a step is acknowledged

LMDB writes into its file through memory, where a full disk would be a signal that ends the process. So room is reserved
before a transaction begins, and a full disk is an error that changes nothing.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from partway.strategy import RuntimeStateError

DURABILITIES = ("process", "disk", "memory")
_ROOM = 2**26  # bytes reserved at once, if there are as many
_PAGE, _SMALL = 4096, 2030  # records that are not small have pages of their own
Record = tuple[bytes, Any]  # a key, and bytes or a buffer of them


class Full(RuntimeStateError):
    """The disk has no room for the records; nothing was changed."""


class ShelfSnapshot(Protocol):
    """The records at one moment."""

    def get(self, key: bytes) -> Any:
        """The bytes under a key; None if there are none."""
        ...

    def items(self, prefix: bytes) -> Iterator[Record]:
        """All records whose keys begin with `prefix`, in the order of their keys."""
        ...

    def close(self) -> None:
        """Free the snapshot."""


class Shelf(Protocol):
    """Records that change together."""

    def commit(self, records: Iterable[Record], size: int, without: Iterable[bytes] = ()) -> None:
        """Write records of about `size` bytes, and remove those whose keys begin with one of `without`: all or nothing.
        Raises Full."""

    def reserve(self, size: int) -> None:
        """Reserve room for a commit of about `size` bytes. Raises Full."""

    def view(self) -> ShelfSnapshot:
        """The present records, whatever comes later."""
        ...

    def sync(self) -> None:
        """Wait until everything is on the disk."""

    def close(self) -> None:
        """Write the rest, and close it."""


def open_shelf(folder: Path | None, durability: str) -> Shelf:
    """The records in a folder; new ones if there are none. Raises RuntimeStateError."""
    if durability == "memory":
        return _InMemory()
    assert folder is not None
    return _OnDisk(folder, durability == "disk")


class _InMemory:
    def __init__(self, records: dict[bytes, bytes] | None = None) -> None:
        self._records = records if records is not None else {}

    def reserve(self, size: int) -> None:
        pass

    def commit(self, records: Iterable[Record], size: int, without: Iterable[bytes] = ()) -> None:
        new = {key: bytes(value) for key, value in records}
        for prefix in without:
            for key in [key for key in self._records if key.startswith(prefix)]:
                del self._records[key]
        self._records.update(new)

    def view(self) -> ShelfSnapshot:
        return _InMemory(dict(self._records))

    def get(self, key: bytes) -> Any:
        return self._records.get(key)

    def items(self, prefix: bytes) -> Iterator[Record]:
        return ((key, self._records[key]) for key in sorted(self._records) if key.startswith(prefix))

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OnDisk:
    def __init__(self, folder: Path, sync: bool) -> None:
        import lmdb

        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            self._env = lmdb.open(
                str(folder),
                map_size=max(2**36, 8 * memory),
                sync=sync,
                metasync=sync,
                writemap=True,
                map_async=False,
                max_readers=64,
            )
            self._file = os.open(folder / "data.mdb", os.O_RDWR)
        except (OSError, lmdb.Error) as error:
            raise RuntimeStateError(f"the shard folder {folder} cannot be used: {error}") from error
        self._reserved = os.fstat(self._file).st_blocks * 512
        self._env.reader_check()

    def reserve(self, size: int) -> None:
        need = (self._env.info()["last_pgno"] + 1) * _PAGE + size + size // 8 + 512 * _PAGE
        if need <= self._reserved:
            return
        disk = os.statvfs(self._folder)
        left = disk.f_bavail * disk.f_frsize - (need - self._reserved)
        upto = need + min(_ROOM, max(left, 0) // 2)
        try:
            os.posix_fallocate(self._file, 0, upto)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise Full(
                    f"the disk of the shard folder {self._folder} has no room for {need - self._reserved:,} bytes "
                    "more; free some: the step is not lost, and waits for it"
                ) from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
        self._reserved = upto

    def commit(self, records: Iterable[Record], size: int, without: Iterable[bytes] = ()) -> None:
        records = list(records)
        self.reserve(max(size, self._at_most(records)))
        with self._env.begin(write=True) as transaction:
            for prefix in without:
                _remove(transaction, prefix)
            with transaction.cursor() as cursor:
                cursor.putmulti(records)

    def _at_most(self, records: list[Record]) -> int:
        """An upper bound on the bytes of the pages that a commit needs. A changed page is written elsewhere, whole: so
        each record may take one, up to the number of existing pages. Pages of small records are at least half full."""
        pages: float = min(len(records), self._env.info()["last_pgno"] + 1)
        for key, value in records:
            if len(key) + len(value) < _SMALL:
                pages += 2 * (len(key) + len(value) + 32) / _PAGE
            else:
                pages += 2 * (len(key) + 32) / _PAGE + math.ceil((len(value) + 16) / _PAGE)
        return int(pages * _PAGE)

    def view(self) -> ShelfSnapshot:
        return _OfTransaction(self._env.begin(buffers=True))

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        self._env.sync(True)
        self._env.close()
        os.close(self._file)


class _OfTransaction:
    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def get(self, key: bytes) -> Any:
        return self._transaction.get(key)

    def items(self, prefix: bytes) -> Iterator[Record]:
        with self._transaction.cursor() as cursor:
            if not cursor.set_range(prefix):
                return
            for key, value in cursor:
                if bytes(key[: len(prefix)]) != prefix:
                    return
                yield bytes(key), value

    def close(self) -> None:
        self._transaction.abort()


def _remove(transaction: Any, prefix: bytes) -> None:
    with transaction.cursor() as cursor:
        there = cursor.set_range(prefix)
        while there and bytes(cursor.key()[: len(prefix)]) == prefix:
            there = cursor.delete()


@contextmanager
def viewing(shelf: Shelf) -> Iterator[ShelfSnapshot]:
    """The present records, for the block."""
    view = shelf.view()
    try:
        yield view
    finally:
        view.close()
