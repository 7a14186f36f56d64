"""scikit-learn's digits: 1,797 images of 8 x 8 pixels, bundled with the package, so nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TEST = 360  # images kept for testing


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) of mean 0 and deviation 1, and labels (n,) from 0 to 9, in a fixed random order."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """The same split every time."""
    from sklearn.datasets import load_digits as read

    data, target = read(return_X_y=True)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8)[order]
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(target)[order]
    return Digits(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])


def batches(digits: Digits, size: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of `size`, shuffled anew in each epoch, the same every time; an incomplete last one is left out."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        order = torch.randperm(len(digits.labels), generator=generator)
        for chosen in order.split(size)[: len(order) // size]:
            yield digits.images[chosen], digits.labels[chosen]
