"""Operators that are captured as those which PyTorch writes them with."""

import pytest
import torch

from partway.propagation.capture import capture
from partway.propagation.graph import operator_name
from partway.propagation.rules import RULES
from partway.propagation.written_out import WRITTEN_OUT, written_out
from partway.strategy.errors import CaptureError

aten = torch.ops.aten
X = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)


def test_each_is_known_to_torch_and_has_no_row():
    assert set(written_out()) >= WRITTEN_OUT
    assert not set(written_out()) & set(RULES)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.outer(x[0], x[1]),
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
