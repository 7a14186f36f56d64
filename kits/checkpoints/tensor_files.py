"""Whole tensors in safetensors files, which several processes write and read by parts, at the same time.

The format is a header in JSON, with the place of each tensor, and then their bytes in C order
(https://github.com/huggingface/safetensors#format). So the place of each part is known before anyone writes.

A part is written and read in pieces of at most `PIECE` bytes of the file, through a window of it in memory: no process
holds more than its part and one piece.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from partway.strategy import RuntimeStateError, shown
from partway.strategy.basics import json_of, naming

PIECE = 2**25  # bytes
SUFFIX = ".safetensors"
Slices = tuple[slice, ...]
Report = Callable[[int], object]  # takes the number of bytes done

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # numpy lacks bfloat16: bits are moved
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_HEADER = 100_000_000  # bytes; the limit of safetensors' own reader


@dataclass(frozen=True)
class FilePlace:
    """The place of a tensor: in `file`, from byte `start` on."""

    file: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """The plan of a file: its header, its size in bytes, and the places of its tensors."""

    header: bytes
    size: int
    places: Mapping[str, FilePlace]


def arrange(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    stem: str,
    largest: int,
    notes: Mapping[str, str] | None = None,
) -> dict[str, TensorFile]:
    """Files of at most `largest` bytes (or of one tensor) for `tensors`, by name, each with `notes` in its header.
    Raises RuntimeStateError for a dtype that the format lacks."""
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    room = largest
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise RuntimeStateError(
                f"{name} is {dtype}, which a safetensors file cannot hold; keep it in another dtype"
            )
        size = math.prod(shape) * dtype.itemsize
        if size > room and groups[-1]:
            groups.append({})
            room = largest
        groups[-1][name] = dtype, shape
        room -= size
    count = len(groups)
    names = (
        [f"{stem}-{i:05d}-of-{count:05d}{SUFFIX}" for i in range(1, count + 1)] if count > 1 else [f"{stem}{SUFFIX}"]
    )
    return {file: _arranged(file, group, notes or {}) for file, group in zip(names, groups, strict=True)}


def _arranged(
    file: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], notes: Mapping[str, str]
) -> TensorFile:
    # the widest first, so that each is aligned, as in safetensors' own writer
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: FilePlace(file, len(header) + entries[name]["data_offsets"][0], *tensors[name]) for name in order}
    return TensorFile(header, len(header) + at, places)


def create(folder: Path, files: Mapping[str, TensorFile]) -> None:
    """Make the files, with their headers and without their tensors."""
    for name, file in files.items():
        with naming(folder / name), open(folder / name, "xb") as out:
            begin(out, file)


def begin(out: IO[bytes], file: TensorFile) -> None:
    """Write the header into a new file, and make room for its tensors. Raises OSError."""
    out.write(file.header)
    out.flush()
    out.truncate(file.size)
    _reserve(out.fileno(), file.size)


def _reserve(number: int, size: int) -> None:
    """Reserve room on the disk, so that a full one is an error here, and not a signal while a window is written."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(number, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # some file systems answer these
                raise


def places_in(folder: Path, names: Sequence[str], headers: Mapping[str, int] | None = None) -> dict[str, FilePlace]:
    """The places of the tensors in the files `names`. Raises RuntimeStateError, with its name, for a file that is
    missing, truncated, not of safetensors, or has another header than the checksum in `headers`."""
    places: dict[str, FilePlace] = {}
    for name in names:
        with _whole(folder / name):
            own = _places(folder, name, (headers or {}).get(name))
            if twice := next((tensor for tensor in own if tensor in places), None):
                raise ValueError(f"it has {shown(twice)}, and so has {places[twice].file}")
            places |= own
    return places


def notes_in(path: Path) -> dict[str, str]:
    """The notes in the header of a file. Raises RuntimeStateError like `places_in`."""
    with _whole(path):
        notes = _header(path, None)[0].get("__metadata__", {})
        return {str(name): str(note) for name, note in notes.items()}


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise RuntimeStateError(f"{path} is not a whole safetensors file: {what}") from error


