"""Crops and flips are decided once for the whole image, and the parts of all ranks make up what one device has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples

import partway as pw
from partway.data import FillMode, RandomCrop, RandomFlip, SlicePatches, View, WindowReader, part_of

PAD = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
MESHES = [({"w": 8}, (None, "w")), ({"h": 4}, ("h", None)), ({"h": 2, "w": 4}, ("h", "w")), ({"a": 1}, (None, None))]


def on_one_device(image, crop, flip, mode, *, epoch, index):
    """The crop and the flips of the whole image by themselves: padded, cut, mirrored."""
    view = crop(View.whole(*image.shape[:2]), epoch=epoch, index=index)
    y0, y1, x0, x1 = view.window
    far = 40
    whole = np.pad(image, [(far, far), (far, far)] + [(0, 0)] * (image.ndim - 2), PAD[mode])
    found = whole[y0 + far : y1 + far, x0 + far : x1 + far]
    turned = flip(view, epoch=epoch, index=index)
    found = found[::-1] if turned.upside_down else found
    return found[:, ::-1] if turned.mirrored else found


@examples(150)
@given(
    size=st.tuples(st.integers(9, 40), st.integers(9, 40)),
    channels=st.sampled_from([0, 3]),
    mesh=st.sampled_from(MESHES),
    cut=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.sampled_from([0, 4, (5, 0), (1, 2, 3, 4)]),
    mode=st.sampled_from(FillMode),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    index=st.one_of(st.integers(0, 10**6), st.text(max_size=5)),
)
def test_the_parts_of_all_ranks_are_the_image_of_one_device(
    size, channels, mesh, cut, padding, mode, seed, epoch, index
):
    axes, strategy = mesh
    parts = [part_of(strategy, rank, mesh=axes) for rank in range(np.prod(list(axes.values())))]
    splits = parts[0].splits
    wanted = [
        min(n * k, (s + 4) // n * n if padding == 4 else s // n * n) for s, n, k in zip(size, splits, cut, strict=True)
    ]
    shape = size + ((channels,) if channels else ())
    image = (np.arange(np.prod(shape)) + 1).reshape(shape)
    reader = WindowReader(image, axes="YXS" if channels else "YX")
    crop, flip = RandomCrop(tuple(wanted), seed, padding), RandomFlip(seed, 0.5, 0.5)
    expected = on_one_device(image, crop, flip, mode, epoch=epoch, index=index)
    found = np.zeros_like(expected)
    for part in parts:
        view = flip(crop(View.of(reader), epoch=epoch, index=index), epoch=epoch, index=index)
        found[part.slices(wanted)] = view.part(part).read(reader, mode=mode)
    assert np.array_equal(found, expected)


@examples(60)
@given(
    chain=st.lists(st.sampled_from(["crop", "horizontal", "vertical", "both"]), max_size=6),
    corner=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_view_of_a_view_is_a_view(chain, corner):
    image = np.arange(30 * 33).reshape(30, 33)
    view, expected = View.whole(30, 33), image
    for step in chain:
        if step == "crop":
            window = corner[0], expected.shape[0] - 1, corner[1], expected.shape[1] - 1
            view, expected = view.crop(window), expected[window[0] : window[1], window[2] : window[3]]
        else:
            across, down = step in ("horizontal", "both"), step in ("vertical", "both")
            view = view.flip(horizontal=across, vertical=down)
            expected = expected[:: -1 if down else 1, :: -1 if across else 1]
    assert view.size == expected.shape
    assert np.array_equal(view.read(WindowReader(image)), expected)


def test_a_flip_moves_a_rank_to_the_other_side_of_the_file(tmp_path, make_picture):
    image = make_picture(64, 1024)
    tifffile.imwrite(tmp_path / "a.tif", image, tile=(64, 64))
    part = part_of((1, 1, 1, 8), 0, devices=8)
    with WindowReader(tmp_path / "a.tif") as reader:
        view = View.of(reader).flip(horizontal=True).part(part)
        assert view.window == (0, 64, 896, 1024)
        assert np.array_equal(view.read(reader), image[:, ::-1][:, :128])
        assert reader.tiles_read == 2


def test_channels_before_the_image_are_not_flipped(make_picture):
    image = make_picture(8, 10, 3, first=True)
    found = View.whole(8, 10).flip(horizontal=True, vertical=True).read(WindowReader(image, axes="CYX"))
    assert np.array_equal(found, image[:, ::-1, ::-1])


def test_a_halo_is_what_stands_beside_the_part_in_the_view(make_picture):
    image = make_picture(16, 32)
    view = View.whole(16, 32).flip(horizontal=True)
    part = part_of((1, 1, 1, 4), 1, devices=4)
    found = view.part(part).read(WindowReader(image), halo=(0, 2))
    assert np.array_equal(found, image[:, ::-1][:, 6:18])


def test_what_is_read_can_be_made_a_tensor_at_once(make_picture):
    import torch

    pixels = View.whole(8, 8).flip(horizontal=True).read(WindowReader(make_picture(8, 8)))
    assert torch.from_numpy(pixels).shape == (8, 8)


def test_patches_and_windows_are_the_same_parts(make_picture):
    image = make_picture(16, 32)
    reader = WindowReader(image)
    for rank in range(8):
        part = part_of((1, 1, 1, 8), rank, devices=8)
        assert np.array_equal(View.of(reader).part(part).read(reader), SlicePatches(1, 8)(image)[part.patch()])


def test_draws_are_the_same_in_every_run_and_depend_on_nothing_else():
    """The figures themselves: another release of NumPy or Python must not change a training run."""
    whole = View.whole(100, 120)
    crop, flip = RandomCrop((32, 48), 1000, 4), RandomFlip(1000, 0.5, 0.5)
    assert [tuple(crop(whole, epoch=e, index=i).window) for e, i in [(0, 0), (0, 1), (1, 0), (0, "a")]] == CROPS
    assert "".join("f" if flip(whole, epoch=0, index=i).mirrored else "." for i in range(24)) == FLIPS


CROPS = [(43, 75, 75, 123), (68, 100, 17, 65), (15, 47, 28, 76), (25, 57, 10, 58)]
FLIPS = ".ff.fffff..ff....f..f.f."


def test_every_place_is_drawn_about_as_often_and_both_flips_by_themselves():
    whole = View.whole(4, 6)
    crop, flip = RandomCrop((2, 3), 0), RandomFlip(0, 0.5, 0.25)
    places = [crop(whole, epoch=e, index=i).window for e in range(4) for i in range(1000)]
    counts = {place: places.count(place) for place in set(places)}
    assert len(counts) == 12
    assert all(250 < count < 420 for count in counts.values())
    turned = [flip(whole, epoch=e, index=i) for e in range(4) for i in range(1000)]
    kinds = [(view.mirrored, view.upside_down) for view in turned]
    for across, down in itertools.product((False, True), repeat=2):
        assert abs(kinds.count((across, down)) / 4000 - 0.5 * (0.25 if down else 0.75)) < 0.03


def test_a_probability_of_zero_or_one_is_certain():
    whole = View.whole(4, 4)
    assert not any(RandomFlip(1, 0, 0)(whole, epoch=0, index=i).mirrored for i in range(50))
    always = [RandomFlip(1, 1, 1)(whole, epoch=0, index=i) for i in range(50)]
    assert all(view.mirrored and view.upside_down for view in always)


def test_the_padding_is_left_top_right_bottom():
    reached = [RandomCrop(4, seed, (1, 2, 3, 4))(View.whole(4, 4), epoch=0, index=0).window for seed in range(400)]
    assert (min(w.x0 for w in reached), max(w.x0 for w in reached)) == (-1, 3)
    assert (min(w.y0 for w in reached), max(w.y0 for w in reached)) == (-2, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(0, 1), "size is 0; write an int of 1 or more, or a pair of them"),
        (lambda: RandomCrop((4, 4, 4), 1), "size is (4, 4, 4); write an int of 1 or more, or a pair of them"),
        (lambda: RandomCrop(4, -1), "seed is -1; write an int of 0 or more, the same on every rank"),
        (lambda: RandomCrop(4, 1, (1, 2, 3)), "padding is (1, 2, 3); write an int of 0 or more, (left and right, top"),
        (lambda: RandomCrop(4, 1, -1), "padding is -1; write an int of 0 or more"),
        (lambda: RandomFlip(0.5), "seed is 0.5; write an int of 0 or more, the same on every rank"),
        (lambda: RandomFlip(1, 1.5), "horizontal is 1.5; write a probability, from 0 to 1"),
        (lambda: RandomFlip(1, 0.5, "x"), "vertical is 'x'; write a probability, from 0 to 1"),
        (lambda: RandomFlip(1)(View.whole(2, 2), epoch=-1, index=0), "epoch is -1; write an int of 0 or more"),
        (lambda: RandomFlip(1)(View.whole(2, 2), epoch=0, index=0.5), "index is 0.5; write the sample's number in the"),
        (
            lambda: RandomCrop(16, 1, 2)(View.whole(8, 20), epoch=0, index=0),
            "a crop of 16 x 16 does not fit into 8 x 20 pixels with the padding 2; use a smaller size, or more padding",
        ),
        (lambda: View.whole(0, 4), "the window (0, 0, 0, 4) (y0, y1, x0, x1) is empty"),
        (lambda: View.whole(4, 4).crop((0, 4)), "the window is (0, 4); write four ints"),
        (
            lambda: View.whole(4, 12).part(pw.data.Part((0,) * 4, (1, 1, 1, 8))),
            "the width has size 12, which 8 parts do",
        ),
        (lambda: View.whole(4, 4).read(np.ones((4, 4))), "a view is read from a WindowReader, not a ndarray"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(pw.DataError) as error:
        make()
    assert message in str(error.value)
