"""Sources of pixels: the interface of files for a reader, and arrays in memory as the simplest source."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from partway.data.window import Window
from partway.strategy import DataError, shown

AXES = ("YX", "YXS", "CYX", "SYX")
"""The orders of dims that can be read: height and width, and the channels before or after them."""


class Source(Protocol):
    """An open image whose blocks can be read. `axes` are one of `AXES`, `tile` is the height and width of a single
    read, and `advice` says how to write the file in tiles."""

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    tile: tuple[int, int]
    advice: str

    def read(self, block: Window) -> NDArray[Any]:
        """The pixels of `block`, which lies inside the image."""
        ...

    def close(self) -> None:
        """Close the file."""


class Count:
    """The amount that was read so far, by all threads of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = self.tiles = 0

    def add(self, size: int, tiles: int = 0) -> None:
        """Add `size` bytes and `tiles`."""
        with self._lock:
            self.bytes += size
            self.tiles += tiles


class ArraySource:
    """An array in memory, or mapped into it. Copied pixels count as read; it has no tiles."""

    def __init__(self, array: NDArray[Any], axes: str | None, count: Count) -> None:
        self.name, self.advice = f"an array of shape {list(array.shape)}", ""
        self.axes = axes_for(self.name, array.shape, axes)
        self.shape, self.dtype, self.tile = array.shape, array.dtype, (1, 1)
        self._array, self._count = array, count

    def read(self, block: Window) -> NDArray[Any]:
        """The pixels of `block`: a copy."""
        pixels = self._array[index_of(self.axes, block)].copy()
        self._count.add(pixels.nbytes)
        return pixels

    def close(self) -> None:
        """Do nothing."""


def axes_for(name: str, shape: tuple[int, ...], axes: str | None) -> str:
    """The axes of an image that does not name them: `axes`, or YX for two dims. Raises DataError."""
    if axes is None and len(shape) == 2:
        return "YX"
    if axes is None:
        raise DataError(f"{name} of shape {list(shape)} does not name its dims; write axes='YXS' or 'CYX'")
    if not isinstance(axes, str) or axes not in AXES or len(axes) != len(shape):
        fitting = " or ".join(repr(one) for one in AXES if len(one) == len(shape)) or "an image of 2 or 3 dims"
        raise DataError(f"axes is {shown(axes)} for {name} of shape {list(shape)}; write {fitting}")
    return axes


def index_of(axes: str, block: Window) -> tuple[slice, ...]:
    """The index of the pixels of `block` in an array of `axes`."""
    cuts = {"Y": slice(block.y0, block.y1), "X": slice(block.x0, block.x1)}
    return tuple(cuts.get(axis, slice(None)) for axis in axes)


def block_shape(axes: str, shape: tuple[int, ...], block: Window) -> tuple[int, ...]:
    """The shape of `block` in an image of `axes` and `shape`."""
    sizes = {"Y": block.height, "X": block.width}
    return tuple(sizes.get(axis, size) for axis, size in zip(axes, shape, strict=True))
