"""Random crops and flips, drawn for a sample and the same on every rank, in every loader worker and in every run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from partway.data.view import View
from partway.data.window import Window, is_int, pair
from partway.strategy import DataError, shown


def draws(name: str, seed: int, epoch: int, index: int | str, count: int) -> list[int]:
    """`count` numbers from 0 to 2**64 - 1 that depend only on the arguments; `name` separates transforms with one seed.
    NumPy promises that a SeedSequence gives the same numbers in every release."""
    key = index if is_int(index) else _number(str(index))
    words = (_number(name), seed, epoch, int(key))
    return [int(n) for n in np.random.SeedSequence(words).generate_state(count, np.uint64)]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def check_seed(seed: object) -> None:
    """Raise DataError unless `seed` is an int of 0 or more."""
    if not is_int(seed, 0):
        raise DataError(f"seed is {shown(seed)}; write an int of 0 or more, the same on every rank")


def _check_sample(epoch: object, index: object) -> None:
    if not is_int(epoch, 0):
        raise DataError(f"epoch is {shown(epoch)}; write an int of 0 or more")
    if not isinstance(index, str) and not is_int(index, 0):
        raise DataError(f"index is {shown(index)}; write the sample's number in the data set, or its key, a str")


@dataclass(frozen=True)
class RandomCrop:
    """A window of `size` pixels at a random place in a view.

    size      height and width, or one int for both
    seed      the same on every rank
    padding   how far it may reach outside, in pixels: an int, (left and right, top and bottom), or (left, top, right,
              bottom), as in MindSpore and torchvision. `View.read` fills it.

    Raises DataError for wrong arguments; a call raises it for a view that is smaller than the window.
    """

    size: int | tuple[int, int]
    seed: int
    padding: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        pair("size", self.size, least=1)
        check_seed(self.seed)
        self._sides()

    def _sides(self) -> tuple[int, int, int, int]:
        """The padding at the left, the top, the right and the bottom."""
        sides = self.padding if isinstance(self.padding, tuple | list) else (self.padding,)
        if len(sides) not in (1, 2, 4) or not all(is_int(side, 0) for side in sides):
            raise DataError(
                f"padding is {shown(self.padding)}; write an int of 0 or more, (left and right, top and bottom), or "
                "(left, top, right, bottom)"
            )
        left, top, right, bottom = tuple(sides) * (4 // len(sides))
        return left, top, right, bottom

    def __call__(self, view: View, *, epoch: int, index: int | str) -> View:
        """The crop of `view` for a sample: `index` is its number in the data set, or its key."""
        _check_sample(epoch, index)
        height, width = pair("size", self.size, least=1)
        left, top, right, bottom = self._sides()
        rows, columns = view.size[0] + top + bottom - height, view.size[1] + left + right - width
        if rows < 0 or columns < 0:
            raise DataError(
                f"a crop of {height} x {width} does not fit into {view.size[0]} x {view.size[1]} pixels with the "
                f"padding {shown(self.padding)}; use a smaller size, or more padding"
            )
        down, across = draws("crop", self.seed, epoch, index, 2)
        y, x = down % (rows + 1) - top, across % (columns + 1) - left
        return view.crop(Window(y, y + height, x, x + width))


@dataclass(frozen=True)
class RandomFlip:
    """A view mirrored left to right with the probability `horizontal`, and top to bottom with `vertical`.

    Raises DataError for a seed below 0, or a probability outside 0 to 1.
    """

    seed: int
    horizontal: float = 0.5
    vertical: float = 0.0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, value in (("horizontal", self.horizontal), ("vertical", self.vertical)):
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise DataError(f"{name} is {shown(value)}; write a probability, from 0 to 1")

    def __call__(self, view: View, *, epoch: int, index: int | str) -> View:
        """`view`, mirrored or not for a sample: `index` is its number in the data set, or its key."""
        _check_sample(epoch, index)
        across, down = (number / 2**64 for number in draws("flip", self.seed, epoch, index, 2))
        return view.flip(horizontal=across < self.horizontal, vertical=down < self.vertical)
