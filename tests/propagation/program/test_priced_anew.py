"""The cost that a plan claims is the cost of the program it becomes, priced anew from nothing but its text.

`priced` knows nothing of options, columns or tables: it adds up what the conversions of the program send, by
`collective_cost`, and what its operators compute on local shapes, by their rules' flops. Searches, conversion tables
and caches are tested by it at once: what any of them gets wrong makes the claim differ from the program.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_profile import FLAT, NODE, profile_with
from torch import Tensor, fx, nn
from zoo import CASES

from partway.propagation.capture.capture import capture
from partway.propagation.cost import conversion, cost
from partway.propagation.cost.conversion import conversion_table
from partway.propagation.cost.cost import BACKWARD_FACTOR, LOOKUPS, WEIGHTS, Level, Weights, collective_cost
from partway.propagation.cost.profile import DeviceProfile, profile_of
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import (
    Value,
    is_pointwise,
    is_view,
    operands,
    rearranges,
    source_of,
    tensor_of,
    values_of,
)
from partway.propagation.graph.port import Role
from partway.propagation.memory.fates import AGAIN
from partway.propagation.minsum.eliminate import eliminate
from partway.propagation.minsum.network import Costs
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import Option, SearchProblem, Settings, Vertex, VertexKind, costs_of
from partway.propagation.program.collective import Conversion
from partway.propagation.program.lower import lower
from partway.propagation.program.program import Program, verify_program
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.propagate import sharding_propagation
from partway.propagation.search.recursive import recursive_programming
from partway.propagation.search.solution import Solution, solution_of, verify_solution
from partway.propagation.search.within_memory import within_memory
from partway.strategy import Layout, Mesh
from partway.strategy.placement import Kind

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("priced anew")]

EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in ("llama_heads", "resnet50") else name for name in CASES]
STEP = 1e-13  # what a step costs that sends nothing, so that no way is a circle


def settings_on(sizes: tuple[int, ...], level: Level = Level.SPEED, profile: str = "h100", **changes: Any) -> Settings:
    return Settings(Mesh.of_sizes(sizes), profile_of(profile), WEIGHTS[level], on_unknown_op="error", **changes)


# -- pricing anew


def sent(c: Conversion, mesh: Mesh, profile: DeviceProfile, weights: Weights) -> float:
    """The cost of one conversion, forward and backward."""
    total = STEP
    for phase in ("forward", "backward"):
        way = c.kind(phase)
        if way.communicates:
            payload = c.payload(phase)
            if way is Kind.ALL_TO_ALL:
                payload = c.whole_bytes / c.size
            seconds, per_byte = collective_cost(way, payload, mesh, c.axes, profile)
            total += weights.latency * seconds + weights.wire * per_byte * payload
        elif way in (Kind.PAD, Kind.KEEP):
            total += weights.compute * c.whole_bytes / (profile.reached.memory * profile.memory_bandwidth)
    return total


def local_bytes(v: Value, found: Layout) -> float:
    tensor = tensor_of(v)
    return math.prod(found.local_shape(tuple(tensor.shape))) * tensor.element_size() if is_tensor(v) else 0.0


def is_tensor(v: Value) -> bool:
    return isinstance(tensor_of(v), Tensor)


def computed(problem: SearchProblem, vertex: Vertex, option: Option) -> float:
    """The cost of one operator: of its local flops and bytes, and of the bytes that wait for the backward."""
    s = problem.settings
    if is_view(vertex.node):
        return 0.0
    sources, results = [source_of(o) for o in operands(vertex.node)], values_of(vertex.node)
    written = sum(local_bytes(v, found) for v, found in zip(results, option.results, strict=True))
    flows = problem.tensors.flows
    backward = any(v in flows for v in results)
    passes = 1.0
    if backward and vertex.rule and vertex.rule.flops:
        # one product for each operand that needs a gradient; an addend's is the result's
        passes += max(sum(v in flows for i, v in enumerate(sources) if i not in vertex.rule.additive), 1)
    elif backward:
        passes += BACKWARD_FACTOR
    weight = s.weights.compute * passes
    return weight * of_forward(problem, vertex, option) + s.weights.memory * (written if backward else 0.0) / 1e9


def of_forward(problem: SearchProblem, vertex: Vertex, option: Option) -> float:
    """The seconds of one operator's forward."""
    s, results = problem.settings, values_of(vertex.node)
    if is_view(vertex.node):
        return 0.0
    read = sum(
        local_bytes(source_of(o), found) for o, found in zip(operands(vertex.node), option.operands, strict=True)
    )
    written = sum(local_bytes(v, found) for v, found in zip(results, option.results, strict=True))
    split = 1.0  # a device whose slice is full works longest
    for factor, size in vertex.rule.sizes.items() if vertex.rule else ():
        by = [s.mesh.size(axis) for axis, f in zip(s.mesh.axes, option.factors, strict=True) if f == factor]
        split *= size / math.ceil(size / math.prod(by))
    flops = vertex.rule.flops if vertex.rule else 0.0
    name, reached = str(vertex.node.target), s.profile.reached
    if vertex.node.target in LOOKUPS:  # of the table only its rows, of 64 bytes at least
        table = local_bytes(source_of(operands(vertex.node)[0]), option.operands[0])
        row = (
            option.results[0].local_shape(tuple(tensor_of(results[0]).shape))[-1] * tensor_of(results[0]).element_size()
        )
        read += min(max(table, written), written * max(1, 64 / row)) - table
    dtype = next((tensor_of(v).dtype for v in results if is_tensor(v)), torch.float32)
    share = reached.attention if "scaled_dot_product" in name else reached.products
    moving = (read + written) / (s.profile.memory_bandwidth * reached.memory)
    return s.profile.overhead + flops / split / (s.profile.peak.of(dtype) * share) + moving