def _header(path: Path, checksum: int | None) -> tuple[dict[str, Any], int, int]:
    """The header of a file, the offset of its tensors, and its size."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(start := file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"its header would have {length:,} bytes, and it has {size:,}")
        text = file.read(length)
    if checksum not in (None, zlib.crc32(start + text)):
        raise ValueError("its header has changed since it was saved")
    try:
        header = json_of(text)
    except ValueError as error:
        raise ValueError(f"its header {error}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + length, size


def _places(folder: Path, name: str, checksum: int | None) -> dict[str, FilePlace]:
    header, begin, size = _header(folder / name, checksum)
    places, spans = {}, []
    for tensor, entry in header.items():
        if tensor == "__metadata__":
            continue
        (start, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError(f"{shown(tensor)} has sizes or offsets that are not whole numbers")
        if math.prod(max(1, size) for size in shape) >= 2**63:
            raise ValueError(f"{shown(tensor)} has more elements than a tensor can have")
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise ValueError(f"{shown(tensor)} has the dtype {shown(entry['dtype'])}, which PyTorch does not have")
        place = FilePlace(name, begin + start, dtype, shape)
        if end - start != place.size or begin + end > size:
            raise ValueError(f"{shown(tensor)} ends at byte {begin + end:,}, and it has {size:,} bytes")
        places[tensor] = place
        spans.append((start, end, tensor))
    at, before = 0, ""
    for start, end, tensor in sorted(spans):
        if start != at:
            where = f"after {shown(before)}" if before else "at its beginning"
            raise ValueError(f"{shown(tensor)} {'overlaps' if start < at else 'leaves a gap to'} what lies {where}")
        at, before = end, tensor
    if begin + at != size:
        raise ValueError(f"its tensors end at byte {begin + at:,}, and it has {size:,} bytes")
    return places


def write_part(folder: Path, place: FilePlace, slices: Slices, part: Tensor, report: Report) -> int:
    """Write the `part` at `slices` of a tensor. Returns its checksum: the CRC-32 of its bytes in C order."""
    checksum = 0
    bits = _bits(part)
    for window, inside, within in _windows(folder, place, slices, "r+"):
        piece = np.ascontiguousarray(bits[within].cpu().numpy())
        window[inside] = piece
        checksum = zlib.crc32(piece.data, checksum)
        report(piece.nbytes)
    return checksum


def read_part(folder: Path, place: FilePlace, slices: Slices, part: Tensor, report: Report) -> None:
    """Copy the range `slices` of a tensor into `part`, which may have another dtype."""
    same = part.dtype is place.dtype
    into = _bits(part) if same else part.detach()
    into = into if into.dim() else into.reshape(1)
    for window, inside, within in _windows(folder, place, slices, "c"):
        piece = torch.from_numpy(np.ascontiguousarray(window[inside]))
        into[within].copy_(piece if same else piece.view(place.dtype))
        report(piece.nbytes)


def checksum_of(folder: Path, place: FilePlace, slices: Slices, report: Report) -> int:
    """The checksum of the part at `slices` of a tensor in the file."""
    checksum = 0
    for window, inside, _ in _windows(folder, place, slices, "r"):
        piece = np.ascontiguousarray(window[inside])
        checksum = zlib.crc32(piece.data, checksum)
        report(piece.nbytes)
    return checksum


def synchronize(folder: Path, names: Sequence[str]) -> None:
    """Wait until this process's writes to the files, and their names, are on the disk."""
    for path in (*(folder / name for name in names), folder):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, with at least one dim."""
    own = tensor.detach().view(_WORDS[tensor.element_size()])
    return own if own.dim() else own.reshape(1)


def _windows(folder: Path, place: FilePlace, slices: Slices, mode: Any) -> Iterator[tuple[Any, Slices, Slices]]:
    """Windows of a file that together hold the part at `slices` of a tensor, as arrays; for each the part's elements in
    it, and their slices of the part."""
    item = place.dtype.itemsize
    shape, slices = (place.shape, slices) if place.shape else ((1,), (slice(0, 1),))
    for offset, window, inside, within in _pieces(shape, slices, max(1, PIECE // item)):
        yield np.memmap(folder / place.file, _BITS[item], mode, place.start + offset * item, window), inside, within


def _pieces(
    shape: tuple[int, ...], slices: Slices, limit: int
) -> Iterator[tuple[int, tuple[int, ...], Slices, Slices]]:
    """Pieces of at most `limit` elements that hold the part at `slices` of a tensor of `shape`: for each its start, its
    shape, the part's elements in it, and their slices of the part."""
    first, *rest = slices
    row = math.prod(shape[1:])
    if any(s.stop <= s.start for s in slices):
        return
    if row <= limit or len(shape) == 1:
        rows = max(1, limit // max(1, row))
        for start in range(first.start, first.stop, rows):
            stop = min(start + rows, first.stop)
            within = slice(start - first.start, stop - first.start), *(slice(0, s.stop - s.start) for s in rest)
            yield start * row, (stop - start, *shape[1:]), (slice(0, stop - start), *rest), within
        return
    for i in range(first.start, first.stop):
        for offset, window, inside, within in _pieces(shape[1:], tuple(rest), limit):
            at = i - first.start
            yield i * row + offset, (1, *window), (slice(0, 1), *inside), (slice(at, at + 1), *within)
