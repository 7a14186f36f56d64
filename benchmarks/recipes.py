"""A recipe that people write by hand, as a search problem: what it pins, and what its backward computes again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

from partway.propagation.graph.nodes import module_path, operator_name
from partway.propagation.memory.fates import KEPT
from partway.propagation.memory.keeping import KeepProblem, keep_problem
from partway.propagation.memory.needs import needs_of
from partway.propagation.problem.problem import SearchProblem, Vertex, VertexKind


def pinned(problem: SearchProblem, modules: Mapping[str, Any]) -> SearchProblem:
    """`problem`, in which the products of `modules` read what goes into these modules as it is annotated. Annotations
    alone would allow that it is converted first."""
    known: dict[object, Any] = {}  # equal products share their options, which makes the search fast

    def options(vertex: Vertex) -> Any:
        path = module_path(vertex.node)
        strategy = next((plan["in_strategy"][0] for name, plan in modules.items() if fnmatch(path, name)), None)
        if strategy is None or not is_product(vertex):
            return vertex.options
        key = id(vertex.options), strategy
        if key not in known:
            axes = problem.settings.mesh.axes
            places = [
                {d for d, split in enumerate(strategy) if split == axis or axis in (split or ())} for axis in axes
            ]
            wanted = [{f"S{d}" for d in dims} or {"R", "B"} for dims in places]
            reads = (tuple(map(str, option.operands[0].placements)) for option in vertex.options)
            rows = [i for i, codes in enumerate(reads) if all(c in w for c, w in zip(codes, wanted, strict=True))]
            known[key] = vertex.options.take(rows)
        return known[key]

    return replace(problem, vertices=tuple(replace(vertex, options=options(vertex)) for vertex in problem.vertices))


def is_product(vertex: Vertex) -> bool:
    """Whether a vertex is the product of a linear layer."""
    return vertex.kind is VertexKind.OPERATOR and operator_name(vertex.node).startswith("aten.linear")


def is_attention(vertex: Vertex) -> bool:
    """Whether a vertex is attention."""
    return vertex.kind is VertexKind.OPERATOR and "scaled_dot_product" in operator_name(vertex.node)


def block_of(path: str) -> int | None:
    """The number of the block that a module is in."""
    found = re.search(r"\blayers\.(\d+)\b", path)
    return int(found[1]) if found else None


def followed(problem: SearchProblem, whole: Callable[[int], bool], again: Callable[[Vertex, int], bool]) -> KeepProblem:
    """`problem` with the fates that a recipe leaves: of what it computes again AGAIN, or GONE where nothing reads it;
    of all else what the default leaves while memory suffices. Stretches are blocks. Nothing inside a block that is
    computed again is kept, what was gathered there included.

    whole   whether a block, by its number, is computed again
    again   whether a vertex of another block is; it takes how many products of the block there were, its own included
    """
    needs = needs_of(problem.graph, problem.tensors.flows)
    free, every = (keep_problem(problem, needs, only_free=only_free) for only_free in (True, False))
    blocks = [block_of(module_path(vertex.node)) if vertex.port is None else None for vertex in problem.vertices]
    leaves = {edge.producer for edge in problem.edges if blocks[edge.consumer] != blocks[edge.producer]}
    products: Counter[int | None] = Counter()
    facts, inside = [], set[int]()
    for i, (vertex, number) in enumerate(zip(problem.vertices, blocks, strict=True)):
        products[number] += is_product(vertex)
        if number is not None and whole(number):
            inside.add(i)
        is_again = i in inside or (number is not None and again(vertex, products[number]))
        fates = tuple(fate for fate in every.facts[i].fates if fate is not KEPT)
        facts.append(replace(every.facts[i], fates=fates) if is_again and i not in leaves and fates else free.facts[i])
    barred = (
        (never_again, never_kept or (edge.consumer in inside and not free.at_hand[edge.producer]))
        for edge, (never_again, never_kept) in zip(problem.edges, free.barred, strict=True)
    )
    return replace(free, facts=tuple(facts), stretches=_stretches(problem, blocks), barred=tuple(barred))


def _stretches(problem: SearchProblem, blocks: list[int | None]) -> tuple[int, ...]:
    """A stretch for what is before the blocks, for each of them, and for what is behind; inputs are in the stretch that
    reads them first."""
    last = max((block for block in blocks if block is not None), default=-1)
    here, numbers = 0, [0] * len(blocks)
    for i, (vertex, block) in enumerate(zip(problem.vertices, blocks, strict=True)):
        if vertex.kind is not VertexKind.INPUT:
            here = max(here, block + 1 if block is not None else last + 2 if here > last else 0)
            numbers[i] = here
    readers: dict[int, int] = {}
    for edge in problem.edges:
        if problem.vertices[edge.producer].kind is VertexKind.INPUT:
            first = numbers[edge.consumer]
            readers[edge.producer] = min(readers.get(edge.producer, first), first)
    return tuple(readers.get(i, number) for i, number in enumerate(numbers))
