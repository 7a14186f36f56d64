"""Variances, norms and logarithms of sums, by sums: values and gradients as PyTorch's, at zeros and infinities too."""

import math

import pytest
import torch
import torch.nn.functional as F
from expansions import check, check_split, randn

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import operator_name
from partway.propagation.problem.formulate import formulate
from partway.propagation.program.lower import lower
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Layout, Mesh, Shard
from partway.strategy.placement import Kind, kind

LINE = Mesh({"a": 4})

aten = torch.ops.aten


def drawn(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def evaluated(lab, fn, x):
    """The value and the gradients of the graph of `fn`, and those of `fn`; the names of the graph's operators."""
    graph = capture(fn, (x,), {})
    found = lab.value_and_gradients(list(torch.fx.Interpreter(graph.module).run(x)), [x])
    return found, lab.value_and_gradients(lab.as_tuple(fn(x)), [x]), {operator_name(n) for n in graph.nodes}


REDUCTIONS = {
    "var": lambda x: x.var(),
    "var of dims": lambda x: x.var((2, 3)),
    "var without correction": lambda x: torch.var(x, (0, -1), unbiased=False, keepdim=True),
    "var with a correction": lambda x: torch.var(x, 3, correction=2),
    "std": lambda x: x.std(),
    "std of dims": lambda x: x.std((2, 3), keepdim=True),
    "var and mean": lambda x: torch.var_mean(x, (2, 3)),
    "std and mean": lambda x: torch.std_mean(x, 1, correction=0),
    "var and mean of all": torch.var_mean,
    "norm": lambda x: x.norm(),
    "norm of dims": lambda x: x.norm(p=2, dim=(2, 3), keepdim=True),
    "vector norm": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "vector norm in another dtype": lambda x: torch.linalg.vector_norm(x.float(), dim=1, dtype=torch.float64),
    "sum of magnitudes": lambda x: torch.linalg.vector_norm(x, 1, dim=(2, 3)),
    "largest magnitude": lambda x: torch.linalg.vector_norm(x, math.inf, dim=(2, 3)),
    "norm along a dim": lambda x: torch.linalg.norm(x, dim=1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "logsumexp of dims": lambda x: torch.logsumexp(x, (2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_they_are_sums(lab, name):
    found, expected, operators = evaluated(lab, REDUCTIONS[name], drawn(2, 3, 4, 5).requires_grad_())
    lab.assert_same(found, expected, name)
    assert not [o for o in operators if o.split(".")[1].startswith(("var", "std", "linalg", "logsumexp"))]


@pytest.mark.parametrize("name", ["var", "var and mean", "norm", "sum", "logsumexp"])
def test_a_number_is_reduced_along_the_dim_that_it_has_not(lab, name):
    reduce = {
        "var": lambda x: x.var(0, correction=0) + x.std(-1, correction=0, keepdim=True) + x,
        "var and mean": lambda x: torch.var_mean(x, 0, correction=0)[1] * x,
        "norm": lambda x: torch.linalg.vector_norm(x, 2, 0),
        "sum": lambda x: x.sum(0) + x.mean(-1) + x.amax(0),
        "logsumexp": lambda x: x.logsumexp(0),
    }[name]
    found, expected, _ = evaluated(lab, reduce, drawn().requires_grad_())
    lab.assert_same(found, expected, name)


@pytest.mark.parametrize("name", ["std of dims", "std and mean", "norm of dims", "sum of magnitudes", "normalize"])
def test_at_zero_they_have_pytorchs_gradient(lab, name):
    x = drawn(2, 3, 4, 5)
    x[0] = 0
    found, expected, _ = evaluated(lab, REDUCTIONS[name], x.requires_grad_())
    lab.assert_same(found, expected, name)
    assert all(t.isfinite().all() for t in found)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_a_variance_of_one_number_is_not_a_number(lab):
    found, expected, _ = evaluated(lab, lambda x: torch.var_mean(x, 1), drawn(3, 1).requires_grad_())
    lab.assert_same(found, expected)
    assert found[0].isnan().all()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_a_correction_above_the_count_divides_by_zero(lab):
    found, expected, _ = evaluated(lab, lambda x: torch.var(x, 1, correction=5), drawn(3, 2))
    lab.assert_same(found, expected)


def test_a_logarithm_of_sums_of_infinities(lab):
    x = drawn(3, 4)
    x[0], x[1, 1] = -math.inf, math.inf
    found, expected, _ = evaluated(lab, lambda x: torch.logsumexp(x, 1), x)
    lab.assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["var of dims", "std and mean", "norm of dims", "sum of magnitudes"])
def test_low_precision_is_computed_in_float32_and_cast_back(lab, dtype, name):
    x = 3 + drawn(2, 3, 64, 9, dtype=dtype)
    found, _, _ = evaluated(lab, REDUCTIONS[name], x.clone().requires_grad_())
    exact = lab.as_tuple(REDUCTIONS[name](x.double()))
    for a, b in zip(found, exact, strict=False):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= torch.finfo(dtype).eps * b.norm()


def test_single_precision_is_as_exact_as_pytorchs():
    x = 30 + drawn(4, 64, 64, dtype=torch.float32)
    graph = capture(lambda x: x.var((1, 2)), (x,), {})
    (found,) = torch.fx.Interpreter(graph.module).run(x)
    exact = x.double().var((1, 2))
    assert (found - exact).norm() <= 2 * (x.var((1, 2)) - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize(
    "fn",
    [
        torch.linalg.norm,
        lambda x: torch.linalg.norm(x, dim=(0, 1)),
        lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        lambda x: torch.linalg.vector_norm(x, 0, dim=1),
        lambda x: torch.linalg.vector_norm(torch.complex(x, x), dim=1),
        lambda x: torch.var(torch.complex(x, x)),
    ],
)
def test_other_norms_stay_as_they_are(lab, fn):
    found, expected, _ = evaluated(lab, fn, drawn(3, 4).requires_grad_())
    lab.assert_same(found, expected)


@pytest.mark.parametrize("name", ["var and mean", "std of dims", "norm of dims", "vector norm", "sum of magnitudes",
                                  "logsumexp", "logsumexp of dims", "normalize"])  # fmt: skip
def test_a_split_map_is_never_gathered(lab, name):
    fn, x = REDUCTIONS[name], drawn(2, 3, 4, 8).requires_grad_()
    graph = capture(fn, (x,), {})
    expected = lab.value_and_gradients(lab.as_tuple(fn(x)), [x])
    layout = Layout(LINE, (Shard(3),))
    allowed = {"x": ((layout,), "by hand")}
    if name == "normalize":
        allowed["result"] = ((layout,), "by hand")
    problem = formulate(graph, lab.settings_of(LINE, stay_split=True, on_unknown_op="error"), allowed)
    choice = dynamic_programming(problem).choice
    lab.check_choice(problem, choice, None, (x,), expected, name)
    moving = {Kind.ALL_GATHER, Kind.ALL_TO_ALL}
    sent = [c for c in lower(problem, choice).conversions if kind(c.source, c.target) in moving]
    assert all(c.where.startswith("output") for c in sent)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.mean(),
        lambda x: x.mean(0),
        lambda x: x.mean(-1),
        lambda x: x.mean((0, 2)),
        lambda x: x.mean((0, -1), keepdim=True),
        lambda x: x.mean(dim=()),
        lambda x: x.float().mean(1, dtype=torch.float64),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
        lambda x: F.adaptive_avg_pool1d(x, 1),
        lambda x: aten._adaptive_avg_pool2d(x, [1, 1]),
    ],
)
def test_a_mean_is_a_sum_over_the_global_count(lab, fn):
    graph = check_split(lab, fn, randn(4, 6, 3))
    assert aten.sum.dim_IntList in {node.target for node in graph.nodes}
    assert not {node.target for node in graph.nodes} & {
        aten.mean.default,
        aten.mean.dim,
        aten.adaptive_avg_pool2d.default,
    }


def test_a_sum_or_mean_of_a_scalar_is_itself(lab):
    def fn(x):
        y = x.sum()
        return y.mean(), y.mean(0), y.sum(0), y.sum(-1, keepdim=True), y.softmax(0), y.cumsum(0)

    graph = check(lab, fn, randn(4))
    lab.check_optimum(graph, fn, (randn(4),), lab.LINE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_histogram_of_integers_which_only_a_gpu_has_is_planned_on_the_meta_device(dtype):
    def fn(ids, x):
        return torch.histc(ids.to(dtype), bins=4, min=0, max=3), x.sum()

    ids, x = torch.tensor([0, 3, 1, 3, 7, 0, 3, -1]), torch.ones(8, requires_grad=True)
    compiled = pw.compile(
        fn, (ids.to("meta"), x.detach().to("meta").requires_grad_()), mesh={"dp": 4}, in_strategy=(("dp",), ("dp",))
    )
    assert compiled.program.backward is not None
    counts, _ = torch.fx.Interpreter(compiled.graph.module).run(ids.clamp(-1, 7), x)
    inside = ids.to(dtype)
    expected = torch.bincount(inside[(inside >= 0) & (inside <= 3)].long(), minlength=4)
    assert counts.dtype is dtype
    assert counts.tolist() == expected.tolist()
    (histogram,) = [each for each in compiled.plan.operators if "histc" in each.operator]
    assert str(histogram.results[0]) == "('P',)"
