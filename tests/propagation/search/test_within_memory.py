"""The search under a memory limit: strategies and fates together, against brute force on small random graphs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from random_examples import examples
from torch import nn

from partway.propagation.capture.capture import capture
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.memory.backward_memory import timeline
from partway.propagation.memory.fates import AGAIN, KEPT
from partway.propagation.memory.held import Purpose
from partway.propagation.memory.keeping import keep_problem
from partway.propagation.memory.needs import needs_of
from partway.propagation.minsum.eliminate import eliminate
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import Recompute, Settings
from partway.propagation.search import within_memory as module
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.search import SearchMode, search
from partway.propagation.search.solution import verify_solution
from partway.propagation.search.within_memory import kept_for_free, with_fates, within_memory
from partway.strategy import Mesh, StrategyError

STEPS = (torch.sin, torch.tanh, F.relu, torch.exp, torch.neg, F.silu)


LINE = Mesh({"x": 2})


def problem_of(fn, tensors, **changes):
    settings = Settings(LINE, profile_of("cpu"), WEIGHTS[Level.SPEED], fully_use_devices=False, **changes)
    return formulate(capture(fn, tuple(tensors), {}), settings, {})


def fates_of(problem, **more):
    return keep_problem(problem, needs_of(problem.graph, problem.tensors.flows), **{"only_free": False, **more})


def peak_of(solution):
    return solution.held.peak


@st.composite
def chains(draw):
    """A function of a matrix: elementwise operators in a row, some of which read an earlier value too."""
    count = draw(st.integers(2, 4))
    steps = [draw(st.sampled_from(STEPS)) for _ in range(count)]
    joins = [draw(st.one_of(st.none(), st.integers(0, i))) for i in range(count)]

    def fn(x):
        values = [x]
        for step, join in zip(steps, joins, strict=True):
            result = step(values[-1])
            values.append(result if join is None else result * values[join])
        return values[-1].sum()

    return fn


def some(problem, seed, most=4):
    """`problem` with at most so many options of each vertex, drawn at random: what brute force can go through."""
    rng = np.random.default_rng(seed)
    vertices, shared = [], {}
    for vertex in problem.vertices:
        key = id(vertex.options)
        if key not in shared:
            rows = np.sort(rng.permutation(len(vertex.options))[:most])
            shared[key] = vertex.options.take(rows)
        vertices.append(replace(vertex, options=shared[key]))
    return replace(problem, vertices=tuple(vertices))


@examples(60)
@given(chains(), st.integers(0, 2**20), st.floats(0.0, 3.0))
def test_strategies_and_fates_at_any_price_are_the_optimum_of_all_of_them(fn, seed, weight):
    problem = some(problem_of(fn, [torch.randn(8, 6, requires_grad=True)]), seed, 2)
    fates = fates_of(problem)
    at = np.random.default_rng(seed).random(len(problem.vertices)) * weight * 1e-9
    costs = fates.costs(at)
    sizes = [range(len(unary)) for unary in costs.unary]
    assume(math.prod(map(len, sizes)) <= 40_000)
    total = np.zeros([len(s) for s in sizes])
    for v, unary in enumerate(costs.unary):
        total = total + unary.reshape([-1 if i == v else 1 for i in range(len(sizes))])
    for (a, b), matrix in costs.pairs.items():
        shape = [1] * len(sizes)
        shape[a], shape[b] = matrix.shape
        total = total + matrix.reshape(shape)
    least = total.min()
    found = eliminate(costs)
    if math.isinf(least):
        assert math.isinf(found.cost)
        return
    assert found.bound == pytest.approx(float(least))
    # what the numbers stand for costs that much: by itself, and its bytes at their prices
    kept = fates.read_off(found.choice, at)
    assert kept.cost + float(at @ kept.held) == pytest.approx(float(least), rel=1e-4)


@examples(40)
@given(chains(), st.integers(0, 2**20), st.floats(0.4, 1.0))
def test_no_plan_that_fits_beats_the_bound_and_the_plan_found_fits(fn, seed, share):
    problem = some(problem_of(fn, [torch.randn(8, 6, requires_grad=True)]), seed, 2)
    free = dynamic_programming(problem)
    assume(math.isfinite(free.cost))
    first = with_fates(problem, free)
    limited = limited_to(problem, share * peak_of(first))
    try:
        found = within_memory(limited, free)
    except StrategyError:
        return
    assert peak_of(found) <= limited.settings.memory_limit
    verify_solution(limited, found)
    assert found.bound <= found.cost * (1 + 1e-9)
    assert free.cost <= found.cost * (1 + 1e-9)


@examples(40)
@given(chains(), st.integers(0, 2**20))
def test_where_there_is_room_the_plan_fits_whatever_is_kept_of_it(fn, seed):
    problem = some(problem_of(fn, [torch.randn(8, 6, requires_grad=True)]), seed, 2)
    free = dynamic_programming(problem)
    assume(math.isfinite(free.cost))
    for recompute in Recompute:
        own = limited_to(problem, None, recompute=recompute)
        assert module.has_room(own, free.choice)
        assert not module.has_room(limited_to(own, peak_of(with_fates(own, free)) * 0.99), free.choice)


def test_options_are_left_out_where_they_are_much_work(monkeypatch):
    problem = layers()
    free, whole = dynamic_programming(problem), fates_of(problem)
    assert module._promising(whole, free, 1e6) == (whole, math.inf)
    monkeypatch.setattr(module, "FEW_OPTIONS", 1)
    monkeypatch.setattr(module, "LITTLE_WORK", 0)
    monkeypatch.setattr(module, "MANY_OPTIONS", (1,))
    some, ceiling = module._promising(whole, free, 1e6)
    sizes = [(len(v.options), len(w.options)) for v, w in zip(problem.vertices, some.problem.vertices, strict=True)]
    assert all(few <= every for every, few in sizes)
    assert any(few < every for every, few in sizes)
    assert math.isfinite(ceiling)


@examples(40)
@given(chains(), st.integers(0, 2**20), st.floats(0.4, 1.0))
def test_where_options_are_left_out_the_bound_holds_for_plans_with_all_of_them(fn, seed, share):
    problem = some(problem_of(fn, [torch.randn(8, 6, requires_grad=True)]), seed, 3)
    free = dynamic_programming(problem)
    assume(math.isfinite(free.cost))
    limited = limited_to(problem, share * peak_of(with_fates(problem, free)))
    with pytest.MonkeyPatch.context() as patch:
        try:
            every = within_memory(limited, free)
            patch.setattr(module, "FEW_OPTIONS", 1)
            patch.setattr(module, "LITTLE_WORK", 0)
            patch.setattr(module, "MANY_OPTIONS", (1,))
            few = within_memory(limited, free)
        except StrategyError:
            return
    verify_solution(limited, few)
    assert peak_of(few) <= limited.settings.memory_limit
    assert few.bound <= min(few.cost, every.cost) * (1 + 1e-9)


def limited_to(problem, limit, **more):
    return replace(problem, settings=replace(problem.settings, memory_limit=limit, **more))


def layer(x, w, v):
    return F.linear(torch.tanh(F.linear(torch.sin(x), w)), v).square().sum()


def layers(**changes):
    tensors = [torch.randn(s, requires_grad=True) for s in ((64, 8), (8, 8), (8, 8))]
    return problem_of(layer, tensors, **changes)


def test_a_limit_that_does_not_bind_changes_nothing():
    problem = layers()
    free = dynamic_programming(problem)
    first = with_fates(problem, free)
    found = within_memory(limited_to(problem, peak_of(first)), free)
    assert (found.choice, found.keeping, found.cost, found.binding) == (first.choice, first.keeping, free.cost, False)


@pytest.mark.parametrize("mode", list(SearchMode))
def test_every_search_keeps_to_the_limit(mode):
    problem = layers()
    held = peak_of(search(problem, mode))
    limit = 0.9 * held
    found = search(limited_to(problem, limit), mode)
    assert peak_of(found) <= limit
    assert found.binding
    verify_solution(problem, found)


def test_no_less_memory_costs_less():
    problem = layers()
    free = dynamic_programming(problem)
    held = peak_of(with_fates(problem, free))
    costs = []
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        try:
            costs.append(within_memory(limited_to(problem, share * held), free).cost)
        except StrategyError:
            break
    assert len(costs) >= 3
    assert costs == sorted(costs)


def bytes_of(text):
    number, unit = text.split()
    return float(number) * 1000 ** ("B", "kB", "MB", "GB").index(unit)


def test_an_impossible_limit_says_what_would_do_and_what_is_heaviest():
    problem = layers()
    for mode in (SearchMode.DYNAMIC_PROGRAMMING, SearchMode.SHARDING_PROPAGATION):
        with pytest.raises(StrategyError) as refused:
            search(limited_to(problem, 1000.0), mode)
        said = str(refused.value)
        assert said.startswith("no plan was found on the mesh x=2 that holds less than ")
        assert "memory_limit is 1 kB; a limit of " in said
        named = bytes_of(re.search(r"a limit of (.*?) would do. The heaviest: ", said)[1])
        found = search(limited_to(problem, named), mode)
        assert peak_of(found) <= named


def test_recompute_none_computes_nothing_again_but_views():
    problem = limited_to(layers(), None, recompute=Recompute.NONE)
    found = with_fates(problem, dynamic_programming(problem))
    assert AGAIN not in found.keeping.fates


def test_recompute_all_keeps_the_least():
    problem = layers()
    free = dynamic_programming(problem)
    auto = with_fates(problem, free)
    everything = with_fates(limited_to(problem, None, recompute=Recompute.ALL), free)
    assert everything.held.by_purpose[Purpose.KEPT].max() < auto.held.by_purpose[Purpose.KEPT].max()
    assert everything.keeping.fates.count(AGAIN) > auto.keeping.fates.count(AGAIN)


def test_what_is_free_is_had_again_and_costs_nothing():
    def fn(x, w):
        return F.linear(torch.tanh(F.linear(x, w)).exp(), w).sum()

    tensors = [torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)]
    problem = problem_of(fn, tensors)
    free = dynamic_programming(problem)
    found = with_fates(problem, free)
    assert found.cost == free.cost
    fates = {v.name: fate for v, fate in zip(problem.vertices, found.keeping.fates, strict=True)}
    # the backward reads both; one is computed of the other
    assert {fates["tanh"], fates["exp"]} == {KEPT, AGAIN}


def test_a_point_is_what_its_timeline_says():
    problem = layers()
    free = dynamic_programming(problem)
    needs = needs_of(problem.graph, problem.tensors.flows)
    point = kept_for_free(problem, free.choice, needs)
    own = keep_problem(problem, needs, only_free=True).at(free.choice)
    again = own.read_off(point.numbers, np.zeros(len(problem.vertices)))
    assert timeline(own, again).total.max() == pytest.approx(point.when.total.max())
    assert point.peak >= point.when.total.max()


class Deep(nn.Module):
    """Blocks that are alike."""

    def __init__(self, count=12):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(count))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(self.norm(x))))
        return x.square().sum()


def test_of_blocks_that_are_alike_some_are_kept():
    problem = problem_of(Deep(), [torch.randn(512, 16)])
    free = dynamic_programming(problem)
    held = peak_of(with_fates(problem, free))
    found = within_memory(limited_to(problem, 0.7 * held), free)
    assert 0.6 * held < peak_of(found) <= 0.7 * held
    gelus = [f for v, f in zip(problem.vertices, found.keeping.fates, strict=True) if v.name.startswith("linear")]
    assert KEPT in gelus
    assert AGAIN in gelus
    assert found.cost <= 1.05 * found.bound
