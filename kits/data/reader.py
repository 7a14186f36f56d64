"""Read a window of an image, and little more of its file."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partway.data.extras import need
from partway.data.source import ArraySource, Count, Source
from partway.data.window import FillMode, Window, as_mode, as_window, check_fill, is_int, source_indices
from partway.strategy import DataError, WholeReadWarning, shown

_WORTH_A_WARNING = 1 << 20  # pixels: a smaller image is read whole in no time


class WindowReader:
    """An image whose windows can be read: a TIFF file, a Zarr array, or a NumPy array.

    source   the path of a TIFF (classic or BigTIFF; in tiles, or in strips with a warning if reading them reads much
             more than the window), that of a Zarr folder or zip file, or an array
    level    of a pyramidal TIFF, 0 the largest; windows are in pixels of the level
    path     of the array inside a Zarr group, such as "0"
    axes     "YX", "YXS", "CYX" or "SYX", if the file does not say it: Zarr without dimension names, and arrays

    It may be used by several threads, pickled, and forked: each process opens the file for itself and counts its own
    reads. Raises DataError for a source that cannot be read, RuntimeStateError if tifffile or zarr is missing.
    """

    def __init__(
        self, source: str | os.PathLike[str] | NDArray[Any], *, level: int = 0, path: str = "", axes: str | None = None
    ) -> None:
        if not is_int(level, 0):
            raise DataError(f"level is {shown(level)}; write an int of 0 or more")
        self._open = functools.partial(_open, source, level, path, axes)
        self._sources: dict[int, Source] = {}  # by process: a fork must not share a file's position
        self._counts: dict[int, Count] = {}
        self._warned = False
        opened = self._source
        self.axes, self.shape, self.dtype = opened.axes, opened.shape, opened.dtype
        self.size = opened.shape[self.axes.index("Y")], opened.shape[self.axes.index("X")]
        self.tile = opened.tile

    @property
    def _source(self) -> Source:
        """The source that this process reads from."""
        process = os.getpid()
        return self._sources.get(process) or self._sources.setdefault(process, self._open(self._count))

    @property
    def _count(self) -> Count:
        """The count of this process's reads."""
        return self._counts.setdefault(os.getpid(), Count())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}, "_counts": {}}

    @property
    def bytes_read(self) -> int:
        """The bytes of pixels that this process has read: of a file as they are stored, compressed."""
        return self._count.bytes

    @property
    def tiles_read(self) -> int:
        """The number of tiles, strips or chunks that this process has read; 0 for an array."""
        return self._count.tiles

    def close(self) -> None:
        """Close the file in this process; a later read opens it again."""
        if opened := self._sources.pop(os.getpid(), None):
            opened.close()

    def __enter__(self) -> WindowReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(
        self,
        window: Window | tuple[int, int, int, int],
        *,
        halo: int | tuple[int, int] = 0,
        mode: str = FillMode.CONSTANT,
        fill_value: float = 0,
    ) -> NDArray[Any]:
        """The pixels of `window` (y0, y1, x0, x1), in the order of `axes`.

        halo         how many more pixels on each side; a pair is for top and bottom, and for left and right
        mode         fills the space outside the image: "constant" (`fill_value`), "reflect", "replicate" or "circular"

        Raises DataError for a wrong argument, or a damaged file.
        """
        grown, fill_mode = as_window(window).grown(halo), as_mode(mode)
        check_fill(fill_value, self.dtype)
        rows = source_indices(grown.y0, grown.y1, self.size[0], fill_mode)
        columns = source_indices(grown.x0, grown.x1, self.size[1], fill_mode)
        inside_y, inside_x = np.unique(rows[rows >= 0]), np.unique(columns[columns >= 0])
        if not inside_y.size or not inside_x.size:
            shape = [{"Y": rows.size, "X": columns.size}.get(a, n) for a, n in zip(self.axes, self.shape, strict=True)]
            return np.full(shape, fill_value, self.dtype)
        self._warn_of_waste(inside_y, inside_x)
        pixels = self._read(inside_y, inside_x)
        for dim, wanted, present in (
            (self.axes.index("Y"), rows, inside_y),
            (self.axes.index("X"), columns, inside_x),
        ):
            pixels = _arranged(pixels, dim, wanted, present, fill_value)
        return pixels

    def _read(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[Any]:
        """The pixels at `rows` and `columns` of the image, both ascending; gaps are not read."""
        read, y, x = self._source.read, self.axes.index("Y"), self.axes.index("X")
        across = [[read(Window(y0, y1, x0, x1)) for x0, x1 in _stretches(columns)] for y0, y1 in _stretches(rows)]
        bands = [blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=x) for blocks in across]
        return bands[0] if len(bands) == 1 else np.concatenate(bands, axis=y)

    def _warn_of_waste(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Warn, once, about a large image with tiles from one side to the other, so that reading these rows and columns
        reads at least twice as much."""
        (height, width), (tall, wide) = self.size, self.tile
        touched_y, touched_x = _touched(rows, height, tall), _touched(columns, width, wide)
        across = (tall >= height and 2 * rows.size <= height) or (wide >= width and 2 * columns.size <= width)
        twice = touched_y * touched_x >= 2 * rows.size * columns.size
        if self._warned or not across or not twice or height * width < _WORTH_A_WARNING:
            return
        self._warned = True
        area = height * width
        warnings.warn(
            f"{self._source.name} of {height} x {width} pixels is stored in pieces of {tall} x {wide}, so that "
            f"reading {rows.size} x {columns.size} of them ({rows.size * columns.size / area:.1%} of the image) reads "
            f"{touched_y * touched_x / area:.1%} of it; write it in tiles, with {self._source.advice}",
            WholeReadWarning,
            stacklevel=3,
        )

    def __repr__(self) -> str:
        return f"<WindowReader of {self._source.name}: {self.axes} {list(self.shape)} {self.dtype}, tiles {self.tile}>"


def _open(source: Any, level: int, path: str, axes: str | None, count: Count) -> Source:
    """Open `source` as a Source."""
    if isinstance(source, np.ndarray):
        _unused(f"an array of shape {list(source.shape)}", level=level, path=path)
        return ArraySource(source, axes, count)
    if not isinstance(source, str | os.PathLike):
        raise DataError(f"WindowReader takes a path or a NumPy array, not a {type(source).__name__}")
    name = os.fspath(source)
    if not os.path.exists(name):
        raise DataError(f"there is no file {shown(name)}")
    if os.path.isdir(name) or name.endswith(".zip"):
        _unused(name, level=level)
        need("zarr", f"reading {name}")
        from partway.data.zarr_source import ZarrSource

        return ZarrSource(name, path, axes, count)
    _unused(name, path=path, axes=axes)
    need("tifffile", f"reading {name}")
    from partway.data.tiff_source import TiffSource

    return TiffSource(name, level, count)


def _unused(name: str, **arguments: Any) -> None:
    """Raise DataError for an argument that this kind of source does not take."""
    places = {
        "level": "level is for pyramidal TIFF files; name the array of a Zarr level with path=",
        "path": "path is for arrays inside a Zarr group",
        "axes": "a TIFF file has its own axes",
    }
    for argument, value in arguments.items():
        if value:
            raise DataError(f"{argument}={shown(value)} was given for {name}: {places[argument]}")


def _stretches(indices: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The begin and the end of each run of successive numbers in the ascending `indices`."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def _touched(indices: NDArray[np.int64], size: int, tile: int) -> int:
    """The number of rows, of `size`, in the tiles of `tile` rows that `indices` touch."""
    firsts = np.unique(indices // tile) * tile
    return int(np.sum(np.minimum(firsts + tile, size) - firsts))


def _arranged(
    pixels: NDArray[Any], dim: int, wanted: NDArray[np.int64], present: NDArray[np.int64], fill_value: float
) -> NDArray[Any]:
    """`pixels`, with the indices `present` along `dim`, arranged as `wanted`; -1 is the fill value."""
    if np.array_equal(wanted, present):
        return pixels
    # index 0 for those outside; they are overwritten
    arranged: NDArray[Any] = np.take(pixels, np.searchsorted(present, np.maximum(wanted, present[0])), axis=dim)
    arranged[(slice(None),) * dim + (wanted < 0,)] = fill_value
    return arranged
