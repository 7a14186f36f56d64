"""A WebDataset pipeline with the same draws on all ranks of a data-parallel group.

WebDataset itself splits shards by rank or not at all, seeds `shuffle` and `resampled` by the clock and the process, and
counts `with_epoch` in every worker. Ranks that share an image would read different ones, and an epoch would be longer
by the number of workers.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from urllib.parse import urlparse

import webdataset as wds
from torch.utils.data import get_worker_info
from webdataset.gopen import gopen

from partway.data.epoch import Epoch
from partway.data.random_views import draws
from partway.data.web_decode import Decoder, Handler, unreadable
from partway.data.window import is_int
from partway.strategy import DataError, shown


@dataclass(frozen=True)
class ShardPass:
    """One pass of one loader worker over the shards: everything on which its draws depend."""

    seed: int
    epoch: int
    number: int
    group: int
    worker: int = 0
    workers: int = 1

    def generator(self, name: str, *, shared: bool = False) -> random.Random:
        """A random generator for `name`: a different one for each group and worker, unless it is `shared`."""
        place = name if shared else f"{name} {self.group} {self.worker}"
        return random.Random(draws(place, self.seed, self.epoch, self.number, 1)[0])


Drawing = Callable[[Iterable[Any], ShardPass], Iterator[Any]]


class GroupedWebDataset(wds.DataPipeline, wds.compat.FluidInterface):  # type: ignore[misc]
    """The pipeline that `web_dataset` returns, with WebDataset's methods. `set_epoch` sets the next epoch."""

    def __init__(
        self, urls: Sequence[str], group: int, groups: int, seed: int, resampled: bool, shuffle_shards: bool
    ) -> None:
        members = partial(wds.tariterators.tar_file_expander, handler=unreadable)
        super().__init__(_opened, members, partial(wds.tariterators.group_by_keys, handler=unreadable))
        self._urls, self._group, self._groups, self._seed = tuple(urls), group, groups, seed
        self._resampled, self._shuffles = resampled, shuffle_shards
        self._epoch = Epoch()
        self._items: int | None = None
        self._length = 0
        self._check_shards(1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also in workers that a loader keeps. Raises DataError unless it is an int of
        0 or more."""
        self._epoch.set(epoch)

    def shuffle(self, size: int, initial: int = 100) -> GroupedWebDataset:
        """Shuffle in a buffer of `size` samples, starting with `initial`. Raises DataError unless both are ints of 0
        (no shuffling) or more."""
        for name, value in (("size", size), ("initial", initial)):
            if not is_int(value, 0):
                raise DataError(f"{name} is {shown(value)}; write how many samples, an int of 0 or more")
        return self._with(pipeline=[*self.pipeline, _Shuffle(size, min(initial, size))]) if size else self

    def with_epoch(self, items: int) -> GroupedWebDataset:
        """Set epochs of `items` items (samples, or batches after `batched`) for the group: each of a loader's workers
        yields its share. Shards are read again as often as needed. Raises DataError."""
        if not is_int(items, 1):
            raise DataError(
                f"with_epoch is given {shown(items)}; write how many items an epoch has, an int of 1 or more"
            )
        return self._with(_items=items)

    def with_length(self, items: int) -> GroupedWebDataset:
        """Set a `len` of `items`, for code that asks for it; the epoch stays the same. Raises DataError."""
        if not is_int(items, 0):
            raise DataError(f"with_length is given {shown(items)}; write how many items, an int of 0 or more")
        sized = self._with(_length=items)
        sized.__class__ = _Sized
        return sized

    def decode(
        self,
        *handlers: str | Handler,
        pre: list[Handler] | None = None,
        post: list[Handler] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        handler: Callable[[Exception], bool] | None = None,
    ) -> GroupedWebDataset:
        """Decode members: images by names like "rgb"; texts, numbers, JSON and arrays by their extension; others by
        your own functions, which take an extension and bytes, and come first. Like WebDataset's, but nothing in a shard
        is run: pickles (.pyd, .pickle, .pth) and PostScript raise DataError."""
        decoder = Decoder(handlers, post, pre=pre, only=only, partial=partial)
        decoded: Any = self.map(decoder, **({} if handler is None else {"handler": handler}))  # of the class of self
        return cast("GroupedWebDataset", decoded)

    def xdecode(self, *arguments: Any, **options: Any) -> GroupedWebDataset:
        """Raise DataError: it would unpickle content of shards."""
        raise DataError("xdecode unpickles data of shards, which can run code; write decode(...)")

    def lmdb_cached(self, *arguments: Any, **options: Any) -> GroupedWebDataset:
        """Raise DataError: it would unpickle content of its file."""
        raise DataError("lmdb_cached unpickles its file, which can run code; write mcached()")

    def repeat(self, *arguments: Any, **options: Any) -> GroupedWebDataset:
        """Raise DataError: `with_epoch` repeats."""
        raise DataError("repeat would end when a group's shards do; write with_epoch(items), which repeats them")

    def rsample(self, p: float = 0.5) -> GroupedWebDataset:
        """Raise DataError: WebDataset's draws would differ on ranks that share an image."""
        raise DataError(
            "rsample draws from a generator that differs from rank to rank; write select(predicate), with a predicate "
            "of the sample's key"
        )

    def _with(self, **changed: Any) -> GroupedWebDataset:
        copied = copy.copy(self)
        copied.__dict__.update(changed)
        return copied

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self._check_shards(workers)
        first = ShardPass(self._seed, int(self._epoch), 0, self._group, worker, workers)
        if self._items is None:
            return self._one(first)
        share = self._items // workers + (worker < self._items % workers)
        return itertools.islice(self._repeated(first), share)

    def _repeated(self, first: ShardPass) -> Iterator[Any]:
        """Pass after pass, without end."""
        for number in itertools.count():
            empty = True
            for item in self._one(replace(first, number=number)):
                empty = False
                yield item
            if empty:
                raise DataError(f"there are no samples in the shards of worker {first.worker}, such as {self._urls[0]}")

    def _one(self, one_pass: ShardPass) -> Iterator[Any]:
        """One pass; it never ends if shards are drawn."""
        stream: Any = ({"url": url} for url in self._shards(one_pass))
        for stage in self.pipeline:
            stream = stage(stream, one_pass) if isinstance(stage, _Shuffle) else self.invoke(stage, stream)
        return iter(stream)

    def _shards(self, one_pass: ShardPass) -> Iterator[str]:
        if self._resampled:
            generator = one_pass.generator("shards")
            while True:
                yield generator.choice(self._urls)
        urls = list(self._urls)
        if self._shuffles:
            one_pass.generator("shards", shared=True).shuffle(urls)
        yield from urls[self._group :: self._groups][one_pass.worker :: one_pass.workers]

    def _check_shards(self, workers: int) -> None:
        needed = self._groups * workers
        if not self._resampled and len(self._urls) < needed:
            with_workers = f" with {workers} loader workers each" if workers > 1 else ""
            raise DataError(
                f"there are {len(self._urls)} shards for {self._groups} data-parallel groups{with_workers}, so that "
                f"some would read nothing; write at least {needed} shards, use fewer workers, or resampled=True"
            )


class _Sized(GroupedWebDataset):
    """A pipeline with a length: PyTorch takes any data set with `__len__` for one of known length."""

    def __len__(self) -> int:
        return self._length


@dataclass(frozen=True)
class _Shuffle:
    """Shuffles in a buffer, as WebDataset does, with the random numbers of the pass."""

    size: int
    initial: int

    def __call__(self, samples: Iterable[Any], one_pass: ShardPass) -> Iterator[Any]:
        generator = one_pass.generator(f"shuffle {self.size}")
        held: list[Any] = []
        stream = iter(samples)
        for sample in stream:
            held.append(sample)
            if len(held) < self.size:
                held.extend(itertools.islice(stream, 1))
            if len(held) >= self.initial:
                yield _taken(held, generator)
        while held:
            yield _taken(held, generator)


def _taken(held: list[Any], generator: random.Random) -> Any:
    """Remove and return one of `held`."""
    i = generator.randrange(len(held))
    held[i], held[-1] = held[-1], held[i]
    return held.pop()


def _opened(shards: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each shard with its stream, which is closed when the next one is opened, or when an epoch ends in it."""
    for shard in shards:
        try:
            stream = gopen(shard["url"])
        except (OSError, ValueError) as error:
            raise DataError(f"the shard {shard['url']!r} cannot be opened: {error}") from error
        with stream:
            yield {**shard, "stream": stream}


_READ = ("", "file", "http", "https")  # opened directly or with curl


def check_schemes(urls: Sequence[str], allow: Sequence[str]) -> None:
    """Raise DataError for a URL that names a command, unless `allow` names its scheme."""
    if isinstance(allow, str) or not isinstance(allow, Sequence) or not all(isinstance(name, str) for name in allow):
        raise DataError(f"allow is {shown(allow)}; write a tuple of the schemes of URLs, such as ('pipe',)")
    for url in urls:
        try:
            scheme = urlparse(url).scheme
        except ValueError as error:
            raise DataError(f"{shown(url)} is not a URL: {error}") from error
        if scheme not in (*_READ, *allow):
            raise DataError(
                f"the shard {shown(url)} is opened by a command ({scheme}:), which may run anything; if you wrote it "
                f"yourself, write web_dataset(..., allow=({shown(scheme)},))"
            )


def expanded(urls: str | Sequence[str]) -> list[str]:
    """The list of shards in `urls`, with braces expanded. Raises DataError if it is missing or empty."""
    try:
        shards = wds.shardlists.expand_urls(urls) if isinstance(urls, str) else urls
    except (ValueError, KeyError) as error:
        raise DataError(f"urls is {shown(urls)}, whose braces do not match: {error}") from error
    if not isinstance(shards, list | tuple) or not shards or not all(isinstance(url, str) for url in shards):
        raise DataError(
            f"urls is {shown(urls)}; write the paths of tar files, or one str such as 'train-{{000..127}}.tar'"
        )
    return list(shards)
