"""The U-Net on parts of a picture: its losses are those of one device, and a rank reads little more than its part."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "large_images.py"
SMALL = ("--picture", "flower", "--size", "64", "--steps", "3")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module examples/pictures.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import pictures

    return pictures


def same_losses(folder: Path) -> None:
    """What the run wrote: both curves, which agree, and the other files."""
    with (folder / "loss.csv").open() as file:
        rows = [tuple(map(float, row.values())) for row in csv.DictReader(file)]
    assert [row[0] for row in rows] == [1, 2, 3]
    assert max(abs(one - split) for _, one, split in rows) < 1e-11
    for name in ("prediction.png", "loss.png", "plan.txt", "picture.tif"):
        assert (folder / name).stat().st_size > 0


def ranks(shown: str) -> list[tuple[str, float]]:
    """The part of the crop of each rank, and the percentage of one device's reading that it reads."""
    rows = re.findall(r"^ +\d+ +(\d+ x \d+ at \d+, \d+) .* ([\d.]+)% $", shown, re.M)
    return [(part, float(read)) for part, read in rows]


def test_virtual_devices_train_as_one_device_on_parts_of_rows_and_columns(python: Runner, tmp_path: Path) -> None:
    done = python(SCRIPT, *SMALL, "--devices", "4", "--split", "hw")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 x 64 over 4 virtual devices, h=2, w=2" in done.stdout
    assert re.search(r"^ net\.down\.0\.conv2 conv2d .*exchange\(h", done.stdout, re.M)
    assert [part for part, _ in ranks(done.stdout)] == [f"32 x 32 at {y}, {x}" for y in (0, 32) for x in (0, 32)]
    assert all(read < 100 for _, read in ranks(done.stdout))
    same_losses(tmp_path / "out" / "large_images")


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("processes", "split"), [(2, "w"), (4, "hw")])
def test_processes_train_as_one_device(python: Runner, tmp_path: Path, processes: int, split: str) -> None:
    done = python(*LAUNCHER, str(processes), SCRIPT, *SMALL, "--split", split)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"64 x 64 over {processes} processes" in done.stdout
    assert len(ranks(done.stdout)) == processes
    same_losses(tmp_path / "out" / "large_images")


@pytest.mark.parametrize("size", ["60", pytest.param("512", marks=pytest.mark.slow)])
def test_crops_that_do_not_fit_are_refused(python: Runner, size: str) -> None:
    done = python(SCRIPT, "--picture", "flower", "--size", size)
    assert done.returncode != 0
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())
    assert f"crops of {size} x {size}: their size must be a multiple of 8 (of 8, for the network, and of the" in said
    assert "up to the 427 pixels of the picture" in said


@pytest.mark.slow
def test_a_missing_extra_is_named_with_the_command_that_installs_it(python: Runner, tmp_path: Path) -> None:
    (tmp_path / "tifffile.py").write_text("raise ModuleNotFoundError('no', name='tifffile')")
    done = python(SCRIPT, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "this example needs tifffile; install what it needs with" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pixel_has_the_same_class_in_every_window(pictures: ModuleType) -> None:
    pixels = pictures.pixels_of("flower")
    whole = pictures.classes(pixels, pictures.PICTURES["flower"])
    halo = pictures.HALO
    assert whole.shape == (427 - 2 * halo, 640 - 2 * halo)
    assert 0.02 < whole.double().mean() < 0.5
    for y, x in ((0, 0), (100, 37), (340, 500)):
        window = pictures.classes(pixels[y : y + 2 * halo + 40, x : x + 2 * halo + 30], pictures.PICTURES["flower"])
        assert torch.equal(window, whole[y : y + 40, x : x + 30])


def test_dark_parts_are_found_where_they_are_sought(pictures: ModuleType) -> None:
    pixels = np.full((60, 60, 3), 200, np.uint8)
    pixels[28:31] = 0
    found = pictures.classes(pixels, pictures.PICTURES["retina"])
    assert found.any(1).nonzero().flatten().tolist() == [28 - pictures.HALO + i for i in range(-1, 4)]
    assert not pictures.classes(pixels, pictures.PICTURES["hubble"])[28 - pictures.HALO].any()


def test_hubbles_deep_field_comes_first_where_its_package_is(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "skimage").mkdir()
    (tmp_path / "skimage" / "__init__.py").touch()
    (tmp_path / "skimage" / "data.py").write_text("def hubble_deep_field(): return [[[1, 2, 3]]]\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "skimage"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pictures.available() == "hubble"
    assert pictures.pixels_of("hubble").tolist() == [[[1, 2, 3]]]
    for name in ("skimage", "skimage.data"):
        monkeypatch.delitem(sys.modules, name)


def test_any_image_file_is_a_picture(pictures: ModuleType, tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(tmp_path / "a.png")
    assert pictures.pixels_of(str(tmp_path / "a.png")).flatten().tolist() == list(range(48))
    assert pictures.picture_of(str(tmp_path / "a.png")).title == "bright parts of a.png"
