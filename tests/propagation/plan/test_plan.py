"""The plan as people see it: table, explanations, totals; and as a file."""

import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.plan.plan import Certificate, Plan
from partway.propagation.plan.units import human
from partway.strategy import Layout, Mesh, Replicate, Shard, StrategyError


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)).unsqueeze(0).squeeze(0))


@pytest.fixture(scope="module")
def plan():
    with torch.device("meta"):
        module, x = MLP(), torch.empty(1024, 512, requires_grad=True)
    return pw.compile(
        module,
        (x,),
        mesh={"dp": 2, "tp": 4},
        in_strategy=(("dp", None),),
        out_strategy=(("dp", None),),
        parameter_plan={"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")},
    ).plan


def test_the_table_of_a_plan(plan):
    assert str(plan.table()).splitlines() == [
        "plan on dp=2, tp=4",
        " operator      strategy      layout   collectives                                    sent   predicted",
        "──────────────────────────────────────────────────────────────────────────────────────────────────────",
        " up linear     dp:_1 tp:n    S0S1     backward all_reduce(tp), 2 all_reduce(dp)   2.62 MB     52.7 us",
        " relu          dp:f0 tp:f1   S0S1                                                             1.88 us",
        " down linear   dp:_1 tp:k    S0P      backward 2 all_reduce(dp)                   1.05 MB     32.5 us",
        " result                      S0R      all_reduce(tp)                              1.57 MB     20.2 us",
        "1 collectives forward, 5 backward; one rank sends 5.25 MB a step; predicted 107 us",
        "on one device: parameters 2.1 MB, gradients 2.1 MB, optimizer 4.2 MB, inputs 1.05 MB, activations 3.15 MB; "
        "12.6 MB in all",
        "search: dynamic_programming: the optimum, proven",
    ]
    assert str(plan) == str(plan.table())
    assert repr(plan.table()) == str(plan.table())


def test_views_are_in_the_table_when_every_operator_is_asked_for(plan):
    rows = str(plan.table(every=True)).splitlines()
    assert len(rows) == len(str(plan.table()).splitlines()) + 2
    assert sum("squeeze" in row for row in rows) == 2


