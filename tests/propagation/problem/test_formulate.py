"""What the algorithm parameters make of a search problem, and of its plans."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partway as pw
from partway.propagation.graph.nodes import is_tensor
from partway.propagation.plan.data import Certificate
from partway.propagation.plan.make import make_plan
from partway.propagation.problem.problem import VertexKind
from partway.propagation.program.lower import lower
from partway.propagation.rules.table import is_elementwise
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.recursive import recursive_programming
from partway.propagation.search.search import SearchMode, search
from partway.propagation.search.solution import verify_solution
from partway.strategy import Mesh, StrategyError
from partway.strategy.layout import layout
from partway.strategy.placement import PARTIAL, REPLICATE, Shard

aten = torch.ops.aten
CUBE = Mesh({"dp": 2, "cp": 2, "tp": 2})
LEAVES = "the optimum among the strategies that enable_algo_approxi leaves"


class MLP(nn.Module):
    """Three layers and a loss."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc3(torch.tanh(self.fc2(torch.relu(self.fc1(x))))).square().mean()


class Block(nn.Module):
    """A block of GPT-2: attention and an MLP, each with a norm before it and a residual around it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        b, s, width = x.shape
        q, k, v = (part.view(b, s, 4, 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


CASES = {"mlp": (MLP, (8, 16)), "block": (Block, (4, 8, 16))}


@pytest.fixture(params=list(CASES))
def case(request):
    torch.manual_seed(0)
    model, size = CASES[request.param]
    return model().double(), (torch.randn(size, dtype=torch.float64),)


@pytest.fixture(autouse=True)
def _own_options():
    yield
    pw.reset_algo_parameters()


def elementwise_edges(problem):
    """The edges out of elementwise operators."""
    found = [e for e in problem.edges if problem.vertices[e.producer].kind is VertexKind.OPERATOR]
    return [e for e in found if is_elementwise(problem.vertices[e.producer].node)]


def check_numbers(lab, problem, choice, fn, args):
    tensors = lab.call_tensors(problem, fn, args)
    expected = lab.value_and_gradients(lab.as_tuple(fn(*args)), [t for t in tensors if t.requires_grad])
    lab.check_choice(problem, choice, fn, args, expected, str(fn))


# -- elementwise_op_strategy_follow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fully", [True, False])
@pytest.mark.parametrize("mode", list(SearchMode))
def test_nothing_stands_behind_an_elementwise_operator_that_follows(lab, case, mode, fully):
    fn, args = case
    problem = lab.problem_of(fn, args, lab.SQUARE, elementwise_follow=True, fully_use_devices=fully)
    found = verify_solution(problem, search(problem, mode))
    edges = elementwise_edges(problem)
    assert len(edges) >= 3
    for edge in edges:
        before, after = edge.codes(problem.vertices)
        assert before[found.choice[edge.producer]] == after[found.choice[edge.consumer]]
    program = lower(problem, found.choice)
    direct = {
        problem.vertices[e.producer].name for e in edges if problem.vertices[e.consumer].kind is not VertexKind.HUB
    }
    plan = make_plan(problem, found, program, mode)
    assert not direct & {c.tensor for c in plan.collectives}
    check_numbers(lab, problem, found.choice, fn, args)


@pytest.mark.parametrize("fully", [True, False])
def test_following_costs_at_least_as_much_as_the_free_optimum(lab, case, fully):
    free = lab.problem_of(*case, lab.SQUARE, fully_use_devices=fully)
    tied = lab.problem_of(*case, lab.SQUARE, fully_use_devices=fully, elementwise_follow=True)
    found = search(tied, SearchMode.DYNAMIC_PROGRAMMING)
    assert found.proven
    assert found.cost >= search(free, SearchMode.DYNAMIC_PROGRAMMING).cost * (1 - 1e-9)
    assert free.cost(found.choice) == pytest.approx(found.cost, rel=1e-9)
    assert not any(edge.table.tied for edge in free.edges)


def test_a_recursive_plan_follows_without_help(lab, case):
    problem = lab.problem_of(*case, CUBE, elementwise_follow=True, fully_use_devices=True)
    found = verify_solution(problem, recursive_programming(problem))
    assert math.isfinite(found.cost)
    assert found.cost >= dynamic_programming(problem).cost * (1 - 1e-9)


def test_the_search_that_writes_no_costs_out_follows_too(lab, case, monkeypatch):
    problem = lab.problem_of(*case, lab.SQUARE, elementwise_follow=True)
    best = dynamic_programming(problem)
    monkeypatch.setattr("partway.propagation.problem.problem.MANY_PAIRS", 0)
    found = verify_solution(problem, dynamic_programming(problem))
    assert found.cost >= best.cost * (1 - 1e-9)
    assert found.bound <= best.cost * (1 + 1e-9)


def result_of_relu(lab, placement, **changes):
    """The problem of a ReLU whose result must be placed so on the one axis of the mesh."""
    x = torch.randn(8, 16, dtype=torch.float64)
    name = lab.problem_of(torch.relu, (x,), lab.LINE).graph.outputs[0].name
    allowed = {name: ((layout(lab.LINE, (placement,)),), "annotated")}
    return lab.problem_of(torch.relu, (x,), lab.LINE, allowed, **changes)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), REPLICATE])
def test_an_elementwise_operator_takes_the_layout_that_is_annotated_behind_it(lab, placement):
    problem = result_of_relu(lab, placement, elementwise_follow=True)
    found = search(problem, SearchMode.DYNAMIC_PROGRAMMING)
    (relu,) = lab.vertices_of(problem, aten.relu.default)
    assert problem.vertices[relu].options[found.choice[relu]].results == (layout(lab.LINE, (placement,)),)


@pytest.mark.parametrize("limit", [None, 1e9])
@pytest.mark.parametrize("mode", list(SearchMode))
def test_an_elementwise_operator_that_cannot_follow_is_an_error(lab, mode, limit):
    assert math.isfinite(search(result_of_relu(lab, PARTIAL), mode).cost)
    with pytest.raises(StrategyError) as error:
        search(result_of_relu(lab, PARTIAL, elementwise_follow=True, memory_limit=limit), mode)
    text = str(error.value)
    assert text.startswith("no plan was found on the mesh x=2: relu gives [8, 16] as ")
    assert text.endswith(
        ", and no conversion is allowed between them; set elementwise_op_strategy_follow=False, or drop an annotation "
        "near them"
    )


def test_elementwise_is_what_has_a_pointwise_rule(lab):
    def fn(x, w, mask):
        y = F.dropout(torch.where(mask, x, w), 0.5, True)
        return torch.softmax((y + 1.0) @ w, -1).cumsum(0).exp().sum()

    args = (torch.randn(4, 4), torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool))
    graph = lab.problem_of(fn, args, lab.LINE, on_unknown_op="warn").graph
    found = {
        n.target._schema.name for n in graph.nodes if n.op == "call_function" and is_tensor(n) and is_elementwise(n)
    }
    assert {"aten::where", "aten::add", "aten::exp"} <= found
    assert not {"aten::softmax", "aten::cumsum", "aten::matmul", "aten::sum", "aten::bernoulli"} & found


# -- enable_algo_approxi ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 4, 10])
def test_of_every_operator_the_cheapest_options_are_kept(lab, case, kept):
    every = lab.problem_of(*case, lab.SQUARE)
    few = lab.problem_of(*case, lab.SQUARE, keep_cheapest=kept)
    assert few.approximate
    for before, after in zip(every.vertices, few.vertices, strict=True):
        if before.kind is not VertexKind.OPERATOR:
            assert len(after.options) == len(before.options)
            continue
        assert len(after.options) == min(kept, len(before.options))
        least = sorted(before.options, key=lambda o, b=before: b.unary[list(b.options).index(o)])[:kept]
        assert set(after.options) == set(least)
    found = verify_solution(few, search(few, SearchMode.DYNAMIC_PROGRAMMING))
    assert found.cost >= search(every, SearchMode.DYNAMIC_PROGRAMMING).cost * (1 - 1e-9)
    check_numbers(lab, few, found.choice, *case)


def test_a_small_epsilon_keeps_all(lab, case):
    every, all_kept = lab.problem_of(*case, lab.SQUARE), lab.problem_of(*case, lab.SQUARE, keep_cheapest=10**6)
    assert not all_kept.approximate
    assert search(all_kept, SearchMode.DYNAMIC_PROGRAMMING) == search(every, SearchMode.DYNAMIC_PROGRAMMING)


def test_a_constraint_keeps_what_it_allows():
    def fn(x):
        return pw.shard(torch.exp, in_strategy=((1, 1),))(x + 1.0)

    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    problem = compiled_with((fn, (x,)), enable_algo_approxi=True, algo_approxi_epsilon=1.0).problem
    (constraint,) = (v for v in problem.vertices if v.kind is VertexKind.OPERATOR and v.annotation)
    assert len(constraint.options) == 4  # Replicate or Broadcast on each axis


def test_an_elementwise_operator_that_follows_keeps_its_strategies(lab, case):
    fn, args = case
    problem = lab.problem_of(fn, args, lab.SQUARE, elementwise_follow=True, keep_cheapest=1)
    found = verify_solution(problem, search(problem, SearchMode.DYNAMIC_PROGRAMMING))
    assert math.isfinite(found.cost)
    check_numbers(lab, problem, found.choice, fn, args)


# -- through the options ---------------------------------------------------------------------------------------------


def compiled_with(case, **options):
    pw.set_algo_parameters(**options)
    return pw.compile(*case, mesh=pw.Mesh({"dp": 2, "tp": 2}))


@pytest.mark.parametrize(("epsilon", "kept"), [(1.0, 1), (0.3, 4), (0.1, 10), (5e-324, 10**18)])
def test_epsilon_says_how_many_strategies_are_kept(case, epsilon, kept):
    found = compiled_with(case, enable_algo_approxi=True, algo_approxi_epsilon=epsilon)
    assert found.problem.settings.keep_cheapest == kept
    assert max(len(v.options) for v in found.problem.vertices if v.kind is VertexKind.OPERATOR) <= kept


def test_the_certificate_says_among_what_it_is_the_optimum(case, tmp_path):
    free = compiled_with(case).plan
    assert str(free.certificate) == "dynamic_programming: the optimum, proven"
    assert not free.certificate.approximate
    all_kept = compiled_with(case, enable_algo_approxi=True, algo_approxi_epsilon=1e-6).plan
    assert all_kept.certificate == free.certificate
    few = compiled_with(case, algo_approxi_epsilon=0.5).plan
    assert few.certificate.approximate
    assert str(few.certificate) == f"dynamic_programming: {LEAVES}, proven"
    assert f"search: dynamic_programming: {LEAVES}, proven" in str(few.summary())
    assert few.certificate.cost >= free.certificate.cost * (1 - 1e-9)
    few.save(tmp_path / "plan.json")
    assert pw.Plan.load(tmp_path / "plan.json").certificate == few.certificate


def test_every_text_of_a_certificate_says_among_what():
    def said(**changes):
        given = {"mode": SearchMode.SHARDING_PROPAGATION, "cost": 3.0, "bound": 2.0, "proven": False, "width": 1}
        return str(Certificate(**{**given, "approximate": True, **changes}))

    assert said(attained=True) == f"sharding_propagation: 50.0 % above {LEAVES}"
    assert said() == f"sharding_propagation: at most 50.0 % above {LEAVES}"


def test_a_memory_limit_that_nothing_left_keeps_to_says_so(case):
    with pytest.raises(
        StrategyError, match="no plan was found on the mesh dp=2, tp=2 among the strategies that enable_algo"
    ):
        compiled_with(case, enable_algo_approxi=True, algo_approxi_epsilon=0.5, memory_limit=1.0)


def test_following_is_set_and_taken_back(case):
    assert compiled_with(case, elementwise_op_strategy_follow=True).problem.settings.elementwise_follow
    pw.reset_algo_parameters()
    assert not compiled_with(case).problem.settings.elementwise_follow


def test_a_plan_that_follows_explains_itself(case):
    plan = compiled_with(case, elementwise_op_strategy_follow=True).plan
    assert plan.collectives
    text = str(plan.explain("*", alternatives=2))
    assert "the cheapest plan without it" in text or "no plan does without it" in text
