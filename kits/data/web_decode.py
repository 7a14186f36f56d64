"""Decode the members of WebDataset shards without running code in them.

WebDataset's own default decoder unpickles members by their extension, so the author of a shard can run code on the
reader's machine. This one has a list of decoders by name, refuses pickles, and names the shard and member.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import webdataset as wds

from partway.strategy import DataError

Handler = Callable[[str, bytes], Any]

# The extensions that webdataset decodes without running anything, and those that it would unpickle.
_PLAIN = (
    "txt", "text", "transcript", "cls", "cls2", "index", "inx", "id", "json", "jsn", "ten", "tb", "mp", "msg", "cbor",
)  # fmt: skip
_PICKLES = ("pkl", "pickle", "pyd", "pth", "pt")
_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")


class Decoder(wds.autodecode.Decoder):  # type: ignore[misc]
    """WebDataset's decoder; `handlers` are names of image formats such as "rgb", or functions of a member's extension
    and its bytes that return None for members of other kinds."""

    def __init__(self, handlers: Iterable[str | Handler], post: list[Handler] | None, **options: Any) -> None:
        decoders = [_Images(handler) if isinstance(handler, str) else handler for handler in handlers]
        if wrong := [handler for handler in decoders if not callable(handler)]:
            raise DataError(f"decode is given {wrong[0]!r}; write 'rgb', or a function of an extension and its bytes")
        try:
            super().__init__(decoders, post=[plain] if post is None else post, **options)
        except (AssertionError, TypeError) as error:
            raise DataError(f"decode is given wrong arguments: {error}") from error

    def decode(self, sample: Any) -> Any:
        """Decode the members of a sample. Raises DataError, with the shard, sample and member."""
        try:
            return super().decode(sample)
        except wds.autodecode.DecodingError as error:
            where = f"member {error.k!r} of sample {error.key!r} in {error.url}"
            raise DataError(f"{where} cannot be decoded: {error.__cause__}") from error.__cause__


def plain(key: str, data: bytes) -> Any:
    """Decode a member by its extension, without running any of it; None for an unknown one."""
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
    """WebDataset's decoder of images, without PostScript, a programming language for which Pillow starts
    Ghostscript."""

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
    """Raise DataError for a shard that is damaged or not a tar file; WebDataset calls it."""
    if isinstance(error, DataError):
        raise error
    raise DataError(f"a shard cannot be read: {' '.join(map(str, error.args)) or repr(error)}") from error
