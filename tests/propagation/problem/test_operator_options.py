"""The options of one call by hand: which there are, which the settings leave, what they cost."""

import dataclasses

import numpy as np
import pytest
import torch

from partway.propagation.cost.conversion import conversion_table
from partway.propagation.cost.cost import WEIGHTS, Level, Weights, collective_seconds
from partway.propagation.cost.profile import profile_of
from partway.propagation.problem.operator_options import OperatorCall, cheapest, operator_options
from partway.propagation.problem.problem import Settings
from partway.propagation.rules.rule import Exchange, Hop, Rule, owning
from partway.strategy import BROADCAST, REPLICATE, Mesh, Shard
from partway.strategy.placement import Kind

MESH = Mesh({"dp": 2, "tp": 4})
PLAIN = Settings(MESH, profile_of("cpu"), WEIGHTS[Level.SPEED], fully_use_devices=False)


def matmul(m, k, n, **changes):
    """A call of m k, k n -> m n, differentiated, by its numbers alone."""
    tables = [
        conversion_table(shape, 4, "sum", True, MESH, PLAIN.profile, PLAIN.weights)
        for shape in ((m, k), (k, n), (m, n))
    ]
    rule = Rule(
        ((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),), {"m": m, "k": k, "n": n}, frozenset("k"),
        linear=(frozenset({0}), frozenset({1})), flops=2.0 * m * k * n,
    )  # fmt: skip
    call = OperatorCall(
        rule, tuple(tables[:2]), (tables[2],), torch.float32, (False, False), (True, True), differentiated=True,
        recomputed=False, in_place=False, view=False, by_batch=True,
    )  # fmt: skip
    return dataclasses.replace(call, **changes)


def splits(options):
    """What each option splits on the two axes."""
    return {option.factors for option in options}


def test_each_axis_splits_one_factor_or_none():
    assert splits(operator_options(matmul(64, 64, 64), PLAIN)) == {(a, b) for a in "mkn" for b in "mkn"} | {
        (a, b) for a in (None, *"mkn") for b in (None, *"mkn")
    }


def test_a_factor_with_too_few_elements_is_not_split():
    assert {f for _, f in splits(operator_options(matmul(3, 64, 64), PLAIN))} == {None, "k", "n"}
    short = dataclasses.replace(PLAIN, short=frozenset({3}))
    shorts = [
        dataclasses.replace(t, short=short.short) for t in (*matmul(3, 64, 64).operands, *matmul(3, 64, 64).results)
    ]
    call = matmul(3, 64, 64, operands=tuple(shorts[:2]), results=(shorts[2],))
    assert {f for _, f in splits(operator_options(call, short))} == {None, "m", "k", "n"}


def test_without_a_rule_everything_is_replicated():
    options = operator_options(matmul(8, 8, 8, rule=None), PLAIN)
    assert splits(options) == {(None, None)}
    assert {p for option in options for p in option.results[0].placements} == {REPLICATE, BROADCAST}


def test_a_contraction_uses_all_devices_where_it_can():
    full = dataclasses.replace(PLAIN, fully_use_devices=True)
    assert all(None not in factors for factors in splits(operator_options(matmul(64, 64, 64), full)))
    assert splits(operator_options(matmul(2, 2, 2), full)) == {("m", None), ("k", None), ("n", None)}


def test_slices_of_the_last_dim_are_aligned_where_they_can_be():
    aligned = dataclasses.replace(PLAIN, slice_align=32)
    assert {f for _, f in splits(operator_options(matmul(64, 64, 128), aligned))} == {None, "m", "n"}


def test_the_batch_is_split_by_default_where_the_call_may():
    by_default = dataclasses.replace(PLAIN, batch_by_default=True)
    assert splits(operator_options(matmul(64, 64, 64), by_default)) == {("m", "m")}
    assert len(splits(operator_options(matmul(64, 64, 64, by_batch=False), by_default))) == 16


def test_the_work_is_divided_by_the_devices_that_share_it():
    options = operator_options(matmul(64, 64, 64), PLAIN)
    for option, flops in zip(options, options.flops, strict=True):
        devices = np.prod([n for n, factor in zip(MESH.sizes, option.factors, strict=True) if factor])
        assert flops == pytest.approx(3 * 2 * 64**3 / devices)  # the product, and one for the gradient of each operand


def test_a_view_costs_nothing_and_a_result_that_nothing_reads_back_is_not_held():
    view = operator_options(matmul(8, 8, 8, in_place=False, view=True), PLAIN)
    assert not view.seconds.any()
    assert not view.held.any()
    forward = operator_options(matmul(8, 8, 8, differentiated=False), PLAIN)
    assert not forward.held.any()
    assert (operator_options(matmul(8, 8, 8), PLAIN).held > 0).all()


def test_of_options_that_cost_the_same_the_first_are_kept():
    options = operator_options(matmul(64, 64, 64), PLAIN)
    same = dataclasses.replace(options, unary=np.ones(len(options)))
    assert [*cheapest(same, 3)] == [*same][:3]
    assert cheapest(options, None) is cheapest(options, len(options)) is options
    assert cheapest(options, 1).unary[0] == options.unary.min()


def owned(beside, settings):
    """The options of a product that may gather the rows of its first operand itself, where its columns are split, and
    what each costs."""
    plain = matmul(64, 32, 64)
    gathers = Exchange("columns", "n", {0: Shard(0)}, lambda counts: (Hop(0, Shard(0), BROADCAST),), beside=beside)
    options = operator_options(dataclasses.replace(plain, rule=owning(plain.rule, gathers)), settings)
    return options, dict(zip((option.factors for option in options), options.unary.tolist(), strict=True))


def test_an_option_has_the_price_of_what_the_operator_sends_itself():
    sending = dataclasses.replace(PLAIN, weights=Weights(wire=1.0, latency=1.0, compute=0.0, memory=0.0))
    options, costs = owned(False, sending)
    option = next(option for option in options if option.factors == ("k", "columns"))
    assert [str(layout.placements[1]) for layout in (*option.operands, *option.results)] == ["S0", "S1", "S1"]
    ways, payload = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER), 64 * 32 * 4 / 2  # of the half that k leaves
    sent = sum(collective_seconds(way, payload, MESH, ("tp",), PLAIN.profile) for way in ways)
    assert costs["k", "columns"] == pytest.approx(sent)
    assert costs["k", "n"] == 0.0


def test_what_is_sent_beside_the_work_costs_what_it_takes_longer():
    (options, beside), (_, alone) = owned(True, PLAIN), owned(False, PLAIN)
    place = next(i for i, option in enumerate(options) if option.factors == ("k", "columns"))
    hidden = alone["k", "columns"] - beside["k", "columns"]
    assert hidden == pytest.approx(3 / 4 * options.seconds[place])
