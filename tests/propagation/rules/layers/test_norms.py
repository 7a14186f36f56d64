"""Norms with statistics of each sample: as PyTorch computes them, in every split, and by PyTorch's operators where
nothing is split that they need."""

import copy

import pytest
import torch
import torch.nn.functional as F
from norm_tensors import EPS, drawn, placed, vectors
from torch import nn

import partway as pw
from partway.fusion import FusionPolicies
from partway.fusion.fuse import fuse_program
from partway.propagation.capture.capture import capture
from partway.propagation.graph.graph import differentiated
from partway.propagation.graph.port import Role
from partway.propagation.ops import batch_norm
from partway.propagation.ops.batch_norm import (
    moments_backward,
    normalise,
    sample_moments,
    scale,
    spread,
    statistics,
    vector_gradients,
)
from partway.propagation.problem.formulate import formulate
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Mesh
from partway.strategy.placement import Kind, kind

aten = torch.ops.aten
SHAPES = [(3, 4, 6), (3, 4, 2, 5), (2, 4, 2, 3, 2)]


def composed(x, weight, bias, shift=None):
    """InstanceNorm of `x`, of the operators by themselves."""
    mean, var = statistics(sample_moments(x, shift), shift, x[0, 0].numel(), batch_norm.wide(x.dtype))
    return normalise(x, mean, var, weight, bias, EPS)


def slopes(result, *leaves):
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
    return torch.autograd.grad(result, leaves, upstream)


# -- by themselves


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("affine", [True, False])
def test_together_they_are_instance_norm(shape, mean, affine):
    x = drawn(*shape, mean=mean).requires_grad_()
    weight, bias = vectors(shape[1]) if affine else (None, None)
    leaves = [x, weight, bias] if affine else [x]
    found = composed(x, weight, bias, x.detach().flatten(2).mean(2))
    expected = F.instance_norm(x, None, None, weight, bias, True, 0.1, EPS)
    for a, b in zip([found, *slopes(found, *leaves)], [expected, *slopes(expected, *leaves)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_moments_of_samples_are_sums_about_the_shift():
    x, shift = drawn(4, 3, 5, mean=2.0), torch.arange(12, dtype=torch.float64).view(4, 3)
    away = x - shift.unsqueeze(2)
    torch.testing.assert_close(sample_moments(x, shift), torch.stack((away.sum(2), away.square().sum(2))))
    torch.testing.assert_close(sample_moments(x, None), torch.stack((x.sum(2), x.square().sum(2))))
    assert sample_moments(x.bfloat16(), None).dtype is torch.float64
    same = statistics(sample_moments(torch.full((2, 3, 7), 1e3 / 3), None), None, 7, torch.float32)
    assert ((same[1] >= 0) & (same[1] < 1e-6)).all()


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3])
@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_single_precision_is_as_exact_as_pytorchs(mean, last):
    x = drawn(2, 4, 64, 96, mean=mean, dtype=torch.float32).contiguous(memory_format=last).requires_grad_()
    weight, bias = vectors(4, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]

    def pytorch(x, weight, bias):
        return F.group_norm(x, 4, weight, bias, EPS)

    def found(norm, leaves):
        y = norm(*leaves)
        return [y, *slopes(y, *leaves)]

    truth = found(pytorch, exact)

    def error(norm):
        got = found(norm, (x, weight, bias))
        return [(a.double() - b).norm() / b.norm() for a, b in zip(got, truth, strict=True)]

    for ours, theirs in zip(error(composed), error(pytorch), strict=True):
        assert ours <= 3 * theirs + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_vectors", [torch.float32, None])
def test_low_precision_is_computed_in_float32_and_cast_back(dtype, of_vectors):
    x = drawn(3, 4, 6, 6, mean=1.0, dtype=dtype).requires_grad_()
    leaves = [x, *(v.detach().to(of_vectors or dtype).requires_grad_() for v in vectors(4))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found, expected = composed(*leaves), F.instance_norm(exact[0], None, None, *exact[1:], True, 0.1, EPS)
    for a, b, like in zip(
        [found, *slopes(found, *leaves)], [expected, *slopes(expected, *exact)], [x, *leaves], strict=True
    ):
        assert a.dtype == like.dtype
        assert (a.double() - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (2, 3, 2, 5, 2)])
