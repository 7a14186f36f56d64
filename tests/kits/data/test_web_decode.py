"""Shards are data: decoding them runs nothing, and says what it refuses."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import partway as pw
from partway.data import Part, web_dataset


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def image(form: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 2), (255, 0, 0)).save(stream, form)
    return stream.getvalue()


def array(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def shard(path: Path, **members: bytes) -> str:
    """A tar file with one sample."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(f"0001.{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return str(path)


def dataset(url: str) -> Any:
    return web_dataset(url, Part.whole(4), seed=0)


def first(data: Any) -> Any:
    return next(iter(data))


def test_the_example_of_the_docstring_works(tmp_path: Path) -> None:
    url = shard(tmp_path / "a.tar", png=image("PNG"), cls=b"3")
    made = dataset(url).shuffle(1000).decode("rgb").to_tuple("png", "cls").with_epoch(10000)
    pixels, label = first(made)
    assert pixels.shape == (2, 4, 3)
    assert pixels[0, 0].tolist() == [1.0, 0.0, 0.0]
    assert label == 3


def test_texts_numbers_and_arrays_are_decoded(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(2))
    url = shard(
        tmp_path / "a.tar", txt=b"hello", json=json.dumps({"a": [1]}).encode(), npy=array(np.eye(2)), bin=b"\x00",
        npz=stream.getvalue(),
    )  # fmt: skip
    found = first(dataset(url).decode())
    assert (found["txt"], found["json"], found["bin"]) == ("hello", {"a": [1]}, b"\x00")
    assert np.array_equal(found["npy"], np.eye(2))
    assert np.array_equal(found["npz"]["a"], np.arange(2))


@pytest.mark.parametrize("name", ["pyd", "pkl", "pickle", "pth", "pt", "seg.pyd", "PYD"])
def test_a_pickle_in_a_shard_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    url = shard(tmp_path / "a.tar", **{name: pickle.dumps(Canary(tmp_path / "ran"))})
    with pytest.raises(
        pw.DataError, match=r"member .* of sample .*0001' in .*a\.tar cannot be decoded: a \.\w+ file is"
    ):
        first(dataset(url).decode("rgb"))
    assert not (tmp_path / "ran").exists()


def test_a_compressed_pickle_is_refused_too(tmp_path: Path) -> None:
    import gzip

    url = shard(tmp_path / "a.tar", **{"pyd.gz": gzip.compress(pickle.dumps(Canary(tmp_path / "ran")))})
    with pytest.raises(pw.DataError, match="reading one runs code in it; write shards of"):
        first(dataset(url).decode())
    assert not (tmp_path / "ran").exists()


def test_an_array_of_objects_is_refused_and_not_run(tmp_path: Path) -> None:
    objects = np.array([Canary(tmp_path / "ran")], dtype=object)
    stream = io.BytesIO()
    np.savez(stream, a=objects)
    for members in ({"npy": array(objects)}, {"npz": stream.getvalue()}):
        with pytest.raises(pw.DataError, match=r"cannot be decoded: .*allow_pickle=False"):
            first(dataset(shard(tmp_path / "a.tar", **members)).decode())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("start", [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\xc5\xd0\xd3\xc6"])
def test_postscript_is_refused_under_any_name(tmp_path: Path, start: bytes) -> None:
    with pytest.raises(pw.DataError, match="it is PostScript, which is a program"):
        first(dataset(shard(tmp_path / "a.tar", jpg=start + b"%%BoundingBox: 0 0 1 1\n")).decode("rgb"))


def test_a_decoder_of_ones_own_comes_first(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2)}, stream)

    def weights(key: str, data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=True) if key.endswith(".pth") else None

    found = first(dataset(shard(tmp_path / "a.tar", pth=stream.getvalue())).decode(weights))
    assert found["pth"]["a"].tolist() == [1, 1]
    left = first(dataset(shard(tmp_path / "a.tar", pyd=b"x", txt=b"y")).decode(only="txt"))
    assert (left["pyd"], left["txt"]) == (b"x", "y")


@pytest.mark.parametrize("scheme", ["pipe", "gs", "ais", "scp", "hf", "zip"])
def test_a_command_in_a_url_is_refused_unless_it_is_allowed_by_name(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}:touch {tmp_path / 'ran'}; cat a.tar"
    for urls in (url, [url], f"a.tar::{url}"):
        with pytest.raises(pw.DataError, match=rf"is opened by a command \({scheme}:\).*allow=\('{scheme}',\)"):
            web_dataset(urls, Part.whole(4), seed=0)
    assert not (tmp_path / "ran").exists()


def test_a_command_that_is_allowed_runs(tmp_path: Path) -> None:
    url = f"pipe:cat {shard(tmp_path / 'a.tar', txt=b'x')}"
    assert first(web_dataset(url, Part.whole(4), seed=0, allow=("pipe",)).decode())["txt"] == "x"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not a tar", "a shard cannot be read"),
        (b"", "a shard cannot be read"),
        (None, "cannot be opened: .*No such file"),
    ],
)
def test_what_is_no_shard_is_an_error_that_says_so(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "a.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(pw.DataError, match=says):
        first(dataset(str(path)).decode())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: d.decode("rbg"), "decode is given 'rbg'; write one of l8, rgb8"),
        (lambda d: d.decode(3), "decode is given 3; write 'rgb', or a function"),
        (lambda d: d.decode(pre=[3]), "decode is given wrong arguments"),
        (lambda d: d.xdecode(), r"write decode\(...\)"),
        (lambda d: d.lmdb_cached("x"), r"write mcached\(\)"),
        (lambda d: web_dataset("a.tar", Part.whole(4), seed=0, allow="pipe"), "allow is 'pipe'; write a tuple"),
        (lambda d: web_dataset("{1..}{", Part.whole(4), seed=0), "urls is '{1..}{', whose braces do not match"),
        (lambda d: web_dataset("http://[a/b.tar", Part.whole(4), seed=0), "is not a URL"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(make: Any, says: str) -> None:
    with pytest.raises(pw.DataError, match=says):
        make(dataset("a.tar"))
