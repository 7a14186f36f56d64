"""The data side of training on images that are split along height and width: a rank reads its part of each image.

    part = pw.data.part_of((1, 1, 1, 8))                      # what this rank holds of the input [N, C, H, W]
    sampler = pw.data.distributed_sampler(dataset, part)      # ranks that share an image get the same samples
    image = pw.data.WindowReader("slide.tif")                 # in the data set: only the tiles of the part are read
    view = pw.data.RandomCrop(4096, seed=7)(pw.data.View.of(image), epoch=epoch, index=index)
    pixels = view.part(part).read(image)

Files are read with tifffile and zarr, and shards with webdataset: the extra `partway[data]`, imported when first used.
"""

from __future__ import annotations

from partway.data.epoch import Epoch
from partway.data.part import Part, part_of, planned_part, to_global
from partway.data.patches import SliceMode, SlicePatches
from partway.data.random_views import RandomCrop, RandomFlip
from partway.data.reader import WindowReader
from partway.data.samplers import distributed_sampler
from partway.data.view import View
from partway.data.web import web_dataset
from partway.data.window import FillMode, Window

__all__ = [
    "Epoch",
    "FillMode",
    "Part",
    "RandomCrop",
    "RandomFlip",
    "SliceMode",
    "SlicePatches",
    "View",
    "Window",
    "WindowReader",
    "distributed_sampler",
    "part_of",
    "planned_part",
    "to_global",
    "web_dataset",
]
