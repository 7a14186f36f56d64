"""A reader gives the pixels of any window, and reads little more of the file than that."""

from __future__ import annotations

import os
import pickle
import threading
import warnings

import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import assume, given
from hypothesis import strategies as st
from random_examples import examples
from torch.utils.data import DataLoader, Dataset

import partway as pw
from partway.data import FillMode, Window, WindowReader

PAD = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def padded(image: np.ndarray, window, mode="constant", axes="YX", fill=0):
    """What a window should hold, by way of NumPy's padding of the whole image."""
    y, x = axes.index("Y"), axes.index("X")
    margin = [(0, 0)] * image.ndim
    margin[y] = max(0, -window[0]), max(0, window[1] - image.shape[y])
    margin[x] = max(0, -window[2]), max(0, window[3] - image.shape[x])
    constant = {"constant_values": fill} if mode == "constant" else {}
    whole = np.pad(image, margin, PAD[mode], **constant)
    cut = [slice(None)] * image.ndim
    cut[y] = slice(window[0] + margin[y][0], window[1] + margin[y][0])
    cut[x] = slice(window[2] + margin[x][0], window[3] + margin[x][0])
    return whole[tuple(cut)]


WINDOWS = [(0, 100, 0, 140), (16, 32, 32, 64), (5, 6, 7, 8), (33, 97, 15, 129), (-10, 20, 130, 150), (-40, 130, -9, 9)]

# How the picture of 100 x 140 pixels with its axes is written.
TIFFS = {
    "tiles": ("YX", {"tile": (16, 32)}),
    "bigtiff": ("YX", {"tile": (16, 32), "bigtiff": True, "byteorder": ">"}),
    "deflate": ("YX", {"tile": (32, 32), "compression": "zlib", "predictor": True}),
    "lzw": ("YX", {"tile": (32, 32), "compression": "lzw"}),
    "zstd": ("YX", {"tile": (32, 32), "compression": "zstd"}),
    "one_strip": ("YX", {}),
    "strips": ("YX", {"rowsperstrip": 8, "compression": "zlib"}),
    "rgb": ("YXS", {"tile": (16, 32), "photometric": "rgb"}),
    "rgb_strips": ("YXS", {"rowsperstrip": 7, "photometric": "rgb"}),
    "separate": ("SYX", {"tile": (16, 32), "photometric": "rgb", "planarconfig": "separate"}),
    "separate_strips": ("SYX", {"rowsperstrip": 7, "photometric": "rgb", "planarconfig": "separate"}),
    "pages": ("CYX", {"tile": (16, 32), "photometric": "minisblack", "metadata": {"axes": "CYX"}}),
    "imagej": ("CYX", {"imagej": True, "metadata": {"axes": "CYX"}}),
}


def image_of(axes, make_picture):
    return make_picture(100, 140, 0 if axes == "YX" else 3, first=axes != "YXS")


@pytest.mark.parametrize("name", TIFFS)
def test_every_kind_of_tiff_gives_the_pixels_of_its_windows(name, tmp_path, make_picture):
    axes, options = TIFFS[name]
    image = image_of(axes, make_picture)
    path = tmp_path / ("picture.ome.tif" if name == "pages" else "picture.tif")
    tifffile.imwrite(path, image, **options)
    with WindowReader(path) as reader:
        assert (reader.axes, reader.shape, reader.dtype, reader.size) == (axes, image.shape, image.dtype, (100, 140))
        for window in WINDOWS:
            assert np.array_equal(reader.read(window), padded(image, window, axes=axes)), window


def test_jpeg_tiles_are_decoded_as_by_tifffile(tmp_path, make_picture):
    image = make_picture(100, 140, 3, dtype="uint8") // 8 + np.arange(140, dtype=np.uint8)[:, None]
    tifffile.imwrite(tmp_path / "a.tif", image, tile=(32, 32), photometric="rgb", compression="jpeg")
    whole = tifffile.imread(tmp_path / "a.tif")
    with WindowReader(tmp_path / "a.tif") as reader:
        assert np.array_equal(reader.read((20, 90, 30, 140)), whole[20:90, 30:140])


