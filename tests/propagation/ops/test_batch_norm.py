"""The operators that BatchNorm is made of: by themselves, and together in every split."""

import copy
import operator

import numpy
import pytest
import torch
import torch.nn.functional as F
from norm_tensors import EPS, drawn, placed, vectors
from torch import fx, nn

from partway.fusion import FusionPolicies
from partway.fusion.fuse import fuse_program
from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.graph.graph import differentiated
from partway.propagation.ops import batch_norm
from partway.propagation.ops.batch_norm import (
    merge_gradients,
    moments,
    moments_backward,
    normalise,
    part_norm,
    part_norm_backward,
    sample_moments,
    scale,
    spread,
    statistics,
    vector_gradients,
)
from partway.propagation.ops.collectives import convert, kind_of
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.search.exact import dynamic_programming
from partway.runtime.code.assemble import assemble_code
from partway.strategy import Mesh, StrategyError
from partway.strategy.placement import Kind

aten = torch.ops.aten
SHAPES = [(6, 4), (4, 4, 6), (4, 4, 2, 2), (2, 4, 2, 2, 2)]


def composed(x, weight, bias, shift=None):
    """BatchNorm of the batch `x`."""
    count = x.numel() // x.shape[1]
    mean, var = statistics(moments(x, shift), shift, count, batch_norm.wide(x.dtype))
    return normalise(x, mean, var, weight, bias, EPS)


def slopes(result, *leaves):
    upstream = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    return torch.autograd.grad(result, leaves, upstream)


# -- by themselves


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("affine", [True, False])
def test_together_they_are_batch_norm(shape, mean, affine):
    x = drawn(*shape, mean=mean).requires_grad_()
    weight, bias = vectors(shape[1]) if affine else (None, None)
    leaves = [x, weight, bias] if affine else [x]
    shift = x.detach().mean([0, *range(2, len(shape))])
    found = composed(x, weight, bias, shift)
    expected = F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)
    for a, b in zip([found, *slopes(found, *leaves)], [expected, *slopes(expected, *leaves)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_moments_are_sums_about_the_shift():
    x, shift = drawn(4, 3, 5, mean=2.0), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    away = x - shift.view(1, -1, 1)
    torch.testing.assert_close(moments(x, shift), torch.stack((away.sum((0, 2)), away.square().sum((0, 2)))))
    torch.testing.assert_close(moments(x, None), torch.stack((x.sum((0, 2)), x.square().sum((0, 2)))))
    assert moments(x.bfloat16(), None).dtype is torch.float64


def test_padding_rounds_nothing() -> None:
    """A short slice is padded with the shift: thousands of equal numbers."""
    torch.manual_seed(0)
    x = torch.randn(9, 3, 128, 128, dtype=torch.float64) - 0.4
    shift = x.mean((0, 2, 3))
    parts = [*x.split(5)]
    parts[1] = torch.cat([parts[1], shift.view(1, 3, 1, 1).expand(1, 3, 128, 128)])
    _, var = statistics(sum(moments(part, shift) for part in parts), shift, 9 * 128 * 128, x.dtype)
    exact = x.numpy().astype(numpy.longdouble).var((0, 2, 3)).astype(numpy.float64)
    torch.testing.assert_close(var, torch.from_numpy(exact), rtol=1e-15, atol=0)


def test_statistics_do_not_depend_on_the_shift_and_a_variance_is_never_negative():
    x, shift = drawn(4, 3, 5, mean=2.0), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = torch.stack((x.mean((0, 2)), x.var((0, 2), correction=0)))
    for about in (None, shift):
        torch.testing.assert_close(statistics(moments(x, about), about, 20, torch.float64), expected)
    assert statistics(moments(x, None), None, 20, torch.float32).dtype is torch.float32
    same = statistics(moments(torch.full((7, 1), 1e3 / 3), None), None, 7, torch.float32)
    assert 0 <= same[1].item() < 1e-6


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3])
def test_single_precision_is_as_exact_as_pytorchs(mean):
    x = drawn(8, 4, 28, 28, mean=mean, dtype=torch.float32).requires_grad_()
    weight, bias = vectors(4, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]

    def pytorch(x, weight, bias):
        return F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)

    def found(batch_norm_of, leaves):
        y = batch_norm_of(*leaves)
        return [y, *slopes(y, *leaves)]

    truth = found(pytorch, exact)

    def error(batch_norm_of):
        return [
            (a.double() - b).norm() / b.norm()
            for a, b in zip(found(batch_norm_of, (x, weight, bias)), truth, strict=True)
        ]

    for ours, theirs in zip(error(composed), error(pytorch), strict=True):
        assert ours <= 3 * theirs + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_vectors", [torch.float32, None])
