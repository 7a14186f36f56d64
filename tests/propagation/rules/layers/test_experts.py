"""Mixtures of experts: every way to split the rows of their tokens."""

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.graph.nodes import operator_name
from partway.propagation.ops.experts import arrival, combine, dispatch, grouped_matmul, per_expert
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Mesh
from partway.strategy.placement import Kind

TOKENS, EXPERTS, EACH, FEATURES, HIDDEN = 16, 8, 2, 8, 6


def weighted_before(x, gate, up, down, bias):
    weights, ids = torch.softmax(x @ gate, -1).topk(EACH, -1)
    rows, offsets, where = dispatch(x, ids, EXPERTS, weights)
    first, second = grouped_matmul(rows, up, offsets).chunk(2, -1)
    made = grouped_matmul(F.silu(first) * second, down, offsets) + per_expert(bias, offsets, rows)
    return combine(made, where, torch.ones_like(weights))


def mixture(x, gate, up, down, bias):
    weights, ids = torch.softmax(x @ gate, -1).topk(EACH, -1)
    rows, offsets, where = dispatch(x, ids, EXPERTS)
    first, second = grouped_matmul(rows, up, offsets).chunk(2, -1)
    made = grouped_matmul(F.silu(first) * second, down, offsets)
    return combine(made + per_expert(bias, offsets, made), where, weights)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    shapes = (
        (TOKENS, FEATURES),
        (FEATURES, EXPERTS),
        (EXPERTS, FEATURES, 2 * HIDDEN),
        (EXPERTS, HIDDEN, FEATURES),
        (EXPERTS, FEATURES),
    )
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


EVERY = [{"x": 2}, {"x": 8}, {"dp": 2, "ep": 2}, {"dp": 2, "ep": 4}]


EVERY_WAY = [*((mesh, mixture) for mesh in EVERY), *((mesh, weighted_before) for mesh in EVERY[:3])]


@pytest.mark.parametrize(("mesh", "mixture"), EVERY_WAY, ids=[f"{mesh}-{f.__name__}" for mesh, f in EVERY_WAY])
def test_every_way_to_split_rows_gives_the_numbers_of_one_device(mesh, mixture, tensors, lab):
    problem = lab.problem_of(mixture, tensors, Mesh(mesh))
    expected = lab.value_and_gradients([mixture(*tensors)], list(tensors))
    (vertex,) = lab.vertices_of(problem, dispatch)
    options = problem.vertices[vertex].options
    ways = {None, "d", "token", "expert", "exchange", "once"}
    assert {factor for option in options for factor in option.factors} == ways
    for i in range(len(options)):
        chosen = lab.choose(problem, vertex, [i])
        step = lab.compiled(chosen, dynamic_programming(chosen).choice)
        found = lab.value_and_gradients(step(lab.call_tensors(problem, mixture, tensors)), list(tensors))
        lab.assert_same(found, expected, str(options[i]), 1e-12)


def test_a_token_may_have_more_slots_than_there_are_experts(lab):
    torch.manual_seed(0)
    x, ids = torch.randn(TOKENS, FEATURES), torch.randint(2, (TOKENS, 3))
    weights = torch.rand(TOKENS, 3)

    def twice(x, ids, weights):
        rows, _, where = dispatch(x, ids, 2)
        return combine(rows.tanh(), where, weights)

    problem = lab.problem_of(twice, (x, ids, weights), Mesh({"x": 2}))
    (vertex,) = lab.vertices_of(problem, dispatch)
    once = [i for i, option in enumerate(problem.vertices[vertex].options) if option.factors == ("once",)]
    chosen = lab.choose(problem, vertex, once)
    step = lab.compiled(chosen, dynamic_programming(chosen).choice)
    found = step(lab.call_tensors(problem, twice, (x, ids, weights)))[0]
    torch.testing.assert_close(found, twice(x, ids, weights))


