"""The table of fates: who may have which, what each holds, and that one more is a row."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partway.propagation.graph.nodes import operator_of
from partway.propagation.memory import fates
from partway.propagation.memory.fates import AGAIN, GONE, KEPT, Candidate, Fate, Stay, fates_of
from partway.propagation.plan.make import make_plan
from partway.propagation.problem.problem import VertexKind
from partway.propagation.program.lower import lower
from partway.propagation.search.search import SearchMode, search


def test_every_vertex_has_a_fate():
    for flags in itertools.product((False, True), repeat=6):
        assert fates_of(Candidate(*flags))


@pytest.mark.parametrize(
    ("candidate", "found"),
    [
        (Candidate(fixed=True, able=True, allowed=True), (KEPT,)),
        (Candidate(marked=True, able=True, allowed=True), (AGAIN,)),
        (Candidate(able=True, allowed=True), (KEPT, GONE, AGAIN)),
        (Candidate(able=True, allowed=True, read=True), (KEPT, AGAIN)),
        (Candidate(able=True, read=True), (KEPT,)),
        (Candidate(view=True, able=True), (GONE, AGAIN)),
        (Candidate(view=True, read=True), (KEPT,)),
    ],
)
def test_the_table_says_who_may_have_which_fate(candidate, found):
    assert fates_of(candidate) == found


def test_a_fate_holds_results_and_what_stands_beside_them():
    made, beside = np.array([100.0, 50.0]), np.array([8.0, 4.0])

    def held(fate, read):
        return [bytes_.tolist() for bytes_ in fate.bytes_of(made, beside, read)]

    assert held(KEPT, True) == [[108.0, 54.0], [0.0, 0.0]]
    assert held(AGAIN, True) == [[0.0, 0.0], [108.0, 54.0]]
    assert held(AGAIN, False) == [[0.0, 0.0], [8.0, 4.0]]
    assert held(GONE, True) == [[8.0, 4.0], [0.0, 0.0]]


# -- one more fate


class Deep(nn.Module):
    """Blocks that are alike."""

    def __init__(self, count=8):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(count))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.square().sum()


def away(noted, seconds_for_a_byte):
    """Results that go to the host and come back: their bytes, there and back."""
    return Fate(
        "away", lambda c: not (c.fixed or c.marked or c.view), Stay.BACK, Stay.THROUGHOUT, False,
        lambda options, settings: 2 * seconds_for_a_byte * options.made, "on the host until the backward: {seconds}",
        noted.append,
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "wanted"), [(1e-13, True), (1.0, False)], ids=["fast link", "slow link"])
def test_one_more_fate_is_a_row(lab, monkeypatch, seconds, wanted):
    noted = []
    row = away(noted, seconds)
    monkeypatch.setattr(fates, "FATES", (*fates.FATES, row))
    free = lab.problem_of(Deep(), [torch.randn(512, 16)], lab.LINE)
    limit = 0.6 * search(free, SearchMode.DYNAMIC_PROGRAMMING).held.peak
    problem = replace(free, settings=replace(free.settings, memory_limit=limit))
    solution = search(problem, SearchMode.DYNAMIC_PROGRAMMING)
    program = lower(problem, solution.choice, solution.keeping)
    chosen = [
        vertex.node
        for vertex, fate in zip(problem.vertices, solution.keeping.fates, strict=True)
        if fate is row and vertex.kind is VertexKind.OPERATOR
    ]
    assert bool(chosen) == wanted
    assert solution.held.peak <= limit
    assert {operator_of(node) for node in noted} == {node.name for node in chosen}
    assert bool(noted) == wanted
    plan = make_plan(problem, solution, program, SearchMode.DYNAMIC_PROGRAMMING)
    its = [operator for operator in plan.operators if operator.fate == "away"]
    assert [operator.name for operator in its] == [node.name for node in chosen]
    assert all(operator.held_bytes == 0.0 and operator.again > 0.0 for operator in its)
    if its:
        assert "on the host until the backward: " in str(plan.explain(its[0].name))