def test_low_precision_is_computed_in_float32_and_cast_back(dtype, of_vectors):
    x = drawn(8, 4, 6, 6, mean=1.0, dtype=dtype).requires_grad_()
    leaves = [x, *(v.detach().to(of_vectors or dtype).requires_grad_() for v in vectors(4))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found, expected = composed(*leaves), F.batch_norm(exact[0], None, None, *exact[1:], True, 0.1, EPS)
    rounding = torch.finfo(dtype).eps
    for a, b, like in zip(
        [found, *slopes(found, *leaves)], [expected, *slopes(expected, *exact)], [x, *leaves], strict=True
    ):
        assert a.dtype == like.dtype
        assert (a.double() - b).norm() <= 2 * rounding * b.norm()


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (2, 3, 2, 5, 2)])
def test_tensors_lie_as_they_lay(shape):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    x = drawn(*shape)
    weight, bias = vectors(3)
    for given in (x.contiguous(memory_format=last), x.transpose(2, 3), x[:, :, ::2]):
        given = given.detach().requires_grad_()
        found, expected = composed(given, weight, bias), F.batch_norm(given, None, None, weight, bias, True, 0.1, EPS)
        kept = last if given.is_contiguous(memory_format=last) else torch.contiguous_format
        assert found.is_contiguous(memory_format=kept)
        for a, b in zip(slopes(found, given, weight), slopes(expected, given, weight), strict=True):
            torch.testing.assert_close(a, b)
        (of_sum,) = torch.autograd.grad(composed(given, weight, bias).sum(), given)  # of a gradient that is expanded
        torch.testing.assert_close(of_sum, torch.zeros_like(of_sum))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_their_results_are_as_they_say_beforehand(dtype):
    x = drawn(2, 3, 4, 4, dtype=dtype)
    weight, _ = (v.detach() for v in vectors(3, batch_norm.wide(dtype)))
    var = weight.square()
    of_moments = moments(x, None)
    parts = drawn(2, 4, 3, 4, 4, dtype=dtype)
    calls = [
        (moments, (x, None)),
        (moments_backward, (of_moments, x, None)),
        (statistics, (of_moments, None, 32, torch.float32)),
        (batch_norm.statistics_backward, (of_moments, of_moments, 32)),
        (normalise, (x, weight, var, weight, None, EPS)),
        (scale, (x, var, weight, EPS)),
        (vector_gradients, (x, x, weight, var, None, EPS)),
        (spread, (x, var, weight, EPS, of_moments, x, None)),
        (part_norm, (parts, weight, weight, 2, EPS)),
        (part_norm, (parts, None, None, 4, EPS)),
        (part_norm_backward, (parts, parts, weight, *part_norm(parts, weight, None, 2, EPS)[2:], EPS)),
    ]
    for target, arguments in calls:
        torch.library.opcheck(target, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_two_gradients_of_x_in_one_pass(dtype):
    x, y = drawn(4, 3, 5, dtype=dtype), drawn(4, 3, 5, mean=1.0, dtype=dtype)
    weight, _ = (v.detach() for v in vectors(3, batch_norm.wide(dtype)))
    of_moments = moments(x, None)
    both = scale(y, weight.square(), weight, EPS) + moments_backward(of_moments, x, None)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        spread(y, weight.square(), weight, EPS, of_moments, x, None), both, rtol=rounding, atol=rounding
    )


