"""Adaptive pools by what they are made of: values and gradients as PyTorch's, in every split."""

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.capture.capture import capture
from partway.propagation.problem.formulate import formulate
from partway.propagation.program.lower import lower
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Layout, Mesh, Replicate, Shard
from partway.strategy.placement import Kind, kind

aten = torch.ops.aten
LINE = Mesh({"a": 4})


def drawn(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def targets(graph):
    return {node.target for node in graph.nodes}


def evaluated(lab, graph, x):
    (y,) = torch.fx.Interpreter(graph.module).run(x)
    return lab.value_and_gradients([y], [x])


@pytest.mark.parametrize(
    ("shape", "places", "parts"),
    [
        ((2, 12), 1, {aten.sum.dim_IntList}),
        ((2, 3, 12), 4, {aten.avg_pool1d.default}),
        ((2, 3, 12), 12, set()),
        ((2, 3, 12), 5, {aten.einsum.default}),
        ((2, 3, 5), 12, {aten.einsum.default}),
        ((2, 3, 4, 12), 1, {aten.sum.dim_IntList}),
        ((2, 3, 4, 12), (1, None), {aten.sum.dim_IntList}),
        ((2, 3, 4, 12), (1, 7), {aten.sum.dim_IntList, aten.einsum.default}),
        ((2, 3, 4, 12), (2, 3), {aten.avg_pool2d.default}),
        ((3, 7, 9), (3, 3), {aten.avg_pool2d.default, aten.einsum.default}),
        ((2, 3, 4, 4, 6), 1, {aten.sum.dim_IntList}),
        ((2, 3, 4, 5, 6), (2, 3, 1), {aten.sum.dim_IntList, aten.avg_pool3d.default, aten.einsum.default}),
        ((2, 3, 4, 5, 6), 7, {aten.einsum.default}),
    ],
)
def test_an_average_is_made_of_sums_pools_and_products(lab, shape, places, parts):
    count = 1 if shape in ((2, 12), (2, 3, 12), (2, 3, 5)) else 2 if len(shape) < 5 else 3
    pool = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[count]
    x = drawn(*shape)
    graph = capture(lambda x: pool(x, places), (x,), {})
    lab.assert_same(evaluated(lab, graph, x), lab.value_and_gradients([pool(x, places)], [x]))
    kinds = {aten.einsum.default, aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default}
    assert targets(graph) & kinds == parts & kinds
    assert (aten.sum.dim_IntList in targets(graph)) == (aten.sum.dim_IntList in parts or aten.einsum.default in parts)


def test_a_private_pool_is_the_public_one(lab):
    for shape, pool in (((2, 3, 4, 6), aten._adaptive_avg_pool2d), ((2, 3, 4, 6, 5), aten._adaptive_avg_pool3d)):
        x, places = drawn(*shape), [1, 5, 2][: len(shape) - 2]
        graph = capture(lambda x, pool=pool, places=places: pool(x, places), (x,), {})
        lab.assert_same(evaluated(lab, graph, x), lab.value_and_gradients([pool(x, places)], [x]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_windows_of_several_sizes_in_low_precision(dtype):
    x = drawn(2, 3, 11, 13, dtype=dtype)
    graph = capture(lambda x: F.adaptive_avg_pool2d(x, (5, 3)), (x,), {})
    (found,) = torch.fx.Interpreter(graph.module).run(x)
    assert found.dtype == dtype
    expected = F.adaptive_avg_pool2d(x.double(), (5, 3))
    assert (found.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("places", [1, (1, None), (None, 1), (1, 7), (7, 5), (3, 1)])
def test_a_split_map_is_never_gathered(lab, places):
    x = drawn(2, 3, 6, 32)
    graph = capture(lambda x: F.adaptive_avg_pool2d(x, places), (x,), {})
    expected = lab.value_and_gradients([F.adaptive_avg_pool2d(x, places)], [x])
    allowed = {"x": ((Layout(LINE, (Shard(3),)),), "by hand")}
    problem = formulate(graph, lab.settings_of(LINE, stay_split=True, on_unknown_op="error"), allowed)
    choice = dynamic_programming(problem).choice
    lab.check_choice(problem, choice, None, (x,), expected, str(places))
    moving = {Kind.ALL_GATHER, Kind.ALL_TO_ALL}
    sent = [c for c in lower(problem, choice).conversions if kind(c.source, c.target) in moving]
    assert all(c.where == "output result" for c in sent)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_dim_of_a_volume_splits(lab, dim):
    x, places = drawn(4, 4, 4, 5, 6), (3, 2, 1)
    graph = capture(lambda x: F.adaptive_avg_pool3d(x, places), (x,), {})
    layout = Layout(Mesh({"a": 2}), (Shard(dim),))
    lab.check_optimum(graph, lambda x: F.adaptive_avg_pool3d(x, places), (x,), layout.mesh, {"x": ((layout,), "")})


# -- maxima


@pytest.mark.parametrize(
    ("shape", "places", "plain"),
    [
        ((2, 3, 12), 4, aten.max_pool1d.default),
        ((2, 3, 12), 5, None),
        ((2, 3, 12), 1, None),
        ((2, 3, 4, 12), (2, 3), aten.max_pool2d.default),
        ((2, 3, 4, 12), (1, 4), aten.max_pool2d.default),
        ((2, 3, 4, 12), (3, 4), None),
        ((2, 3, 4, 4, 6), (2, 2, None), aten.max_pool3d.default),
    ],
)
def test_a_maximum_is_a_plain_pool_where_places_divide_the_dims(lab, shape, places, plain):
    """The first of equal elements gets the gradient."""
    pool = {3: F.adaptive_max_pool1d, 4: F.adaptive_max_pool2d, 5: F.adaptive_max_pool3d}[len(shape)]
    x = drawn(*shape).detach().mul(2).round().requires_grad_()
    graph = capture(lambda x: pool(x, places), (x,), {})
    lab.assert_same(evaluated(lab, graph, x), lab.value_and_gradients([pool(x, places)], [x]))
    kinds = {aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default}
    assert targets(graph) & kinds == ({plain} if plain else set())


def test_a_maximum_that_says_where_it_is_stays(lab):
    def fn(x):
        return F.adaptive_max_pool2d(x, 2, return_indices=True)

    x = drawn(2, 3, 4, 4)
    graph = capture(fn, (x,), {})
    assert aten.adaptive_max_pool2d.default in targets(graph)
    lab.check_optimum(graph, fn, (x,), LINE, {"x": ((Layout(LINE, (Replicate(),)),), "by hand")})