def resting(program: Program, problem: SearchProblem) -> float:
    """The weighed bytes of the inputs: a parameter that is trained stands there with its gradient and its states. The
    optimizer reads all of them, and writes all but the gradient."""
    total = updating = 0.0
    s = problem.settings
    for placed in program.inputs:
        if placed.port.node not in problem.constants:
            trained = placed.port.role is Role.PARAMETER and placed.port.requires_grad
            copies = 2 + s.optimizer_states if trained else 1
            held = local_bytes(Value(placed.port.node), placed.layout)
            total += copies * held / 1e9
            updating += (copies + copies - 1) * held * trained
    return s.weights.memory * total + s.weights.compute * updating / (
        s.profile.memory_bandwidth * s.profile.reached.memory
    )


def priced(problem: SearchProblem, choice: tuple[int, ...], program: Program) -> float:
    s = problem.settings
    constants = {node.name for node in problem.constants}
    communicated = sum(
        sent(c, s.mesh, s.profile, s.weights) for c in program.conversions if c.tensor.split("[")[0] not in constants
    )
    worked = sum(
        computed(problem, v, v.options[c])
        for v, c in zip(problem.vertices, choice, strict=True)
        if v.kind is VertexKind.OPERATOR
    )
    return communicated + worked + resting(program, problem)


def check(problem: SearchProblem, solution: Solution, shared: bool = False) -> Program:
    """The claim is what the program costs, but for steps that do nothing and are not in its text: a `STEP` each.
    `shared`: the program may cost less, as a conversion that two consumers asked for is done once."""
    program = verify_program(lower(problem, verify_solution(problem, solution).choice))
    found, claimed = priced(problem, solution.choice, program), solution.cost
    silent = STEP * len(problem.edges) * 2 * len(problem.settings.mesh.axes)
    assert program.cost == pytest.approx(found, rel=1e-9, abs=silent)
    assert found <= claimed * (1 + 1e-9) + silent
    assert shared or found >= claimed * (1 - 1e-9) - silent
    return program


# -- every model

MESHES = [(8,), (2, 4), (2, 2, 2), (3, 2)]
# A batch norm in float64 reads its input twice for its moments: both may ask for one conversion of it.
BATCH_NORM = ("convnet", "resnet50")
SEARCHES: dict[str, Callable[[SearchProblem], Solution]] = {
    "dynamic": dynamic_programming,
    "recursive": recursive_programming,
    "propagation": sharding_propagation,
}


@functools.cache
def graph_of(name: str) -> Graph:
    """A model of the zoo on a batch that 6 and 8 ranks can split."""
    return capture(CASES[name].build(), (), CASES[name].batch(size=24))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_every_search_claims_what_its_program_costs(name: str, sizes: tuple[int, ...]) -> None:
    problem = formulate(graph_of(name), settings_on(sizes), {})
    for search, find in SEARCHES.items():
        if (name, len(sizes), search) == ("resnet50", 3, "dynamic"):
            continue  # its tables pass the limit: minutes, for a plan that is not proven
        program = check(problem, find(problem), shared=search == "propagation" or name in BATCH_NORM)
        assert any(c.kind("forward").communicates or c.kind("backward").communicates for c in program.conversions)


@pytest.mark.parametrize("changes", [{}, {"fully_use_devices": False}, {"shard_parameters": 0}, {"slice_align": 4}])
@pytest.mark.parametrize("level", list(Level))
def test_the_claim_holds_for_every_objective_and_setting(level: Level, changes: dict[str, Any]) -> None:
    for name in ("convnet", "gpt2"):
        for profile in ("cpu", "a100"):
            problem = formulate(graph_of(name), settings_on((2, 3), level, profile, **changes), {})
            check(problem, dynamic_programming(problem), shared=name in BATCH_NORM)


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_the_claim_holds_for_collectives_in_steps(kind: Kind) -> None:
    slow = profile_with(levels=[{**NODE, "devices": 2}, {**FLAT, "bandwidth": 1e7}])
    settings = settings_on((4,), shard_parameters=None if kind is Kind.ALL_REDUCE else 0)
    problem = formulate(graph_of("gpt2"), replace(settings, profile=slow), {})
    program = check(problem, dynamic_programming(problem))
    assert {bool(c.steps) for c in program.planned_collectives if c.kind is kind} == {False, True}