def each_part(x, weight, bias):
    """BatchNorm of every part of `x` by PyTorch."""
    return torch.stack([F.batch_norm(part, None, None, weight, bias, True, 0.1, EPS) for part in x.unbind()])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_parts_are_normalised_each_by_itself(parts, shape, affine):
    x = drawn(parts, *shape, mean=2.0).requires_grad_()
    weight, bias = vectors(shape[1]) if affine else (None, None)
    leaves = [x, weight, bias] if affine else [x]
    y, *found = part_norm(x, weight, bias, 4, EPS)
    expected = each_part(x, weight, bias)
    for a, b in zip([y, *slopes(y, *leaves)], [expected, *slopes(expected, *leaves)], strict=True):
        torch.testing.assert_close(a, b)
    assert not any(t.requires_grad for t in found)
    dims, x = [1, *range(3, x.dim())], x.detach()
    every = torch.stack((x.mean(dims), x.var(dims)))
    for a, b in zip(found, [every.sum(1) / 4, every[0], (x.var(dims, correction=0) + EPS).rsqrt()], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_vectors", [torch.float32, None])
def test_parts_in_low_precision_are_computed_in_float32_and_cast_back(dtype, of_vectors):
    x = drawn(2, 8, 4, 6, 6, mean=1.0, dtype=dtype).requires_grad_()
    leaves = [x, *(v.detach().to(of_vectors or dtype).requires_grad_() for v in vectors(4))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    (y, *found), expected = part_norm(*leaves, 2, EPS), each_part(*exact)
    assert {t.dtype for t in found} == {torch.float32}
    for a, b, like in zip([y, *slopes(y, *leaves)], [expected, *slopes(expected, *exact)], [x, *leaves], strict=True):
        assert a.dtype == like.dtype
        assert (a.double() - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (2, 3, 2, 5, 2)])
def test_parts_lie_as_they_lay(parts, shape):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    x = drawn(parts * shape[0], *shape[1:])
    weight, bias = vectors(3)
    for batch in (x.contiguous(memory_format=last), x.transpose(2, 3), x[:, :, ::2], x[:, :1].expand(x.shape)):
        given = batch.unflatten(0, (parts, -1)).detach().requires_grad_()
        found, expected = part_norm(given, weight, bias, parts, EPS)[0], each_part(given, weight, bias)
        kept = last if given[0].is_contiguous(memory_format=last) else torch.contiguous_format
        assert found.flatten(0, 1).is_contiguous(memory_format=kept)
        for a, b in zip(slopes(found, given, weight), slopes(expected, given, weight), strict=True):
            torch.testing.assert_close(a, b)


def test_gradients_that_something_else_reads_stay_apart():
    def graph(also):
        made = fx.Graph()
        y, var, slope, x = (made.placeholder(name) for name in ("y", "var", "slope", "x"))
        one = made.call_function(scale, (y, var, None, EPS))
        two = made.call_function(moments_backward, (slope, x, None))
        total = made.call_function(aten.add.Tensor, (two, one))
        made.output((total, one) if also else (total,))
        merge_gradients(made)
        return {node.target for node in made.nodes if node.op == "call_function"}

    assert graph(also=False) == {spread}
    assert graph(also=True) == {scale, moments_backward, aten.add.Tensor}


# -- in every split


class Norm(nn.Module):
    """BatchNorm of anything, with statistics that have moved already."""

    def __init__(self, channels, **options):
        super().__init__()
        self.norm = nn.modules.batchnorm._BatchNorm(channels, **options).double()
        self.norm._check_input_dim = lambda x: None
        with torch.no_grad():
            for tensor in (*self.norm.parameters(), *self.norm.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.linspace(0.5, 1.5, channels))

    def forward(self, x):
        return self.norm(x)


def split_by(lab, fn, x, layout, parts=1):
    """The problem and the optimum with x, the result and both operators on x in `layout`: tensors of tests are so
    small that it is cheaper to gather them."""
    allowed = {"x": ((layout,), "by hand"), "result": ((layout,), "by hand")}
    problem = lab.problem_of(fn, (x,), layout.mesh, allowed, batch_norm_parts=parts)
    for vertex in (*lab.vertices_of(problem, moments), *lab.vertices_of(problem, normalise)):
        options = problem.vertices[vertex].options
        problem = lab.choose(problem, vertex, [i for i, option in enumerate(options) if option.operands[0] == layout])
    return problem, dynamic_programming(problem).choice


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ({"a": 2}, {"a": 0}),
        ({"a": 2}, {"a": 1}),
        ({"a": 2}, {"a": 2}),
        ({"a": 4}, {"a": 0}),
        ({"a": 4}, {"a": 1}),
        ({"a": 4}, {"a": 3}),
        ({"a": 2, "b": 2}, {"a": 0, "b": 0}),
        ({"a": 2, "b": 2}, {"a": 0, "b": 1}),
        ({"a": 2, "b": 2}, {"a": 0, "b": 2}),
        ({"a": 2, "b": 2}, {"a": 3, "b": 2}),
    ],
)
def test_split_it_is_that_of_one_device(lab, sizes, splits, mean):
    mesh, fn, x = Mesh(sizes), Norm(4), drawn(4, 4, 4, 4, mean=mean).requires_grad_()
    layout = placed(mesh, splits)
    problem, choice = split_by(lab, fn, x, layout)
    tensors = lab.call_tensors(problem, fn, (x,))
    outputs = lab.compiled(problem, choice)(tensors)
    real = copy.deepcopy(fn)
    results = {port.name: out for port, out in zip(problem.graph.outputs, outputs, strict=True)}
    found = lab.value_and_gradients([results.pop("result")], [t for t in tensors if t.requires_grad])
    names = [port.name for port in problem.graph.inputs if port.requires_grad]
    leaves = [x if name == "x" else real.get_parameter(name) for name in names]
    lab.assert_same(found, lab.value_and_gradients([real(x)], leaves), str(layout))
    for name, out in results.items():
        lab.assert_same([out], [real.get_buffer(name)], name)


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 4}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_split_batch_costs_one_allreduce_forward_and_one_backward(lab, sizes, dtype):
    """Besides those of weight and bias, whose gradients are parameters' gradients; in float64 two forward."""
    mesh, fn, x = Mesh(sizes), Norm(4).to(dtype), drawn(64, 4, 64, dtype=dtype).requires_grad_()
    layout = placed(mesh, dict.fromkeys(sizes, 0))
    problem, choice = split_by(lab, fn, x, layout)
    step = differentiate(lower(problem, choice), differentiated(problem.graph))

    def kinds(module, phase):
        return [c.relayout.kind for c in assemble_code(module, phase).instructions if c.communicates]

    assert kinds(step.forward, "forward") == [Kind.ALL_REDUCE] * (2 if dtype is torch.float64 else 1)
    assert kinds(step.backward, "backward") == [Kind.ALL_REDUCE] * 3
    targets = [node.target for node in step.backward.graph.nodes]
    assert targets.count(spread) == 1
    assert not {scale, moments_backward} & set(targets)


