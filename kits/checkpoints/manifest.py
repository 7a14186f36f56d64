"""The description of a checkpoint in partway.json: its files, and checksums that show whether they are intact."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from partway.checkpoints.tensor_files import SUFFIX, FilePlace
from partway.strategy import PartwayError, RuntimeStateError
from partway.strategy.basics import first_problem, json_of

MANIFEST = "partway.json"
PARTS = re.compile(r"parts-\d{5,}\.json")


def parts_file(rank: int) -> str:
    """The file in which rank `rank` lists the parts that it wrote, with their checksums."""
    return f"parts-{rank:05d}.json"


def state_file(rank: int) -> str:
    """The file of rank `rank` for values that are not tensors; that of rank 0 has the common ones."""
    return f"state-{rank:05d}.pt" if rank else "state.pt"


def _plain(name: str) -> str:
    if name in ("", ".", "..", MANIFEST) or {"/", "\\", "\0"} & set(name):
        raise ValueError(f"{name!r} is not the name of a file in it")
    return name


_File = Annotated[str, AfterValidator(_plain)]
_Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class Manifest(BaseModel):
    """The manifest of a complete checkpoint.

    aliases    further names of weights, each with the first one
    differ     the values that differed between the processes
    sizes      of all files but this one, in bytes
    checksums  of the files that are read as a whole, and `headers` of those of tensors, whose parts have their own
    checksum   of everything before it
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    saved: str
    torch: str
    processes: int = Field(ge=1)
    aliases: dict[str, str]
    differ: tuple[str, ...]
    sizes: dict[_File, Annotated[int, Field(ge=0)]]
    checksums: dict[_File, _Checksum]
    headers: dict[_File, _Checksum]
    checksum: _Checksum = 0

    @model_validator(mode="after")
    def _covers_all(self) -> Manifest:
        needed = {parts_file(rank) for rank in range(self.processes)} if self.processes <= len(self.sizes) else {"?"}
        needed |= {state_file(rank) for rank in range(self.processes if self.differ else 1)}
        if self.sizes.keys() != self.checksums.keys() | self.headers.keys() or not needed <= self.checksums.keys():
            raise ValueError("its lists of files do not agree")
        if any(name in self.checksums or not name.endswith(SUFFIX) for name in self.headers):
            raise ValueError("its lists of files do not agree")
        return self

    def text(self) -> str:
        """The content of its file."""
        tree = self.model_dump(mode="json")
        return json.dumps({**tree, "checksum": _checksum_of(tree)}, indent=1) + "\n"


def _checksum_of(tree: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({key: value for key, value in tree.items() if key != "checksum"}).encode())


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises RuntimeStateError if it is missing, of a later version, or damaged."""
    path = checkpoint / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise RuntimeStateError(f"{path} is missing; the checkpoint is incomplete") from error
    except OSError as error:
        raise RuntimeStateError(f"{path} cannot be read: {error.strerror}") from error
    with whole(path):
        tree = json_of(data)
        if not isinstance(tree, dict):
            raise ValueError("holds no manifest")
        if type(number := tree.get("format")) is int and number > 1:
            raise RuntimeStateError(f"{path} is of a later version of Partway (format {number})")
        manifest = Manifest.model_validate_json(data)
        if manifest.checksum != _checksum_of(tree):
            raise ValueError("is not what was saved")
    return manifest


def manifest_in(folder: Path) -> Manifest | None:
    """The manifest in a folder, if it has one that Partway wrote."""
    try:
        return read_manifest(folder)
    except RuntimeStateError:
        return None


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Raise RuntimeStateError, with the file at `path`, for any other error of the block that reads it."""
    try:
        yield
    except PartwayError:
        raise
    except ValidationError as error:
        raise RuntimeStateError(f"{path} is damaged: {first_problem(error)}") from error
    except Exception as error:  # readers of other packages raise any error for damaged files
        told = next(iter(str(error).splitlines()), "")
        why = f"it {error}" if type(error) is ValueError else f"{type(error).__name__}: {told}"
        raise RuntimeStateError(f"{path} is damaged: {why}") from error


_Part = tuple[str, str, tuple[tuple[int, int], ...], _Checksum]
_PARTS: TypeAdapter[tuple[_Part, ...]] = TypeAdapter(tuple[_Part, ...], config=ConfigDict(strict=True))
Part = tuple[FilePlace, str, tuple[slice, ...], int]  # its place, the name of its tensor, its slices, its checksum


def parts_in(
    checkpoint: Path, manifest: Manifest, places: Mapping[str, Mapping[str, FilePlace]]
) -> list[tuple[str, Part]]:
    """All parts that the processes wrote, each with the name of its files. Raises RuntimeStateError if they are not the
    tensors at `places`."""
    parts = []
    left = {stem: {name: math.prod(place.shape) for name, place in group.items()} for stem, group in places.items()}
    for rank in range(manifest.processes):
        with whole(path := checkpoint / parts_file(rank)):
            data = path.read_bytes()
            json_of(data)
            for stem, name, ends, checksum in _PARTS.validate_json(data):
                if (place := places.get(stem, {}).get(name)) is None:
                    raise ValueError(f"has a part of {name}, which is in no file")
                slices = tuple(slice(*end) for end in ends)
                if not _is_in(ends, place.shape):
                    raise ValueError(f"has a part of {name} that is not in it")
                left[stem][name] -= math.prod(b - a for a, b in ends)
                parts.append((stem, (place, name, slices, checksum)))
    for stem, group in left.items():
        for name, count in group.items():
            if count:
                raise RuntimeStateError(
                    f"{checkpoint / places[stem][name].file} is damaged: not all of {name} was saved"
                )
    return parts


def _is_in(ends: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    return len(ends) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(ends, shape, strict=True))