@pytest.mark.parametrize("name", ["convnet", "gpt2"])
def test_a_plan_within_a_limit_claims_what_it_computes_and_sends_again_too(name: str) -> None:
    settings = settings_on((2, 4))
    if name == "convnet":  # too small to compute anything again where each launch counts
        settings = replace(settings, profile=settings.profile.model_copy(update={"overhead": 0.0}))
    problem = formulate(graph_of(name), settings, {})
    free = within_memory(problem, dynamic_programming(problem))
    assert free.held
    limited = replace(problem, settings=replace(problem.settings, memory_limit=0.6 * free.held.peak))
    solution = within_memory(limited, dynamic_programming(limited))
    program = lower(limited, solution.choice, solution.keeping)
    assert solution.binding
    again = [
        limited.settings.weights.compute * of_forward(limited, v, v.options[c])
        for v, c, fate in zip(limited.vertices, solution.choice, solution.keeping.fates, strict=True)
        if fate is AGAIN and v.kind is VertexKind.OPERATOR and not costs_nothing(v.node)
    ]
    once_more = [replace(c, again=True) for c in program.conversions if c.repeated]
    whole = replace(program, conversions=(*program.conversions, *once_more))
    assert again
    found = priced(limited, solution.choice, whole) + sum(again)
    silent = STEP * (len(problem.edges) * 2 * len(problem.settings.mesh.axes) + len(once_more))
    assert found == pytest.approx(solution.cost, rel=1e-9 if name == "gpt2" else 1e-3, abs=silent)


def costs_nothing(node: fx.Node) -> bool:
    return is_view(node) or is_pointwise(node.target) or rearranges(node)


# -- layers that repeat are solved once


class Blocks(nn.Module):
    """Equal residual blocks, so that the numbers of each are the same arrays."""

    def __init__(self, count: int, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@functools.cache
def blocks(count: int) -> Graph:
    torch.manual_seed(0)
    return capture(Blocks(count), (torch.randn(48, 24),), {})


def copied(costs: Costs) -> Costs:
    """The same numbers, each in an array of its own: nothing is found to repeat."""
    return Costs(tuple(map(np.copy, costs.unary)), {pair: np.copy(matrix) for pair, matrix in costs.pairs.items()})


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equal_blocks_cost_the_same_solved_once_or_one_by_one(sizes: tuple[int, ...]) -> None:
    problem = formulate(blocks(3), settings_on(sizes), {})
    costs = costs_of(problem)
    assert len({id(unary) for unary in costs.unary}) < len(costs.unary)
    once, each = eliminate(costs), eliminate(copied(costs))
    assert once.proven
    assert each.proven
    assert once.cost == pytest.approx(each.cost, rel=1e-12)
    for found in (once, each):
        check(problem, solution_of(found))


def test_each_block_more_costs_the_same() -> None:
    """A block that is solved once and used often would cost nothing, or twice, if it were counted wrongly."""
    found = [dynamic_programming(formulate(blocks(count), settings_on((2, 4)), {})).cost for count in (3, 4, 5, 6)]
    assert np.diff(found) == pytest.approx([found[1] - found[0]] * 3, rel=1e-6)
    assert found[1] > found[0]


# -- what one plan leaves behind does not change the next

CACHES = (
    conversion_table, conversion._coefficients, conversion.digits_of, conversion._layouts, conversion._index,
    conversion._groups_of_codes, cost.collective_costs, cost.ranks_by_level, cost.hierarchies,
)  # fmt: skip


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


PLANS: list[tuple[tuple[int, ...], Level, str]] = [
    ((2, 4), Level.SPEED, "h100"), ((4, 2), Level.SPEED, "h100"), ((2, 4), Level.COMMUNICATION, "h100"),
    ((2, 4), Level.SPEED, "cpu"), ((8,), Level.SPEED, "h100"), ((2, 2, 2), Level.SPEED, "h100"),
]  # fmt: skip


def plans(graph: Graph, between: Callable[[], None]) -> list[tuple[float, tuple[int, ...]]]:
    found = []
    for arguments in PLANS:
        between()
        solution = dynamic_programming(formulate(graph, settings_on(*arguments), {}))
        found.append((solution.cost, solution.choice))
    return found


@pytest.mark.parametrize("name", ["convnet", "gpt2"])
def test_a_plan_after_others_is_that_of_a_process_that_made_no_other(name: str) -> None:
    graph = graph_of(name)
    forget()
    assert plans(graph, lambda: None) == plans(graph, forget)


@pytest.mark.slow
def test_another_process_makes_the_same_plan() -> None:
    """Every rank plans for itself: their plans must not hang on where arrays lie in memory, nor on hashes."""
    code = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import test_priced_anew as t
print(json.dumps(t.plans(t.blocks(3), lambda: None)))
"""
    folders = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(folders)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    said = [(cost, tuple(choice)) for cost, choice in json.loads(done.stdout)]
    assert said == plans(blocks(3), lambda: None)
