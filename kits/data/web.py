"""WebDataset shards, read by data-parallel groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partway.data.extras import need
from partway.data.part import Part
from partway.data.random_views import check_seed
from partway.data.samplers import group_of
from partway.strategy import DataError

if TYPE_CHECKING:
    from partway.data.web_pipeline import GroupedWebDataset


def web_dataset(
    urls: str | Sequence[str],
    part: Part,
    *,
    seed: int,
    resampled: bool = False,
    shuffle_shards: bool = True,
    dim: int = 0,
    allow: Sequence[str] = (),
) -> GroupedWebDataset:
    """The samples of the tar files `urls` (a list, or a str with braces) for the rank that holds `part`: a WebDataset
    pipeline, to continue as in `.shuffle(1000).decode("rgb").to_tuple("png", "cls").with_epoch(10000)`.

    resampled        True: shards are drawn without end, with repetition; set `with_epoch`. False: each is read once, by
                     one worker of one data-parallel group
    shuffle_shards   True: another order in every epoch; False: that of `urls`, and then not with `resampled`
    dim              the input's dim that is the batch
    allow            schemes of URLs that are opened by a command, such as ("pipe",); files and http(s) always are

    No content of a shard is run as code: `decode` takes images, texts, numbers, JSON and arrays, and refuses pickles.

    Shards go to data-parallel groups and then to a loader's workers, so ranks that share an image read the same samples
    in the same order, if their loaders have the same number of workers. All draws, also those of `.shuffle`, depend
    only on `seed`, the epoch (`set_epoch`), the group and the worker. `with_epoch(n)` is n items for the group, for any
    number of workers. Without it, groups whose shards hold fewer samples end earlier, and the others would wait for
    them.

    Raises DataError for no shards, fewer than groups (or, once it is iterated, than groups times workers) unless
    `resampled`, or wrong arguments; RuntimeStateError if webdataset is missing.
    """
    group, groups = group_of(part, dim)
    check_seed(seed)
    if resampled and not shuffle_shards:
        raise DataError("resampled=True draws shards at random; omit shuffle_shards=False")
    need("webdataset", "web_dataset")
    from partway.data.web_pipeline import GroupedWebDataset, check_schemes, expanded

    shards = expanded(urls)
    check_schemes(shards, allow)
    return GroupedWebDataset(shards, group, groups, seed, resampled, shuffle_shards)
