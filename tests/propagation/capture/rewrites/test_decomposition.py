"""Operators that are captured as those which PyTorch writes them with."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from partway.propagation.capture.capture import capture
from partway.propagation.capture.rewrites import decomposition as module
from partway.propagation.capture.rewrites.decomposition import WRITTEN_OUT, write_out, written_out
from partway.propagation.graph.nodes import operator_name
from partway.propagation.rules.table import ROWS
from partway.strategy.errors import CaptureError

aten = torch.ops.aten
X = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)


def test_each_is_known_to_torch_and_has_no_row():
    assert set(written_out()) >= WRITTEN_OUT
    assert not set(written_out()) & set(ROWS)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.outer(x[0], x[1]),
        lambda x: F.affine_grid(x[:3].view(2, 2, 3), [2, 1, 4, 6], align_corners=False),
        lambda x: torch.cosine_similarity(x, x + 1),
        lambda x: aten.expand_copy(x[0], [2, 4]),
        lambda x: aten.unbind_copy(x)[1],
        lambda x: torch.dist(x, 2 * x, 3.0),
        lambda x: x.repeat(2, 1, 3),
        lambda x: x.t()[None].repeat(3, 1, 1).view(-1),
        lambda x: x.rot90(1, (0, 1)),
        lambda x: [part * 2 for part in x.unsafe_split(3, 1)],
    ],
)
def test_a_written_out_operator_gives_the_same_numbers_by_operators_with_rules(fn, lab):
    graph = capture(fn, (X,), {})
    names = {operator_name(node) for node in graph.nodes}
    assert not names & {str(target) for target in written_out()}
    lab.check_optimum(graph, fn, (X,), lab.LINE)


def test_results_inside_results_are_refused_by_name():
    with pytest.raises(CaptureError, match=r"aten\.histogramdd.* gives lists of tensors among its results"):
        capture(lambda x: torch.histogramdd(x, [2, 2, 2, 2]), (X.detach().float(),), {})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(x.reshape(1, 4, 4).flatten(0, 1)).relu_()
        x += F.dropout(self.linear(x), 0.5, False).chunk(2)[0].repeat_interleave(2, 0).to(torch.float64)
        with torch.no_grad():
            largest = x.contiguous().view_as(x).amax()
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x.float(), self.linear.weight.float())
        q = y.unflatten(1, (2, 2)).transpose(0, 1).expand(2, 4, 2)
        out = F.scaled_dot_product_attention(q, q, q).movedim(0, 1).where(x.narrow(1, 0, 2)[:, None] > 0, 0.0)
        return out.std() + largest, torch.cond(x.sum() > 0, torch.sin, lambda x: x.square().softmax(0).clone(), (x,))


class Written(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def of(module, signature):
    graphs = [str(part.graph) for part in module.modules() if isinstance(part, fx.GraphModule)]
    return graphs, str(signature)


@pytest.mark.filterwarnings("ignore")  # of torch.export about itself
@pytest.mark.parametrize(
    ("model", "short"),
    [
        (Model().double(), True),
        (Written(lambda x: x.repeat(2, 1)), True),
        (
            Written(lambda x: torch.where(x > 0, 1.0, x) + torch.where(x > 1, x, 1.0) + torch.where(x > 1, 2.0, 1.0)),
            True,
        ),
        (Written(lambda x: x.clone().fill_(2.0) * x.new_empty(4).zero_() + x.clone().fill_(x.sum())), True),
        (Written(lambda x: torch.rsub(x, x).masked_fill(x > 0, torch.tensor(2.0))), True),
        (Written(lambda x: x.clone().square_()), False),
        (Written(lambda x: x.diff(dim=0, prepend=x[:1]) * (x > 0).diff(2, dim=0)[:1, :1]), True),
        (Written(lambda x: torch.meshgrid(x[0], x[1], indexing="xy")[0] + x), True),
        (Written(lambda x: torch.cosine_similarity(x, x + 1)), False),
        (Written(lambda x: x.clone().renorm_(2, 0, 1.0)), False),
    ],
    ids=["model", "repeat", "where", "fill_", "rsub", "square_", "diff", "meshgrid", "similarity", "renorm_"],
)
def test_the_short_way_is_taken_where_it_gives_the_program_of_run_decompositions(model, short, monkeypatch):
    calls = []
    decompose = module.decompose
    monkeypatch.setattr(module, "decompose", lambda *args: calls.append(args) or decompose(*args))
    exported = torch.export.export(model, (X.detach(),), strict=False)
    whole = exported.run_decompositions(written_out())
    assert of(*write_out(exported)) == of(whole.graph_module, whole.graph_signature)
    assert bool(calls) == short
