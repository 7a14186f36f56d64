"""Slices that are short: what is behind their ends never shows, in values or in gradients."""

import pytest
import torch
import torch.nn.functional as F
from shares import every_other

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import operands, shape
from partway.propagation.problem.problem import VertexKind
from partway.propagation.rules.table import rule_of
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Mesh

FOUR = Mesh({"x": 4})
GRID = Mesh({"x": 2, "y": 2})


def real(*size):
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def positive(*size):
    return (torch.rand(size, dtype=torch.float64) + 0.5).requires_grad_()


def unit(*size):
    return (0.1 + 0.8 * torch.rand(size, dtype=torch.float64)).requires_grad_()


def above(*size):
    return (1.5 + torch.rand(size, dtype=torch.float64)).requires_grad_()


def index(high, *size):
    return torch.randint(0, high, size)


def uneven(option, vertex):
    """Whether an option cuts a tensor of the vertex into slices that are not all full."""
    sizes = [shape(o) for o in operands(vertex.node)]
    return any(not found.divides(size) for found, size in zip(option.operands, sizes, strict=True))


# functions whose every operator can be split so, with parameters that gather gradients over the short dim
SPLIT = {
    "affine": (lambda x, w, b: x * w + b, (real(5, 7), real(7), real(5, 1))),
    "log": (lambda x, b: (x + b).log() * b, (positive(5, 7), positive(7))),
    "sqrt": (lambda x, b: (x * b).sqrt() - b, (positive(5, 7), positive(7))),
    "rsqrt": (lambda x, b: b * (x * b).rsqrt(), (positive(5, 7), positive(7))),
    "quotient": (lambda x, y, b: b * x / (y * b), (real(5, 7), positive(5, 7), positive(7))),
    "power": (lambda x, b: (x * b) ** -1.5, (positive(5, 7), positive(7))),
    "exp": (lambda x, b: (x * b).exp(), (real(5, 7), real(7))),
    "activations": (lambda x, b: F.gelu(x + b) + F.silu(x * b) + torch.tanh(x - b).relu(), (real(5, 7), real(7))),
    "where": (lambda x, b: torch.where(x > 0, x * b, b), (real(5, 7), real(7))),
    "sum": (lambda x: x.sum(0) * x.sum(), (real(5, 7),)),
    "mean": (lambda x: x.mean(1) + x.mean(), (real(5, 7),)),
    "largest": (lambda x: x.detach().amax(0) * x.sum(0), (real(5, 7),)),
    "matmul": (lambda x, w: x @ w, (real(5, 7), real(7, 6))),
    "linear": (F.linear, (real(5, 7), real(9, 7), real(9))),
    "bmm": (torch.bmm, (real(3, 5, 7), real(3, 7, 6))),
    "softmax": (lambda x, w: (x * w).softmax(1), (real(5, 7), real(7))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), (real(5, 7), real(7), real(7))),
    "logistic losses": (
        lambda x, b, t: F.binary_cross_entropy_with_logits(x * b, t) + F.soft_margin_loss(x * b, t, reduction="sum"),
        (real(5, 7), real(7), torch.rand(5, 7, dtype=torch.float64)),
    ),
    "loss of rows": (lambda x, b, t: F.multilabel_margin_loss(x + b, t), (real(5, 7), real(7), index(7, 5, 7))),
    "half": (lambda x, b: (x * b).asin() + (x * b).atanh(), (unit(5, 7), unit(7))),
    "cosh": (lambda x, b: (x * b).acosh(), (above(5, 7), above(7))),
    "sorted": (lambda x, b: (x * b).sort(1)[0] * b, (real(5, 7), real(7))),
    "largest cumulative": (lambda x, b: (x * b).cumprod(1) + (x * b).cummax(1)[0], (real(5, 7), real(7))),
    "norm": (lambda x, b: torch.linalg.vector_norm(x * b, 3, 1), (real(5, 7), real(7))),
    "cross_entropy": (F.cross_entropy, (real(5, 7), index(7, 5))),
    "weighted": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1) + F.nll_loss(x, t, w, ignore_index=2),
        (real(5, 3, 7), index(3, 5, 7), real(3).abs().detach()),
    ),
    "probabilities": (
        lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1, reduction="sum"),
        (real(5, 3, 7), real(5, 3, 7)),
    ),
    "maps": (F.cross_entropy, (real(3, 4, 5, 7), index(4, 3, 5, 7))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (real(5, 7, 6), real(7), real(7))),
    "attention": (F.scaled_dot_product_attention, (real(3, 5, 7, 2), real(3, 5, 6, 2), real(3, 5, 6, 2))),
    "hidden": (
        lambda q, k, m, w: F.scaled_dot_product_attention(q * w, k, k, m.tril()),
        (real(3, 5, 7, 2), real(3, 5, 7, 2), torch.ones(7, 7, dtype=torch.bool), real(7, 2)),
    ),
    "causal": (
        lambda q, k, w: F.scaled_dot_product_attention(q * w, k, k, is_causal=True),
        (real(3, 5, 7, 2), real(3, 5, 6, 2), real(7, 2)),
    ),
    "recurrent": (
        lambda x, h, w, u: torch.gru(x, h, [w, u], False, 1, 0.0, True, False, False),
        (real(2, 5, 3), real(1, 5, 2), real(6, 3), real(6, 2)),
    ),
    "read": (lambda x, w, i, j: (x * w)[i - 2, :, j], (real(5, 7, 3), real(7, 1), index(5, 6, 1), index(3, 1, 9))),
    "selected": (lambda x, w: (x * w)[3] + (x * w)[-1], (real(5, 7), real(7))),
    "written": (
        lambda x, w, i, y, j: (x * w).index_put((i,), y, True).scatter_add(1, j, x * w),
        (real(5, 7), real(7), index(5, 6), real(6, 7), index(7, 5, 7)),
    ),
    "decomposed": (lambda x, w: torch.linalg.svd(x * w)[1].sum(-1), (real(5, 3, 2), positive(3, 2))),
    "solved": (lambda x, w, y: torch.linalg.solve(x * w, y), (real(5, 3, 3), positive(3, 3), real(3, 7))),
    "embedding": (lambda w, i: F.embedding(i, w), (real(9, 5), index(9, 7))),
    "padded_rows": (lambda w, i: F.embedding(i, w, 2), (real(5, 3), index(5, 7))),
    "channels": (F.conv1d, (real(3, 5, 7), real(6, 5, 3), real(6))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (real(3, 4, 5, 7), real(4), real(4))),
    "instance_norm": (F.instance_norm, (real(3, 4, 5, 7),)),
    "norm_of_images": (lambda x, w: F.layer_norm(x, (4, 5, 7), w), (real(3, 4, 5, 7), real(4, 5, 7))),
    "variance": (lambda x: x.var(1) + x.std((0, 1)) + torch.linalg.vector_norm(x), (real(5, 7),)),
    "logsumexp": (lambda x: x.logsumexp(1).sum() + x.logsumexp(0), (real(5, 7),)),
    "gather": (lambda x, i: x.gather(1, i.cumsum(0) % 7) * 2, (real(5, 7), index(7, 5, 7))),
    "positions": (
        lambda w, i: F.embedding((i > 0).long().cumsum(1) - 1 + (i <= 0).long(), w),
        (real(9, 5), index(3, 7, 5)),
    ),
    "one_hot": (lambda i, w: F.one_hot(i - 1 + (i == 0).long(), 5).double() @ w, (index(5, 7, 3), real(5, 2))),
    "transposed": (lambda x, w: x.transpose(0, 1) @ w, (real(5, 7), real(5, 6))),
    "loss": (F.mse_loss, (real(5, 7), real(5, 7))),
}
# functions that give no numbers, or no derivatives, behind the end of a slice whatever is there: these slices are full
FULL = {
    "bound": (lambda x: x.clamp(max=torch.inf), (real(5, 7),)),
    "masked": (lambda x, m: x.masked_fill(m, -torch.inf).exp(), (real(5, 7), torch.rand(5, 7) > 0.5)),
}


