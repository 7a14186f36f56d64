"""Random numbers that depend on the seed and not on the layout, so that a rank draws its part of them alone.

    partway::keys(count)     a key for each drawing operator of the graph, derived from one number of torch's CPU
                             generator, which is the same on all ranks; no other value depends on more than its operands
    partway::draw(key, places, dims, cuts, kind, given, size, dtype, device, stream)
                             this rank's part of a tensor of the global `size`: the slice `places[i]` of dim `dims[i]`,
                             with the cut `cuts[i]`. Kinds, with their parameters `given`:
                             bernoulli p, uniform low high, open (between 0 and 1, neither of them), normal mean
                             deviation, integers low high
    partway::bernoulli(x, p) the numbers that PyTorch's generator draws for a whole tensor with the strides of x, as in
                             dropout (PyTorch's own functional operator draws for a contiguous one)

A number is `mix(key + gamma * n)`, where n follows from the global index of its element, and `mix` is that of
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). One of 64 bits serves
two elements if 32 bits are enough. With `stream`, PyTorch's own generator fills the part, seeded by key and place:
faster with its kernels, but the numbers depend on the split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...strategy.basics.choice import Choice
from ...strategy.cut import Cut
from .dtypes import wide
from .registration import define


class RandomNumbers(Choice):
    """The inputs that determine random numbers."""

    COUNTER = "counter"  # the seed, the operator, and the global index of the element
    TORCH = "torch"  # PyTorch's generator: every rank draws the whole tensor
    RANK = "rank"  # the seed, the operator, and the rank's part of the tensor


_GAMMA, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}

# Numbers mixed at once: as many as fit a core's cache; on other devices few launches.
_AT_ONCE = 2**15
_AT_ONCE_ELSEWHERE = 2**25


def _mix(z: Tensor) -> Tensor:
    """Mix the bits of `z` in place, with logical shifts."""
    shifted = torch.empty_like(z)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            z.mul_(factor)
    return z


def _keys(count: int) -> list[Tensor]:
    seed = torch.empty((), dtype=torch.int64).random_(-(2**63), None)
    return [key.clone() for key in _mix(_mix(seed) + _GAMMA * torch.arange(1, count + 1)).unbind()]


def _local_size(size: list[int], dims: list[int], cuts: list[str]) -> list[int]:
    widths = {dim: Cut.of_text(cut).width for dim, cut in zip(dims, cuts, strict=True)}
    return [widths.get(dim, extent) for dim, extent in enumerate(size)]


def _draw(
    key: Tensor, places: list[Tensor], dims: list[int], cuts: list[str], kind: str, given: list[float],
    size: list[int], dtype: torch.dtype, device: torch.device, stream: bool,
) -> Tensor:  # fmt: skip
    part = torch.empty(_local_size(size, dims, cuts), dtype=dtype, device=device)
    positions = [int(place) for place in places]
    if stream:
        return _from_stream(part, int(key), dims, positions, kind, given)
    starts = [0] * len(size)
    for dim, cut, position in zip(dims, cuts, positions, strict=True):
        starts[dim] = Cut.of_text(cut).spans[position][0]
    return _by_index(part, int(key), starts, size, kind, given)


def _from_stream(
    part: Tensor, key: int, dims: list[int], positions: list[int], kind: str, parameters: list[float]
) -> Tensor:
    """`part` filled by a PyTorch generator seeded with `key` and the place of the part."""
    seed = torch.tensor(key)
    for dim, position in zip(dims, positions, strict=True):
        seed = _mix(_mix(seed + (dim + 1)) + position)
    generator = torch.Generator(part.device).manual_seed(int(seed))
    match kind:
        case "bernoulli":
            return part.bernoulli_(parameters[0], generator=generator)
        case "normal":
            return part.normal_(*parameters, generator=generator)
        case "integers":
            return part.random_(int(parameters[0]), int(parameters[1]), generator=generator)
        case _:
            low, high = parameters or (torch.finfo(part.dtype).tiny, 1.0)
            return part.uniform_(low, high, generator=generator)


def _by_index(part: Tensor, key: int, starts: list[int], size: list[int], kind: str, parameters: list[float]) -> Tensor:
    """`part`, which begins at the index `starts` of a tensor of `size`, filled block by block."""
    if not part.numel():
        return part
    # one run of memory for each index of the dims before the last split one
    last = max((d for d, extent in enumerate(size) if part.shape[d] != extent), default=0)
    strides = [math.prod(size[d + 1 :]) for d in range(len(size))]
    origin = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    runs = torch.zeros(1, dtype=torch.int64, device=part.device)
    for extent, stride in zip(part.shape[:last], strides, strict=False):
        runs = (runs.unsqueeze(1) + stride * torch.arange(extent, device=part.device)).view(-1)
    alike = all(
        stride % 2 == 0 for stride in strides[:last]
    )  # whether all runs begin at an even index, or all at an odd one
    halves, rows = _halves(kind, part.dtype), part.view(len(runs), -1)
    at_once = _AT_ONCE * torch.get_num_threads() if part.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    for these, columns in _blocks(len(runs), rows.shape[1], 2 * at_once // halves):
        first, count = origin + columns.start, columns.stop - columns.start
        bits = _bits(key, runs[these] + first, count, halves, first % 2 if alike else None)
        rows[these, columns] = _number(kind, parameters, bits, part.dtype)
    return part


def _blocks(rows: int, columns: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Slices of a matrix with about `elements` elements."""
    width = min(columns, elements)
    height = max(1, elements // width)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, min(left + width, columns))


def _halves(kind: str, dtype: torch.dtype) -> int:
    """The number of 32-bit numbers per element."""
    if kind == "bernoulli":
        return 1
    least = {"uniform": 1, "open": 1, "normal": 2, "integers": 2}[kind]
    return 2 * least if dtype == torch.float64 else least


def _bits(key: int, firsts: Tensor, count: int, halves: int, odd: int | None) -> Tensor:
    """`halves` 32-bit numbers (int32) for each of `count` elements from each of the indices `firsts` on. `odd`: whether
    all of `firsts` are odd; None if only some are."""
    mixes = halves // 2 if halves > 1 else 0
    begin = firsts * mixes if mixes else firsts.bitwise_right_shift(1)
    steps = torch.arange(count * mixes if mixes else count // 2 + 1, device=firsts.device)
    bits = _mix((begin * _GAMMA + key).unsqueeze(1) + steps * _GAMMA).view(torch.int32)
    if mixes:
        return bits.view(len(firsts), count, halves)
    if odd is None:
        return torch.where((firsts.bitwise_and(1) == 1).unsqueeze(1), bits[:, 1 : count + 1], bits[:, :count])
    return bits[:, odd : odd + count]


def _number(kind: str, parameters: list[float], bits: Tensor, dtype: torch.dtype) -> Tensor | float:
    """The random numbers of a kind from the bits of their elements."""
    if kind == "bernoulli":
        ones = round(parameters[0] * 2**32)  # the number of 32-bit numbers that become one
        return bits < ones - 2**31 if 0 < ones < 2**32 else float(ones > 0)
    if kind == "normal":
        bits = bits if dtype != torch.float64 else bits.view(torch.int64)
        digits = 8 * bits.element_size() - 1
        radius, angle = bits.unbind(-1)  # Box-Muller, the cosine only
        nonzero = (radius.bitwise_and(2**digits - 1).to(wide(dtype)) + 0.5).mul_(2.0**-digits)
        numbers = angle.to(wide(dtype)).mul_(math.pi * 2.0**-digits).cos_()
        return numbers.mul_(nonzero.log_().mul_(-2.0).sqrt_()).mul_(parameters[1]).add_(parameters[0])
    if kind == "integers":
        least, end = map(int, parameters)
        return bits.view(torch.int64).squeeze(-1).bitwise_and(2**63 - 1).remainder_(end - least).add_(least)
    bits = bits if dtype != torch.float64 else bits.view(torch.int64).squeeze(-1)
    digits = DIGITS[dtype] - (kind == "open")
    numbers = bits.bitwise_and(2**digits - 1).to(wide(dtype))
    if kind == "open":
        return numbers.add_(0.5).mul_(2.0**-digits)
    low, high = parameters
    return numbers.mul_((high - low) * 2.0**-digits).add_(low)


def _bernoulli(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(p)


def _fake_keys(count: int) -> list[Tensor]:
    return [torch.empty((), dtype=torch.int64) for _ in range(count)]


def _fake_draw(
    key: Tensor, places: list[Tensor], dims: list[int], cuts: list[str], kind: str, given: list[float],
    size: list[int], dtype: torch.dtype, device: torch.device, stream: bool,
) -> Tensor:  # fmt: skip
    return torch.empty(_local_size(size, dims, cuts), dtype=dtype, device=device)


def _fake_bernoulli(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


# -- The operators

_BY_SEED = (torch.Tag.nondeterministic_seeded,)
keys = define("keys(int count) -> Tensor[]", _keys, _fake_keys, tags=_BY_SEED)
draw = define(
    "draw(Tensor key, Tensor[] places, int[] dims, str[] cuts, str kind, float[] given, int[] size, ScalarType dtype, "
    "Device device, bool stream) -> Tensor",
    _draw,
    _fake_draw,
)
bernoulli = define("bernoulli(Tensor x, float p) -> Tensor", _bernoulli, _fake_bernoulli, tags=_BY_SEED)
