"""Images of which every pixel says where it is, in all the ways that they can be stored."""

from __future__ import annotations

import numpy as np
import pytest


def picture(height: int, width: int, channels: int = 0, *, first: bool = False, dtype: str = "uint16") -> np.ndarray:
    """An image with another number in each pixel (as far as `dtype` goes); channels last unless `first`."""
    shape = (
        (channels, height, width) if channels and first else (height, width, channels) if channels else (height, width)
    )
    return (np.arange(np.prod(shape)) * 7919 % (np.iinfo(dtype).max + 1)).astype(dtype).reshape(shape)


@pytest.fixture
def make_picture():
    return picture