def test_samples_lie_as_they_lay(shape):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    x = drawn(*shape)
    weight, bias = vectors(3)
    for given in (x.contiguous(memory_format=last), x.transpose(2, 3), x[:, :, ::2], x[:, :, :1].expand(x.shape)):
        given = given.detach().requires_grad_()
        found, expected = composed(given, weight, bias), F.instance_norm(given, None, None, weight, bias)
        kept = last if given.is_contiguous(memory_format=last) else torch.contiguous_format
        assert found.is_contiguous(memory_format=kept)
        for a, b in zip(slopes(found, given, weight), slopes(expected, given, weight), strict=True):
            torch.testing.assert_close(a, b)
        (of_sum,) = torch.autograd.grad(composed(given, weight, bias).sum(), given)  # of a gradient that is expanded
        torch.testing.assert_close(of_sum, torch.zeros_like(of_sum))


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_their_results_are_as_they_say_beforehand(dtype, last):
    x = drawn(2, 3, 4, 4, dtype=dtype).contiguous(memory_format=last)
    weight, _ = (v.detach() for v in vectors(3, batch_norm.wide(dtype)))
    each = torch.stack((weight, weight * 2))
    found = sample_moments(x, None)
    calls = [
        (sample_moments, (x, None)),
        (moments_backward, (found, x, None)),
        (statistics, (found, None, 16, torch.float32)),
        (normalise, (x, each, each.square(), weight, None, EPS)),
        (scale, (x, each.square(), weight, EPS)),
        (vector_gradients, (x, x, each, each.square(), weight, EPS)),
        (spread, (x, each.square(), weight, EPS, found, x, None)),
    ]
    for target, arguments in calls:
        torch.library.opcheck(target, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_two_gradients_of_samples_in_one_pass(dtype):
    x, y = drawn(2, 3, 5, dtype=dtype), drawn(2, 3, 5, mean=1.0, dtype=dtype)
    weight, _ = (v.detach() for v in vectors(3, batch_norm.wide(dtype)))
    var, found = torch.stack((weight, weight * 3)), sample_moments(x, None)
    both = scale(y, var, weight, EPS) + moments_backward(found, x, None)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(spread(y, var, weight, EPS, found, x, None), both, rtol=rounding, atol=rounding)


# -- in every split


def moved(module):
    """`module` in float64, with parameters and running statistics that have moved already."""
    module = module.double()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape))
    return module


def split_by(lab, fn, x, layout):
    """The problem and the optimum with x and the result in `layout`, where what is split stays split."""
    return split(lab, capture(fn, (x,), {}), layout)


def split(lab, graph, layout):
    name = next(port.name for port in graph.inputs if port.role is Role.INPUT)
    allowed = {name: ((layout,), "by hand"), "result": ((layout,), "by hand")}
    settings = lab.settings_of(layout.mesh, stay_split=True, on_unknown_op="error")
    problem = formulate(graph, settings, allowed)
    return problem, dynamic_programming(problem).choice


def targets_of(problem, choice):
    return {node.target for node in lower(problem, choice).lowered.graph.nodes}


def gathered(problem, choice):
    """How many elements a rank has of each tensor that a program gathers or exchanges in its forward."""
    moving = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
    return [c.whole_bytes // 8 for c in lower(problem, choice).conversions if kind(c.source, c.target) in moving]


def check(lab, fn, x, problem, choice, message):
    """The program of `choice` computes what `fn` does: result, gradients and running statistics."""
    tensors, real = lab.call_tensors(problem, fn, (x,)), copy.deepcopy(fn)
    outputs = lab.compiled(problem, choice)(tensors)
    results = {port.name: out for port, out in zip(problem.graph.outputs, outputs, strict=True)}
    found = lab.value_and_gradients([results.pop("result")], [t for t in tensors if t.requires_grad])
    ports = [port for port in problem.graph.inputs if port.requires_grad]
    leaves = [x if port.role is Role.INPUT else real.get_parameter(port.name) for port in ports]
    lab.assert_same(found, lab.value_and_gradients([real(x)], leaves), message)
    moving = {name for name, b in fn.named_buffers() if not torch.equal(b, real.get_buffer(name))}
    assert set(results) == moving
    for name, out in results.items():
        lab.assert_same([out], [real.get_buffer(name)], f"{message}: {name}")


NORMS = {
    "group": lambda: nn.GroupNorm(4, 8),
    "group of one": lambda: nn.GroupNorm(1, 8),
    "group without affine": lambda: nn.GroupNorm(2, 8, affine=False, eps=0.1),
    "instance": lambda: nn.InstanceNorm2d(8),
    "instance with affine": lambda: nn.InstanceNorm2d(8, affine=True, eps=0.1),
    "instance with running statistics": lambda: nn.InstanceNorm2d(8, track_running_stats=True, momentum=0.3),
    "instance with all": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "instance that does not move": lambda: nn.InstanceNorm2d(8, track_running_stats=True, momentum=None),
    "instance in evaluation": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True).eval(),
    "layer of images": lambda: nn.LayerNorm([8, 4, 4]),
    "layer of planes": lambda: nn.LayerNorm([4, 4], bias=False),
    "layer without affine": lambda: nn.LayerNorm([8, 4, 4], elementwise_affine=False),
    "layer of all": lambda: nn.LayerNorm([4, 8, 4, 4]),
    "rms of images": lambda: nn.RMSNorm([8, 4, 4]),
    "rms of planes": lambda: nn.RMSNorm([4, 4], eps=0.1, elementwise_affine=False),
}
OFTEN = [({"a": 4}, {"a": 3}), ({"a": 2, "b": 2}, {"a": 1, "b": 2})]
ALL = [
    *OFTEN,
    ({"a": 2}, {"a": 0}),
    ({"a": 4}, {"a": 1}),
    ({"a": 2, "b": 2}, {"a": 2, "b": 3}),
    ({"a": 2, "b": 2}, {"a": 0, "b": 3}),
]


