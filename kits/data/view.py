"""A view of an image: a window of it, perhaps mirrored. A crop of a view is a view again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partway.data.part import IMAGE_DIMS, Part
from partway.data.reader import WindowReader
from partway.data.window import FillMode, Window, as_window
from partway.strategy import DataError, shown


@dataclass(frozen=True, slots=True)
class View:
    """The pixels of `window` of an image, mirrored top to bottom if `upside_down`, left to right if `mirrored`.

    Crops and flips are decided for the whole image, the same on every rank, and a rank's part of the result is one more
    crop: a window of the file. In a mirrored view it is the window on the other side.
    """

    window: Window
    upside_down: bool = False
    mirrored: bool = False

    @classmethod
    def of(cls, image: WindowReader) -> View:
        """All of `image`. Raises DataError for anything but a reader of one."""
        if not isinstance(getattr(image, "size", None), tuple):
            raise DataError(f"View.of takes a WindowReader, not {shown(image)}; or write View.whole(height, width)")
        return cls.whole(*image.size)

    @classmethod
    def whole(cls, height: int, width: int) -> View:
        """All of an image of `height` and `width`. Raises DataError unless both are ints of 1 or more."""
        return cls(as_window((0, height, 0, width)))

    @property
    def size(self) -> tuple[int, int]:
        """Its height and width."""
        return self.window.height, self.window.width

    def crop(self, window: Window | tuple[int, int, int, int]) -> View:
        """The part of the view at `window`, counted from its own upper left corner. It may reach outside of the view,
        and beyond the image, where `read` fills it."""
        y0, y1, x0, x1 = as_window(window)
        mine = self.window
        rows = (mine.y1 - y1, mine.y1 - y0) if self.upside_down else (mine.y0 + y0, mine.y0 + y1)
        columns = (mine.x1 - x1, mine.x1 - x0) if self.mirrored else (mine.x0 + x0, mine.x0 + x1)
        return View(Window(*rows, *columns), self.upside_down, self.mirrored)

    def flip(self, *, horizontal: bool = False, vertical: bool = False) -> View:
        """The view mirrored left to right if `horizontal`, top to bottom if `vertical`."""
        return View(self.window, self.upside_down != vertical, self.mirrored != horizontal)

    def part(self, part: Part, dims: tuple[int, int] = IMAGE_DIMS) -> View:
        """A rank's part of the view; height and width are `dims` of the tensor. Raises DataError for uneven parts."""
        return self.crop(part.window(*self.size, dims))

    def read(
        self,
        image: WindowReader,
        *,
        halo: int | tuple[int, int] = 0,
        mode: str = FillMode.CONSTANT,
        fill_value: float = 0,
    ) -> NDArray[Any]:
        """The pixels of the view. The arguments and the errors are those of `WindowReader.read`."""
        if not isinstance(image, WindowReader):
            raise DataError(f"a view is read from a WindowReader, not a {type(image).__name__}; write WindowReader(it)")
        pixels = image.read(self.window, halo=halo, mode=mode, fill_value=fill_value)
        turned = {"Y": self.upside_down, "X": self.mirrored}
        steps = tuple(slice(None, None, -1 if turned.get(axis) else 1) for axis in image.axes)
        return np.ascontiguousarray(pixels[steps])
