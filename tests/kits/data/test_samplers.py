"""Data-parallel groups get different samples; ranks that share an image get the same ones, in the same order."""

from __future__ import annotations

import io
import tarfile
from collections import Counter

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

import partway as pw
from partway.data import Epoch, Part, distributed_sampler, part_of, web_dataset

MESH = {"dp": 2, "w": 4}
STRATEGY = ("dp", None, None, "w")


def parts():
    return [part_of(STRATEGY, rank, mesh=MESH) for rank in range(8)]


# -- map-style data sets


def test_a_group_is_the_ranks_that_share_an_image():
    samples = [list(distributed_sampler(range(20), part, seed=3)) for part in parts()]
    assert samples[:4] == [samples[0]] * 4
    assert samples[4:] == [samples[4]] * 4
    assert sorted(samples[0] + samples[4]) == list(range(20))


def test_a_strategy_that_splits_only_the_image_gives_all_ranks_every_sample():
    samples = [list(distributed_sampler(range(6), part_of((1, 1, 1, 8), rank, devices=8))) for rank in range(8)]
    assert sorted(samples[0]) == list(range(6))
    assert samples == [samples[0]] * 8


def test_set_epoch_changes_the_order_alike_on_all_ranks_of_a_group():
    first, second = (distributed_sampler(range(20), part, seed=3) for part in parts()[:2])
    before = list(first)
    for sampler in (first, second):
        sampler.set_epoch(1)
    assert list(first) == list(second) != before


def test_the_other_arguments_are_those_of_pytorch():
    assert list(distributed_sampler(range(5), parts()[4], shuffle=False)) == [1, 3, 0]
    assert list(distributed_sampler(range(5), parts()[4], shuffle=False, drop_last=True)) == [1, 3]
    assert list(distributed_sampler(range(4), part_of((1, 4), 2, devices=4), shuffle=False, dim=1)) == [2]


def test_wrong_arguments_of_a_sampler_are_refused():
    with pytest.raises(pw.DataError, match=r"the part is 3; write part_of\(strategy\), with the strategy of the input"):
        distributed_sampler(range(4), 3)
    with pytest.raises(pw.DataError, match="seed is -1; write an int of 0 or more, the same on every rank"):
        distributed_sampler(range(4), parts()[0], seed=-1)
    with pytest.raises(pw.DataError, match=r"part .* has no dim 4, only"):
        distributed_sampler(range(4), parts()[0], dim=4)


