"""Each expansion computes what the operator that it replaces does: value, gradients, buffers, random numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.graph.port import Role
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import CaptureError, Layout, Shard

aten = torch.ops.aten
SEED = 7


def randn(*shape, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_(
        grad
    )


def integers(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def run(graph, fn, args):
    """The outputs of a captured graph on real tensors, by name."""
    given, tensors = iter(args), []
    for port in graph.inputs:
        if port.role is Role.INPUT:
            tensors.append(next(given))
        elif port.role is Role.CONSTANT:
            tensors.append(graph.constants[port.name])
        else:
            tensors.append(fn.get_parameter(port.name) if port.role is Role.PARAMETER else fn.get_buffer(port.name))
    torch.manual_seed(SEED)
    outputs = fx.Interpreter(graph.module).run(*tensors)
    return {(port.role, port.name): out for port, out in zip(graph.outputs, outputs, strict=True)}


def check(lab, fn, *args, gone=None):
    """The graph of `fn` computes what `fn` does, and `gone` is not in it."""
    graph = capture(fn, args, {}, CaptureOptions(random_numbers=RandomNumbers.TORCH))
    if gone is not None:
        assert gone not in {node.target for node in graph.nodes}
    modules = isinstance(fn, nn.Module)
    leaves = [t for t in args if t.requires_grad] + (list(fn.parameters()) if modules else [])
    found = run(graph, fn, args)
    results = [out for (role, _), out in found.items() if role is Role.RESULT]
    got = lab.value_and_gradients(results, leaves)
    torch.manual_seed(SEED)
    real = copy.deepcopy(fn) if modules else fn
    real_leaves = [t for t in args if t.requires_grad] + (list(real.parameters()) if modules else [])
    expected = lab.value_and_gradients(lab.as_tuple(real(*args)), real_leaves)
    lab.assert_same(got, expected, str(graph))
    for (role, name), out in found.items():
        if role is Role.BUFFER_UPDATE:
            lab.assert_same([out], [real.get_buffer(name)], name)
    return graph


def check_split(lab, fn, *args):
    """The same, and with the first argument split along its first dim."""
    graph = check(lab, fn, *args)
    split = Layout(lab.LINE, (Shard(0),))
    name = next(port.name for port in graph.inputs if port.role is Role.INPUT)
    lab.check_optimum(graph, fn, args, lab.LINE, {name: ((split,), "by hand")})
    return graph


# -- means


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


# -- strides


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.as_strided((4, 4, 3), (8, 1, 2)),  # windows of each row
        lambda x: x.as_strided((4, 4), (8, 2), 1),
        lambda x: x.as_strided((3, 12), (8, 1)),  # rows that overlap
        lambda x: x.t().as_strided((8, 4), (1, 8)) * 2,
        lambda x: x[1:].as_strided((3, 2), (8, 0), 8),
        lambda x: torch.as_strided_copy(x, (2, 16), (16, 1)),
        lambda x: x.as_strided((), (), 5),
    ],
)
def test_elements_at_strides_are_picked_by_number(lab, fn):
    graph = check_split(lab, fn, randn(4, 8))
    assert not {node.target for node in graph.nodes} & {aten.as_strided.default, aten.as_strided_copy.default}


def test_windows_of_rows_stay_with_their_rows(lab):
    graph = capture(lambda x: x.as_strided((4, 4, 3), (8, 1, 2)), (randn(4, 8),), {})
    (picked,) = [node for node in graph.nodes if node.target is aten.index_select.default]
    assert picked.args[1] == 1


def test_elements_that_another_tensor_has_are_refused():
    with pytest.raises(CaptureError, match=r"as_strided in the function takes \[2\] out of the memory of a tensor"):
        capture(lambda x: x[1:].as_strided((2,), (1,), 0), (randn(4, 8, grad=False),), {})


# -- losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_cross_entropy(lab, reduction, smoothing, weighted, ignored):
    target = integers(5, 8)
    target[[2, 5]] = ignored if ignored < 0 else target[[2, 5]]
    weight = torch.rand(5, dtype=torch.float64) + 0.5 if weighted else None

    def loss(x, t):
        return F.cross_entropy(
            x, t, weight=weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing
        )

    check_split(lab, loss, randn(8, 5), target)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5, 2)])
@pytest.mark.parametrize("classes", [False, True])
def test_cross_entropy_of_images_and_of_probabilities(lab, shape, classes, weighted, smoothing):
    positions = (shape[0], *shape[2:])
    target = randn(*shape, grad=False).softmax(1) if classes else integers(3, *positions)
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else None

    def loss(x, t):
        return F.cross_entropy(x, t, weight=weight, label_smoothing=smoothing)

    check_split(lab, loss, randn(*shape), target)


def test_cross_entropy_of_one_position(lab):
    check(lab, F.cross_entropy, randn(5), integers(5))
    check(lab, F.cross_entropy, randn(5), randn(5, grad=False).softmax(0))


def test_cross_entropy_without_a_valid_target_is_not_a_number(lab):
    ignored = torch.full((4,), -100)
    graph = capture(F.cross_entropy, (randn(4, 3), ignored), {})
    (found,) = run(graph, F.cross_entropy, (randn(4, 3), ignored)).values()
    assert found.isnan()
    assert F.cross_entropy(randn(4, 3), ignored).isnan()


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(lab, weighted):
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else None

    def loss(x, t):
        return F.nll_loss(x.log_softmax(1), t, weight=weight, ignore_index=2)

    for shape in ((6, 3), (4, 3, 2)):
        target = integers(3, shape[0], *shape[2:])
        check_split(lab, loss, randn(*shape), target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.soft_margin_loss,
        lambda x, t, reduction: F.smooth_l1_loss(x, t, beta=0.3, reduction=reduction),
        lambda x, t, reduction: F.huber_loss(x, t, delta=0.3, reduction=reduction),
        lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
        lambda x, t, reduction: F.binary_cross_entropy(
            x.sigmoid(), t.sigmoid(), weight=torch.arange(1, 4).double(), reduction=reduction
        ),
        lambda x, t, reduction: F.binary_cross_entropy_with_logits(
            x, t.sigmoid(), pos_weight=torch.arange(1, 4).double(), reduction=reduction
        ),
        lambda x, t, reduction: F.kl_div(x, t.sigmoid(), reduction=reduction.replace("mean", "batchmean")),
        lambda x, t, reduction: aten.kl_div(x, t, ["none", "mean", "sum"].index(reduction), log_target=True),
    ],
)
def test_pointwise_losses(lab, loss, reduction):
    def fn(x, t):
        return loss(x, t, reduction=reduction)

    check_split(lab, fn, randn(4, 3), randn(4, 3, grad=False))


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_a_pointwise_loss_counts_the_elements_after_broadcasting(lab):
    check(lab, F.mse_loss, randn(4, 3), randn(4, 1))
    check(lab, F.l1_loss, randn(4, 1), randn(3))


# -- batch normalization


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


# -- random numbers


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.3),
        lambda x: F.dropout(x, 0.9) + F.dropout(x, 0.1),
        lambda x: nn.Dropout(0.5)(x * 2),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.4, training=False),
        lambda x: F.dropout(F.dropout(x, 0.5).float(), 0.5),
    ],
)
def test_dropout_draws_the_numbers_that_pytorch_draws(lab, fn):
    check(lab, fn, randn(8, 6))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"mask": "bool"},
        {"mask": "float"},
        {"mask": "keys"},
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_attention(lab, options, p):
    options = dict(options)
    kind = options.pop("mask", None)
    masks = {
        None: None,
        "bool": torch.ones(5, 5, dtype=torch.bool).tril(),
        "float": randn(2, 1, 5, 5, grad=False),
        "keys": torch.tensor([[True, True, False, True, True]]),
    }

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, masks[kind], dropout_p=p, **options)

    graph = check(lab, attention, randn(2, 3, 5, 4), randn(2, 3, 5, 4), randn(2, 3, 5, 4))
    whole = aten.scaled_dot_product_attention.default in {node.target for node in graph.nodes}
    assert whole == (p == 0)


def written_into(z):
    out = torch.zeros_like(z)
    out[:, 1:3], out[2] = z[:, :2] * 2, z[0]
    return out


def two_sided(z):
    return torch.istft(z, 4, window=torch.ones(4).double(), onesided=False, return_complex=True)


@pytest.mark.parametrize(
    "fn",
    [
        written_into,
        two_sided,
        lambda z: torch.istft(z, 4, window=torch.ones(4).double(), onesided=False),
        lambda z: z.conj() * z[0],
        lambda z: (z @ z.mH).imag.neg(),
        lambda z: z.var(1),
        lambda z: torch.cat([part.reshape(-1) for part in torch.std_mean(z, 0, correction=0)]),
        lambda z: torch.linalg.vector_norm(z, dim=1),
        lambda z: torch.linalg.vector_norm(z, 3, dim=0, dtype=torch.complex128),
        lambda z: torch.linalg.vector_norm(z, torch.inf, keepdim=True),
        lambda z: F.pad(z, (1, 2), value=1.0),
        lambda z: aten.constant_pad_nd(z, [1, 1], 1 + 2j),
    ],
    ids=[
        "written_into", "istft", "istft_real", "conj", "imag", "var", "std_mean", "norm", "norm_3", "norm_inf", "pad",
        "pad_complex",
    ],
)  # fmt: skip
def test_complex_numbers(lab, fn):
    def of_parts(x):
        y = fn(torch.view_as_complex(x))
        return torch.view_as_real(y) if y.is_complex() else y

    x = randn(4, 6, 2)
    check(lab, of_parts, x)
    lab.check_optimum(capture(of_parts, (x,), {}), of_parts, (x,), lab.LINE)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention_with_dropout_whose_queries_are_broadcast_over_the_batch(lab, options):
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, **options)

    check(lab, attention, randn(3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 4))


def test_with_dropout_too_a_mask_that_hides_all_keys_gives_zeros():
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5, dtype=torch.bool), dropout_p=0.25)

    x = randn(2, 5, 4, grad=False)
    assert torch.equal(attention(x), torch.zeros_like(x))
    (found,) = run(capture(attention, (x,), {}), attention, (x,)).values()
    assert torch.equal(found, torch.zeros_like(x))


def test_dropout_of_a_split_tensor_is_that_of_the_whole(lab):
    x = randn(8, 6)

    def fn(x):
        return F.dropout(x, 0.5) * x

    split = Layout(lab.LINE, (Shard(0),))
    problem = lab.problem_of(fn, (x,), lab.LINE, {"x": ((split,), "by hand"), "result": ((split,), "by hand")})
    step = lab.compiled(problem, dynamic_programming(problem).choice)
    torch.manual_seed(SEED)
    found = lab.value_and_gradients(step([x]), [x])
    torch.manual_seed(SEED)
    lab.assert_same(found, lab.value_and_gradients([fn(x)], [x]))


# -- what needs only a shape


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.zeros_like(x) + x,
        lambda x: torch.ones_like(x, dtype=torch.float64) * x,
        lambda x: torch.full_like(x, 3.0) * x,
        lambda x: x.new_zeros(4, 3) + x,
        lambda x: x.new_ones(3) * x,
        lambda x: x.new_full((4, 1), 2.0) * x,
    ],
)
def test_a_constant_in_the_shape_of_a_tensor_does_not_depend_on_it(lab, fn):
    graph = check(lab, fn, randn(4, 3))
    (x,) = (port.node for port in graph.inputs if port.role is Role.INPUT)
    assert len(x.users) == 1


def test_broadcast_tensors(lab):
    check(
        lab,
        lambda x, y: torch.broadcast_tensors(x, y, x + y),
        randn(4, 1),
        randn(3),
        gone=aten.broadcast_tensors.default,
    )


@pytest.mark.parametrize(
    ("fn", "gone"),
    [
        (lambda x: torch.cat([torch.tensor([]), x], -2), aten.cat.default),
        (lambda x: torch.cat([x, torch.tensor([], dtype=torch.float64), 2 * x], 0), None),
        (lambda x: torch.cat([torch.tensor([], dtype=torch.float64), x.float()], -2), aten.cat.default),
        (lambda x: torch.concat([x, 2 * x], 1), aten.concat.default),
        (lambda x: torch.concatenate([x, 2 * x]), aten.concatenate.default),
        (lambda x: x.repeat_interleave(3, -1), aten.repeat_interleave.self_int),
        (lambda x: x.repeat_interleave(2), aten.repeat_interleave.self_int),
        (lambda x: x.float().type_as(x) * x, aten.type_as.default),
        (lambda x: (2 * x).copy_(x.sum(0)) + x, aten.copy.default),
        (lambda x: (2 * x.float()).copy_(x), aten.copy.default),
        (lambda x: (2 * x).fill_(x.sum()) + x, aten.fill.Tensor),
        (lambda x: (2 * x).fill_(3.0) + x, aten.fill.Scalar),
        (lambda x: torch._weight_norm(x, x.sum(0, keepdim=True), 1), aten._weight_norm.default),
        (lambda x: torch._weight_norm(x, x.sum(), -1), aten._weight_norm.default),
    ],
)
def test_what_is_written_with_other_operators(lab, fn, gone):
    check(lab, fn, randn(4, 3), gone=gone)


@pytest.mark.parametrize(
    ("fn", "target"),
    [
        (aten.__and__, aten.bitwise_and.Tensor),
        (aten.__or__, aten.bitwise_or.Tensor),
        (aten.__xor__, aten.bitwise_xor.Tensor),
        (aten.divide, aten.div.Tensor),
        (aten.multiply, aten.mul.Tensor),
        (aten.subtract, aten.sub.Tensor),
    ],
)
def test_an_operator_by_another_name_is_the_operator(fn, target):
    args = torch.tensor([5, 6]), torch.tensor([3, 4])

    def call(x, y):
        return fn(x, y)

    graph = capture(call, args, {})
    assert [node.target for node in graph.nodes] == [target]
    assert torch.equal(torch.fx.Interpreter(graph.module).run(*args)[0], fn(*args))
