"""Decoding the members of WebDataset shards without running any of them.

WebDataset's own default decoder unpickles members by their extension, so that whoever wrote a shard runs code where it
is read. This one knows its decoders by name, refuses what would be unpickled, and says where that is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import webdataset as wds

from partway.strategy.errors import DataError

Handler = Callable[[str, bytes], Any]

# What webdataset decodes without running anything, and what it would unpickle.
_PLAIN = (
    "txt", "text", "transcript", "cls", "cls2", "index", "inx", "id", "json", "jsn", "ten", "tb", "mp", "msg", "cbor",
)  # fmt: skip
_PICKLES = ("pkl", "pickle", "pyd", "pth", "pt")
_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")


class Decoder(wds.autodecode.Decoder):  # type: ignore[misc]
    """WebDataset's decoder; `handlers` are names of image formats such as "rgb", or functions of a member's extension
    and its bytes, that return None for what they leave to others."""

    def __init__(self, handlers: Iterable[str | Handler], post: list[Handler] | None, **options: Any) -> None:
        decoders = [_Images(handler) if isinstance(handler, str) else handler for handler in handlers]
        if wrong := [handler for handler in decoders if not callable(handler)]:
            raise DataError(f"decode is given {wrong[0]!r}; write 'rgb', or a function of an extension and its bytes")
        try:
            super().__init__(decoders, post=[plain] if post is None else post, **options)
        except (AssertionError, TypeError) as error:
            raise DataError(f"decode is given wrong arguments: {error}") from error

    def decode(self, sample: Any) -> Any:
        """The sample with its members decoded. Raises DataError, which names the shard, sample and member."""
        try:
            return super().decode(sample)
        except wds.autodecode.DecodingError as error:
            where = f"member {error.k!r} of sample {error.key!r} in {error.url}"
            raise DataError(f"{where} cannot be decoded: {error.__cause__}") from error.__cause__


def plain(key: str, data: bytes) -> Any:
    """A member decoded by its extension, without running any of it; None for one that is not known."""
    extension = key.rpartition(".")[2].lower()
    if extension in _PICKLES:
        raise DataError(
            f"a .{extension} file is a pickle, and reading one runs code in it; write shards of .npy and .json, "
            f"or, if you trust whoever wrote these, give decode a function of your own for .{extension}"
        )
    if extension == "npy":
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    if extension == "npz":
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)
    return wds.autodecode.decoders[extension](data) if extension in _PLAIN else None


class _Images:
    """WebDataset's decoder of images, without PostScript, which is a program that Pillow has Ghostscript run."""

    def __init__(self, name: str) -> None:
        if name not in wds.autodecode.imagespecs:
            raise DataError(f"decode is given {name!r}; write one of {', '.join(wds.autodecode.imagespecs)}")
        self._decode = wds.autodecode.ImageHandler(name)

    def __call__(self, key: str, data: bytes) -> Any:
        known = key.rpartition(".")[2].lower() in self._decode.extensions
        if known and data.startswith(_POSTSCRIPT):
            raise DataError("it is PostScript, which is a program; write shards of .png, .jpg or .tif")
        return self._decode(key, data)


def unreadable(error: Exception) -> NoReturn:
    """What webdataset does with a shard that is not a tar file, or damaged: it raises DataError."""
    if isinstance(error, DataError):
        raise error
    raise DataError(f"a shard cannot be read: {' '.join(map(str, error.args)) or repr(error)}") from error