def test_tiles_that_the_file_leaves_out_are_its_background(tmp_path):
    tiles = [np.ones((16, 16), np.uint8), None, None, None]
    tifffile.imwrite(tmp_path / "a.tif", iter(tiles), shape=(32, 32), dtype="uint8", tile=(16, 16))
    with WindowReader(tmp_path / "a.tif") as reader:
        assert int(reader.read((0, 32, 0, 32)).sum()) == 256
        assert reader.bytes_read == 256


def test_a_level_of_a_pyramid_is_read_in_its_own_pixels(tmp_path, make_picture):
    image = make_picture(128, 160)
    levels = [image, image[::2, ::2].copy(), image[::4, ::4].copy()]
    with tifffile.TiffWriter(tmp_path / "a.tif", bigtiff=True) as writer:
        for number, level in enumerate(levels):
            place = {"subifds": 2} if number == 0 else {"subfiletype": 1}
            writer.write(level, tile=(32, 32), photometric="minisblack", **place)
    for number, level in enumerate(levels):
        with WindowReader(tmp_path / "a.tif", level=number) as reader:
            assert reader.size == level.shape
            assert np.array_equal(reader.read((3, 30, 5, 37)), level[3:30, 5:37])
    with pytest.raises(pw.DataError, match=r"a.tif has no level 3; its levels are 0 to 2"):
        WindowReader(tmp_path / "a.tif", level=3)


ZARRS = {
    "v3": ("YX", {"chunks": (16, 32)}),
    "v2": ("YX", {"chunks": (16, 32), "zarr_format": 2}),
    "shards": ("YX", {"chunks": (16, 16), "shards": (64, 64)}),
    "named": ("CYX", {"chunks": (1, 16, 32), "dimension_names": ("c", "y", "x")}),
    "last": ("YXS", {"chunks": (16, 32, 3)}),
}


@pytest.mark.parametrize("name", ZARRS)
def test_every_kind_of_zarr_gives_the_pixels_of_its_windows(name, tmp_path, make_picture):
    axes, options = ZARRS[name]
    image = image_of(axes, make_picture)
    zarr.create_array(tmp_path / "a.zarr", data=image, **options)
    with WindowReader(tmp_path / "a.zarr", axes="YXS" if name == "last" else None) as reader:
        assert (reader.axes, reader.shape, reader.dtype, reader.tile) == (axes, image.shape, image.dtype, reader.tile)
        for window in WINDOWS:
            assert np.array_equal(reader.read(window), padded(image, window, axes=axes)), window


def test_an_array_inside_a_group_is_named_by_its_path(tmp_path, make_picture):
    image = make_picture(40, 50)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("scan/0", data=image, chunks=(16, 16))
    with WindowReader(tmp_path / "a.zarr", path="scan/0") as reader:
        assert np.array_equal(reader.read((1, 20, 30, 50)), image[1:20, 30:50])
    with pytest.raises(
        pw.DataError, match=r"cannot be read as a Zarr array: .*; name an array inside a group with path="
    ):
        WindowReader(tmp_path / "a.zarr")


def test_a_zip_file_of_zarr_is_read_too(tmp_path, make_picture):
    image = make_picture(40, 50)
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        zarr.create_array(store, data=image, chunks=(16, 16))
    with WindowReader(tmp_path / "a.zip") as reader:
        assert np.array_equal(reader.read((1, 20, 30, 50)), image[1:20, 30:50])
        assert reader.tiles_read == 6
        assert 0 < reader.bytes_read < os.path.getsize(tmp_path / "a.zip")


