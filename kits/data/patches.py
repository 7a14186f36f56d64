"""Cut an image into a grid of patches, like MindSpore's `vision.SlicePatches`."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from partway.data.window import check_fill, is_int
from partway.strategy import DataError, shown

Image = TypeVar("Image", NDArray[Any], torch.Tensor)


class SliceMode(Enum):
    """How to cut an image that the grid does not divide."""

    PAD = "pad"
    DROP = "drop"


class SlicePatches:
    """A transform: cuts an image of [H, W] or [H, W, C], an array or a tensor, into a tuple of `num_height` times
    `num_width` patches of the same kind and dtype, row after row; a grid of 1x1 returns the image itself.

    PAD    a patch has ceil(H / num_height) x ceil(W / num_width) pixels; `fill_value` (0 to 255) pads the bottom and
           the right, so that the last patches may be all padding
    DROP   it has floor(H / num_height) x floor(W / num_width); the rest at the bottom and at the right is dropped

    Patches share the image's memory unless they are padded. A rank's patch is `patches[part.patch()]`.

    Raises DataError for an argument of a wrong type or value; a call raises it for anything but such an image, and for
    fewer pixels than slices along a dim.
    """

    def __init__(
        self,
        num_height: int = 1,
        num_width: int = 1,
        slice_mode: SliceMode = SliceMode.PAD,
        fill_value: int = 0,
    ) -> None:
        for name, count in (("num_height", num_height), ("num_width", num_width)):
            if not is_int(count, 1):
                raise DataError(f"{name} is {shown(count)} ({type(count).__name__}); write an int of 1 or more")
        if not isinstance(slice_mode, SliceMode):
            raise DataError(
                f"slice_mode is {shown(slice_mode)} ({type(slice_mode).__name__}); write SliceMode.PAD or "
                "SliceMode.DROP"
            )
        if not is_int(fill_value, 0) or fill_value > 255:
            raise DataError(
                f"fill_value is {shown(fill_value)} ({type(fill_value).__name__}); write an int from 0 to 255"
            )
        self.num_height, self.num_width = num_height, num_width
        self.slice_mode, self.fill_value = slice_mode, fill_value

    def __call__(self, image: Image) -> Image | tuple[Image, ...]:
        """The patches of `image`."""
        self._check(image)
        if self.num_height == self.num_width == 1:
            return image
        rows, columns = (
            -(-size // count) if self.slice_mode is SliceMode.PAD else size // count
            for size, count in zip(image.shape, (self.num_height, self.num_width), strict=False)
        )
        padded = self._padded(image, rows * self.num_height, columns * self.num_width)
        return tuple(
            padded[y * rows : (y + 1) * rows, x * columns : (x + 1) * columns]
            for y in range(self.num_height)
            for x in range(self.num_width)
        )

    def _check(self, image: Any) -> None:
        if not isinstance(image, np.ndarray | torch.Tensor):
            raise DataError(f"SlicePatches takes a NumPy array or a tensor, not a {type(image).__name__}")
        if image.ndim not in (2, 3):
            raise DataError(
                f"SlicePatches takes an image of [H, W] or [H, W, C], not one of shape {list(image.shape)}; put it "
                "before the batch is made, and before HWC becomes CHW"
            )
        counts = (("height", image.shape[0], self.num_height), ("width", image.shape[1], self.num_width))
        for name, size, count in counts:
            if count > size:
                raise DataError(
                    f"the image of shape {list(image.shape)} has {size} pixels in its {name}, fewer than "
                    f"num_{name}={count}; use at most {size} slices"
                )

    def _padded(self, image: Image, height: int, width: int) -> Image:
        """`image` padded with the fill value at the bottom and at the right, up to `height` and `width`."""
        if height <= image.shape[0] and width <= image.shape[1]:
            return image
        shape = (height, width, *image.shape[2:])
        if isinstance(image, torch.Tensor):
            padded = image.new_full(shape, self.fill_value)
            padded[: image.shape[0], : image.shape[1]] = image
            return padded
        check_fill(self.fill_value, image.dtype)
        filled = np.full(shape, self.fill_value, image.dtype)
        filled[: image.shape[0], : image.shape[1]] = image
        return filled

    def __repr__(self) -> str:
        return f"SlicePatches({self.num_height}, {self.num_width}, {self.slice_mode}, {self.fill_value})"
