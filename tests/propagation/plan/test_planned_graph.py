"""The planned graph for networkx: operators, what they read, and what is sent on the way."""

import json

import networkx
import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.plan.plan import Plan
from partway.strategy import StrategyError


class Branches(nn.Module):
    """Two results of one operator, a tensor that is read twice, a constant and a residual."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        first, second = self.up(x).chunk(2, -1)
        both = torch.cat([first, second], -1) + torch.arange(256)
        return self.down(torch.relu(both) * both) + x


def branches(mesh, **annotations):
    return pw.compile(Branches(), (torch.zeros(128, 64),), mesh=mesh, in_strategy=(("dp", None),), **annotations).plan


@pytest.fixture(scope="module")
def planned():
    return branches({"dp": 2, "tp": 4})


def content(graph):
    return graph.graph, dict(graph.nodes(data=True)), list(graph.edges(keys=True, data=True))


def test_nodes_are_inputs_operators_constants_and_outputs(planned):
    graph = planned.to_networkx()
    assert isinstance(graph, networkx.MultiDiGraph)
    assert networkx.is_directed_acyclic_graph(graph)
    kinds = networkx.get_node_attributes(graph, "kind")
    assert {node for node, kind in kinds.items() if kind == "input"} == {f"input {t.name}" for t in planned.inputs}
    assert {node for node, kind in kinds.items() if kind == "operator"} == {o.name for o in planned.operators}
    assert [node for node, kind in kinds.items() if kind == "output"] == ["output result"]
    assert [node for node, kind in kinds.items() if kind == "constant"] == ["constant arange"]
    assert graph.graph == {
        "mesh": {"dp": 2, "tp": 4}, "wire_bytes": planned.wire_bytes, "predicted_time": planned.predicted_time
    }  # fmt: skip


def test_a_node_says_what_the_plan_says(planned):
    nodes = planned.to_networkx().nodes
    (operator,) = [o for o in planned.operators if o.module == "down"]
    down = nodes[operator.name]
    assert down["operator"] == "aten.linear.default"
    assert down["result"] == "float32[128, 64]"
    assert down["module"] == "down"
    assert down["source"].startswith("test_planned_graph.py:")
    assert down["strategy"] == operator.strategy
    assert list(down["factors"]) == ["dp", "tp"]
    assert down["layouts"] == operator.results
    assert down["seconds"] == operator.seconds > 0
    assert down["held_bytes"] == operator.held_bytes
    assert (down["fate"], down["again"]) == (operator.fate, operator.again)
    x = nodes["input x"]
    assert (x["role"], x["shape"], x["dtype"], x["layout"]) == ("input", (128, 64), "float32", ("S0", "R"))
    assert x["annotation"] == "('dp', None)"
    assert sum(data.get("held_bytes", 0.0) for _, data in nodes(data=True)) <= planned.memory.activations


def test_edges_lead_from_each_operand_to_its_reader(planned):
    graph = planned.to_networkx()
    reads = [(source, target, key, tensor) for source, target, key, tensor in graph.edges(keys=True, data="tensor")]
    assert ("split", "cat", 0, "split") in reads
    assert ("split", "cat", 1, "split[1]") in reads
    assert ("constant arange", "add", 1, "arange") in reads
    assert [target for source, target, _, _ in reads if source == "input x"] == ["linear", "add_1"]
    assert ("add_1", "output result", 0, "add_1") in reads
    assert len(reads) == sum(len(o.operands) for o in planned.operators) + 1
    for source, target, key, data in graph.edges(keys=True, data=True):
        if graph.nodes[target]["kind"] == "operator":
            (operator,) = [o for o in planned.operators if o.name == target]
            assert data["read_as"] == operator.operands[key]
        if graph.nodes[source]["kind"] == "operator":
            assert data["produced_as"] == graph.nodes[source]["layouts"][data["result"]]


def test_edges_add_up_to_the_plan(planned):
    graph = planned.to_networkx()
    assert sum(sent for *_, sent in graph.edges(data="wire_bytes")) == planned.wire_bytes > 0
    standing = [c for *_, collectives in graph.edges(data="collectives") for c in collectives]
    assert sorted(map(str, standing)) == sorted(map(str, planned.collectives))
    nodes = sum(data.get("seconds", 0.0) + data.get("again", 0.0) for _, data in graph.nodes(data=True))
    edges = sum(seconds for *_, seconds in graph.edges(data="seconds"))
    assert nodes + edges == pytest.approx(planned.predicted_time)


def test_a_collective_stands_at_an_edge_whose_layouts_differ_on_its_axes(planned):
    for _, _, data in planned.to_networkx().edges(data=True):
        for c in data["collectives"]:
            assert c.tensor == data["tensor"]
            before, after = (dict(zip(planned.axes, data[side], strict=True)) for side in ("produced_as", "read_as"))
            assert any(before[axis] != after[axis] for axis in c.axes)


def test_a_graph_is_the_callers_own(planned):
    graph = planned.to_networkx()
    graph.remove_node("linear")
    assert "linear" in planned.to_networkx()


def test_a_loaded_plan_has_the_same_graph(planned, tmp_path):
    planned.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").to_networkx()
    assert content(loaded) == content(planned.to_networkx())


def test_a_plan_of_the_version_before_says_what_is_missing(of_the_version_before):
    with pytest.raises(StrategyError, match="did not keep which tensors each operator reads"):
        of_the_version_before.to_networkx()


def test_a_collective_of_a_tensor_that_nothing_reads_is_refused(planned, tmp_path):
    data = json.loads(planned.model_dump_json())
    data["collectives"][0]["tensor"] = "nobody"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(StrategyError, match="nothing in the plan reads 'nobody', which a collective converts"):
        Plan.load(tmp_path / "plan.json").to_networkx()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o["producers"].pop(), "operator 'relu' of the plan has 1 operand and 0 producers"),
        (
            lambda o: o["producers"][0].update(name="nobody"),
            "'relu' of the plan reads 'nobody', which nothing",
        ),
        (
            lambda o: o["producers"][0].update(result=1),
            r"'relu' of the plan reads 'linear\[1\]', which nothing",
        ),
        (
            lambda o: o["producers"][0].update(name="linear_1"),
            "'relu' of the plan reads 'linear_1', which nothing",
        ),
    ],
)
def test_an_edited_plan_in_which_an_operator_reads_what_nothing_produces_has_no_graph(plan, tmp_path, change, message):
    data = json.loads(plan.model_dump_json())
    change(next(o for o in data["operators"] if o["name"] == "relu"))
    (tmp_path / "plan.json").write_text(json.dumps(data))
    edited = Plan.load(tmp_path / "plan.json")
    assert "reads" not in edited.explain("down", alternatives=0)
    with pytest.raises(StrategyError, match=message):
        edited.to_networkx()


def test_an_edited_plan_with_an_output_that_nothing_produces_has_no_graph(plan, tmp_path):
    data = json.loads(plan.model_dump_json())
    data["outputs"][0]["producer"]["name"] = "nobody"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(StrategyError, match="output 'result' of the plan is 'nobody', which nothing produces"):
        Plan.load(tmp_path / "plan.json").to_networkx()


def test_an_edited_plan_with_a_collective_over_an_unknown_axis_has_no_graph(plan, tmp_path):
    data = json.loads(plan.model_dump_json())
    data["collectives"][0]["axes"] = ["nowhere"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    edited = Plan.load(tmp_path / "plan.json")
    assert "reads" not in edited.explain("down", alternatives=0)
    with pytest.raises(StrategyError, match="is over the axis 'nowhere'; the mesh of the plan has"):
        edited.to_networkx()


def test_windows_of_an_image_stand_at_the_edges_of_their_readers():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        image = torch.empty(1, 3, 512, 512)
    split = (None, None, None, "w")
    plan = pw.compile(net, (image,), mesh={"w": 4}, in_strategy=(split,), out_strategy=(split,)).plan
    graph = plan.to_networkx()
    exchanges = [c.tensor for *_, data in graph.edges(data=True) for c in data["collectives"] if c.kind == "exchange"]
    assert exchanges
    assert sum(sent for *_, sent in graph.edges(data="wire_bytes")) == plan.wire_bytes


@pytest.mark.parametrize("split", [False, True])
def test_weights_that_are_gathered_again_are_counted_again(split):
    with pw.auto_parallel_context(enable_parallel_optimizer=True, reshard_after_forward=split):
        plan = branches({"dp": 8})
    assert sum(sent for *_, sent in plan.to_networkx().edges(data="wire_bytes")) == pytest.approx(plan.wire_bytes)


def of_a_rank():
    return content(branches({"dp": 2}).to_networkx())


@pytest.mark.gloo
def test_every_process_has_the_graph_of_one(on_ranks):
    assert on_ranks(2, of_a_rank) == [of_a_rank()] * 2
