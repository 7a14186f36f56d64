"""Safetensors files that are written and read by parts."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from partway.checkpoints import tensor_files
from partway.checkpoints.tensor_files import arrange, checksum_of, create, places_in, read_part, write_part
from partway.strategy import RuntimeStateError

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def nothing(done):
    return None


def some(shape, dtype):
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(shape) * 3).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def specs(tensors):
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def whole(tensor):
    return tuple(slice(0, size) for size in tensor.shape)


@st.composite
def cut_tensors(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return shape, cuts, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 8, 40, 2**20])), draw(st.booleans())


def parts_of(cuts):
    """The slices of all parts, for cuts along each dim."""
    parts = [()]
    for at in cuts:
        parts = [(*part, slice(a, b)) for part in parts for a, b in itertools.pairwise(at)]
    return parts


@given(cut_tensors())
def test_parts_that_are_written_in_pieces_make_the_tensors_that_safetensors_reads(tmp_path_factory, case):
    shape, cuts, dtype, piece, transposed = case
    folder = tmp_path_factory.mktemp("files")
    tensor = some(shape[::-1], dtype).permute(tuple(range(len(shape)))[::-1]) if transposed else some(shape, dtype)
    before, tensor_files.PIECE = tensor_files.PIECE, piece
    try:
        tensors = {"one": tensor, "other": torch.arange(3)}
        (file,) = arrange(specs(tensors), "model", 10**9).values()
        create(folder, {"model.safetensors": file})
        checksums = [write_part(folder, file.places["one"], at, tensor[at], nothing) for at in parts_of(cuts)]
        write_part(folder, file.places["other"], whole(torch.arange(3)), torch.arange(3), nothing)
        read = load_file(folder / "model.safetensors")
        assert read["one"].dtype is dtype
        assert torch.equal(read["one"].to(torch.complex128), tensor.to(torch.complex128))
        assert torch.equal(read["other"], torch.arange(3))
        places = places_in(folder, ["model.safetensors"])
        assert places == dict(file.places)
        for at, checksum in zip(parts_of(cuts), checksums, strict=True):
            assert checksum_of(folder, places["one"], at, nothing) == checksum
            part = torch.zeros_like(tensor[at])
            read_part(folder, places["one"], at, part, nothing)
            assert torch.equal(part.to(torch.complex128), tensor[at].to(torch.complex128))
    finally:
        tensor_files.PIECE = before


def test_files_of_safetensors_own_writer_are_read_and_other_dtypes_converted(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(2.0), "c": torch.randn(5).bfloat16()}
    save_file(tensors, tmp_path / "x.safetensors")
    places = places_in(tmp_path, ["x.safetensors"])
    for name, tensor in tensors.items():
        into = torch.zeros(tensor.shape, dtype=torch.float64)
        read_part(tmp_path, places[name], whole(tensor), into, nothing)
        assert torch.equal(into, tensor.double())


def test_more_than_fits_goes_to_further_files_named_as_hugging_face_does(tmp_path):
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(5)} | {"large": torch.ones(100)}
    files = arrange(specs(tensors), "model", 100)
    assert list(files) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert [sorted(file.places) for file in files.values()] == [["w0", "w1"], ["w2", "w3"], ["w4"], ["large"]]
    create(tmp_path, files)
    for file in files.values():
        for name, place in file.places.items():
            write_part(tmp_path, place, whole(tensors[name]), tensors[name], nothing)
    for name in files:
        with safe_open(tmp_path / name, "pt") as read:
            assert all(torch.equal(read.get_tensor(key), tensors[key]) for key in read.keys())  # noqa: SIM118


def test_pieces_are_no_larger_than_asked():
    for shape, limit in (((100, 100), 250), ((3, 1000), 300), ((1000,), 7), ((2, 3, 50), 40)):
        slices = tuple(slice(0, size) for size in shape)
        windows = [window for _, window, _, _ in tensor_files._pieces(shape, slices, limit)]
        assert all(math.prod(window) <= limit for window in windows)
        assert sum(map(math.prod, windows)) == math.prod(shape)


def test_what_was_done_is_told(tmp_path):
    told = []
    (file,) = arrange({"x": (torch.float32, (8, 2))}, "model", 100).values()
    create(tmp_path, {"model.safetensors": file})
    write_part(tmp_path, file.places["x"], (slice(0, 8), slice(0, 1)), torch.ones(8, 1), told.append)
    assert sum(told) == 32


def test_a_dtype_that_the_format_lacks_is_named():
    with pytest.raises(RuntimeStateError, match=r"^w is torch\.complex128, which a safetensors file cannot hold; keep"):
        arrange({"w": (torch.complex128, (2,))}, "model", 100)


FOUR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}  # bytes


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "its header would have 0 bytes"),
        (b"\xff" * 30, "its header would have 18,446,744,073,709,551,615 bytes, and it has 30"),
        ((16).to_bytes(8, "little") + b"not a json text!", "Expecting value"),
        (None, "No such file"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "'w' ends at byte 77, and it has 69 bytes"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "'w' ends at byte"),
        ({"w": {"dtype": "X9", "shape": [3], "data_offsets": [0, 8]}}, "'w' has the dtype 'X9', which PyTorch"),
        ({"w": 3}, "not subscriptable"),
        ([["w"]], "its header is not a JSON object"),
        ([{"w": {**FOUR, "shape": [1.0]}}, b"four"], "'w' has sizes or offsets that are not whole numbers"),
        ([{"w": {**FOUR, "shape": [True]}}, b"four"], "'w' has sizes or offsets that are not whole numbers"),
        ([{"w": {**FOUR, "shape": [-1, -1]}}, b"four"], "'w' has sizes or offsets that are not whole numbers"),
        ([{"a": FOUR, "b": FOUR}, b"four"], "'b' overlaps what lies after 'a'"),
        ([{"a": {**FOUR, "data_offsets": [1, 5]}}, b" four"], "'a' leaves a gap to what lies at its beginning"),
        ([{"a": FOUR}, b"four more"], "its tensors end at byte 73, and it has 78 bytes"),
        pytest.param(b"[" * 100_000, "its header is nested too deeply", id="deep"),
        (b'{"w": 1, "w": 2}'.ljust(56), "its header has 'w' twice in one object"),
        (b'{"w": {"dtype": "F32", "shape": [NaN]}}'.ljust(56), "its header has NaN, which is not a finite number"),
        (b'{"__metadata__": {"a": "\xff"}}'.ljust(56), "its header has no text in UTF-8 at byte 24"),
        (
            {"w": {**FOUR, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}},
            "'w' has more elements than a tensor can",
        ),
        ({"w": {"dtype": "F32", "shape": [1]}}, "it lacks 'data_offsets'"),
    ],
)
def test_a_file_that_is_damaged_or_missing_is_named(tmp_path, content, why):
    tensors = b""
    if isinstance(content, list):
        content, tensors = content if len(content) == 2 else (content, b"")
    if isinstance(content, dict | list) or (content or b"")[:1] in (b"[", b"{"):
        text = content if isinstance(content, bytes) else json.dumps(content).encode().ljust(56)
        content = len(text).to_bytes(8, "little") + text + tensors
    if content is not None:
        (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(RuntimeStateError, match=rf"x\.safetensors is not a whole safetensors file: .*{why}"):
        places_in(tmp_path, ["x.safetensors"])


def test_a_tensor_that_two_files_have_is_named_with_both(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    text = r"b\.safetensors is not a whole safetensors file: it has 'w', and so has a\.safetensors$"
    with pytest.raises(RuntimeStateError, match=text):
        places_in(tmp_path, ["a.safetensors", "b.safetensors"])