def test_evaluation_only_normalises():
    graph = capture(Norm(4).eval(), (drawn(4, 4, 2),), {})
    assert [node.target for node in graph.nodes] == [normalise]


# -- by parts of the batch, in every split


class ByParts(nn.Module):
    """`Norm` as one device computes it for each part of a batch; running statistics move by what the parts' move."""

    def __init__(self, norm, parts):
        super().__init__()
        self.norm, self.parts = copy.deepcopy(norm), parts

    def forward(self, x):
        norm = self.norm
        tracks, results, moved = norm.track_running_stats, [], []
        for part in x.chunk(self.parts):
            own = (norm.running_mean.clone(), norm.running_var.clone()) if tracks else (None, None)
            results.append(F.batch_norm(part, *own, norm.weight, norm.bias, True, norm.momentum, norm.eps))
            moved.append(own)
        if tracks:
            for buffer, values in zip((norm.running_mean, norm.running_var), zip(*moved, strict=True), strict=True):
                buffer.copy_(torch.stack(values).mean(0))
            norm.num_batches_tracked += 1
        return torch.cat(results)


def check_parts(lab, fn, x, parts, problem, choice, message):
    """The program of `choice` computes what `ByParts` does: result, gradients and running statistics."""
    tensors, real = lab.call_tensors(problem, fn, (x,)), ByParts(fn.norm, parts)
    outputs = lab.compiled(problem, choice)(tensors)
    results = {port.name: out for port, out in zip(problem.graph.outputs, outputs, strict=True)}
    found = lab.value_and_gradients([results.pop("result")], [t for t in tensors if t.requires_grad])
    names = [port.name for port in problem.graph.inputs if port.requires_grad]
    leaves = [x if name == "x" else real.get_parameter(name) for name in names]
    lab.assert_same(found, lab.value_and_gradients([real(x)], leaves), message)
    assert set(results) == {name for name, _ in fn.named_buffers()}
    for name, out in results.items():
        lab.assert_same([out], [real.get_buffer(name)], name)