@pytest.mark.parametrize("name", NORMS)
def test_split_they_are_those_of_one_device(lab, name):
    fn, x = moved(NORMS[name]()), drawn(4, 8, 4, 4, mean=3.0).requires_grad_()
    graph = capture(fn, (x,), {})
    for sizes, splits in ALL if name in ("group", "instance with all", "layer of images") else OFTEN:
        problem, choice = split(lab, graph, placed(Mesh(sizes), splits))
        check(lab, fn, x, problem, choice, f"{name} by {splits}")
        # channels of one group on several ranks: small vectors are gathered
        assert max(gathered(problem, choice), default=0) <= (2 * 4 * 8 if 1 in splits.values() else 0)


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("shape", [(2, 8, 4), (2, 8, 4, 2, 2)])
def test_any_number_of_image_dims(lab, shape, mean):
    fn, x = moved(nn.GroupNorm(2, 8)), drawn(*shape, mean=mean).requires_grad_()
    graph = capture(fn, (x,), {})
    for dim in range(len(shape)):
        problem, choice = split(lab, graph, placed(lab.LINE, {"x": dim}))
        check(lab, fn, x, problem, choice, f"dim {dim} of {shape}")


def test_a_layer_norm_after_several_dims(lab):
    for shape in ((2, 2, 3, 4, 2), (2, 1, 2, 3, 4, 2)):
        fn, x = moved(nn.LayerNorm([4, 2])), drawn(*shape).requires_grad_()
        problem, choice = split_by(lab, fn, x, placed(lab.LINE, {"x": len(shape) - 2}))
        check(lab, fn, x, problem, choice, str(shape))


@pytest.mark.parametrize("name", ["group", "group of one", "instance with affine", "layer of images"])
def test_where_no_group_is_split_pytorchs_operator_runs(lab, name):
    fn, x = moved(NORMS[name]()), drawn(4, 8, 4, 4).requires_grad_()
    graph = capture(fn, (x,), {})
    for splits in ({}, {"x": 0}, {"x": 1}):
        problem, choice = split(lab, graph, placed(lab.LINE, splits))
        targets = targets_of(problem, choice)
        whole = 1 not in splits.values() or name in ("group", "instance with affine")
        assert (aten.group_norm.default in targets) == whole
        assert (sample_moments in targets) != whole
        check(lab, fn, x, problem, choice, name)


