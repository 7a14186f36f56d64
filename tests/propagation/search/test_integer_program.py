"""The exact search against an integer program (HiGHS) on the numbers of real graphs: the same optimum."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from partway.propagation.capture.capture import capture
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.memory.keeping import keep_problem
from partway.propagation.memory.needs import needs_of
from partway.propagation.minsum.eliminate import eliminate
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import Settings, costs_of
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import REPLICATE, Layout, Mesh, Shard

WIDTH = 24


class Net(nn.Module):
    """A multilayer perceptron."""

    example = (96, WIDTH)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


class Attention(nn.Module):
    """An attention block of six heads, with its residual and norm."""

    example = (12, 6, WIDTH)

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (6, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (x + self.out(y)).square().mean()


class ConvNet(nn.Module):
    """A convolution with batch statistics, and a classifier."""

    example = (12, 6, 6, 6)

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 6)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))).square().mean()


@functools.cache
def graph_of(make):
    return capture(make(), (torch.randn(make.example),), {})


def integer_program(costs, scale):
    """The optimum of `costs` by HiGHS: a binary variable for each option, and for each edge a flow between what the two
    ends choose (options that the edge prices alike are one). `scale`: about the optimum."""
    starts = np.cumsum([0, *map(len, costs.unary)])
    objective, upper = [np.concatenate(costs.unary)], [np.ones(starts[-1])]
    rows, columns, values, right = [], [], [], []
    at, row = starts[-1], 0

    def entry(column, value):
        rows.append(row)
        columns.append(column)
        values.append(value)

    for start, end in itertools.pairwise(starts):  # each vertex takes one option
        for column in range(start, end):
            entry(column, 1.0)
        right.append(1.0)
        row += 1
    for (a, b), matrix in costs.pairs.items():
        distinct, first = np.unique(matrix, axis=0, return_inverse=True)
        distinct, second = np.unique(distinct, axis=1, return_inverse=True)
        number = at + np.arange(distinct.size).reshape(distinct.shape)
        for vertex, groups, flows in ((a, first.reshape(-1), number), (b, second.reshape(-1), number.T)):
            for group, flow in enumerate(flows):  # what flows from a group is whether one of its options was taken
                for column in flow:
                    entry(column, 1.0)
                for option in np.flatnonzero(groups == group):
                    entry(starts[vertex] + option, -1.0)
                right.append(0.0)
                row += 1
        possible = np.isfinite(distinct)
        objective.append(np.where(possible, distinct, 0.0).reshape(-1))
        upper.append(possible.astype(float).reshape(-1))
        at += distinct.size
    found = milp(
        np.concatenate(objective) / scale,
        constraints=LinearConstraint(sparse.csr_array((values, (rows, columns)), shape=(row, at)), right, right),
        integrality=np.arange(at) < starts[-1],
        bounds=Bounds(0, np.concatenate(upper)),
        options={"mip_rel_gap": 0.0},
    )
    assert found.status == 0, found.message
    choice = tuple(int(found.x[start:end].argmax()) for start, end in itertools.pairwise(starts))
    return found.fun * scale, choice


@pytest.mark.parametrize("level", [Level.COMMUNICATION, Level.SPEED])
@pytest.mark.parametrize(
    "sizes", [pytest.param((2,), marks=pytest.mark.slow), (2, 2), pytest.param((2, 3), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("make", [Net, Attention, ConvNet])
def test_the_exact_search_and_an_integer_program_agree(make, sizes, level):
    mesh = Mesh.of_sizes(sizes)
    settings = Settings(mesh, profile_of("h100"), WEIGHTS[level], on_unknown_op="error")
    split = Layout(mesh, (Shard(0), *[REPLICATE] * (len(sizes) - 1)))
    for allowed in ({}, {"x": ((split,), "by hand")}):
        problem = formulate(graph_of(make), settings, allowed)
        costs, solution = costs_of(problem), dynamic_programming(problem)
        assert solution.proven
        optimum, choice = integer_program(costs, solution.cost)
        assert optimum == pytest.approx(solution.cost, rel=1e-6)
        assert costs.of(choice) == pytest.approx(solution.cost, rel=1e-6)
        assert costs.of(choice) >= solution.bound * (1 - 1e-9)


@pytest.mark.parametrize("make", [Net, Attention, ConvNet])
@pytest.mark.parametrize("price", [1e-13, 1e-10])
def test_with_fates_too_the_exact_search_and_an_integer_program_agree(make, price):
    settings = Settings(Mesh({"x": 2}), profile_of("h100"), WEIGHTS[Level.SPEED], on_unknown_op="error")
    problem = formulate(graph_of(make), settings, {})
    fates = keep_problem(problem, needs_of(problem.graph, problem.tensors.flows), only_free=False)
    costs = fates.costs(np.full(len(problem.vertices), price))
    solution = eliminate(costs)
    assert solution.proven
    optimum, choice = integer_program(costs, solution.cost)
    assert optimum == pytest.approx(solution.cost, rel=1e-6)
    assert costs.of(choice) == pytest.approx(solution.cost, rel=1e-6)
