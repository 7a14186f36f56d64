"""What operators were measured to take: as numbers, as a part of a profile, and in what is predicted by it."""

import json

import numpy as np
import pytest
import torch
from round_profile import DATA, ROUND

from partway.propagation.cost.cost import CACHED, operator_seconds
from partway.propagation.cost.profile import DeviceProfile, profile_of
from partway.propagation.cost.rates import KNEES, MAPPED, OperatorRates, Rates, features_of
from partway.strategy import StrategyError

CALL = Rates.of([1e-5, 1e-11, 1e-9, 2e-9, 4e-9, 8e-9])
RATES = {"call": 1e-5, "flop": 1e-11, "byte": [1e-9, 0, 0], "mapped": 0}


def with_operators(*operators: OperatorRates) -> DeviceProfile:
    return ROUND.model_copy(update={"operators": operators})


def test_a_byte_costs_more_beyond_each_knee():
    _, first, second = KNEES
    assert CALL.seconds(0, 0, 0) == 1e-5
    assert CALL.seconds(1e6, 0, 0) == pytest.approx(2e-5)
    assert CALL.seconds(0, first, 0) == pytest.approx(1e-5 + 1e-9 * first)
    assert CALL.seconds(0, first + 10, 0) - CALL.seconds(0, first, 0) == pytest.approx(30e-9)
    assert CALL.seconds(0, second + 10, 0) - CALL.seconds(0, second, 0) == pytest.approx(70e-9)


def test_memory_that_is_mapped_costs_what_is_written_to_it():
    assert CALL.seconds(0, 2 * MAPPED, MAPPED - 1) == CALL.seconds(0, 2 * MAPPED, 0)
    assert CALL.seconds(0, 2 * MAPPED, MAPPED) - CALL.seconds(0, 2 * MAPPED, 0) == pytest.approx(8e-9 * MAPPED)


def test_one_number_stands_for_all_of_several_calls():
    several = CALL.seconds(0, [1e3, 1e7], 0)
    assert several.tolist() == [float(CALL.seconds(0, each, 0)) for each in (1e3, 1e7)]


def test_no_work_makes_a_call_shorter():
    figures = np.random.default_rng(0).integers(0, 1 << 28, (3, 500))
    for more in np.eye(3, dtype=int) * 12345:
        assert (CALL.seconds(*(figures + more[:, None])) >= CALL.seconds(*figures)).all()


def test_the_numbers_are_in_the_order_of_their_features():
    assert Rates.of(CALL.numbers) == CALL
    assert [float(each) for each in features_of(3, MAPPED, MAPPED)] == [
        1, 3, MAPPED, MAPPED - KNEES[1], MAPPED - KNEES[2], MAPPED
    ]  # fmt: skip


def test_measured_operators_are_never_below_the_roofline():
    nothing = Rates.of([0.0] * 6)
    flops, moved = 1e12, CACHED + 10 * ROUND.memory_bandwidth
    assert operator_seconds(flops, 0, torch.float32, ROUND, nothing) == flops / ROUND.peak.float32
    assert operator_seconds(0, moved, torch.float32, ROUND, nothing) == pytest.approx(10.0)
    assert operator_seconds(0, CACHED, torch.float32, ROUND, nothing) == 0.0
    slow = ROUND.model_copy(update={"peak": ROUND.peak.model_copy(update={"float64": ROUND.peak.float32 / 4})})
    of_products = Rates.of([0.0, 2 / slow.peak.float32, 0, 0, 0, 0])
    assert operator_seconds(flops, 0, torch.float64, slow, of_products) == pytest.approx(8 * flops / slow.peak.float32)


def test_an_operator_that_was_not_measured_has_the_rates_of_its_kind():
    names = ("aten.mm.default", "pointwise", "view", "other")
    profile = with_operators(*(OperatorRates(name=name, forward=CALL) for name in names))
    for operator, kind, found in (
        ("aten.mm.default", "other", "aten.mm.default"),
        ("aten.exp.default", "pointwise", "pointwise"),
        ("aten.sort.default", "other", "other"),
        ("aten.sort.default", "none that was measured", "other"),
    ):
        rates = profile.rates_of(operator, kind)
        assert rates is not None
        assert rates.name == found
    assert ROUND.rates_of("aten.mm.default") is None


def test_rates_are_a_part_of_the_profile_on_disk(tmp_path):
    profile = with_operators(OperatorRates(name="other", forward=CALL, backward=CALL))
    profile.save(tmp_path / "with.json")
    assert profile_of(tmp_path / "with.json") == profile
    assert hash(profile_of(tmp_path / "with.json")) == hash(profile)
    assert profile != ROUND


@pytest.mark.parametrize(
    ("operators", "problem"),
    [
        (
            [{"name": "x", "forward": RATES}],
            "operators: has none named 'other'; write a list of the rates of operators and kinds, each once, and among "
            "them other",
        ),
        (
            [{"name": "other", "forward": RATES}, {"name": "other", "forward": RATES}],
            "operators[1].name: is 'other', as another is; write a list of the rates of operators and kinds, each "
            "once, and among them other",
        ),
        (
            [{"name": "other", "forward": {**RATES, "call": -1}}],
            "operators[0].forward.call: is -1; write a finite number of 0 or more (s)",
        ),
        (
            [{"name": "other", "forward": {**RATES, "byte": [1]}}],
            "operators[0].forward.byte[1]: is missing; write a list of 3 numbers (s)",
        ),
        (
            [{"name": "other", "forward": {**RATES, "more": 1}}],
            "operators[0].forward.more: is not a field; remove it: what is read is an object with call, flop, byte and "
            "mapped",
        ),
    ],
)
def test_what_is_wrong_with_rates_is_said(tmp_path, operators, problem):
    (tmp_path / "wrong.json").write_text(json.dumps({**DATA, "operators": operators}))
    with pytest.raises(StrategyError) as error:
        profile_of(tmp_path / "wrong.json")
    assert problem in str(error.value)