class Epochs(torch.utils.data.Dataset):
    def __init__(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return int(self.epoch)


def test_workers_that_a_loader_keeps_see_the_epoch():
    epoch = Epoch()
    loader = DataLoader(Epochs(epoch), batch_size=None, num_workers=2, persistent_workers=True)
    for number in (0, 3):
        epoch.set(number)
        assert list(loader) == [number] * 4
    assert repr(epoch) == "Epoch(3)"
    with pytest.raises(pw.DataError, match="epoch is -1; write an int of 0 or more"):
        epoch.set(-1)


# -- WebDataset


SHARDS, SAMPLES = 8, 5
# WebDataset itself leaves the files of shards to the garbage collector.
UNCLOSED = pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar:ResourceWarning")


@pytest.fixture
def urls(tmp_path):
    """8 tar files with 5 samples each; sample j of shard i has the key i * 5 + j."""
    for i in range(SHARDS):
        with tarfile.open(tmp_path / f"{i}.tar", "w") as tar:
            for j in range(SAMPLES):
                data = str(i * SAMPLES + j).encode()
                entry = tarfile.TarInfo(f"{i * SAMPLES + j:04}.txt")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return str(tmp_path / f"{{0..{SHARDS - 1}}}.tar")


def keys(dataset, workers=0):
    """The keys of all samples that a loader of `dataset` gives."""
    return [int(sample["__key__"]) for sample in DataLoader(dataset, batch_size=None, num_workers=workers)]


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_groups_read_different_shards_and_the_ranks_of_a_group_the_same_samples(urls, resampled, workers):
    read = []
    for part in parts():
        dataset = web_dataset(urls, part, seed=7, resampled=resampled).shuffle(10).with_epoch(20)
        read.append(keys(dataset, workers))
    assert read[:4] == [read[0]] * 4
    assert read[4:] == [read[4]] * 4
    assert read[0] != read[4]
    if not resampled:
        assert sorted(read[0] + read[4]) == list(range(SHARDS * SAMPLES))


@UNCLOSED
def test_webdataset_alone_refuses_several_ranks_or_gives_ranks_of_one_image_different_ones(urls, monkeypatch):
    """What `web_dataset` is for."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="you need to add an explicit nodesplitter"):
        next(iter(wds.WebDataset(urls, resampled=True, shardshuffle=False)))
    read = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        dataset = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node)
        read.append(keys(dataset))
    assert not set(read[0]) & set(read[1])
    monkeypatch.setenv("RANK", "1")
    assert keys(web_dataset(urls, Part.whole(4), seed=0, shuffle_shards=False)) == list(range(SHARDS * SAMPLES))


@UNCLOSED
def test_webdataset_alone_counts_an_epoch_in_every_worker_and_here_it_is_that_of_the_group(urls):
    theirs = wds.WebDataset(urls, shardshuffle=False).with_epoch(10)
    assert len(keys(theirs, workers=2)) == 20
    for workers in (0, 1, 2):
        assert len(keys(web_dataset(urls, parts()[0], seed=0, resampled=True).with_epoch(10), workers)) == 10


def test_an_epoch_may_be_longer_than_the_shards(urls):
    dataset = web_dataset(urls, parts()[0], seed=0, shuffle_shards=False).with_epoch(45)
    counts = Counter(keys(dataset))
    assert set(counts.values()) == {2, 3}
    assert len(counts) == 20


def test_without_an_epoch_each_shard_is_read_once(urls):
    read = [keys(web_dataset(urls, part, seed=0), workers=2) for part in (parts()[0], parts()[4])]
    assert sorted(read[0] + read[1]) == list(range(SHARDS * SAMPLES))


def test_an_epoch_of_batches_is_counted_in_batches(urls):
    dataset = web_dataset(urls, parts()[0], seed=0).to_tuple("txt").batched(4).with_epoch(6)
    assert len(list(DataLoader(dataset, batch_size=None, num_workers=2))) == 6


def test_the_order_follows_from_seed_and_epoch_alone(urls):
    def order(seed, epoch, **options):
        dataset = web_dataset(urls, parts()[0], seed=seed, **options).shuffle(20)
        dataset.set_epoch(epoch)
        return keys(dataset.with_epoch(20))

    for options in ({}, {"resampled": True}):
        assert order(1, 0, **options) == order(1, 0, **options)
        assert order(1, 0, **options) != order(1, 1, **options)
        assert order(1, 0, **options) != order(2, 0, **options)


def test_the_epoch_reaches_pipelines_made_of_it_and_workers_that_a_loader_keeps(urls):
    dataset = web_dataset(urls, parts()[0], seed=1)
    shuffled = dataset.shuffle(20).with_epoch(20)
    loader = DataLoader(shuffled, batch_size=None, num_workers=2, persistent_workers=True)

    def read():
        return [int(sample["__key__"]) for sample in loader]

    first = read()
    assert read() == first
    dataset.set_epoch(1)
    assert read() != first


def test_shuffling_takes_from_a_buffer_and_loses_nothing(urls):
    plain = web_dataset(urls, Part.whole(4), seed=0, shuffle_shards=False)
    read = keys(plain.shuffle(1000))
    assert read != sorted(read)
    assert sorted(read) == list(range(SHARDS * SAMPLES))
    assert max(key - place for place, key in enumerate(keys(plain.shuffle(3, initial=3)))) <= 3
    assert keys(plain.shuffle(0)) == list(range(SHARDS * SAMPLES))


def test_a_length_is_what_was_said_and_changes_no_epoch(urls):
    dataset = web_dataset(urls, parts()[0], seed=0).with_epoch(20)
    sized = dataset.with_length(20)
    assert len(sized) == 20
    assert len(DataLoader(sized, batch_size=4)) == 5
    assert len(keys(sized, workers=2)) == 20
    assert not hasattr(type(dataset), "__len__")


def test_a_step_of_the_pipeline_leaves_the_one_before_as_it_was(urls):
    dataset = web_dataset(urls, parts()[0], seed=0)
    dataset.with_epoch(3)
    dataset.shuffle(5)
    assert len(keys(dataset)) == 20


def test_more_workers_than_shards_are_refused(urls):
    with pytest.raises(pw.DataError) as error:
        web_dataset(urls, part_of((16, 1), 0, devices=16), seed=0)
    assert str(error.value) == (
        "there are 8 shards for 16 data-parallel groups, so that some would read nothing; write at least 16 shards, "
        "use fewer workers, or resampled=True"
    )


@pytest.mark.slow  # DataLoader waits for its workers for some seconds
def test_more_loader_workers_than_shards_are_refused(urls):
    few = wds.shardlists.expand_urls(urls)[:3]
    with pytest.raises(pw.DataError, match="there are 3 shards for 2 data-parallel groups with 2 loader workers each"):
        keys(web_dataset(few, parts()[0], seed=0), workers=2)
    assert len(keys(web_dataset(few, parts()[0], seed=0, resampled=True).with_epoch(20), workers=2)) == 20


def test_shards_without_samples_are_no_endless_epoch(tmp_path):
    tarfile.open(tmp_path / "0.tar", "w").close()
    with pytest.raises(pw.DataError, match=r"there are no samples in the shards of worker 0, such as .*0\.tar"):
        keys(web_dataset([str(tmp_path / "0.tar")], Part.whole(1), seed=0).with_epoch(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: web_dataset([], Part.whole(4), seed=0),
            "urls is []; write the paths of tar files, or one str such as",
        ),
        (lambda: web_dataset([3], Part.whole(4), seed=0), "urls is [3]; write the paths of tar files"),
        (lambda: web_dataset("a.tar", 0, seed=0), "the part is 0; write part_of(strategy)"),
        (lambda: web_dataset("a.tar", Part.whole(4), seed=None), "seed is None; write an int of 0 or more"),
        (
            lambda: web_dataset("a.tar", Part.whole(4), seed=0, resampled=True, shuffle_shards=False),
            "resampled=True draws shards at random; omit shuffle_shards=False",
        ),
        (
            lambda: web_dataset("a.tar", Part.whole(4), seed=0).with_epoch(0),
            "with_epoch is given 0; write how many items",
        ),
        (
            lambda: web_dataset("a.tar", Part.whole(4), seed=0).with_length(-1),
            "with_length is given -1; write how many",
        ),
        (lambda: web_dataset("a.tar", Part.whole(4), seed=0).shuffle(-1), "size is -1; write how many samples"),
        (lambda: web_dataset("a.tar", Part.whole(4), seed=0).repeat(2), "write with_epoch(items), which repeats them"),
        (
            lambda: web_dataset("a.tar", Part.whole(4), seed=0).rsample(0.1),
            "rsample draws from a generator that differs",
        ),
        (lambda: web_dataset("a.tar", Part.whole(4), seed=0).set_epoch("1"), "epoch is '1'; write an int of 0 or more"),
    ],
)
def test_wrong_arguments_of_a_web_dataset_are_refused(make, message):
    with pytest.raises(pw.DataError) as error:
        make()
    assert message in str(error.value)


def test_a_missing_webdataset_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr("partway.data.extras.find_spec", lambda name: None)
    with pytest.raises(pw.RuntimeStateError) as error:
        web_dataset("a.tar", Part.whole(4), seed=0)
    said = "web_dataset needs webdataset; install it with: pip install '.[data]' in Partway's checkout"
    assert str(error.value) == said