@examples(150)
@given(
    size=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    start=st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
    extent=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    halo=st.integers(0, 5),
    mode=st.sampled_from(FillMode),
)
def test_what_lies_outside_is_as_numpy_pads(size, start, extent, halo, mode):
    assume(mode is not FillMode.REFLECT or np.__version__ >= "2")  # NumPy 1 goes wrong at the second reflection
    image = np.arange(1, size[0] * size[1] + 1).reshape(size)
    window = Window(start[0], start[0] + extent[0], start[1], start[1] + extent[1])
    found = WindowReader(image).read(window, halo=halo, mode=mode, fill_value=7)
    assert np.array_equal(found, padded(image, window.grown(halo), mode, fill=7))


def test_the_modes_are_those_of_torch(make_picture):
    image = make_picture(6, 7).astype("float64")
    for mode in FillMode:
        ours = WindowReader(image).read((0, 6, 0, 7), halo=(2, 3), mode=mode)
        theirs = torch.nn.functional.pad(torch.from_numpy(image)[None, None], (3, 3, 2, 2), mode=str(mode))
        assert np.array_equal(ours, theirs[0, 0].numpy())


# -- what is read of the file


def columns_of(rank: int) -> Window:
    """The eighth of the columns of 8192 x 8192 pixels that `rank` holds."""
    return pw.data.part_of((1, 1, 1, 8), rank, devices=8).window(8192, 8192)


