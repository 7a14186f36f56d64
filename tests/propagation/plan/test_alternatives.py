"""What plans could have been: against brute force, against other plans of the same call, and as text."""

import copy
import itertools
import math
import pickle
import warnings

import pytest
import torch
from bend import bend
from torch import nn

import partway as pw
from partway.propagation.plan.alternatives import (
    Alternatives,
    Outcome,
    best,
    comparison,
    has,
    outcome,
    price,
    without_annotations,
    without_collective,
)
from partway.propagation.problem.problem import costs_of
from partway.propagation.program.lower import lower
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.search import SearchMode
from partway.strategy import Layout, Shard, StrategyError
from partway.strategy.basics.units import human

MESH = {"dp": 2, "tp": 4}
LIMIT = 0.95  # of what the cheapest plan holds


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normal = self.norm1(x)
        q, k, v = (part(normal).unflatten(-1, (8, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=128, width=64):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


MEGATRON = {
    "blocks.*.up.weight": ("tp", None),
    "blocks.*.down.weight": (None, "tp"),
    "blocks.*.out.weight": (None, "tp"),
}
GIVEN = {"in_strategy": {"ids": ("dp", None)}, "out_strategy": (None, ("dp", None, None)), "parameter_plan": MEGATRON}


def gpt(**annotations):
    with torch.device("meta"):
        ids = torch.zeros(8, 32, dtype=torch.long)
        return pw.compile(GPT(), (ids, ids), mesh=MESH, **annotations)


def mlp(**annotations):
    with torch.device("meta"):
        return pw.compile(MLP(), (torch.empty(1024, 512, requires_grad=True),), mesh=MESH, **annotations)


def alternatives_of(compiled):
    made = outcome(compiled.problem, compiled.solution, compiled.local)
    return Alternatives(compiled.problem, made, compiled.plan.certificate.mode, compiled.annotations.written)


@pytest.fixture(scope="module")
def language_model():
    return gpt(**GIVEN)


@pytest.fixture(scope="module")
def perceptron():
    return mlp(
        in_strategy=(("dp", None),),
        out_strategy=(("dp", None),),
        parameter_plan={"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")},
    )


# -- without a collective


@pytest.mark.parametrize("name", ["perceptron", "language_model"])
def test_the_plan_without_a_collective_lacks_it_and_costs_no_less(name, request):
    compiled = request.getfixturevalue(name)
    found = alternatives_of(compiled)
    possible = 0
    for c in compiled.plan.collectives:
        other = found.without(c)
        if other is not None:
            possible += 1
            assert not has(other, c)
            assert other.cost >= compiled.solution.cost * (1 - 1e-9)
            assert other.proven
    assert possible > len(compiled.plan.collectives) / 2
    assert all(has(found.planned, c) for c in compiled.plan.collectives)


def rows(x):
    return (x * 2 + x.sum(0, keepdim=True)).sum(1)


def test_the_plan_without_a_collective_is_that_of_brute_force(lab):
    split = Layout(lab.LINE, (Shard(0),))
    x = torch.randn(4, 6, requires_grad=True)
    problem = lab.problem_of(rows, (x,), lab.LINE, {"x": ((split,), "by hand")})
    solution = dynamic_programming(problem)
    costs = costs_of(problem)
    plans = sorted(
        (cost, choice)
        for choice in itertools.product(*(range(len(u)) for u in costs.unary))
        if (cost := costs.of(choice)) < math.inf
    )
    collectives = lower(problem, solution.choice).planned_collectives
    assert collectives
    for c in collectives:
        found = best(without_collective(problem, c))
        cheapest = next(
            cost
            for cost, choice in plans
            if not any(
                (c.tensor, c.kind, c.phase) == (d.tensor, d.kind, d.phase)
                for d in lower(problem, choice).planned_collectives
            )
        )
        assert found.cost == pytest.approx(cheapest)
        assert found.cost > solution.cost


def test_a_collective_that_no_plan_does_without():
    def same(x):
        return x

    plan = pw.compile(same, (torch.ones(64, 64, device="meta"),), mesh={"dp": 4}, in_strategy=(("dp", None),)).plan
    assert str(plan.explain("x")).splitlines()[2:] == [
        "    this annotation costs 15.8 us and 12.3 kB a step over the optimum without it",
        "    forward all_gather over dp (4 ranks) of x: 16.4 kB, 12.3 kB sent, 15.8 us",
        "        because input x [dp:S0] meets result result [dp:R]",
        "        no plan does without it under these annotations",
        "        caused by in_strategy['x'] ('dp', None)",
    ]


# -- annotations


def test_an_annotations_price_is_the_difference_of_two_plans(language_model):
    found = alternatives_of(language_model)
    others = {
        "in_strategy['ids']": {**GIVEN, "in_strategy": None},
        "out_strategy[1]": {**GIVEN, "out_strategy": None},
        **{
            f"parameter_plan[{pattern!r}]": {
                **GIVEN, "parameter_plan": {name: s for name, s in MEGATRON.items() if name != pattern}
            }
            for pattern in MEGATRON
        },
    }  # fmt: skip
    assert [one.source for one in found.annotations] == list(others)
    for one in found.annotations:
        other = gpt(**others[one.source]).plan
        dropped = found.dropping(one)
        assert dropped.cost == pytest.approx(other.certificate.cost)
        assert dropped.seconds == pytest.approx(other.predicted_time)
        assert dropped.sent == pytest.approx(other.wire_bytes)
    free = gpt().plan
    assert found.dropping(*found.annotations).cost == pytest.approx(free.certificate.cost)


def test_what_one_pattern_says_is_one_annotation(language_model):
    up = alternatives_of(language_model).annotation_of("blocks.1.up.weight")
    assert up.keys == ("blocks.0.up.weight", "blocks.1.up.weight")
    assert str(up) == "parameter_plan['blocks.*.up.weight'] ('tp', None)"
    assert alternatives_of(language_model).annotation_of("blocks.1.q.weight") is None


def product(x, w):
    return x @ w


def test_the_annotation_that_causes_a_collective_is_named():
    arguments = torch.empty(512, 1024, device="meta"), torch.empty(1024, 256, device="meta")
    plan = pw.compile(product, arguments, mesh={"tp": 4}, in_strategy=(None, ("tp", None))).plan
    assert plan.collectives
    lines = str(plan.explain("*")).splitlines()
    causes = {line.strip() for line in lines if "caused by" in line}
    assert causes == {"caused by in_strategy['w'] ('tp', None)"}


def test_annotations_that_cause_a_collective_together_are_all_named(perceptron):
    found = alternatives_of(perceptron)
    (c,) = (c for c in perceptron.plan.collectives if (c.tensor, c.axes) == ("down.weight", ("dp",)))
    assert found.causes(c) == ()
    together = found.together(c)
    assert len(together) > 1
    assert not has(found.dropping(*together), c)
    for one in together:
        assert has(found.dropping(*(other for other in together if other is not one)), c)
    assert f"caused by {' and '.join(map(str, together))} together" in perceptron.plan.explain("down.weight")


def test_a_collective_that_is_there_without_any_annotation(perceptron):
    text = str(perceptron.plan.explain("result"))
    assert "caused by no annotation: it is there in an optimum without any too" in text
    plain = mlp().plan
    assert plain.collectives
    assert "caused by no annotation: there is none" in plain.explain("*")


def test_a_collective_that_the_optimum_does_without_is_the_searchs(perceptron):
    del perceptron
    model = gpt(**GIVEN)
    with pw.auto_parallel_context(search_mode="recursive_programming"):
        other = gpt(**GIVEN)
    found = alternatives_of(other)
    assert found.optimum.cost == pytest.approx(model.solution.cost)
    lost = [c for c in other.plan.collectives if not has(found.optimum, c)]
    assert lost
    cause = "caused by recursive_programming: the optimum under the same annotations does without it"
    assert all(found.of_collective(c)[1] == cause for c in lost)


def test_a_price_is_in_the_explanation_of_what_was_annotated(language_model, perceptron):
    text = str(language_model.plan.explain("blocks.0.down.weight"))
    found = alternatives_of(language_model)
    one = found.annotation_of("blocks.0.down.weight")
    amounts = price(found.planned, found.dropping(one))
    assert (
        f"    this annotation (parameter_plan['blocks.*.down.weight'], of 1 other too) {amounts} "
        "over the optimum without it\n"
    ) in text
    assert "this annotation costs nothing: the optimum has it too" in perceptron.plan.explain("up.weight")
    assert "this annotation" not in perceptron.plan.explain("up.weight", alternatives=0)


def outcome_of(cost, seconds, sent, proven=True):
    return Outcome(cost, seconds, sent, (), proven)


@pytest.mark.parametrize(
    ("other", "costs", "takes"),
    [
        (
            outcome_of(1.0, 1e-3, 2e6),
            "costs 1 ms and 1 MB a step (weighted cost +100.0 %)",
            "takes 1 ms more and sends 1 MB more a step (weighted cost +100.0 %)",
        ),
        (
            outcome_of(1.6, 1e-3, 4e6),
            "costs 1 ms and saves 1 MB a step (weighted cost +25.0 %)",
            "takes 1 ms more and sends 1 MB less a step (weighted cost +25.0 %)",
        ),
        (
            outcome_of(4.0, 3e-3, 3e6, proven=False),
            "saves about 1 ms and 0 B a step (weighted cost -50.0 %)",
            "takes about 1 ms less and sends 0 B more a step (weighted cost -50.0 %)",
        ),
        (
            outcome_of(0.0, 2e-3, 2e6),
            "costs 0 us and 1 MB a step",
            "takes 0 us more and sends 1 MB more a step",
        ),
    ],
)
def test_two_plans_in_words(other, costs, takes):
    one = outcome_of(2.0, 2e-3, 3e6)
    assert price(one, other) == costs
    assert comparison(one, other) == takes
    assert comparison(one, one) == "costs the same"


def test_an_output_that_is_whole_unless_annotated_saves_what_its_gather_costs(perceptron):
    assert "this annotation saves 12.5 us and 1.05 MB a step (weighted cost -14.4 %" in perceptron.plan.explain(
        "result"
    )


def test_the_constraint_inside_a_function_has_its_price():
    @pw.shard(in_strategy=(("tp", None),))
    def inner(x):
        return torch.relu(x)

    def outer(x, w):
        return inner(x @ w).sum(0)

    arguments = torch.empty(4096, 64, device="meta"), torch.empty(64, 256, device="meta", requires_grad=True)
    compiled = pw.compile(outer, arguments, mesh={"tp": 4}, in_strategy=((None, "tp"), None))
    (one,) = (one for one in alternatives_of(compiled).annotations if one.source.startswith("constraint"))
    name = one.keys[0].removeprefix("constraint:")
    text = str(compiled.plan.explain(name))
    assert "    annotated ('tp', None)\n" in text
    assert "    this annotation " in text


def test_leaving_out_an_annotation_does_not_warn_again():
    def shifted(x):
        return bend(x)

    x = torch.empty(8, 8, device="meta")
    with pytest.warns(pw.UnknownOperatorWarning):
        plan = pw.compile(shifted, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),)).plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "this annotation" in plan.explain("x")


