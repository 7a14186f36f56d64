"""Tensors come out as they went in, without a copy where that can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from partway.ps.service.wire import DTYPES, array_of, bytes_of, copy_into, name_of, tensor_from, tensor_of

SHAPES = [(), (0, 3), (3, 0), (5,), (2, 3, 4)]
by_dtype = pytest.mark.parametrize("name", DTYPES)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = DTYPES[name]
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, dtype=kind)
    return torch.randint(0, 2, shape).to(kind)


@by_dtype
@by_shape
def test_a_tensor_comes_back_as_it_was(name: str, shape: tuple[int, ...]) -> None:
    one = tensor(name, shape)
    assert name_of(one.dtype) == name
    for two in (tensor_of(array_of(one), name), tensor_from(bytes_of(one), name, shape)):
        assert (two.dtype, two.shape) == (one.dtype, one.shape)
        assert torch.equal(one, two)


@by_dtype
@by_shape
def test_an_array_that_is_read_only_is_copied_into_a_tensor(name: str, shape: tuple[int, ...]) -> None:
    one, two = (
        tensor(name, shape),
        torch.zeros(shape, dtype=DTYPES[name]).requires_grad_(DTYPES[name].is_floating_point),
    )
    array = array_of(one).copy()
    array.setflags(write=False)
    copy_into(two, array)
    assert torch.equal(one, two.detach())


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_an_array_is_copied_into_a_part_that_is_not_contiguous(name: str) -> None:
    whole = torch.zeros(4, 6, dtype=DTYPES[name])
    one = tensor(name, (4, 2))
    copy_into(whole[:, 2:4], array_of(one))
    assert torch.equal(whole[:, 2:4], one)
    assert int(whole[:, :2].count_nonzero()) == int(whole[:, 4:].count_nonzero()) == 0


def test_contiguous_tensors_are_not_copied() -> None:
    one = torch.zeros(3, 2)
    array_of(one)[0, 0] = 5
    assert float(one[0, 0]) == 5
    bytes_of(one)[0:4] = np.float32(7).tobytes()
    assert float(one[0, 0]) == 7
    short = torch.zeros(3, dtype=torch.bfloat16)
    assert array_of(short).dtype == np.int16
    array_of(short)[0] = 16256  # the bits of 1
    assert float(short[0]) == 1


def test_a_transposed_tensor_is_sent_in_the_order_of_its_elements() -> None:
    one = torch.arange(6.0).reshape(2, 3)
    assert array_of(one.t()).flags.c_contiguous
    assert torch.equal(tensor_of(array_of(one.t()), "float32"), one.t())


def test_what_came_is_a_tensor_of_its_own() -> None:
    array = np.zeros(3, np.float32)
    one = tensor_of(array, "float32")
    one += 1
    assert array.sum() == 0
    data = b"\0" * 12
    tensor_from(data, "float32", (3,)).add_(1)
    assert data == b"\0" * 12