@pytest.fixture(scope="module")
def large():
    """An image that compresses, though not to nothing: no two tiles are equal."""
    ramp = np.arange(8192, dtype=np.uint32)
    return ((ramp[:, None] // 32 + ramp * 3) % 251).astype(np.uint8)


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("kind", ["tiff", "zarr"])
def test_a_rank_of_eight_reads_at_most_a_fifth_of_the_file(kind, rank, large, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"large.{kind}"
    if not path.exists() and kind == "tiff":
        tifffile.imwrite(path, large, tile=(256, 256), compression="zlib", compressionargs={"level": 1})
    elif not path.exists():
        zarr.create_array(path, data=large, chunks=(256, 256))
    stored = sum(os.path.getsize(p) for p in ([path] if kind == "tiff" else path.rglob("*")) if os.path.isfile(p))
    window = columns_of(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = WindowReader(path)
        pixels = reader.read(window, halo=32)
    assert np.array_equal(pixels, padded(large, window.grown(32)))
    tile_columns = 5 if rank in (0, 7) else 6  # of 32: 4, and one for the halo on each side that has pixels
    assert reader.tiles_read == 32 * tile_columns
    assert reader.tiles_read <= 32 * 32 / 5
    assert 0 < reader.bytes_read <= stored / 5
    reader.close()


@pytest.mark.parametrize(
    ("name", "write", "advice"),
    [
        ("strips of 4 x 1536", {"rowsperstrip": 4}, "tifffile.imwrite(path, image, tile=(256, 256))"),
        ("pieces of 1024 x 1536", {}, "tifffile.imwrite(path, image, tile=(256, 256))"),
        ("pieces of 1024 x 1536", None, "zarr.create_array(store, data=image, chunks=(256, 256))"),
    ],
)
def test_a_file_that_forces_reading_all_of_it_is_named_once(name, write, advice, tmp_path):
    image, path = np.zeros((1024, 1536), np.uint8), tmp_path / "image"
    if write is None:
        zarr.create_array(path, data=image + 1, chunks=image.shape)
    else:
        tifffile.imwrite(path, image, **write)
    with WindowReader(path) as reader:
        with pytest.warns(pw.WholeReadWarning) as caught:
            reader.read((0, 1024, 0, 192))
        reader.read((0, 1024, 192, 384))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"{path} of 1024 x 1536 pixels is stored in pieces of {name.split('of ')[1]}, so that ")
    assert message.endswith(
        f"reading 1024 x 192 of them (12.5% of the image) reads 100.0% of it; write it in tiles, with {advice}"
    )
    assert caught[0].filename == __file__


def test_strips_are_no_matter_where_whole_rows_are_read(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((1024, 1536), np.uint8), rowsperstrip=16)
    with WindowReader(tmp_path / "a.tif") as reader:
        reader.read((128, 256, 0, 1536))
        assert (reader.tiles_read, reader.bytes_read) == (8, 128 * 1536)


def test_a_small_image_is_read_whole_without_a_word(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((512, 512), np.uint8))
    with WindowReader(tmp_path / "a.tif") as reader:
        assert reader.read((0, 512, 0, 64)).shape == (512, 64)


def test_a_window_around_the_edge_reads_both_sides_and_nothing_between(tmp_path, make_picture):
    image = make_picture(64, 1024)
    tifffile.imwrite(tmp_path / "a.tif", image, tile=(64, 64))
    with WindowReader(tmp_path / "a.tif") as reader:
        found = reader.read((0, 64, -64, 64), mode="circular")
        assert np.array_equal(found, np.concatenate([image[:, -64:], image[:, :64]], axis=1))
        assert reader.tiles_read == 2


def test_a_window_outside_of_the_image_reads_nothing(tmp_path, make_picture):
    tifffile.imwrite(tmp_path / "a.tif", make_picture(64, 64, 3), tile=(64, 64), photometric="rgb")
    with WindowReader(tmp_path / "a.tif") as reader:
        assert np.array_equal(reader.read((70, 80, 0, 64), fill_value=5), np.full((10, 64, 3), 5))
        assert (reader.bytes_read, reader.tiles_read) == (0, 0)


# -- threads and processes


@pytest.fixture(params=["tiff", "zarr"])
def stored(request, tmp_path, make_picture):
    image = make_picture(256, 256)
    if request.param == "tiff":
        tifffile.imwrite(tmp_path / "a", image, tile=(16, 16), compression="zlib")
    else:
        zarr.create_array(tmp_path / "a", data=image, chunks=(16, 16))
    reader = WindowReader(tmp_path / "a")
    yield reader, image
    reader.close()


def test_threads_share_a_reader(stored):
    reader, image = stored
    wrong = []

    def work(first):
        for i in range(30):
            y, x = (first * 37 + i * 11) % 200, (first * 53 + i * 17) % 200
            if not np.array_equal(reader.read((y, y + 40, x, x + 40)), image[y : y + 40, x : x + 40]):
                wrong.append((y, x))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_copy_by_pickle_opens_the_file_itself_and_counts_anew(stored):
    reader, image = stored
    reader.read((0, 32, 0, 32))
    with pickle.loads(pickle.dumps(reader)) as copy:
        assert np.array_equal(copy.read((0, 16, 0, 16)), image[:16, :16])
        assert (reader.tiles_read, copy.tiles_read) == (4, 1)


def test_a_closed_reader_opens_the_file_again_and_keeps_its_count(stored):
    reader, image = stored
    reader.read((0, 16, 0, 16))
    reader.close()
    assert reader.tiles_read == 1
    assert np.array_equal(reader.read((0, 16, 16, 32)), image[:16, 16:32])
    assert reader.tiles_read == 2


class Rows(Dataset):
    def __init__(self, reader):
        self.reader = reader

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.from_numpy(self.reader.read((16 * i, 16 * i + 16, 0, 256)).astype("int64"))


def test_workers_that_a_loader_forks_read_right(stored):
    reader, image = stored
    reader.read((0, 256, 0, 256))  # the file is open, and its position somewhere, when the workers are forked
    found = torch.cat(list(DataLoader(Rows(reader), batch_size=None, num_workers=2)))
    assert np.array_equal(found.numpy(), image)


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 4, 0),), "the window is (0, 4, 0); write four ints (y0, y1, x0, x1), in pixels of the whole image"),
        (((0, 4.0, 0, 4),), "the window is (0, 4.0, 0, 4); write four ints"),
        (((4, 4, 0, 4),), "the window (4, 4, 0, 4) (y0, y1, x0, x1) is empty; y0 must be below y1, and x0 below x1"),
        (((0, 4, 0, 4), {"halo": -1}), "halo is -1; write an int of 0 or more, or a pair of them"),
        (((0, 4, 0, 4), {"halo": (1, 2, 3)}), "halo is (1, 2, 3); write an int of 0 or more, or a pair of them"),
        (
            ((0, 4, 0, 4), {"mode": "edge"}),
            "mode is 'edge'; write one of 'constant', 'reflect', 'replicate', 'circular'",
        ),
        (
            ((0, 4, 0, 4), {"fill_value": 256}),
            "fill_value is 256, which a pixel of uint8 cannot be; write an int from 0",
        ),
        (((0, 4, 0, 4), {"fill_value": "0"}), "fill_value is '0' (str); write a number"),
    ],
)
def test_wrong_arguments_of_a_read_are_refused(arguments, message):
    window, options = (*arguments, {})[:2]
    with pytest.raises(pw.DataError) as error:
        WindowReader(np.zeros((8, 8), np.uint8)).read(window, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (3, {}, "WindowReader takes a path or a NumPy array, not a int"),
        ("nowhere.tif", {}, "there is no file 'nowhere.tif'"),
        (np.zeros((2, 2)), {"level": -1}, "level is -1; write an int of 0 or more"),
        (np.zeros((2, 2)), {"level": 1}, "level=1 was given for an array of shape [2, 2]: level is for pyramidal TIF"),
        (np.zeros((2, 2)), {"path": "0"}, "path='0' was given for an array of shape [2, 2]: path is for arrays insid"),
        (np.zeros((2, 2, 3)), {}, "an array of shape [2, 2, 3] of shape"),
        (np.zeros((2, 2)), {"axes": "YXS"}, "axes is 'YXS' for an array of shape [2, 2]"),
        (np.zeros((2, 2, 2, 2)), {"axes": "TYXS"}, "write an image of 2 or 3 dims"),
    ],
)
def test_what_cannot_be_opened_is_refused(source, options, message):
    with pytest.raises(pw.DataError) as error:
        WindowReader(source, **options)
    assert message in str(error.value)


