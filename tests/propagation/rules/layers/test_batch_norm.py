"""The expansion of BatchNorm; its operators are tested in tests/propagation/ops/test_batch_norm.py."""

import copy

import pytest
import torch
from expansions import check, randn, run
from torch import nn

from partway.propagation.capture.capture import capture
from partway.propagation.graph.port import Role
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Layout, Shard

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.3},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1},
        {"track_running_stats": False, "affine": False},
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(lab, shape, options, training):
    made = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, **options).double()
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64) + 0.5)
    made.train(training)
    if made.num_batches_tracked is not None:
        made.num_batches_tracked.fill_(3)
    graph = check(lab, made, randn(*shape), gone=aten._native_batch_norm_legit_functional.default)
    updated = {port.name for port in graph.outputs if port.role is Role.BUFFER_UPDATE}
    tracks = training and options.get("track_running_stats", True)
    assert updated == ({"running_mean", "running_var", "num_batches_tracked"} if tracks else set())


@pytest.mark.parametrize("training", [True, False])
def test_no_gradient_comes_by_the_statistics_that_batch_norm_returns(lab, training):
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def fn(x, w):
        y, saved, inverse = torch.native_batch_norm(x, w, None, mean.clone(), var.clone(), training, 0.1, 1e-5)
        return y.sin(), saved, inverse

    check(lab, fn, randn(4, 3, 2), randn(3))


def test_batch_norm_of_a_split_batch_is_that_of_the_whole_batch(lab):
    made = nn.BatchNorm2d(3).double()
    real = copy.deepcopy(made)
    x = randn(4, 3, 2, 2)
    split = Layout(lab.LINE, (Shard(0),))
    problem = lab.problem_of(made, (x,), lab.LINE, {"input": ((split,), "by hand")})
    choice = dynamic_programming(problem).choice
    outputs = lab.compiled(problem, choice)(lab.call_tensors(problem, made, (x,)))
    expected = real(x)
    for port, out in zip(problem.graph.outputs, outputs, strict=True):
        lab.assert_same([out], [expected if port.role is Role.RESULT else real.get_buffer(port.name)], port.name)


def test_batch_norm_in_half_precision_computes_in_single(lab):
    made = nn.BatchNorm1d(3)
    x = torch.randn(8, 3, dtype=torch.bfloat16)
    graph = capture(made, (x,), {})
    found = run(graph, made, (x,))[Role.RESULT, "result"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, copy.deepcopy(made)(x), rtol=1e-2, atol=1e-2)
