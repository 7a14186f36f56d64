"""The search under a memory limit: the exact search at the best price of a byte."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...strategy.errors import StrategyError
from .eliminate import eliminate
from .exact import dynamic_programming
from .network import Costs, costs_of, is_written_out
from .problem import AMONG, SearchProblem
from .solution import Solution


def within_memory(problem: SearchProblem, limit: float) -> tuple[Solution, float]:
    """The cheapest plan found that holds at most `limit` bytes on a device, with a bound on what any such plan costs,
    and the price of a byte that it was found with.

    Lagrange: for any price p of a byte the least of `cost + p * (memory - limit)` is a bound. The best price is where
    the cheapest plan changes from one that fits to one that does not: the price at which the two last found cost the
    same is tried until neither is beaten (Handler & Zang, "A dual algorithm for the constrained shortest path
    problem", 1980).
    """
    free = dynamic_programming(problem)
    if math.isinf(free.cost) or problem.memory(free.choice) <= limit:
        return free, 0.0
    fits = _least_memory(problem)
    if problem.memory(fits.choice) > limit:
        raise StrategyError(_too_little(problem, fits, limit))
    above, bound, best_price = free, free.bound, 0.0
    while True:
        price = (fits.cost - above.cost) / (problem.memory(above.choice) - problem.memory(fits.choice))
        if price <= 0.0:
            break
        priced = dynamic_programming(problem, price)
        plan = replace(priced, cost=problem.cost(priced.choice))
        bound, best_price = max(bound, priced.bound - price * limit), price
        held = problem.memory(plan.choice)
        if plan.cost + price * held >= (fits.cost + price * problem.memory(fits.choice)) * (1 - 1e-12):
            break  # neither of the two is beaten: no price gives a higher bound
        if held <= limit:
            fits = plan
        else:
            above = plan
    return replace(fits, bound=bound, width=free.width), best_price


def _least_memory(problem: SearchProblem) -> Solution:
    """A plan that holds the least on a device."""
    if not is_written_out(problem):  # a price that outweighs all else
        heaviest = sum(float(v.options.memory.max()) for v in problem.vertices)
        plan = dynamic_programming(problem, 1e6 / max(heaviest, 1.0))
    else:
        costs = costs_of(problem)
        possible = {id(array): np.where(np.isfinite(array), 0.0, np.inf) for array in costs.pairs.values()}
        pairs = {ends: possible[id(array)] for ends, array in costs.pairs.items()}
        memory = {id(v.options): v.options.memory for v in problem.vertices}
        plan = eliminate(Costs(tuple(memory[id(v.options)] for v in problem.vertices), pairs))
    return replace(plan, cost=problem.cost(plan.choice))


def _too_little(problem: SearchProblem, least: Solution, limit: float) -> str:
    """Why no plan keeps to the limit, and which would do; `least` is the plan that holds the least."""
    needed = problem.memory(least.choice)
    held = sorted(
        ((float(v.options.memory[c]), v.name) for v, c in zip(problem.vertices, least.choice, strict=True)),
        reverse=True,
    )
    heaviest = ", ".join(f"{name} {size / 1e9:.3g} GB" for size, name in held[:5] if size)
    among = AMONG if problem.approximate else ""
    return (
        f"no plan on the mesh {problem.settings.mesh}{among} holds less than {needed / 1e9:.4g} GB on a device "
        f"(parameters, gradients, optimizer states and activations), and memory_limit is {limit / 1e9:.4g} GB; "
        f"a limit of {needed / 1e9 * 1.001:.4g} GB would do, or more devices. The heaviest: {heaviest}"
    )