@pytest.mark.parametrize("parts", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "shape", [(8, 4), *(pytest.param(s, marks=pytest.mark.slow) for s in ((8, 4, 3), (8, 4, 2, 1, 2))), (8, 4, 2, 2)]
)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}]
)
@pytest.mark.parametrize(
    "sizes",
    [*(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({"dp": 2}, {"dp": 4})), {"dp": 2, "tp": 2}],
    ids=str,
)
def test_parts_have_statistics_of_their_own(lab, parts, shape, options, sizes):
    """However the batch is split: in as many ranks as parts, in fewer, and in more."""
    mesh, fn, x = Mesh(sizes), Norm(4, **options), drawn(*shape, mean=1.0).requires_grad_()
    layout = placed(mesh, {"dp": 0})
    problem = lab.problem_of(fn, (x,), mesh, {"x": ((layout,), "by hand")}, batch_norm_parts=parts)
    check_parts(lab, fn, x, parts, problem, dynamic_programming(problem).choice, f"{parts} parts on {mesh}")


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    ("sizes", "splits"),
    [({"a": 2}, {"a": 0}), ({"a": 2}, {"a": 1}), ({"a": 4}, {"a": 1}), ({"a": 2, "b": 2}, {"a": 0, "b": 1}),
     ({"a": 2, "b": 2}, {"a": 1, "b": 1})],
)  # fmt: skip
def test_ranks_hold_parts_and_channels(lab, parts, sizes, splits):
    mesh, fn, x = Mesh(sizes), Norm(4), drawn(8, 4, 2, 2).requires_grad_()
    layout = placed(mesh, splits)
    within = placed(mesh, {axis: 2 * dim for axis, dim in splits.items()})  # of [part, sample, channel, ...]
    problem, _ = split_by(lab, fn, x, layout, parts)
    (vertex,) = lab.vertices_of(problem, part_norm)
    options = problem.vertices[vertex].options
    problem = lab.choose(problem, vertex, [i for i, option in enumerate(options) if option.operands[0] == within])
    check_parts(lab, fn, x, parts, problem, dynamic_programming(problem).choice, str(layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_with_parts_of_their_own_send_only_running_statistics(lab, dtype):
    """Besides the gradients of weight and bias; nothing of them is read before the end."""
    mesh, fn, x = Mesh({"a": 2}), Norm(4).to(dtype), drawn(64, 4, 64, dtype=dtype).requires_grad_()
    problem, choice = split_by(lab, fn, x, placed(mesh, {"a": 0}), parts=2)
    step = differentiate(lower(problem, choice), differentiated(problem.graph))
    program = fuse_program(step, FusionPolicies())
    found = [(c.phase, c.kind, c.payload_bytes) for c in program.collectives]
    size = torch.finfo(dtype).bits // 8
    assert found == [
        ("forward", Kind.ALL_REDUCE, 2 * 4 * size),
        *[("backward", Kind.ALL_REDUCE, 4 * size)] * 2,
    ]
    forward = [node for node in program.forward.graph.nodes if node.op == "call_function"]
    (sent,) = (node for node in forward if node.target is convert and kind_of(*node.args[1:3]) is Kind.ALL_REDUCE)
    read = [node.target for node in forward[forward.index(next(iter(sent.users))) :]]
    assert set(read) <= {aten.detach.default, aten.unbind.int, operator.getitem, aten.lerp.Scalar}


@pytest.mark.parametrize(("parts", "native"), [(2, True), (4, False)])
def test_a_rank_with_one_part_runs_the_norm_of_pytorch(lab, parts, native):
    """And nothing around it but what makes the addends of the running statistics."""
    mesh, fn, x = Mesh({"a": 2}), Norm(4), drawn(64, 4, 64).requires_grad_()
    problem, choice = split_by(lab, fn, x, placed(mesh, {"a": 0}), parts=parts)
    step = differentiate(lower(problem, choice), differentiated(problem.graph))
    forward, backward = ([n.target for n in graph.graph.nodes] for graph in (step.forward, step.backward))
    normal = aten._native_batch_norm_legit_functional.default
    assert (normal in forward, part_norm in forward) == (native, not native)
    assert (aten.native_batch_norm_backward.default in backward) is native
    if native:
        kept = {aten.stack.default, aten.zeros.default, aten.unbind.int, aten.lerp.Scalar, convert, operator.getitem}
        assert {target for target in forward if not isinstance(target, str)} <= {
            normal,
            aten.add.Tensor,
            aten.detach.default,
            *kept,
        }


def test_evaluation_has_no_parts():
    graph = capture(Norm(4).eval(), (drawn(3, 4, 2),), {}, CaptureOptions(batch_norm_parts=2))
    assert [node.target for node in graph.nodes] == [normalise]


def test_what_is_no_batch_norm_has_no_parts():
    """A SyncBatchNorm says itself that its statistics are of the whole batch."""
    for module, target in ((nn.SyncBatchNorm(4), moments), (nn.InstanceNorm1d(4), sample_moments)):
        targets = {
            node.target
            for node in capture(
                nn.Sequential(module), (drawn(4, 4, 2).float(),), {}, CaptureOptions(batch_norm_parts=2)
            ).nodes
        }
        assert {target, part_norm} & targets == {target}


def test_saved_statistics_are_the_means_of_the_parts(lab):
    """As PyTorch's operator returns them, which is no part of a BatchNorm's result."""

    def fn(x):
        return aten._native_batch_norm_legit_functional(x, None, None, zeros, ones, True, 0.1, EPS)[:3]

    zeros, ones, x = torch.zeros(3).double(), torch.ones(3).double(), drawn(8, 3, 2)
    problem = lab.problem_of(fn, (x,), lab.LINE, batch_norm_parts=2)
    found = lab.compiled(problem, dynamic_programming(problem).choice)([zeros, ones, x])
    assert part_norm in {node.target for node in problem.graph.nodes}
    parts = x.unflatten(0, (2, 4))
    y, _, mean, rstd = part_norm(parts, None, None, 2, EPS)
    lab.assert_same(list(found), [y.flatten(0, 1), mean.mean(0), rstd.mean(0)])


@pytest.mark.parametrize(
    ("shape", "parts", "what", "numbers"),
    [
        (
            (6, 4, 2),
            4,
            "does not divide that batch; give a multiple of it (the last batch of an epoch: DataLoader's drop_last)",
            "1, 2, 3 or 6",
        ),
        ((3, 4, 2), 2, "does not divide that batch; give a multiple of it ", "1 or 3"),
        ((6, 4), 6, "leaves one value per channel and part, which has no variance; give a larger batch", "1, 2 or 3"),
    ],
)
def test_a_batch_that_has_no_such_parts_is_an_error(shape, parts, what, numbers):
    for fn, where in ((Norm(4), "norm"), (lambda x: F.batch_norm(x, None, None, training=True), "the function")):
        with pytest.raises(StrategyError) as error:
            capture(fn, (drawn(*shape),), {}, CaptureOptions(batch_norm_parts=parts))
        told = (
            f"the BatchNorm in {where} gets a batch of {shape[0]} (its input is {list(shape)}), and batch_norm_parts="
        )
        assert str(error.value).startswith(f"{told}{parts} {what}")
        assert f", or set batch_norm_parts to {numbers}\n  at test_batch_norm.py:" in str(error.value)
