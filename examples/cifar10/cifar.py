"""CIFAR-10's binary files: reading them, making small ones of the same format, and the augmentations of the reference.

A file is a row of records. A record is a byte with the label, 0 to 9, and 3,072 bytes with the pixels: the red, the
green and the blue plane, each 32 rows of 32. The data set has five files of 10,000 records for training and one for
testing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Sampler

import partway as pw

SIDE, CLASSES = 32, 10
RECORD = 1 + 3 * SIDE * SIDE  # bytes
TRAINING, TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, DEVIATION = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)  # the reference's numbers, in its order


# -- The files ---------------------------------------------------------------------------------------------------------


class Records:
    """The images and labels of a folder's files, which are mapped: processes of one host share their memory.

    Raises DataError, which names the file, for what is not of the format.
    """

    def __init__(self, folder: Path, names: Sequence[str] = TRAINING) -> None:
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise pw.DataError(f"{folder} has no {', '.join(missing)}; {_where_then(folder)}")
        self._files = [_read(folder / name) for name in names]
        self.each = len(self._files[0])
        for name, records in zip(names, self._files, strict=True):
            if len(records) != self.each:
                raise pw.DataError(
                    f"{folder / name} has {len(records)} images and {names[0]} {self.each}; one of them is incomplete: "
                    "copy it again"
                )
        self.labels = np.concatenate([records[:, 0] for records in self._files]).astype(np.int64)
        for index in np.flatnonzero(self.labels >= CLASSES)[:1]:
            file, record = divmod(int(index), self.each)
            raise pw.DataError(
                f"{folder / names[file]} has the label {self.labels[index]} in its record {record}, and CIFAR-10 has "
                f"0 to {CLASSES - 1}; it is damaged, or another data set: copy the binary version of CIFAR-10 again"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> np.ndarray[Any, Any]:
        """The pixels of an image, uint8 [3, 32, 32]."""
        file, record = divmod(index, self.each)
        return self._files[file][record, 1:].reshape(3, SIDE, SIDE)


def _read(path: Path) -> np.ndarray[Any, Any]:
    size = path.stat().st_size
    if size == 0 or size % RECORD:
        raise pw.DataError(
            f"{path} has {size} bytes, no multiple of the {RECORD} of an image: it is incomplete; copy it again"
        )
    return np.memmap(path, np.uint8, "r").reshape(-1, RECORD)


def _where_then(folder: Path) -> str:
    """Where the files may be instead."""
    inside = folder / "cifar-10-batches-bin"
    if inside.is_dir():
        return f"give {inside}"
    if (folder / "data_batch_1").is_file():
        return "these are the files of the Python version; take the binary version of CIFAR-10"
    return "give the folder cifar-10-batches-bin, or make files of its format with make_files.py"


def make_files(folder: Path, records: int, seed: int = 0) -> None:
    """Write the files of a small data set of CIFAR-10's format, each of so many records: see `pictures`."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate((*TRAINING, *TEST)):
        images, labels = pictures(records, [seed, i])
        np.concatenate([labels[:, None], images.reshape(records, -1)], axis=1).tofile(folder / name)
    (folder / "batches.meta.txt").write_text("\n".join([*NAMES, "", ""]), encoding="ascii")


def pictures(count: int, seed: int | list[int] = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """So many images of noisy stripes, uint8 [count, 3, 32, 32]. Their labels, uint8 [count], are the direction of the
    stripes, and their colour, since a mirrored image has another direction."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(count) % CLASSES)
    angle = (labels * math.pi / CLASSES)[:, None, None]
    rows, columns = np.mgrid[:SIDE, :SIDE]
    waves = np.sin((np.cos(angle) * columns + np.sin(angle) * rows) * 0.8 + generator.uniform(0, 6, (count, 1, 1)))
    tint = np.cos(2 * math.pi * (labels[:, None] / CLASSES + np.arange(3) / 3))[:, :, None, None]
    noisy = 128 + 50 * waves[:, None] + 40 * tint + generator.normal(0, 20, (count, 3, SIDE, SIDE))
    return noisy.clip(0, 255).astype(np.uint8), labels.astype(np.uint8)


# -- Training data -----------------------------------------------------------------------------------------------------


class Augment:
    """The reference's augmentations: a crop of the image with 4 pixels around it, mirrored or not, resized to `size`,
    normalized. What is drawn follows from the seed, the epoch and the number of the sample, on whatever process."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.crop, self.flip = size, pw.data.RandomCrop(SIDE, seed, padding=4), pw.data.RandomFlip(seed)
        self.mean, self.deviation = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, DEVIATION))

    def __call__(self, image: np.ndarray[Any, Any], epoch: int, index: int) -> Tensor:
        """The image uint8 [3, 32, 32] as [3, size, size]."""
        view = self.flip(self.crop(pw.data.View.whole(SIDE, SIDE), epoch=epoch, index=index), epoch=epoch, index=index)
        pixels = torch.from_numpy(view.read(pw.data.WindowReader(image, axes="CYX"))).to(self.mean)
        large = F.interpolate(pixels[None], (self.size, self.size), mode="bilinear")[0]
        return (large / 255 - self.mean) / self.deviation


class Cifar10(Dataset[tuple[Tensor, Tensor]]):
    """The augmented images [3, size, size] of a folder, and their labels."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        self.records, self.augment, self.epoch = Records(folder), Augment(size, seed), pw.data.Epoch()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.augment(self.records.image(index), int(self.epoch), index)
        return image, torch.tensor(self.records.labels[index])


class Shares(Sampler[int]):
    """The samples that this process reads: its share of every batch of `batch` samples. Their order follows from the
    seed and the epoch, so that any number of processes trains on the same batches. A last, incomplete one is left out.
    """

    def __init__(self, data: Cifar10, batch: int, seed: int) -> None:
        self.data, self.batch, self.seed = data, batch, seed
        self.rank, self.processes = pw.get_rank(), pw.get_group_size()  # 0 and 1 in simulation: the whole batch

    def set_epoch(self, epoch: int) -> None:
        """Shuffle and augment as in this epoch from now on."""
        self.data.epoch.set(epoch)

    def __len__(self) -> int:
        return len(self.data) // self.batch * (self.batch // self.processes)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + int(self.data.epoch))
        order = torch.randperm(len(self.data), generator=generator)
        for samples in order.split(self.batch)[: len(order) // self.batch]:
            yield from samples.chunk(self.processes)[self.rank].tolist()
