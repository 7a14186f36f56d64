"""The data side of training on images that are split along height and width: a rank reads its part of each image.

    part = pw.data.part_of((1, 1, 1, 8))                      # this rank's part of the input [N, C, H, W]
    sampler = pw.data.distributed_sampler(dataset, part)      # ranks that share an image get the same samples
    image = pw.data.WindowReader("slide.tif")                 # in the data set: only the tiles of the part are read
    view = pw.data.RandomCrop(4096, seed=7)(pw.data.View.of(image), epoch=epoch, index=index)
    pixels = view.part(part).read(image)

The input is a strategy or a plan, and images or shards. The output is a rank's `Part`, the window of each image that it
holds, and samplers and pipelines that give ranks that share an image the same samples.

    part                         the part of a tensor that a rank holds; joins parts, whole or as a DTensor
    window, view, random_views   rectangles of an image; crops and flips of it, and random ones
    reader, source               read a window; tiff_source and zarr_source read files, an array is a source too
    patches                      MindSpore's SlicePatches
    samplers, epoch              the samples that a rank reads, and the epoch
    web                          WebDataset shards by group; web_pipeline and web_decode do the work
    extras                       the packages of `partway[data]`: tifffile, zarr, webdataset

Packages of the extra are imported at their first use.
"""

from __future__ import annotations

from partway.data.epoch import Epoch
from partway.data.part import Part, part_of, planned_part, to_global, whole_batch
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
    "whole_batch",
]
