"""PyTorch's samples of its operators, run eagerly on split tensors: no result is wrong, and no error is of another
library."""

from __future__ import annotations

import eager
import pytest

SLICE = (  # of each way in which operators run on split tensors
    "add", "addcmul", "cat", "clamp", "diagonal", "index_put", "linalg.norm", "linalg.svd", "matmul",
    "max.reduction_with_dim", "nn.functional.batch_norm", "nn.functional.cross_entropy", "nn.functional.conv2d",
    "sort", "std", "sum", "t", "tensor_split", "where",
)  # fmt: skip


def bad(results: list[dict[str, object]]) -> list[dict[str, object]]:
    return [result for result in results if {"raw", "wrong"} & set(result["found"])]  # type: ignore[call-overload]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_operators_on_what_is_split_give_the_numbers_of_one_device(ranks: int, on_ranks) -> None:  # type: ignore[no-untyped-def]
    found = on_ranks(ranks, eager.examine, list(SLICE), 2)
    assert [bad(results) for results in found] == [[]] * ranks
    assert sum(result["found"].get("right", 0) for result in found[0]) > 200


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_operators_on_what_is_split_give_the_numbers_of_one_device(ranks: int) -> None:
    assert bad(list(eager.examine_all(list(eager.entries()), ranks))) == []
