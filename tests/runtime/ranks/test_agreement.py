"""What has to be alike on all ranks is compared, and every rank is told how it differs."""

import pytest
import torch
import torch.distributed as dist

from partway.runtime import Fact, agree, facts_of, generators
from partway.runtime.ranks.agreement import agreement, gathered
from partway.strategy import RuntimeStateError

pytestmark = pytest.mark.gloo

SEED = "seed every rank alike"


def refused(facts):
    with pytest.raises(RuntimeStateError) as error:
        agree("try", facts)
    return str(error.value)


def tensors():
    rank = dist.get_rank()
    torch.manual_seed(7)
    same = {"weight": torch.rand(3, 4), "mask": torch.tensor([True, False]), "none": torch.zeros(0)}
    nan = {"nan": torch.tensor([float("nan"), -0.0]), "half": torch.ones(5, dtype=torch.bfloat16)}
    agree("try", facts_of({**same, **nan, "complex": torch.ones(2, dtype=torch.complex64), **generators()}, SEED))
    return (
        refused(facts_of({**same, "bias": torch.full((2,), float(rank))}, SEED)),
        refused(facts_of({"labels": torch.tensor([1, 2] if rank else [2, 1])}, "give every rank the whole batch")),
        refused(facts_of({**same, "bias": torch.zeros(2 + rank)}, SEED)),
        refused(facts_of({f"a{i}": torch.zeros(2) for i in range(rank + 1)}, SEED)),
    )


def test_tensors_that_differ_are_named_on_every_rank(on_ranks):
    said = (
        "bias has other values on rank 1 than on rank 0; seed every rank alike",
        "labels has other values on rank 1 than on rank 0; give every rank the whole batch",
        "bias is float32[2] on rank 0 and float32[3] on rank 1; seed every rank alike",
        "a1 is there on rank 1 and not on rank 0; seed every rank alike",
    )
    assert on_ranks(2, tensors) == [said] * 2


def texts():
    rank = dist.get_rank()
    agree("try", [Fact("object", f"<function f at 0x{rank}>"), Fact("device", f"cuda:{rank}")])
    return (
        refused([Fact("a", "1"), Fact("b", f"{rank == 3}", fix="say one thing")]),
        refused([Fact("graph", f"one\ntwo\nthree {rank // 2}\nfour")]),
        refused([Fact("graph", "\n".join("abc"[: 3 - (rank == 2)]))]),
        refused([Fact("a", f"{rank == 1}"), Fact("b", f"{rank == 2}")]),
        refused([Fact("long", "x" * 1000 + str(rank))]).replace("x" * 299, "(x)"),
    )


def test_texts_that_differ_are_shown_from_the_line_in_which_they_do(on_ranks):
    assert (
        on_ranks(4, texts)
        == [
            (
                "b is False on rank 0 and True on rank 3; say one thing",
                "graph differs, first in line 3: it is three 0 on rank 0 and three 1 on rank 2; "
                "run the same program on every rank",
                "graph differs, first in line 3: it is c on rank 0 and nothing more on rank 2; "
                "run the same program on every rank",
                "the ranks differ:\n"
                "  - a is False on rank 0 and True on rank 1; run the same program on every rank\n"
                "  - b is False on rank 0 and True on rank 2; run the same program on every rank",
                "long is ...(x)0 on rank 0 and ...(x)1 on rank 1; run the same program on every rank",
            )
        ]
        * 4
    )


def fails(really):
    with agreement("try"):
        if really:
            raise ValueError("no")


def blocks():
    rank = dist.get_rank()
    with pytest.raises((ValueError, RuntimeStateError)) as error:
        fails(rank == 1)
    with pytest.raises(ValueError, match=f"all {rank}"), agreement("try"):
        raise ValueError(f"all {rank}")
    other = refused([]) if rank else None
    if not rank:
        with pytest.raises(RuntimeStateError) as points:
            agree("sit", [Fact("the seat", "taken")])  # which is not told: nobody else is asked for one
        other = str(points.value)
    agree("try", [])
    return str(error.value), other


def test_a_block_that_fails_on_one_rank_is_an_error_on_all(on_ranks):
    points = "the ranks are at different points of the program; run the same program on every rank:\n"
    points += "  rank 0 would sit\n  rank 1 would try"
    failed = "rank 1 could not try, and other ranks could; run the same program on every rank:\nValueError: no"
    assert on_ranks(2, blocks) == [(failed, points), ("no", points)]


def values():
    rank = dist.get_rank()
    here = gathered("count", [rank, float("inf")])
    errors = []
    for meet in (
        lambda: gathered("count" if rank else "weigh", rank),
        lambda: agree("try", []) if rank else gathered("count", 0),
    ):
        with pytest.raises(RuntimeStateError) as error:
            meet()
        errors.append(str(error.value))
    return here, errors, gathered("count", rank)


def test_values_of_all_ranks_are_gathered_where_they_are_at_one_point_of_the_program(on_ranks):
    points = "the ranks are at different points of the program; run the same program on every rank:\n"
    errors = [
        f"{points}  rank 0 would weigh\n  rank 1 would count",
        f"{points}  rank 0 would count\n  rank 1 would try",
    ]
    assert on_ranks(2, values) == [([[0, float("inf")], [1, float("inf")]], errors, [0, 1])] * 2
