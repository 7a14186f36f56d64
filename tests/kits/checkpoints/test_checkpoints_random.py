"""Any model on any mesh with any optimizer is saved, and on any other mesh loaded, bit by bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from random_examples import examples
from random_training import OPTIMIZERS, Case, assert_same_bits, cases, loaded, saved

Ranks = Callable[..., list[Any]]
AXES: list[Any] = [{"x": n} for n in (1, 2, 3, 4, 5, 7, 8)]
AXES += [{"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 4, "y": 2}, {"x": 1, "y": 3}]
ANY = st.sampled_from([None, *AXES])
# PyTorch's Rprop takes no DTensors, and its LBFGS few: it makes one flat tensor of all
OF_DTENSORS = [name for name in OPTIMIZERS if name not in ("lbfgs", "rprop")]
TWO = st.sampled_from([{"x": 2}, {"x": 2, "y": 1}])


def check(case: Case, on_one: Callable[..., list[Any]], on_other: Callable[..., list[Any]], alike: bool) -> None:
    """`alike`: as many processes load as saved."""
    with tempfile.TemporaryDirectory() as folder:
        states, losses = zip(*on_one(saved, folder, case), strict=True)
        for state, continued in on_other(loaded, folder, case):
            assert_same_bits(state, states[0])
            if alike and case.one == case.other:
                assert_same_bits(continued, losses[0])


def here(function: Any, *arguments: Any) -> list[Any]:
    return [function(*arguments)]


@examples(6)
@given(case=cases(ANY, ANY))
def test_on_virtual_devices(case: Case) -> None:
    check(case, here, here, alike=True)


@pytest.mark.gloo
@examples(3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), saving=st.booleans(), loading=st.booleans())
def test_between_two_ranks_and_virtual_devices(on_ranks: Ranks, data: Any, saving: bool, loading: bool) -> None:
    """`saving`, `loading`: it is done by two ranks."""
    one, other = (TWO if ranks else ANY for ranks in (saving, loading))

    def there(function: Any, *arguments: Any) -> list[Any]:
        results: list[Any] = on_ranks(2, function, *arguments)
        return results

    case = data.draw(cases(one, other, OF_DTENSORS))
    check(case, there if saving else here, there if loading else here, alike=saving == loading)
