"""Mixtures of experts as people write them become dispatch and combine, with the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partway.propagation.capture.capture import capture
from partway.propagation.ops import experts as ops
from partway.propagation.ops.experts import combine, dispatch, grouped_matmul, per_expert

TOKENS, EXPERTS, WIDTH, HIDDEN = 12, 4, 6, 5


class Mixture(nn.Module):
    """What all idioms share: experts with biases, and the two, or one, of each token."""

    def __init__(self, each=2):
        super().__init__()
        self.each = each
        self.gate = nn.Parameter(torch.randn(WIDTH, EXPERTS))
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN)),
            nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH)),
        )
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x):
        weights, ids = (x @ self.gate).softmax(-1).topk(self.each, -1)
        return self.experts(x, ids, weights)

    def hidden(self, both):
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    def reference(self, x, before=False):
        """Each token times each of its experts, in a loop; `before`: their weights are of what the experts get."""
        weights, ids = (x @ self.gate).softmax(-1).topk(self.each, -1)
        result = torch.zeros_like(x)
        for j in range(self.each):
            own, weight = ids[:, j], weights[:, j : j + 1]
            made = self.hidden(torch.einsum("td,tdf->tf", x * weight if before else x, self.up[own]))
            made = torch.einsum("tf,tfd->td", made, self.down[own]) + self.bias[own]
            result = result + (made if before else weight * made)
        return result

    def rows(self, rows, ends, ids):
        hidden = self.hidden(ops.grouped_matmul(rows, self.up, ends))
        return ops.grouped_matmul(hidden, self.down, ends) + self.bias[ids]


class Sorted(Mixture):
    """Sorted by expert, and back by the inverse of the order."""

    def order(self, ids):
        return torch.sort(ids)

    def ends(self, ids):
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return torch.cumsum(counts, 0, dtype=torch.int32)

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        by_expert, order = self.order(flat)
        made = self.rows(x[order // self.each], self.ends(by_expert), by_expert)
        return self.together(made * weights.reshape(-1)[order].unsqueeze(-1), order, x)

    def together(self, made, order, x):
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return made[inverse].view(x.shape[0], self.each, -1).sum(1)


class ByArgsort(Sorted):
    """The order and its inverse by argsort, counted by one_hot."""

    def order(self, ids):
        order = torch.argsort(ids, stable=True)
        return ids[order], order

    def ends(self, ids):
        return torch.cumsum(F.one_hot(ids, EXPERTS).sum(0), 0).to(torch.int32)

    def together(self, made, order, x):
        return made[torch.argsort(order)].view(x.shape[0], self.each, -1).sum(1)


class AddedByIndex(Sorted):
    """Added up at their tokens."""

    def together(self, made, order, x):
        return torch.zeros_like(x).index_add(0, order // self.each, made)


class AddedByScatter(Sorted):
    """Gathered and scattered with an index as wide as the rows."""

    def experts(self, x, ids, weights):
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        wide = (order // self.each).reshape(-1, 1).expand(-1, WIDTH)
        made = self.rows(torch.gather(x, 0, wide), self.ends(flat), flat[order])
        made = made * weights.view(-1)[order].reshape(-1, 1)
        return torch.zeros_like(x).scatter_add(0, wide, made)


class Batched(Mixture):
    """Each row times a copy of the matrix of its expert."""

    def experts(self, x, ids, weights):
        flat, copies = ids.reshape(-1), x.repeat_interleave(self.each, dim=0)
        hidden = self.hidden(torch.bmm(copies.unsqueeze(1), self.up[flat]).squeeze(1))
        made = torch.bmm(self.down.transpose(1, 2)[flat], hidden.unsqueeze(-1)).squeeze(-1) + self.bias[flat]
        made = made * weights.reshape(-1).unsqueeze(-1)
        return made.view(x.shape[0], self.each, WIDTH).sum(dim=1)


class Squared(Sorted):
    """With an operator that takes the same rows twice."""

    def hidden(self, both):
        gate, up = both.chunk(2, -1)
        return gate * gate + up


class WeightedBefore(Sorted):
    """Rows times their weights before their experts, in a wider dtype, as torchtitan's score_before_experts."""

    wide = torch.float64

    def experts(self, x, ids, weights):
        order = torch.argsort(ids.view(-1), stable=True)
        rows, of_rows = x[order // self.each], weights.view(-1)[order].reshape(-1, 1)
        rows = self.beside(rows) if hasattr(self, "beside") else rows
        rows = (rows.to(self.wide) * of_rows).to(x.dtype)
        made = self.rows(rows, self.ends(ids.view(-1)), ids.view(-1)[order])
        return torch.zeros_like(x).index_add(0, order // self.each, made)

    def reference(self, x):
        return super().reference(x, before=True)


IDIOMS = [WeightedBefore, Squared, Sorted, ByArgsort, AddedByIndex, AddedByScatter, Batched]


def captured(model, x):
    graph = capture(model, (x,), {})
    return graph, [node.target for node in graph.nodes]


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_idiom_becomes_dispatch_and_combine_with_the_same_numbers(idiom, each):
    torch.manual_seed(0)
    model, x = idiom(each).double(), torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    graph, targets = captured(model, x)
    assert [targets.count(target) for target in (dispatch, combine, per_expert)] == [1, 1, 1], graph
    assert targets.count(grouped_matmul) == 2
    parameters = dict(model.named_parameters())
    inputs = [x if port.name == "x" else parameters[port.name] for port in graph.inputs]
    found = graph.module(*inputs)
    found = found[0] if isinstance(found, tuple | list) else found
    torch.testing.assert_close(found, model.reference(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x), model.reference(x), rtol=1e-12, atol=1e-12)


class InBfloat16(WeightedBefore):
    """With a router in float32, in which the rows are weighted, as in torchtitan."""

    wide = torch.float32

    def forward(self, x):
        weights, ids = (x.float() @ self.gate.float()).softmax(-1).topk(self.each, -1)
        return self.experts(x, ids, weights)


def test_rows_that_are_weighted_in_a_wider_dtype_are_sent_in_their_own():
    torch.manual_seed(0)
    model, x = InBfloat16().bfloat16(), torch.randn(TOKENS, WIDTH).bfloat16()
    graph, targets = captured(model, x)
    assert [targets.count(target) for target in (dispatch, combine)] == [1, 1]
    (made,) = (node for node in graph.nodes if node.target is dispatch)
    assert len(made.args) == 4
    assert made.meta["val"][0].dtype == torch.bfloat16
    inputs = [x if port.name == "x" else model.get_parameter(port.name) for port in graph.inputs]
    torch.testing.assert_close(graph.module(*inputs)[0], model(x), rtol=2e-2, atol=2e-2)


class ReadsRows(Sorted):
    def together(self, made, order, x):
        return super().together(made, order, x) + made.sum()


class DropsRows(Sorted):
    def rows(self, rows, ends, ids):
        return F.dropout(super().rows(rows, ends, ids), 0.5, training=True)


class MixesRows(Sorted):
    def rows(self, rows, ends, ids):
        return super().rows(rows, ends, ids).cumsum(0)


class OtherExperts(Sorted):
    """The ends count other rows than those that are sorted."""

    def experts(self, x, ids, weights):
        self.others = (EXPERTS - 1 - ids).reshape(-1)
        return super().experts(x, ids, weights)

    def ends(self, ids):
        return super().ends(self.others)


class SortsTwice(Sorted):
    """The order of what is sorted already."""

    def order(self, ids):
        return torch.sort(torch.sort(ids)[0])


class Descending(Sorted):
    def order(self, ids):
        return torch.sort(ids, descending=True)


class WeightedAndNot(WeightedBefore):
    """Reads its rows without their weights, too."""

    def beside(self, rows):
        self.given = rows
        return rows

    def rows(self, rows, ends, ids):
        return super().rows(rows, ends, ids) + self.given


class RoundedBefore(WeightedBefore):
    """Rounds its rows before they are weighted."""

    wide = torch.float32


@pytest.mark.parametrize(
    "idiom", [WeightedAndNot, RoundedBefore, ReadsRows, DropsRows, MixesRows, OtherExperts, SortsTwice, Descending]
)
def test_what_is_not_recognised_stays_as_it_is(idiom):
    _, targets = captured(idiom().double(), torch.randn(TOKENS, WIDTH, dtype=torch.float64))
    assert dispatch not in targets
    assert combine not in targets


class Counts(Sorted):
    """Returns the load of the experts, too."""

    def experts(self, x, ids, weights):
        load = F.one_hot(ids.reshape(-1), EXPERTS).sum(0)
        return super().experts(x, ids, weights), load


def test_statistics_of_the_experts_may_be_read_beside_it():
    torch.manual_seed(0)
    model, x = Counts().double(), torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    graph, targets = captured(model, x)
    assert targets.count(dispatch) == 1
    found, load = graph.module(*[x if port.name == "x" else model.get_parameter(port.name) for port in graph.inputs])
    torch.testing.assert_close(found, model.reference(x), rtol=1e-12, atol=1e-12)
    assert load.sum() == 2 * TOKENS


def test_flat_numbers_of_tokens_are_no_experts():
    table, ids = torch.randn(EXPERTS, WIDTH), torch.zeros(3, 2, dtype=torch.int64)
    graph = capture(lambda table, ids: table[ids.reshape(-1)], (table, ids), {})
    assert dispatch not in [node.target for node in graph.nodes]
