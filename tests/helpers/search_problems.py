"""Small search problems: random numbers, and small graphs."""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from partway.propagation.minsum.network import Costs
from partway.strategy import REPLICATE, Layout, Mesh, Shard


@st.composite
def random_costs(draw, vertices=6, options=4, forbidden=True, fractions=False):
    """Costs of a random graph: whole numbers, so that there are ties, or also fractions with `fractions`. With
    `forbidden` some choices are impossible."""
    count = draw(st.integers(1, vertices))
    sizes = draw(st.lists(st.integers(1, options), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    possible = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []

    whole = not fractions or draw(st.booleans())

    def numbers(*shape):
        costs = rng.integers(0, 9, shape).astype(float) if whole else rng.random(shape)
        if forbidden and rng.random() < 0.3:
            costs[rng.random(shape) < 0.2] = math.inf
        return costs

    return Costs(tuple(numbers(n) for n in sizes), {(a, b): numbers(sizes[a], sizes[b]) for a, b in edges})


@st.composite
def reducible(draw, options=4):
    """Random costs in which some tables are a row plus a column, or a function of one end."""
    costs = draw(random_costs(options=options))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs = {}
    for ends, table in costs.pairs.items():
        kind, (rows, columns) = rng.integers(4), table.shape
        if kind == 0:
            table = rng.integers(0, 9, (rows, 1)) + rng.integers(0, 9, (1, columns)).astype(float)
        elif kind == 1:
            seats, table = rng.integers(0, columns, rows), np.full(table.shape, math.inf)
            table[np.arange(rows), seats] = rng.integers(0, 9, rows)
        pairs[ends] = table
    return Costs(costs.unary, pairs)


def plans(costs):
    """The cost of every choice."""
    return {choice: costs.of(choice) for choice in itertools.product(*(range(len(u)) for u in costs.unary))}


def brute_force(costs):
    """The lowest cost of any choice."""
    return min(plans(costs).values())


def copied(costs):
    """The same costs, each in its own array."""
    return Costs(tuple(map(np.copy, costs.unary)), {pair: np.copy(matrix) for pair, matrix in costs.pairs.items()})


def grid(side, options, seed=0, coupling=9):
    """A grid whose costs are whole numbers or infinite."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for v in range(side * side):
        for u in (v + 1, v + side):
            if u < side * side and (u == v + side or u % side):
                pairs[v, u] = rng.integers(0, coupling + 1, (options, options)).astype(float)
                pairs[v, u][rng.random((options, options)) < 0.05] = math.inf
    return Costs(tuple(rng.integers(0, 30, options).astype(float) for _ in range(side * side)), pairs)


def mlp(x, w, v, b):
    """Two layers and a loss."""
    return F.linear(torch.relu(F.linear(x, w)), v, b).pow(2).mean()


def mlp_tensors():
    """Arguments of `mlp`."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (4, 4), (4, 4), (4,)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)


def rows(x):
    """A few operators, with so few plans that each can be evaluated."""
    return (x * 2 + x.sum(0, keepdim=True)).sum(1)


def annotated_problem(lab, sizes=(2, 2)):
    """`mlp` with its first weight split on the last axis."""
    mesh = Mesh.of_sizes(sizes)
    later = Layout(mesh, (*[REPLICATE] * (len(sizes) - 1), Shard(1)))
    return lab.problem_of(mlp, mlp_tensors(), mesh, {"w": ((later,), "by hand")})
