"""From timed calls to the rates of operators."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from partway.measure import operators as module
from partway.measure.operators import (
    BACKWARD,
    FORWARD,
    OperatorSample,
    fit_operators,
    fitted_seconds,
    no_longer_than,
    nonnegative,
    operator_samples,
    usual_seconds,
)
from partway.measure.probes import ProbeFunctions, probes
from partway.measure.workloads import Workload
from partway.propagation.cost.rates import MAPPED, Rates

TRUE = Rates.of([2e-5, 1e-11, 1e-10, 2e-10, 0, 5e-10])
SIZES = [1 << k for k in range(8, 29, 2)]


def sample(flops: float, moved: float, name: str = "aten.mm.default", of: str = FORWARD) -> OperatorSample:
    written = moved / 2
    return OperatorSample(name, "other", of, flops, moved, written, float(TRUE.seconds(flops, moved, written)))


def test_the_fit_finds_the_rates_that_the_times_were_made_of() -> None:
    samples = [sample(flops, moved) for flops in (0, 1 << 20, 1 << 30) for moved in SIZES]
    found = {rates.name: rates for rates in fit_operators(samples)}
    assert found.keys() == {"aten.mm.default", "other"}
    assert found["aten.mm.default"].forward.numbers == pytest.approx(TRUE.numbers, rel=1e-3, abs=1e-16)
    assert found["aten.mm.default"].backward is None
    for each in samples:
        assert fitted_seconds(tuple(found.values()), each) == pytest.approx(each.seconds, rel=1e-3)


def test_the_backward_of_an_operator_has_rates_of_its_own() -> None:
    found = fit_operators([*(sample(0, n) for n in SIZES), *(sample(0, n, of=BACKWARD) for n in SIZES[:1])])
    assert all(rates.backward is not None for rates in found)
    assert fit_operators([sample(0, n, of=BACKWARD) for n in SIZES]) == ()


def test_what_bytes_cost_beyond_a_knee_is_not_guessed_from_a_little_beyond() -> None:
    samples = [sample(0, moved) for moved in SIZES if moved < 1 << 20]
    few = OperatorSample("aten.mm.default", "other", FORWARD, 0, (1 << 20) + 8, 0, 1.0)  # one that was disturbed
    (found, *_) = fit_operators([*samples, few])
    assert found.forward.byte[1:] == (0, 0)


def test_what_takes_now_little_and_now_much_is_fitted_so_that_sums_come_out_right() -> None:
    measured = [OperatorSample("aten.view.default", "view", FORWARD, 0, 0, 0, s) for s in (2e-6, 2e-6, 2e-6, 34e-6)]
    (found, *_) = fit_operators([*measured, *(sample(0, n, "other") for n in SIZES)])
    assert found.forward.call == pytest.approx(10e-6, rel=1e-3)


def test_calls_are_as_much_longer_as_whole_steps_are() -> None:
    turns = [{"a": 3.0 if i == 0 else 1.0, "b": 3.0 if i == 1 else 1.0, "c": 3.0 if i > 1 else 1.0} for i in range(3)]
    assert usual_seconds(turns) == dict.fromkeys("abc", 5 / 3)  # each waits once in three steps, each step once


def test_calls_that_were_told_take_no_longer_than_a_step_that_was_not() -> None:
    assert no_longer_than({"a": 3.0, "b": 1.0}, 2.0) == {"a": 1.5, "b": 0.5}
    assert no_longer_than({"a": 3.0, "b": 1.0}, 5.0) == {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_that_are_not_negative_meet_the_conditions_of_the_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(12, 6)), random.normal(size=12)
    matrix[:, seed % 6] *= 1e6
    found = nonnegative(matrix, target)
    slope = matrix.T @ (target - matrix @ found) / np.linalg.norm(matrix, axis=0)
    assert (found >= 0).all()
    assert (slope <= 1e-7).all()
    assert slope[found > 0] == pytest.approx(0, abs=1e-7)


def test_an_unknown_that_nothing_depends_on_is_zero() -> None:
    assert nonnegative(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([2.0, 2.0])).tolist() == [pytest.approx(2), 0]


def test_quick_probes_are_some_of_all() -> None:
    quick, every = ([(p.name, p.each) for p in probes(quick=q)] for q in (True, False))
    assert set(quick) < set(every)


def test_probes_have_larger_batches() -> None:
    def numbers(times: int) -> list[tuple[str, int]]:
        made = [(p.name, p.tensors(p.each, torch.float32)) for p in probes(times, quick=True)]
        return [(name, sum(t.numel() for t in tensors)) for name, tensors in made]

    assert numbers(2) == [(name, 2 * count) for name, count in numbers(1)]


@pytest.mark.gloo
def test_the_calls_of_a_probe_are_timed_on_a_rank_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Workload(
        "one",
        lambda: ProbeFunctions([torch.tanh, lambda x: x.softmax(-1)], 64),
        lambda n: (torch.rand(n, 64),),
        8,
        (2,),
    )
    met = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        samples = list(operator_samples("cpu", lambda: met.append(1), [probe]))
    finally:
        dist.destroy_process_group()
    assert len(met) == module.WARM + module.STEPS
    by = {(s.name, s.of): s for s in samples}
    product, tanh = by["aten.mm.default", FORWARD], by["aten.tanh.default", FORWARD]
    assert (product.flops, product.moved, product.written) == (2 * 8 * 64 * 64, 4 * (2 * 8 * 64 + 64 * 64), 4 * 8 * 64)
    assert (tanh.flops, tanh.moved, tanh.kind) == (0, 2 * 4 * 8 * 64, "pointwise")
    assert by["aten.mm.default", BACKWARD].flops == 2 * product.flops
    assert by["aten.tanh.default", BACKWARD].seconds > 0
    assert all(s.seconds > 0 for s in samples)
    assert max(s.written for s in samples) < MAPPED
