"""Pictures that come with packages, written as tiled TIFF files, and what stands out in them: the classes to learn.

scikit-image's package holds Hubble's deep field (872 x 1000 pixels) and a retina (1411 x 1411), scikit-learn's a flower
(427 x 640), so nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from torch import Tensor

NEAR, HALO = 1, 12  # pixels to each side of one: what is compared, and what it is compared with
TILE = 32


@dataclass(frozen=True)
class Picture:
    """Where a picture is from, and what of it is to be found: pixels that are brighter than what is around them, or
    darker (`sign` -1), by `level` of 255."""

    package: str
    title: str
    sign: int
    level: float


PICTURES = {
    "hubble": Picture("skimage", "galaxies in Hubble's deep field", 1, 10.0),
    "retina": Picture("skimage", "vessels of a retina", -1, 4.0),
    "flower": Picture("sklearn", "bright parts of a flower", 1, 10.0),
}


def available() -> str:
    """The first picture whose package is installed."""
    return next(name for name, picture in PICTURES.items() if find_spec(picture.package))


def picture_of(name: str) -> Picture:
    """One of PICTURES, or that of a file, in which bright parts are sought."""
    return PICTURES.get(name) or Picture("", f"bright parts of {Path(name).name}", 1, 10.0)


def pixels_of(name: str) -> np.ndarray[Any, Any]:
    """The picture as uint8 [H, W, 3]; `name` may be the path of an image file."""
    match name:
        case "hubble" | "retina":
            from skimage import data

            return np.asarray(data.hubble_deep_field() if name == "hubble" else data.retina())
        case "flower":
            from sklearn.datasets import load_sample_image

            return np.asarray(load_sample_image("flower.jpg"))
    from matplotlib.image import pil_to_array
    from PIL import Image

    with Image.open(name) as image:
        return np.asarray(pil_to_array(image.convert("RGB")))


def write_tiles(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    """Write a picture so that a window of it can be read without the rest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, pixels, tile=(TILE, TILE), photometric="rgb", compression="zlib")


def classes(pixels: np.ndarray[Any, Any], picture: Picture) -> Tensor:
    """1 where a pixel stands out from its surroundings, else 0, of all pixels but the outermost HALO ones.

    Sums of whole numbers are exact: a pixel has the same class in every window that it is read in.
    """
    grey = torch.from_numpy(pixels.sum(-1, dtype=np.float64))[None, None]

    def mean(radius: int) -> Tensor:
        margin, extent = HALO - radius, 2 * radius + 1
        held = grey[..., margin : grey.shape[-2] - margin, margin : grey.shape[-1] - margin]
        rows = F.avg_pool2d(held, (extent, 1), 1, divisor_override=1)
        return F.avg_pool2d(rows, (1, extent), 1, divisor_override=1) / (3 * extent * extent)

    return (picture.sign * (mean(NEAR) - mean(HALO)) > picture.level)[0, 0].long()
