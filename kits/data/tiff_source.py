"""A TIFF file (classic or BigTIFF): only the tiles or strips that a block touches are read and decoded."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from partway.data.source import AXES, Count, block_shape
from partway.data.window import Window
from partway.strategy import DataError
from partway.strategy.basics import install_extra

_JPEG = (6, 7, 34892, 33007)  # compressions whose tiles share tables, kept in the page


@dataclass(frozen=True)
class _Plane:
    """A plane of pixels: its page, and the number of the page's segments before its own."""

    page: Any
    first: int
    decoding: dict[str, Any]


class TiffSource:
    """One level of the first image of the file at `path`.

    Raises DataError for anything but a TIFF file, a level that it does not have, or axes other than YX, YXS, CYX and
    SYX.
    """

    def __init__(self, path: str, level: int, count: Count) -> None:
        self.name = path
        self.advice = "tifffile.imwrite(path, image, tile=(256, 256))"
        self._count, self._lock = count, threading.Lock()
        try:
            self._file = tifffile.TiffFile(path)
        except (tifffile.TiffFileError, OSError) as error:
            raise DataError(f"{path} cannot be read as a TIFF: {error}") from error
        self._closing = weakref.finalize(self, self._file.close)
        try:
            self._open(level)
        except DataError:
            self.close()
            raise

    def _open(self, level: int) -> None:
        levels = self._file.series[0].levels
        if level >= len(levels):
            raise DataError(f"{self.name} has no level {level}; its levels are 0 to {len(levels) - 1}")
        image = levels[level]
        self.axes, self.shape, self.dtype = image.axes, tuple(image.shape), np.dtype(image.dtype)
        if self.axes not in AXES:
            raise DataError(
                f"{self.name} has the axes {self.axes} of shape {list(self.shape)}, but only {', '.join(AXES)} can be "
                "read; write one image per file, or its channels as C"
            )
        key = image.keyframe
        _, _, self._height, self._width, _ = key.shaped
        height, width = (key.tilelength, key.tilewidth) if key.is_tiled else (key.rowsperstrip, self._width)
        self.tile = min(height, self._height), width
        self._columns = -(-self._width // width)
        segments = -(-self._height // height) * self._columns  # of one plane
        self._planes = [
            _Plane(page, sample * segments, _decoding(page)) for page in image.pages for sample in range(key.shaped[0])
        ]
        if len(self._planes) != (1 if self.axes in ("YX", "YXS") else self.shape[0]):
            raise DataError(
                f"{self.name} has {len(self._planes)} planes of pixels for the shape {list(self.shape)} ({self.axes}); "
                f"write it again, with {self.advice}"
            )

    def read(self, block: Window) -> NDArray[Any]:
        """The pixels of `block`."""
        pixels = np.empty(block_shape(self.axes, self.shape, block), self.dtype)
        height, width = self.tile
        for number, plane in enumerate(self._planes):
            target = pixels if self.axes[0] == "Y" else pixels[number]
            for row in range(block.y0 // height, -(-block.y1 // height)):
                for column in range(block.x0 // width, -(-block.x1 // width)):
                    self._place(target, plane, row, column, block)
        return pixels

    def _place(self, target: NDArray[Any], plane: _Plane, row: int, column: int, block: Window) -> None:
        """Write the pixels of one tile that lie in `block` into `target`, the block's pixels of that plane."""
        y, x = row * self.tile[0], column * self.tile[1]
        at_y, at_x = max(y, block.y0), max(x, block.x0)
        to_y, to_x = min(y + self.tile[0], block.y1), min(x + self.tile[1], block.x1)
        tile = self._tile(plane, plane.first + row * self._columns + column)
        if tile is None:
            pixels: Any = plane.page.keyframe.nodata
        else:
            tile = tile[..., 0] if target.ndim == 2 else tile
            pixels = tile[at_y - y : to_y - y, at_x - x : to_x - x]
        target[at_y - block.y0 : to_y - block.y0, at_x - block.x0 : to_x - block.x0] = pixels

    def _tile(self, plane: _Plane, index: int) -> NDArray[Any] | None:
        """A tile of [height, width, samples], or None if the file leaves it out."""
        page = plane.page
        size = page.databytecounts[index]
        data = None
        if size:
            file = page.parent.filehandle
            with self._lock:  # all threads share the position in the file
                file.seek(page.dataoffsets[index])
                data = file.read(size)
        self._count.add(size, 1)
        try:
            decoded = page.keyframe.decode(data, index, **plane.decoding)[0]
        except (ValueError, RuntimeError) as error:
            raise DataError(
                f"{self.name}: tile {index} cannot be decoded: {error}; codecs beyond deflate need imagecodecs: "
                f"{install_extra('data')}"
            ) from error
        return None if decoded is None else decoded[0]

    def close(self) -> None:
        """Close the file."""
        self._closing()


def _decoding(page: Any) -> dict[str, Any]:
    """The arguments for decoding a tile of `page`, besides the tile."""
    if page.keyframe.compression not in _JPEG:
        return {}
    return {"jpegtables": page.jpegtables, "jpegheader": page.keyframe.jpegheader}
