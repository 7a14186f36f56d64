"""Routed rows: each rank sends others as many as it has for them, on processes and simulated."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn

import partway as pw
from partway.propagation.ops.collectives import convert
from partway.runtime import Simulator, Worker
from partway.runtime.code.assemble import assemble_code
from partway.strategy import Mesh

RANKS, WIDTH = 4, 3
# the rows that the rank of a row sends to the rank of a column: all to one, none to another, none of its own
SENT = torch.tensor([[2, 0, 1, 0], [3, 0, 0, 0], [0, 0, 4, 1], [0, 0, 0, 0]])


def code_of():
    graph = fx.Graph()
    x, counts = graph.placeholder("x"), graph.placeholder("counts")
    back = graph.placeholder("back")
    there = graph.call_function(convert, (x, "T0|4", "E0|5", ["x"], RANKS, 0, counts))
    graph.output((there, graph.call_function(convert, (there, "E0|5", "T0|4", ["x"], RANKS, 1, back))))
    return assemble_code(fx.GraphModule(nn.Module(), graph), "forward")


def inputs(dtype):
    """The rows of each rank, numbered, and their counts there and back."""
    rows = [
        torch.arange(n * WIDTH).view(n, WIDTH).add(100 * rank).to(dtype) for rank, n in enumerate(SENT.sum(1).tolist())
    ]
    counts = [torch.stack([SENT[rank], SENT[:, rank]]) for rank in range(RANKS)]
    return rows, counts, [each.flip(0) for each in counts]


def expected(rows):
    parts = [part.split(SENT[rank].tolist()) for rank, part in enumerate(rows)]
    return [torch.cat([parts[sender][rank] for sender in range(RANKS)]) for rank in range(RANKS)]


DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_ranks_get_their_rows_and_send_them_back(dtype):
    rows, counts, back = inputs(dtype)
    there, home = Simulator(Mesh({"x": RANKS})).run(code_of(), [list(rows), counts, back])
    for got, wanted in zip((*there, *home), (*expected(rows), *rows), strict=True):
        assert torch.equal(got, wanted)


def send():
    rank = dist.get_rank()
    for dtype in DTYPES:
        rows, counts, back = inputs(dtype)
        given = [rows[rank].t().contiguous().t(), counts[rank], back[rank]]  # the rows with other strides
        there, home = Worker(Mesh({"x": RANKS})).run(code_of(), given)
        assert torch.equal(there, expected(rows)[rank])
        assert torch.equal(home, rows[rank])


@pytest.mark.gloo
def test_processes_get_their_rows_and_send_them_back(on_ranks):
    on_ranks(RANKS, send)


TOKENS, EXPERTS, FEATURES, HIDDEN = 256, 32, 16, 128


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FEATURES) / 6)

    def forward(self, x, bias):
        weights, ids = (self.gate(x) + bias).softmax(-1).topk(2, -1)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        made = pw.ops.grouped_matmul(F.silu(pw.ops.grouped_matmul(rows, self.up, ends)), self.down, ends)
        return (pw.ops.combine(made, where, weights) ** 2).mean()


def train(axes):
    """Three steps: tokens to many experts, to two of them alone, and to many again."""
    torch.manual_seed(0)
    plain = Mixture().double()
    model = copy.deepcopy(plain)
    sharded = pw.shard(model, ((RANKS, 1), None), mesh=axes)
    to_two = torch.zeros(EXPERTS, dtype=torch.float64)
    to_two[:2] = 100.0
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for bias in (torch.zeros_like(to_two), to_two, torch.zeros_like(to_two)):
        x = torch.randn(TOKENS, FEATURES, dtype=torch.float64)
        losses = [call(x, bias) for call in (plain, sharded)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-12, atol=1e-12)
    assert sum(str(c.kind) == "all_to_allv" for c in sharded.plan.collectives) == 3  # of x no gradient is wanted
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        whole = other.full_tensor() if hasattr(other, "full_tensor") else other
        torch.testing.assert_close(whole.detach(), one.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axes", [{"ep": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_simulated_training_with_exchanges_is_that_of_one_device(axes):
    train(axes)


@pytest.mark.gloo
@pytest.mark.parametrize("axes", [{"ep": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_training_with_exchanges_is_that_of_one_device(on_ranks, axes):
    on_ranks(RANKS, train, axes)


class Sized(Mixture):
    """With operators that take the number of rows, and with a sum over all rows."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        hidden = F.silu(pw.ops.grouped_matmul(rows, self.up, ends))
        hidden = hidden.view(-1, 2, HIDDEN // 2).flip(1).reshape(-1, HIDDEN) + hidden.sum(-1, True).expand(-1, HIDDEN)
        made = pw.ops.grouped_matmul(hidden, self.down, ends)
        return pw.ops.combine(made, where, weights), hidden.sum() / 100


class Twice(nn.Module):
    """Two mixtures that expect equally many rows, and get different ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Sized(), Sized()

    def forward(self, x):
        y, one = self.first(x)
        z, other = self.second(x + y)
        return (z**2).mean() + one + other


@pytest.mark.parametrize("axes", [{"ep": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_each_mixture_has_its_own_number_of_rows(axes):
    torch.manual_seed(0)
    plain, x = Twice().double(), torch.randn(TOKENS, FEATURES, dtype=torch.float64)
    model = copy.deepcopy(plain)
    sharded = pw.shard(model, ((RANKS, 1),), mesh=axes)
    loss, expected = sharded(x), plain(x)
    loss.backward()
    expected.backward()
    assert sum(str(c.kind) == "all_to_allv" for c in sharded.plan.collectives) == 7
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-11, atol=1e-11)
