"""While rows of experts are on their way, other operators run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import partway as pw
from partway.fusion import exchanges
from partway.fusion.exchanges import hide_exchanges
from partway.propagation.cost.profile import profile_of
from partway.propagation.ops.collectives import convert, kind_of
from partway.strategy import Mesh
from partway.strategy.placement import Kind

EXPERTS, K = 16, 4


class Mixture(nn.Module):
    """A mixture beside a shared expert, which is written before or after it."""

    def __init__(self, first, width, hidden, dropout=0.0):
        super().__init__()
        self.first, self.dropout = first, dropout
        self.before, self.router = nn.Linear(width, width, bias=False), nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, width) / hidden**0.5)
        self.shared = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width, bias=False)
        )

    def forward(self, x):
        x = self.before(x)
        beside = F.dropout(self.shared(x), self.dropout) if self.first else None
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        made = pw.ops.grouped_matmul(F.silu(pw.ops.grouped_matmul(rows, self.up, ends)), self.down, ends)
        made = pw.ops.combine(made, where, weights)
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


@pytest.mark.parametrize("first", [True, False])
def test_ranks_compute_what_one_device_does_in_any_order(first):
    """Dropout too, which keeps its place among random operators."""
    torch.manual_seed(0)
    plain, x = Mixture(first, 8, 12, dropout=0.3).double(), torch.randn(32, 8, dtype=torch.float64)
    found = []
    for mesh in ({"x": 1}, {"x": 4}, {"dp": 2, "ep": 2}):
        model = copy.deepcopy(plain)
        sharded = pw.shard(model, **split(mesh))
        torch.manual_seed(1)
        for _ in range(2):
            loss = sharded(x)
            loss.backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        found.append([loss.detach(), *grads])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-12, atol=1e-12)


def test_collectives_keep_their_order_but_for_exchanges():
    torch.manual_seed(0)
    compiled = pw.compile(Mixture(True, 8, 12), (torch.randn(32, 8),), **split({"x": 4}))
    mesh, profile = Mesh({"x": 4}), profile_of("h100")
    for module in compiled.program.phases.values():
        moved = hide_exchanges(module, mesh, profile)
        kept = [
            [
                n.name
                for n in graph.nodes
                if n.target is convert and kind_of(*n.args[1:3]) not in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALLV)
            ]
            for graph in (module.graph, moved.graph)
        ]
        assert kept[0] == kept[1]
        assert sorted(n.name for n in module.graph.nodes) == sorted(n.name for n in moved.graph.nodes)


def test_a_graph_without_rows_stays_the_same():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = fx.GraphModule(nn.Module(), graph)
    assert hide_exchanges(module, Mesh({"x": 2}), profile_of("h100")) is module