def test_what_is_no_such_tiff_is_refused(tmp_path):
    (tmp_path / "a.tif").write_bytes(b"not a TIFF")
    with pytest.raises(pw.DataError, match=r"a.tif cannot be read as a TIFF: not a TIFF file"):
        WindowReader(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((5, 16, 16), np.uint8), metadata={"axes": "ZYX"})
    with pytest.raises(
        pw.DataError, match=r"b.tif has the axes ZYX of shape \[5, 16, 16\], but only YX, YXS, CYX, SYX can"
    ):
        WindowReader(tmp_path / "b.tif")
    with pytest.raises(pw.DataError, match=r"axes='YX' was given for .*b.tif: a TIFF file has its own axes"):
        WindowReader(tmp_path / "b.tif", axes="YX")


def test_a_damaged_tile_is_named(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 64), np.uint8), tile=(32, 32), compression="zlib")
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        at = file.pages[0].dataoffsets[3]
    data = bytearray((tmp_path / "a.tif").read_bytes())
    data[at : at + 4] = b"\0\0\0\0"
    (tmp_path / "a.tif").write_bytes(data)
    with WindowReader(tmp_path / "a.tif") as reader:
        reader.read((0, 32, 0, 64))
        with pytest.raises(pw.DataError, match=r"a.tif: tile 3 cannot be decoded: "):
            reader.read((0, 64, 0, 64))


@pytest.mark.parametrize(("package", "file"), [("tifffile", "a.tif"), ("zarr", "a.zarr")])
def test_a_missing_package_is_named_with_the_extra(package, file, tmp_path, monkeypatch):
    (tmp_path / "a.tif").touch()
    (tmp_path / "a.zarr").mkdir()
    monkeypatch.setattr("partway.data.extras.find_spec", lambda name: None)
    with pytest.raises(pw.RuntimeStateError) as error:
        WindowReader(tmp_path / file)
    assert str(error.value) == (
        f"reading {tmp_path / file} needs {package}; install it with: pip install '.[data]' in Partway's checkout"
    )