@pytest.mark.parametrize("mesh", [FOUR, pytest.param(GRID, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", every_other(SPLIT))
def test_every_option_with_short_slices_computes_the_value_and_the_gradients(name, mesh, lab):
    fn, args = SPLIT[name]
    problem = lab.problem_of(fn, args, mesh)
    expected = lab.value_and_gradients(lab.as_tuple(fn(*args)), [t for t in args if t.requires_grad])
    tried = 0
    for position, vertex in enumerate(problem.vertices):
        if vertex.kind is not VertexKind.OPERATOR:
            continue
        short = [i for i, option in enumerate(vertex.options) if uneven(option, vertex)]
        for option in short[:: max(1, len(short) // 4)]:
            restricted = lab.choose(problem, position, [option])
            choice = dynamic_programming(restricted).choice
            text = f"{vertex.node.target} as {restricted.vertices[position].options[0]} on {mesh}"
            lab.check_choice(restricted, choice, fn, args, expected, text)
            tried += 1
    assert tried


def test_all_operators_of_a_chain_on_short_slices_at_once(lab):
    """What one operator leaves behind the end of a slice the next one takes for an operand."""

    def fn(x, w, b, t):
        y = torch.log(F.softplus(F.linear(x, w, b)) + 1e-3)
        y = F.layer_norm(y / (y * y).mean(-1, keepdim=True).sqrt(), (6,)) * b
        return F.cross_entropy(y.exp().rsqrt(), t) + (y.softmax(-1) * b).sum().sqrt()

    args = (real(7, 5), real(6, 5), positive(6), index(6, 7))
    problem = lab.problem_of(fn, args, FOUR)
    expected = lab.value_and_gradients([fn(*args)], args[:3])
    for position, vertex in enumerate(problem.vertices):
        if vertex.kind is VertexKind.OPERATOR:
            rows = [i for i, o in enumerate(vertex.options) if any(p.splits(3)[0] == 4 for p in o.operands)]
            by_row = [i for i in rows if uneven(vertex.options[i], vertex)]
            if by_row:
                problem = lab.choose(problem, position, by_row)
    solution = dynamic_programming(problem)
    short = sum(
        uneven(v.options[c], v)
        for v, c in zip(problem.vertices, solution.choice, strict=True)
        if v.kind is VertexKind.OPERATOR
    )
    assert short > 10
    lab.check_choice(problem, solution.choice, fn, args, expected, "the chain")


@pytest.mark.parametrize("name", FULL)
def test_what_has_no_numbers_behind_an_end_keeps_its_slices_full(name, lab):
    fn, args = FULL[name]
    problem = lab.problem_of(fn, args, FOUR)
    first = next(v for v in problem.vertices if v.kind is VertexKind.OPERATOR)
    assert not any(uneven(option, first) for option in first.options)


def test_a_factor_inside_a_merged_dim_is_cut_evenly():
    graph = capture(lambda x: x.reshape(15, 7) * 2, (torch.ones(5, 3, 7),), {})
    (view,) = (node for node in graph.nodes if node.target is torch.ops.aten.reshape.default)
    rule = rule_of(view)
    whole = {f for dims in rule.operands for parts in dims if len(parts) == 1 for f in parts}
    assert rule.uneven <= whole
    assert {name: rule.sizes[name] for name in rule.uneven} == {"f2": 7}


def test_a_factor_that_begins_a_dim_is_cut_evenly():
    """16 is eight twos and 24 is eight threes: thirds of 16 are not thirds of 24."""
    graph = capture(lambda x: x.reshape(8, 24, 2) * 2, (torch.ones(8, 16, 3),), {})
    (view,) = (node for node in graph.nodes if node.target is torch.ops.aten.reshape.default)
    assert set(rule_of(view).uneven) == {"f0"}
    x = torch.randn(8, 16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fn = pw.shard(lambda x: x.reshape(8, 24, 2) * 2, mesh={"a": 3}, in_strategy=((None, "a", None),))
    torch.testing.assert_close(fn(x), x.reshape(8, 24, 2) * 2, rtol=0, atol=0)