def test_a_problem_without_an_annotation_is_the_problem_before_it(language_model):
    (ids,) = (one for one in alternatives_of(language_model).annotations if one.source == "in_strategy['ids']")
    problem = without_annotations(language_model.problem, [ids])
    assert "ids" not in problem.allowed
    assert problem.allowed.items() <= language_model.problem.allowed.items()
    assert [v.name for v in problem.vertices] == [v.name for v in language_model.problem.vertices]


# -- memory


def test_alternatives_keep_to_the_memory_limit():
    held = mlp(in_strategy=(("dp", None),)).plan.memory.total
    pw.set_algo_parameters(memory_limit=LIMIT * held)
    try:
        compiled = mlp(in_strategy=(("dp", None),))
    finally:
        pw.reset_algo_parameters()
    assert compiled.plan.memory.total <= LIMIT * held
    assert f"caused by memory_limit {human(LIMIT * held)}: the optimum without a limit" in compiled.plan.explain("*")
    assert f"; memory_limit {human(LIMIT * held)}\n" in compiled.plan.summary()
    assert str(compiled.plan.certificate).endswith("% above the optimum (the duality gap)")
    found = alternatives_of(compiled)
    for c in compiled.plan.collectives[:3]:
        problem = without_collective(compiled.problem, c)
        other = found.without(c)
        if other is None:
            limit = r"no plan does without it under these annotations and memory_limit"
            assert found.of_collective(c)[0].startswith(limit)
        else:
            assert not has(other, c)
            assert other.cost >= dynamic_programming(problem).cost * (1 - 1e-9)


