"""Processes that read their own parts of the images train as one device does that reads all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from checks import whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import partway as pw

pytestmark = pytest.mark.gloo

SEED, EPOCHS, SIZE = 1000, 2, 32


class Files(Dataset):
    """One TIFF for each sample: the rank's part of a random crop, flipped; and the label."""

    def __init__(self, folder: Path, part: pw.data.Part) -> None:
        self.paths, self.part, self.epoch = sorted(folder.glob("*.tif")), part, pw.data.Epoch()
        self.crop = pw.data.RandomCrop(SIZE, SEED, padding=4)
        self.flip = pw.data.RandomFlip(SEED, 0.5, 0.5)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with pw.data.WindowReader(self.paths[index]) as image:
            view = pw.data.View.of(image)
            for transform in (self.crop, self.flip):
                view = transform(view, epoch=int(self.epoch), index=index)
            pixels = view.part(self.part).read(image, mode="reflect")
        return torch.from_numpy(pixels).double()[None] / 255, torch.tensor(float(index)).double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        out: Tensor = ((image[:, 0] * self.weight).mean((1, 2)) - label).square().mean()
        return out


def train(model: Any, folder: Path, part: pw.data.Part, labels: pw.data.Part, given: Any = lambda image: image) -> Any:
    """The losses, the weight, and which samples were read. `labels`: the part of the label that a rank is given."""
    files = Files(folder, part)
    sampler = pw.data.distributed_sampler(files, labels, seed=SEED)
    loader = DataLoader(files, batch_size=4 // labels.splits[0], sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, samples = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        files.epoch.set(epoch)
        for image, label in loader:
            loss = model(given(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            samples += label.tolist()
    weight = model.weight.detach()
    return losses, whole(weight), samples


def on_a_rank(folder: Path, strategy: Any) -> Any:
    """A process of two that is given its part, as the dataset_strategy says."""
    pw.set_auto_parallel_context(dataset_strategy=strategy)
    part, labels = (pw.data.part_of(entry) for entry in strategy)
    model = pw.shard(Net())
    result = train(model, folder, part, labels)
    assert pw.data.planned_part(model, "image") == part
    assert pw.data.planned_part(model, "label") == labels
    return result


def with_global_tensors(folder: Path) -> Any:
    """A process of two that hands over its part as a DTensor, as axis names say."""
    mesh, strategy = {"dp": 1, "w": 2}, ("dp", None, None, "w")
    part = pw.data.part_of(strategy, mesh=mesh)
    model = pw.shard(Net(), mesh=mesh, in_strategy=(strategy, ("dp",)))
    result = train(model, folder, part, part, lambda image: pw.data.to_global(image, strategy, mesh))
    assert pw.data.planned_part(model) == part
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for i in range(8):
        tifffile.imwrite(path / f"{i}.tif", generator.integers(0, 256, (40, 48), np.uint8), tile=(16, 16))
    return path


@pytest.fixture(scope="module")
def alone(folder):
    whole = pw.data.Part.whole(4)
    return train(Net(), folder, whole, pw.data.Part.whole(1))


def same_training(found, alone):
    losses, weight, _ = found
    torch.testing.assert_close(losses, alone[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weight, alone[1], rtol=1e-12, atol=1e-14)


def test_ranks_that_share_an_image_read_the_same_samples_and_train_as_one_device(on_ranks, folder, alone):
    results = on_ranks(2, on_a_rank, folder, ((1, 1, 1, 2), (1,)))
    for result in results:
        same_training(result, alone)
        assert result[2] == alone[2]


def test_data_parallel_groups_read_different_samples_and_train_as_one_device(on_ranks, folder, alone):
    results = on_ranks(2, on_a_rank, folder, ((2, 1, 1, 1), (2,)))
    for result in results:
        same_training(result, alone)
    for epoch in range(EPOCHS):
        first, second = (result[2][4 * epoch : 4 * epoch + 4] for result in results)
        assert sorted(first + second) == list(range(8))


def test_parts_may_be_handed_over_as_global_tensors(on_ranks, folder, alone):
    for result in on_ranks(2, with_global_tensors, folder):
        same_training(result, alone)
