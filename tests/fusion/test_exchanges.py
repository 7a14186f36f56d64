"""While rows of experts are on their way, other operators run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from round_profile import FLAT, profile_with
from torch import fx, nn

import partway as pw
from partway.fusion import exchanges
from partway.fusion.exchanges import hide_exchanges
from partway.propagation.cost.profile import profile_of
from partway.propagation.graph.nodes import draws_random_numbers
from partway.propagation.ops.collectives import convert, kind_of
from partway.strategy import Mesh
from partway.strategy.placement import Kind

EXPERTS, K = 16, 4
SLOW = {**FLAT, "latency": 0, "launch": 0, "bandwidth": 1e6}


class Mixture(nn.Module):
    """A mixture beside a shared expert, which is written before or after it."""

    def __init__(self, first, width, hidden, each=K, dropout=0.0):
        super().__init__()
        self.first, self.each, self.dropout = first, each, dropout
        self.before, self.router = nn.Linear(width, width, bias=False), nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, width) / hidden**0.5)
        self.shared = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width, bias=False)
        )

    def forward(self, x):
        x = self.before(x)
        beside = F.dropout(self.shared(x), self.dropout) if self.first else None
        weights, ids = self.router(x).softmax(-1).topk(self.each, -1)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        made = pw.ops.grouped_matmul(F.silu(pw.ops.grouped_matmul(rows, self.up, ends)), self.down, ends)
        made = F.dropout(pw.ops.combine(made, where, weights), self.dropout)
        return (made + (F.dropout(self.shared(x), self.dropout) if beside is None else beside)).square().mean()


def split(mesh):
    return {
        "mesh": mesh,
        "in_strategy": ((tuple(mesh), None),),
        "parameter_plan": dict.fromkeys(("up", "down"), (tuple(mesh), None, None)),
    }


def exposed(first):
    with torch.device("meta"):
        model, x = Mixture(first, 1024, 4096).bfloat16(), torch.empty(32768, 1024, dtype=torch.bfloat16)
    with pw.auto_parallel_context(device_profile="h100"):
        schedule = pw.compile(model, (x,), **split({"x": 8})).program.schedule
    sent = [span for span in schedule.spans if "all_to_allv" in str(span.args.get("kind"))]
    under_way = {
        other.args["kind"]
        for other in schedule.spans
        for span in sent
        if other.lane == "compute"
        and other.start < span.start + span.seconds
        and other.start + other.seconds > span.start
    }
    return schedule.exposed / sum(span.seconds for span in sent), under_way


@pytest.mark.parametrize("first", [True, False])
def test_a_shared_expert_and_the_products_of_a_backward_hide_exchanges(first, monkeypatch):
    share, under_way = exposed(first)
    assert share < 0.7
    assert {
        "aten.mm.default",
        "partway.grouped_outer.default" if first else "partway.grouped_matmul.default",
    } <= under_way
    monkeypatch.setattr(exchanges, "AHEAD", -1)
    assert exposed(first)[0] > 1.4


@pytest.fixture
def slow(tmp_path):
    """A network on which even a few rows are sent by an exchange, and take long."""
    path = tmp_path / "slow.json"
    profile_with(levels=[SLOW]).save(path)
    with pw.auto_parallel_context(device_profile=str(path)):
        yield


def kinds_in(graph):
    return {node.name: kind_of(*node.args[1:3]) for node in graph.nodes if node.target is convert}


@pytest.mark.parametrize("first", [True, False])
def test_ranks_compute_what_one_device_does_in_any_order(first, slow):
    """Dropout too."""
    torch.manual_seed(0)
    plain, x = Mixture(first, 8, 12, 1, 0.3).double(), torch.randn(32, 8, dtype=torch.float64)
    found = []
    for mesh in ({"x": 1}, {"x": 4}, {"dp": 2, "ep": 2}):
        model = copy.deepcopy(plain)
        sharded = pw.shard(model, **split(mesh))
        torch.manual_seed(1)
        for _ in range(2):
            loss = sharded(x)
            loss.backward()
        if found:
            assert "exchange" in str(sharded.plan).split("dispatch")[1]
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        found.append([loss.detach(), *grads])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-12, atol=1e-12)


def test_collectives_and_random_operators_keep_their_order_but_for_exchanges(slow, monkeypatch):
    monkeypatch.setattr(exchanges, "AHEAD", -1)
    given = split({"x": 4})
    given["parameter_plan"] |= {"shared.0.weight": ("x", None), "shared.2.weight": (None, "x")}
    compiled = pw.compile(Mixture(False, 8, 12, 1), (torch.randn(32, 8),), **given)
    monkeypatch.undo()
    module = compiled.program.phases["forward"]
    before = kinds_in(module.graph)
    sent = [name for name, kind in before.items() if kind in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALLV)]
    assert Kind.ALL_TO_ALLV in before.values()
    nodes = {node.name: node for node in module.graph.nodes}
    late, gather = nodes[sent[-1]], next(nodes[name] for name, kind in before.items() if kind is Kind.ALL_GATHER)
    for target, *others in ((torch.ops.aten.rand_like.default,), (convert, *gather.args[1:])):
        for operand in (late.args[0], late):  # the second runs first, and waits for what arrives
            with module.graph.inserting_after(late):
                made = module.graph.call_function(target, (operand, *others), gather.kwargs if others else {})
            made.meta["val"] = operand.meta["val"]
    moved = hide_exchanges(module, Mesh({"x": 4}), profile_with(levels=[SLOW]))
    orders = [
        [n.name for n in graph.nodes if n.name not in sent and (n.target is convert or draws_random_numbers(n))]
        for graph in (module.graph, moved.graph)
    ]
    assert len(orders[0]) > 5
    assert orders[0] == orders[1]


def test_a_graph_without_rows_stays_the_same():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = fx.GraphModule(nn.Module(), graph)
    assert hide_exchanges(module, Mesh({"x": 2}), profile_of("h100")) is module