# -- how much is found, and for which plans


def test_alternatives_are_of_the_collectives_that_cost_most(language_model):
    plan = language_model.plan
    few = str(plan.explain("blocks.*", alternatives=2))
    assert few.count("caused by") == 2
    assert few.splitlines()[-1] == (
        "alternatives are shown for 2 of 30 collectives, those that cost most and for 2 of 3 annotations; "
        "explain(..., alternatives=30) shows all"
    )
    assert "caused by" not in plan.explain("blocks.*", alternatives=0)
    assert "alternatives are" not in plan.explain("blocks.*", alternatives=0)
    assert "alternatives are" not in plan.explain("blocks.0.up.weight")
    assert (
        "for 1 of 10 collectives, those that cost most and for 1 of 3 annotations; explain(..., alternatives=10)"
        in (plan.explain("blocks.*.weight", alternatives=1))
    )


@pytest.mark.parametrize(("count", "shown"), [(-1, "-1 (int)"), (True, "True (bool)"), ("all", "'all' (str)")])
def test_a_number_of_alternatives_that_is_none_is_refused(perceptron, count, shown):
    with pytest.raises(StrategyError) as error:
        perceptron.plan.explain("up", alternatives=count)
    assert str(error.value) == (
        f"alternatives is {shown}; write for how many collectives to find what the plan without them would cost: "
        "0 (none) or more"
    )


