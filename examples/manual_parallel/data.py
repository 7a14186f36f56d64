"""MNIST's files, or scikit-learn's digits where there are none."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import partway as pw

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels, from 0 to 1


def load(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Images (n, 1, height, width) and labels (n,) from 0 to 9: MNIST's from its files in `folder`, which may be
    gzipped, or scikit-learn's digits for None. Raises DataError for files that are not MNIST's."""
    if folder is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels = digits.images / 16, digits.target
    else:
        pixels, labels = _read(folder, IMAGES, 3) / 255, _read(folder, LABELS, 1)
        if len(pixels) != len(labels):
            raise pw.DataError(f"{folder} has {len(pixels)} images and {len(labels)} labels; copy both files again")
    images = (torch.tensor(pixels, dtype=torch.get_default_dtype()) - MEAN) / DEVIATION
    return images.unsqueeze(1), torch.tensor(labels, dtype=torch.int64)


def _read(folder: Path, name: str, ndim: int) -> np.ndarray:
    """An array of bytes in the IDX format: two zeros, 8 for bytes, the number of dims, each size as 4 bytes; then the
    values."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise pw.DataError(f"{folder} has no {name}, or {name}.gz; give the folder of MNIST's files, or no DATA_PATH")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    sizes = np.frombuffer(data[4 : 4 + 4 * ndim], ">u4").astype(int)
    if data[:4] != bytes([0, 0, 8, ndim]) or len(data) != 4 + 4 * ndim + sizes.prod():
        raise pw.DataError(f"{path} is no file of MNIST's, or incomplete; copy it again")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(sizes)


def batches(images: Tensor, labels: Tensor, size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches of `size`, in an order of the epoch's own, the same on every rank; the rest is left out."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for chosen in order.split(size)[: len(order) // size]:
        yield images[chosen], labels[chosen]
