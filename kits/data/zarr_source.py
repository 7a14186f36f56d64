"""A Zarr array (formats 2 and 3, a folder or a zip file): only the chunks that a block touches are read."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore, ZipStore

from partway.data.source import AXES, Count, axes_for, index_of
from partway.data.window import Window
from partway.strategy import DataError

_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


class _Counting(WrapperStore[LocalStore | ZipStore]):
    """A store that counts the bytes of the chunks it reads."""

    def __init__(self, store: LocalStore | ZipStore, count: Count) -> None:
        super().__init__(store)
        self._count = count

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        content = await self._store.get(key, prototype, byte_range)
        if content is not None and key.rpartition("/")[2] not in _METADATA:
            self._count.add(len(content))
        return content


class ZarrSource:
    """The array at `path` inside the store at `root`.

    Raises DataError if there is none, or its dims are not those of an image.
    """

    def __init__(self, root: str, path: str, axes: str | None, count: Count) -> None:
        self.name = os.path.join(root, path) if path else root
        self.advice = "zarr.create_array(store, data=image, chunks=(256, 256))"
        self._count = count
        inner = ZipStore(root, mode="r") if os.path.isfile(root) else LocalStore(root, read_only=True)
        try:
            self._array = zarr.open_array(_Counting(inner, count), path=path, mode="r")
        except Exception as error:
            raise DataError(
                f"{self.name} cannot be read as a Zarr array: {error}; name an array inside a group with path="
            ) from error
        self._store = inner
        shape, chunks = tuple(self._array.shape), tuple(self._array.chunks)
        named = "".join(name or "?" for name in getattr(self._array.metadata, "dimension_names", None) or ()).upper()
        self.axes = axes_for(self.name, shape, axes or (named if named in AXES else None))
        self.shape, self.dtype = shape, np.dtype(self._array.dtype)
        self.tile = chunks[self.axes.index("Y")], chunks[self.axes.index("X")]
        self._planes = [-(-size // n) for axis, size, n in zip(self.axes, shape, chunks, strict=True) if axis in "CS"]

    def read(self, block: Window) -> NDArray[Any]:
        """The pixels of `block`."""
        rows = -(-block.y1 // self.tile[0]) - block.y0 // self.tile[0]
        columns = -(-block.x1 // self.tile[1]) - block.x0 // self.tile[1]
        self._count.add(0, rows * columns * (self._planes or [1])[0])
        return np.asarray(self._array[index_of(self.axes, block)])

    def close(self) -> None:
        """Close the store."""
        self._store.close()
