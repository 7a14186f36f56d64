"""Dropout; what each operator draws is tested in tests/propagation/ops/test_random_numbers.py."""

import pytest
import torch
import torch.nn.functional as F
from expansions import SEED, check, randn
from torch import nn

from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Layout, Shard


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.3),
        lambda x: F.dropout(x, 0.9) + F.dropout(x, 0.1),
        lambda x: nn.Dropout(0.5)(x * 2),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.4, training=False),
        lambda x: F.dropout(F.dropout(x, 0.5).float(), 0.5),
    ],
)
def test_dropout_draws_the_numbers_that_pytorch_draws(lab, fn):
    check(lab, fn, randn(8, 6))


def test_dropout_of_a_split_tensor_is_that_of_the_whole(lab):
    x = randn(8, 6)

    def fn(x):
        return F.dropout(x, 0.5) * x

    split = Layout(lab.LINE, (Shard(0),))
    problem = lab.problem_of(fn, (x,), lab.LINE, {"x": ((split,), "by hand"), "result": ((split,), "by hand")})
    step = lab.compiled(problem, dynamic_programming(problem).choice)
    torch.manual_seed(SEED)
    found = lab.value_and_gradients(step([x]), [x])
    torch.manual_seed(SEED)
    lab.assert_same(found, lab.value_and_gradients([fn(x)], [x]))
