"""Slicing an image into patches has the meaning of MindSpore's vision.SlicePatches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import partway as pw
from partway.data import SliceMode, SlicePatches

IMAGE = np.arange(70, dtype=np.uint8).reshape(7, 10)


def test_a_grid_of_one_gives_the_image_itself():
    assert SlicePatches()(IMAGE) is IMAGE
    assert SlicePatches(1, 1, SliceMode.DROP)(IMAGE) is IMAGE


def test_patches_are_in_rows():
    patches = SlicePatches(1, 2)(IMAGE)
    assert isinstance(patches, tuple)
    assert np.array_equal(np.concatenate(patches, axis=1), IMAGE)
    top_left, top_right, bottom_left, bottom_right = SlicePatches(2, 2, SliceMode.DROP)(IMAGE)
    assert [top_left[0, 0], top_right[0, 0], bottom_left[0, 0], bottom_right[0, 0]] == [0, 5, 30, 35]


def test_pad_rounds_up_and_fills_the_bottom_and_the_right():
    patches = SlicePatches(2, 3, fill_value=9)(IMAGE)
    assert [patch.shape for patch in patches] == [(4, 4)] * 6
    whole = np.block([list(patches[:3]), list(patches[3:])])
    assert np.array_equal(whole, np.pad(IMAGE, ((0, 1), (0, 2)), constant_values=9))


def test_the_last_patches_may_be_all_padding():
    patches = SlicePatches(1, 8)(np.ones((1, 10), np.uint8))
    assert [int(patch.sum()) for patch in patches] == [2, 2, 2, 2, 2, 0, 0, 0]


def test_drop_rounds_down_and_leaves_the_rest_out():
    patches = SlicePatches(2, 3, SliceMode.DROP)(IMAGE)
    assert [patch.shape for patch in patches] == [(3, 3)] * 6
    assert np.array_equal(np.block([list(patches[:3]), list(patches[3:])]), IMAGE[:6, :9])


@pytest.mark.parametrize("mode", SliceMode)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "bool"])
def test_channels_and_dtypes_stay(mode, dtype):
    image = np.ones((7, 10, 3), dtype)
    patches = SlicePatches(2, 3, mode, 1)(image)
    assert {(patch.shape[2], patch.dtype) for patch in patches} == {(3, np.dtype(dtype))}
    assert all(patch.all() for patch in patches)


@pytest.mark.parametrize("mode", SliceMode)
def test_tensors_give_tensors_of_the_same_values(mode):
    arrays = SlicePatches(2, 3, mode, 9)(IMAGE)
    tensors = SlicePatches(2, 3, mode, 9)(torch.from_numpy(IMAGE))
    assert all(tensor.dtype == torch.uint8 for tensor in tensors)
    assert all(np.array_equal(a, t.numpy()) for a, t in zip(arrays, tensors, strict=True))


def test_a_rank_finds_its_patch():
    patches = SlicePatches(2, 4)(IMAGE[:6, :8])
    for rank in range(8):
        part = pw.data.part_of(("h", "w"), rank, mesh={"h": 2, "w": 4})
        assert np.array_equal(patches[part.patch()], IMAGE[:6, :8][part.slices((6, 8))])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_height": 0}, "num_height is 0 (int); write an int of 1 or more"),
        ({"num_height": 2.0}, "num_height is 2.0 (float); write an int of 1 or more"),
        ({"num_width": True}, "num_width is True (bool); write an int of 1 or more"),
        ({"slice_mode": "pad"}, "slice_mode is 'pad' (str); write SliceMode.PAD or SliceMode.DROP"),
        ({"fill_value": 256}, "fill_value is 256 (int); write an int from 0 to 255"),
        ({"fill_value": -1}, "fill_value is -1 (int); write an int from 0 to 255"),
        ({"fill_value": 0.5}, "fill_value is 0.5 (float); write an int from 0 to 255"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(pw.DataError) as error:
        SlicePatches(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("mode", SliceMode)
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ([[1, 2]], "SlicePatches takes a NumPy array or a tensor, not a list"),
        (np.ones(4), "SlicePatches takes an image of [H, W] or [H, W, C], not one of shape [4]"),
        (torch.ones(1, 3, 8, 8), "not one of shape [1, 3, 8, 8]; put it before the batch is made"),
        (
            np.ones((3, 9)),
            "the image of shape [3, 9] has 3 pixels in its height, fewer than num_height=4; use at most 3",
        ),
        (np.ones((9, 4)), "the image of shape [9, 4] has 4 pixels in its width, fewer than num_width=5; use at most 4"),
    ],
)
def test_what_cannot_be_sliced_is_refused(mode, image, message):
    with pytest.raises(pw.DataError) as error:
        SlicePatches(4, 5, mode)(image)
    assert message in str(error.value)


def test_a_fill_value_that_no_pixel_can_be_is_refused():
    with pytest.raises(
        pw.DataError, match="fill_value is 200, which a pixel of int8 cannot be; write an int from -128"
    ):
        SlicePatches(2, 1, fill_value=200)(np.ones((3, 3), np.int8))
