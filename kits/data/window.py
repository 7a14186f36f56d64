"""A rectangle of an image in global pixels, and the fill outside the image."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from partway.strategy import DataError, shown
from partway.strategy.basics import Choice


class FillMode(Choice):
    """The fill of the space outside an image; the names are those of torch.nn.functional.pad.

    constant    the fill value
    reflect     the image mirrored at its outermost pixels, which are not repeated
    replicate   the outermost pixel
    circular    the image again
    """

    CONSTANT = "constant"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"


class Window(NamedTuple):
    """Rows `y0` up to `y1` and columns `x0` up to `x1`, in pixels of the whole image. It may reach outside.

    A plain tuple of four ints may be passed for a Window.
    """

    y0: int
    y1: int
    x0: int
    x1: int

    @property
    def height(self) -> int:
        """The number of its rows."""
        return self.y1 - self.y0

    @property
    def width(self) -> int:
        """The number of its columns."""
        return self.x1 - self.x0

    def grown(self, halo: int | tuple[int, int]) -> Window:
        """This window with `halo` more pixels on each side; a pair is for top and bottom, and for left and right.
        Raises DataError."""
        y, x = pair("halo", halo, least=0)
        return Window(self.y0 - y, self.y1 + y, self.x0 - x, self.x1 + x)


def is_int(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether `value` is an int of `least` or more, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return least is None or int(value) >= least


def pair(name: str, value: Any, *, least: int) -> tuple[int, int]:
    """A pair for height and width: `value` twice, or a pair itself. Raises DataError, naming it, for anything else."""
    both = value if isinstance(value, tuple | list) else (value, value)
    if len(both) != 2 or not all(is_int(one, least) for one in both):
        raise DataError(
            f"{name} is {shown(value)}; write an int of {least} or more, or a pair of them: for the height and "
            "for the width"
        )
    return int(both[0]), int(both[1])


def as_window(window: object) -> Window:
    """Convert `window` to a Window. Raises DataError unless it is four ints with y0 < y1 and x0 < x1."""
    if not isinstance(window, tuple | list) or len(window) != 4 or not all(map(is_int, window)):
        raise DataError(
            f"the window is {shown(window)}; write four ints (y0, y1, x0, x1), in pixels of the whole image"
        )
    checked = Window(*map(int, window))
    if checked.y0 >= checked.y1 or checked.x0 >= checked.x1:
        raise DataError(f"the window {tuple(checked)} (y0, y1, x0, x1) is empty; y0 must be below y1, and x0 below x1")
    return checked


def as_mode(mode: object) -> FillMode:
    """Convert `mode` to a FillMode. Raises DataError, with the list of modes."""
    if not isinstance(mode, str) or mode not in list(FillMode):
        raise DataError(f"mode is {shown(mode)}; write one of {', '.join(map(repr, FillMode))}")
    return FillMode(mode)


def check_fill(fill_value: object, dtype: Any) -> None:
    """Raise DataError unless `fill_value` is a number that a pixel of `dtype` can be."""
    if not isinstance(fill_value, int | float | np.number):
        raise DataError(f"fill_value is {shown(fill_value)} ({type(fill_value).__name__}); write a number")
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        if fill_value != int(fill_value) or not limits.min <= fill_value <= limits.max:
            raise DataError(
                f"fill_value is {shown(fill_value)}, which a pixel of {np.dtype(dtype)} cannot be; write an int from "
                f"{limits.min} to {limits.max}"
            )


def source_indices(start: int, stop: int, size: int, mode: FillMode) -> NDArray[np.int64]:
    """For each row (or column) from `start` up to `stop`, the row of an image of `size` rows that fills it, or -1 for
    the fill value."""
    wanted = np.arange(start, stop, dtype=np.int64)
    match mode:
        case FillMode.CONSTANT:
            return np.where((wanted >= 0) & (wanted < size), wanted, -1)
        case FillMode.REPLICATE:
            return np.clip(wanted, 0, size - 1)
        case FillMode.CIRCULAR:
            return wanted % size
        case FillMode.REFLECT:
            period = max(2 * size - 2, 1)
            folded = wanted % period
            return np.minimum(folded, period - folded) if size > 1 else np.zeros_like(wanted)