def test_products_of_routed_rows_split_in_every_way_on_two_axes(tensors, lab):
    problem = lab.problem_of(mixture, tensors, Mesh({"dp": 2, "ep": 2}))
    expected = lab.value_and_gradients([mixture(*tensors)], list(tensors))
    vertex, _ = lab.vertices_of(problem, grouped_matmul)
    options = problem.vertices[vertex].options
    ways = {way for option in options for way in option.factors}
    assert ways == {None, "token", "expert", "k", "n"}
    for i in range(len(options)):
        chosen = lab.choose(problem, vertex, [i])
        step = lab.compiled(chosen, dynamic_programming(chosen).choice)
        found = lab.value_and_gradients(step(lab.call_tensors(problem, mixture, tensors)), list(tensors))
        lab.assert_same(found, expected, str(options[i]), 1e-12)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_products_of_groups_and_values_of_experts_split_in_every_way(mesh, lab):
    """By rows, by experts, and within; groups that are whole on every rank."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((8, 4), (4, 4, 6), (4, 6)))
    ends = torch.tensor([3, 3, 5, 8], dtype=torch.int32)

    def f(x, w, b, ends):
        rows = x * 2
        return grouped_matmul(rows, w, ends) + per_expert(b, ends, rows)

    problem = lab.problem_of(f, (x, w, b, ends), Mesh(mesh))
    expected = lab.value_and_gradients([f(x, w, b, ends)], [x, w, b])
    for target, ways in ((grouped_matmul, {None, "t", "k", "e", "n"}), (per_expert, {None, "t", "d"})):
        (vertex,) = lab.vertices_of(problem, target)
        options = problem.vertices[vertex].options
        assert {option.factors[0] for option in options} == ways, operator_name(problem.vertices[vertex].node)
        for i in range(len(options)):
            chosen = lab.choose(problem, vertex, [i])
            step = lab.compiled(chosen, dynamic_programming(chosen).choice)
            found = lab.value_and_gradients(step(lab.call_tensors(problem, f, (x, w, b, ends))), [x, w, b])
            lab.assert_same(found, expected, str(options[i]), 1e-12)


def cumulative(x, ids, up, ends):
    return torch.cumsum(dispatch(x, ids, EXPERTS)[0], 0)


def by_other_ends(x, ids, up, ends):
    return grouped_matmul(dispatch(x, ids, EXPERTS)[0], up, ends)


def by_the_ends_of_others(x, ids, up, ends):
    return grouped_matmul(dispatch(x, ids, EXPERTS)[0], up, dispatch(x, ids.flip(1), EXPERTS)[1])


def beside_others(x, ids, up, ends):
    return dispatch(x, ids, EXPERTS)[0] * dispatch(x + 1, ids, EXPERTS)[0]


def beside_their_numbers(x, ids, up, ends):
    return dispatch(x, ids, EXPERTS)[0] * torch.arange(1.0, TOKENS * EACH + 1).unsqueeze(1)


@pytest.mark.parametrize("f", [cumulative, by_other_ends, by_the_ends_of_others, beside_others, beside_their_numbers])
def test_what_reads_more_than_single_rows_has_them_whole(f, lab):
    torch.manual_seed(0)
    x, ids = torch.randn(TOKENS, FEATURES), torch.rand(TOKENS, EXPERTS).topk(EACH, -1).indices
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    given = (x, ids, torch.randn(EXPERTS, FEATURES, FEATURES), counts.cumsum(0).int())
    problem = lab.problem_of(f, given, Mesh({"x": 2}))
    last = max(i for i, vertex in enumerate(problem.vertices) if vertex.rule)
    assert not {"token", "expert"} & {option.factors[0] for option in problem.vertices[last].options}
    step = lab.compiled(problem, dynamic_programming(problem).choice)
    torch.testing.assert_close(step(lab.call_tensors(problem, f, given))[0], f(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("load", "share"), [(None, 1.0), (1.5, 1.5), (8.0, 4.0)])
def test_the_busiest_rank_has_its_load_and_at_most_all_rows(load, share, tensors, lab):
    """In what the search counts, in what the program sends and holds, and in the work."""
    mesh, even = Mesh({"ep": 4}), TOKENS * EACH // 4
    problem = lab.problem_of(mixture, tensors, mesh, expert_load=load)
    (place,), (product, _) = lab.vertices_of(problem, dispatch), lab.vertices_of(problem, grouped_matmul)
    routing, products = problem.vertices[place].options, problem.vertices[product].options
    made = {option.factors[0]: float(size) for option, size in zip(routing, routing.made, strict=True)}
    work = {option.factors[0]: float(flops) for option, flops in zip(products, products.flops, strict=True)}
    rows, slots = FEATURES * 8 * even, 8 * even
    assert made["token"] == rows + 4 * EXPERTS + slots
    assert made["exchange"] == made["once"] == share * rows + 4 * EXPERTS // 4 + slots
    assert work["expert"] == share * work["token"]
    exchanged = [i for i, option in enumerate(routing) if option.factors == ("exchange",)]
    chosen = lab.choose(problem, place, exchanged)
    step = lab.compiled(chosen, dynamic_programming(chosen).choice)
    sent = [c.payload_bytes for c in step.program.collectives if c.kind is Kind.ALL_TO_ALLV]
    assert set(sent) == {share * rows}
    arrived = [n.meta["val"].shape for n in step.program.forward.graph.nodes if n.target is arrival]
    assert arrived == [(share * even,)] * 2  # by dispatch, and by combine