def test_the_totals_are_those_of_the_parts(plan):
    assert plan.memory.parameters == 4 * (512 * 2048 * 2 // 4 + 2048 // 4 + 512 // 4)
    assert plan.memory.gradients == plan.memory.parameters
    assert plan.memory.optimizer == 2 * plan.memory.parameters
    assert plan.memory.inputs == 4 * 1024 * 512 // 2
    assert plan.memory.total == 4 * plan.memory.parameters + plan.memory.inputs + plan.memory.activations
    assert plan.wire_bytes == sum(c.wire_bytes for c in plan.collectives)
    assert plan.predicted_time == pytest.approx(
        sum(o.seconds for o in plan.operators) + sum(c.predicted_time for c in plan.collectives)
    )


def test_the_parameters_at_rest(plan):
    mesh = Mesh({"dp": 2, "tp": 4})
    assert plan.mesh == mesh
    assert plan.parameters["up.weight"] == Layout(mesh, (Replicate(), Shard(0)))
    assert plan.parameters["down.weight"] == Layout(mesh, (Replicate(), Shard(1)))


# -- explanations


def test_a_module_is_explained_by_its_operators_with_their_collectives_and_the_reason(plan):
    lines = str(plan.explain("down")).splitlines()
    assert lines[0] == "linear_1 = aten.linear.default float32[1024, 512] in down"
    assert lines[1] == "    splits (dp:_1 tp:k); results [dp:S0 tp:P]"
    assert lines[2].startswith("    from test_plan.py:")
    assert lines[3] == "    backward all_reduce over dp (2 ranks) of down.weight: 1.05 MB, 1.05 MB sent, 11.8 us"
    assert lines[4] == (
        "        because parameter down.weight [dp:R tp:S1] meets aten.linear.default linear_1 (dp:_1 tp:k)"
    )


def test_a_parameter_is_explained_with_its_annotation(plan):
    lines = str(plan.explain("up.weight")).splitlines()
    assert lines[:3] == [
        "parameter up.weight float32[2048, 512]: [dp:R tp:S0]",
        "    annotated ('tp', None)",
        "    this annotation costs nothing: the optimum has it too",
    ]
    assert "of up.weight" in lines[3]


def test_an_output_is_explained_with_the_collective_that_it_causes(plan):
    text = str(plan.explain("result"))
    assert text.startswith("result result float32[1024, 512]: [dp:S0 tp:R]\n    annotated ('dp', None)\n")
    assert "forward all_reduce over tp (4 ranks) of linear_1" in text


def test_patterns_and_nodes_are_explained(plan):
    assert str(plan.explain("up.*")).count("\nparameter ") == 1
    assert str(plan.explain("relu")).startswith("relu = aten.relu.default")

    class Node:
        name = "relu"

    assert plan.explain(Node()) == plan.explain("relu")


def test_what_is_not_in_the_plan_is_an_error_that_names_what_is(plan):
    with pytest.raises(StrategyError, match=r"the plan has nothing called 'up.wieght'; did you mean 'up.weight'"):
        plan.explain("up.wieght")
    with pytest.raises(StrategyError, match="the plan has nothing called 'zzz'"):
        plan.explain("zzz")


# -- files


def test_a_plan_is_the_same_after_saving_and_loading(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert loaded.collectives == plan.collectives
    assert loaded.collectives[0].kind.communicates
    assert loaded.parameters == plan.parameters
    assert str(loaded.explain("*", alternatives=0)) == str(plan.explain("*", alternatives=0))


def test_a_plan_without_a_bound_is_saved(plan, tmp_path):
    unknown = plan.model_copy(
        update={"certificate": Certificate(mode="sharding_propagation", cost=1.0, bound=None, proven=False, width=1)}
    )
    unknown.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == unknown


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', "not json"])
def test_a_file_that_holds_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(StrategyError, match="holds no plan of this version"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StrategyError, match=r"could not read a plan from .*No such file"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_cannot_be_changed(plan):
    with pytest.raises(ValueError, match="frozen"):
        plan.axes = ("x",)


# -- words


LIMITED = {"memory_limit": 8e9}


@pytest.mark.parametrize(
    ("mode", "bound", "more", "gap", "text"),
    [
        ("dynamic_programming", 2.0, {"proven": True}, 0.0, ": the optimum, proven"),
        ("dynamic_programming", 1.6, {}, 0.25, ": at most 25.0 % above the optimum"),
        ("sharding_propagation", None, {}, None, ": no bound"),
        ("sharding_propagation", 0.0, {}, None, ": no bound"),
        ("sharding_propagation", 1.6, {}, 0.25, ": at most 25.0 % above the optimum"),
        ("recursive_programming", 1.6, {"attained": True}, 0.25, ": 25.0 % above the optimum"),
        ("recursive_programming", 2.0, {"proven": True, "attained": True}, 0.0, ": the optimum, proven"),
        (
            "dynamic_programming",
            2.0,
            {"proven": True, **LIMITED},
            0.0,
            " within memory_limit 8 GB: the optimum, proven",
        ),
        (
            "dynamic_programming",
            1.6,
            LIMITED,
            0.25,
            " within memory_limit 8 GB: at most 25.0 % above the optimum (the duality gap)",
        ),
        ("sharding_propagation", 1.6, LIMITED, 0.25, " within memory_limit 8 GB: at most 25.0 % above the optimum"),
    ],
)
def test_a_certificate_says_what_is_known(mode, bound, more, gap, text):
    found = Certificate(**{"mode": mode, "cost": 2.0, "bound": bound, "proven": False, "width": 2, **more})
    assert str(found) == mode + text
    assert found.gap == pytest.approx(gap)


def test_another_search_stands_beside_the_optimum():
    def plan_by(mode):
        with torch.device("meta"), pw.auto_parallel_context(search_mode=mode):
            module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 8))
            return pw.compile(module, (torch.empty(64, 64),), mesh={"dp": 2, "tp": 4}).plan

    best, other = plan_by("dynamic_programming").certificate, plan_by("recursive_programming").certificate
    assert best.proven
    assert other.attained
    assert other.bound == best.cost
    assert other.gap == pytest.approx(other.cost / best.cost - 1)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999.4, "999 B"),
        (999.7, "1 kB"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (123_456, "123 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3 TB"),
        (1.2345e16, "12300 TB"),
    ],
)
def test_bytes_for_people(size, text):
    assert human(size) == text