@pytest.mark.parametrize(
    ("dtype", "of_weight", "whole"),
    [(torch.bfloat16, torch.bfloat16, True), (torch.bfloat16, torch.float32, True), (torch.float16, None, True)],
)
def test_low_precision_runs_pytorchs_operator_too(lab, dtype, of_weight, whole):
    weight = None if of_weight is None else torch.linspace(0.5, 1, 4, dtype=of_weight).requires_grad_()
    x = drawn(2, 4, 6, 6, dtype=dtype).requires_grad_()
    args = (x,) if weight is None else (x, weight)

    def fn(x, w=None):
        return F.group_norm(x, 2, w)

    problem = lab.problem_of(fn, args, lab.LINE)
    solution = dynamic_programming(problem)
    assert (aten.group_norm.default in targets_of(problem, solution.choice)) == whole
    (found,) = lab.compiled(problem, solution.choice)(list(args))
    torch.testing.assert_close(found, fn(*args))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("group", torch.bfloat16),
        ("instance with all", torch.bfloat16),
        ("layer of images", torch.float16),
        ("rms of images", torch.bfloat16),
    ],
)
def test_parts_of_images_in_low_precision(lab, name, dtype):
    fn, x = NORMS[name]().to(dtype), drawn(4, 8, 4, 4, mean=2.0, dtype=dtype).requires_grad_()
    problem, choice = split_by(lab, fn, x, placed(Mesh({"a": 4}), {"a": 3}))
    outputs = lab.compiled(problem, choice)(lab.call_tensors(problem, fn, (x,)))
    exact = copy.deepcopy(fn).double()
    results = {port.name: out for port, out in zip(problem.graph.outputs, outputs, strict=True)}
    result = exact(x.double())
    for port, out in results.items():
        expected = result if port == "result" else exact.get_buffer(port)
        assert out.dtype == dtype
        assert (out.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_split_image_costs_one_allreduce_forward_and_one_backward(lab, dtype):
    """Besides those of weight and bias, whose gradients are parameters' gradients; in float64 two forward."""
    fn, x = nn.GroupNorm(2, 4).to(dtype), drawn(2, 4, 8, 16, dtype=dtype).requires_grad_()
    problem, choice = split_by(lab, fn, x, placed(Mesh({"a": 4}), {"a": 3}))
    step = differentiate(lower(problem, choice), differentiated(problem.graph))
    program = fuse_program(step, FusionPolicies())
    kinds = {p: [c.kind for c in program.collectives if c.phase == p] for p in ("forward", "backward")}
    assert kinds["forward"] == [Kind.ALL_REDUCE] * (2 if dtype is torch.float64 else 1)
    assert set(kinds["backward"]) == {Kind.ALL_REDUCE}
    sent = [c.payload_bytes for c in program.collectives if len(c.members) == 1]
    assert max(sent) <= 2 * 2 * 4 * 8
    targets = [node.target for node in step.backward.graph.nodes]
    assert targets.count(spread) == 1
    assert not {scale, moments_backward} & set(targets)


# -- what torch.export does not see


class Twice(nn.Module):
    """Running statistics that move twice, and are read in between."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x):
        y = self.norm(x) * self.norm.running_mean.clone().view(-1, 1)
        return self.norm(2 * y + self.norm.running_var.clone().view(-1, 1))


def test_running_statistics_move_where_they_are_used(lab):
    fn, x = moved(Twice()), drawn(2, 4, 6).requires_grad_()
    problem, choice = split_by(lab, fn, x, placed(lab.LINE, {"x": 2}))
    check(lab, fn, x, problem, choice, "twice")


class Written(nn.Module):
    """Running statistics that the module itself writes to as well."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x):
        self.norm.running_mean.mul_(0.5)
        y = self.norm(x)
        self.norm.running_var.add_(1.0)
        return y


def test_running_statistics_that_something_else_writes_to(lab):
    fn, x = moved(Written()), drawn(2, 4, 6).requires_grad_()
    problem, choice = split_by(lab, fn, x, placed(lab.LINE, {"x": 2}))
    check(lab, fn, x, problem, choice, "written")


def test_running_statistics_that_are_arguments_are_updated():
    def fn(x, mean, var):
        return F.instance_norm(x, mean, var)

    graph = capture(fn, (drawn(2, 4, 6), torch.zeros(4).double(), torch.ones(4).double()), {})
    assert [port.name for port in graph.outputs if port.role is Role.INPUT_UPDATE] == ["mean", "var"]


def test_native_group_norm_returns_its_statistics(lab):
    def fn(x, w):
        return torch.native_group_norm(x, w, None, 2, 4, 6, 2, EPS)

    x, w = drawn(2, 4, 2, 3).requires_grad_(), torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()
    graph = capture(fn, (x, w), {})
    problem, _ = lab.check_optimum(graph, fn, (x, w), lab.LINE)
    assert lab.vertices_of(problem, sample_moments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_rms_norm_without_eps_has_pytorchs(lab, dtype):
    x = 1e-7 * drawn(2, 4, 6, dtype=dtype)
    graph = capture(lambda x: F.rms_norm(x, (4, 6)), (x,), {})
    (found,) = torch.fx.Interpreter(graph.module).run(x)
    torch.testing.assert_close(found, F.rms_norm(x, (4, 6)))


SIZES = (5, 64, 64), (64, 64), (64, 64)  # five of the batch on four devices
ROWS = "x", None, None


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w, b, eps: F.layer_norm(x, (64, 64), w, b, eps),
        lambda x, w, b, eps: F.layer_norm(x, (64,), w[0], b[0], eps),
        lambda x, w, b, eps: F.rms_norm(x, (64, 64), w, eps) + b,
        lambda x, w, b, eps: F.group_norm(x, 4, w[0], b[0], eps),
    ],
    ids=["layer of images", "layer", "rms", "group"],
)
def test_padding_has_no_variance_and_spoils_no_gradient(norm, eps):
    draws = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(size, dtype=torch.float64, generator=draws).requires_grad_() for size in SIZES)
    split = pw.shard(
        lambda *given: norm(*given, eps), mesh={"x": 4}, in_strategy=(ROWS, None, None), out_strategy=(ROWS,)
    )
    results = split(x, w, b), norm(x, w, b, eps)
    found, expected = (torch.autograd.grad(y.square().sum(), (x, w, b)) for y in results)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