def test_a_loaded_plan_says_that_alternatives_need_the_model(perceptron, tmp_path):
    plan = perceptron.plan
    plan.save(tmp_path / "plan.json")
    loaded = pw.Plan.load(tmp_path / "plan.json")
    needs = "(loaded from a file: what alternatives cost, and what caused a collective, needs the model)"
    assert str(loaded.explain("down")) == str(plan.explain("down", alternatives=0)) + "\n" + needs
    assert str(loaded.explain("relu")) == str(plan.explain("relu"))
    assert loaded == plan
    assert plan == loaded


def test_where_a_plan_comes_from_is_no_part_of_it(perceptron):
    plan = perceptron.plan
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    assert "loaded from a file" in again.explain("down")
    assert copy.deepcopy(plan).explain("down") == plan.explain("down")
    assert "_origin" not in plan.model_dump_json()


def test_an_explanation_is_searched_for_once(perceptron, monkeypatch):
    plan = mlp(in_strategy=(("dp", None),)).plan
    text = plan.explain("*")
    monkeypatch.setattr("partway.propagation.plan.alternatives.search", None)
    assert plan.explain("*") == text


def test_the_search_mode_of_the_plan_is_that_of_its_alternatives(perceptron):
    assert perceptron.plan.certificate.mode is SearchMode.DYNAMIC_PROGRAMMING
    assert alternatives_of(perceptron).optimum.cost == perceptron.solution.cost


# -- What options cost


class Narrow(nn.Module):
    """Its weights lie whole, and splitting its work would send more than it saves."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(96, 200), nn.LayerNorm(96), nn.Linear(200, 96)

    def forward(self, x):
        return self.n(x + self.b(nn.functional.gelu(self.a(x)))).square().mean()


def summary_under(**algo):
    pw.set_auto_parallel_context(device_profile="cpu")
    pw.set_algo_parameters(**algo)
    with torch.device("meta"):
        model, x = Narrow(), torch.empty(32, 96)
    return pw.compile(model, (x,), mesh={"x": 8}).plan


def test_an_option_that_rules_out_a_cheaper_plan_is_named_with_what_it_costs():
    plan = summary_under()
    (line,) = str(plan.summary()).splitlines()[3:]
    assert line.startswith("with fully_use_devices=False the cheapest plan takes ")
    assert line.endswith(" %)")
    assert " less" in line
    assert line in str(plan.explain("a.weight"))
    assert line not in str(plan.explain("a.weight", alternatives=0))  # which searches for nothing
    free = summary_under(fully_use_devices=False)
    assert len(str(free.summary()).splitlines()) == 3
    assert free.certificate.cost < 0.99 * plan.certificate.cost


def test_a_plan_from_a_file_says_nothing_of_options(tmp_path):
    plan = summary_under()
    plan.save(tmp_path / "plan.json")
    assert len(str(pw.Plan.load(tmp_path / "plan.json").summary()).splitlines()) == 3
