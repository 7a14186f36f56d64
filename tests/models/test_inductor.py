"""Stretches between collectives become one call each; the rest of the graph stays as it is."""

import copy
import operator

import pytest
import torch
from checks import assert_same_gradients, gradients, loss_of
from torch import fx, nn
from zoo import CASES

import partway as pw
from partway.propagation.graph.nodes import draws_random_numbers
from partway.propagation.ops.collectives import convert, convert_group
from partway.runtime import Simulator, torch_internals
from partway.runtime.code import inductor
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.inductor import compile_regions, example
from partway.runtime.code.instructions import ConvertLayout
from partway.strategy import Mesh

aten = torch.ops.aten


class Compiler:
    """Runs a stretch as it is, and remembers it."""

    def __init__(self):
        self.seen = []

    def __call__(self, module, examples, unsized):
        self.seen.append(module)
        return module.forward


def graph_of(write):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    graph.output(tuple(write(graph, x)))
    return fx.GraphModule(nn.Module(), graph)


def layers(graph, x, count=3, between=("P", "R")):
    """`count` times two operators and a collective."""
    for _ in range(count):
        x = graph.call_function(aten.tanh.default, (graph.call_function(aten.mul.Tensor, (x, x)),))
        x = graph.call_function(convert, (x, *between, ["d"], 2, 0))
    return (x,)


def compiled(module, *shapes):
    compiler = Compiler()
    examples = [example(shape, torch.float32, torch.device("cpu")) for shape in shapes or [(4, 4)]]
    return *compile_regions(module, examples, compiler), compiler


def run(module, *values):
    code = assemble_code(module, "forward")
    return Simulator(Mesh({"d": 2})).run(code, [[value, value + 1] for value in values])


def test_collectives_stay_where_they_are_and_equal_stretches_are_compiled_once():
    module = graph_of(layers)
    made, outputs, compiler = compiled(module)
    assert [node.target for node in made.graph.nodes if node.target is convert] == [convert] * 3
    assert len(compiler.seen) == 1
    assert [tuple(out.shape) for out in outputs] == [(4, 4)]
    assert [node.op for node in made.graph.nodes].count("call_function") == 3 * 3  # a call, its result, a collective
    x = torch.rand(4, 4)
    for one, other in zip(run(made, x)[0], run(module, x)[0], strict=True):
        assert torch.equal(one, other)


def test_operators_that_draw_random_numbers_stay_as_they_are():
    def write(graph, x):
        y = graph.call_function(aten.tanh.default, (graph.call_function(aten.neg.default, (x,)),))
        kept = graph.call_function(aten.bernoulli.p, (y, 0.5))
        z = graph.call_function(aten.mul.Tensor, (y, kept))
        return (graph.call_function(aten.neg.default, (z,)),)

    made, _, compiler = compiled(graph_of(write))
    assert len(compiler.seen) == 2
    drawing = [n for n in made.graph.nodes if n.op == "call_function" and draws_random_numbers(n)]
    assert [node.target for node in drawing] == [aten.bernoulli.p]


def test_one_operator_alone_and_views_are_not_worth_a_call():
    def write(graph, x):
        y = graph.call_function(aten.view.default, (graph.call_function(aten.neg.default, (x,)), [16]))
        return (graph.call_function(aten.view.default, (y, [2, 8])),)

    made, _, compiler = compiled(graph_of(write))
    assert not compiler.seen
    assert run(made, torch.ones(4, 4))[0][0].shape == (2, 8)


def test_what_takes_a_group_apart_parts_stretches_and_several_results_do_not():
    def write(graph, x):
        top = graph.call_function(aten.max.dim, (x, 0))
        a, b = (graph.call_function(operator.getitem, (top, i)) for i in range(2))
        low = graph.call_function(aten.neg.default, (a,))
        group = graph.call_function(convert_group, ([a, low], "P", "R", ["d"], 2, [0, 1]))
        busy = graph.call_function(aten.exp.default, (graph.call_function(aten.neg.default, (low,)),))
        first, second = (graph.call_function(operator.getitem, (group, i)) for i in range(2))
        total = graph.call_function(aten.add.Tensor, (first, busy))
        return total, graph.call_function(aten.mul.Tensor, (total, second)), b

    module = graph_of(write)
    made, _, compiler = compiled(module)
    assert len(compiler.seen) == 2  # before the group, and what goes on while it is under way
    x = torch.rand(4, 4)
    for one, other in zip(run(made, x), run(module, x), strict=True):
        assert all(map(torch.equal, one, other))


def test_a_conversion_that_changes_nothing_keeps_strides():
    def write(graph, x):
        y = graph.call_function(aten.t.default, (graph.call_function(aten.neg.default, (x,)),))
        return (graph.call_function(convert, (y, "R", "B", ["d"], 2, 0)),)

    made, outputs, _ = compiled(graph_of(write))
    assert outputs[0].stride() == (1, 4)
    assert run(made, torch.rand(4, 4))[0][0].stride() == (1, 4)


def check_model(name, mesh, tolerance=1e-10):
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.build()
    with pw.auto_parallel_context(backend="inductor"):
        model = pw.shard(copy.deepcopy(plain), mesh=mesh, in_strategy=case.batch_split("dp"))
        for step in range(2):  # compiled, then only run
            loss, found = gradients(model, case.batch(step=step))
            expected, wanted = gradients(plain, case.batch(step=step))
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            assert_same_gradients(found, wanted, tolerance)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model(**case.batch())), loss_of(plain(**case.batch())))
        model.zero_grad()
        plain.zero_grad()
        with model.no_sync():
            loss_of(model(**case.batch(step=0))).backward()
        loss_of(model(**case.batch(step=1))).backward()
        for step in range(2):
            loss_of(plain(**case.batch(step=step))).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_a_step_of_inductor_has_the_numbers_of_one_device():
    check_model("mlp", {"dp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "gpt2", "llama"])
def test_models_compiled_by_inductor_have_the_numbers_of_one_device(name):
    check_model(name, {"dp": 2, "tp": 2}, 1e-6 if name == "llama" else 1e-10)


class Logits(nn.Module):
    """Classes of a linear layer in a low precision, and their loss in float32, as models of transformers have it."""

    def __init__(self, classes):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, classes, bias=False)

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.head(x).float().view(-1, self.head.out_features), target.view(-1))


def check_classes():
    """Of 2 devices the second has one class less, and some targets are ignored."""
    torch.manual_seed(1)
    x, target = torch.randn(4, 6, 16), torch.randint(101, (4, 6))
    target[0, :4] = -100
    plain = Logits(101).double()
    with pw.auto_parallel_context(backend="inductor"):
        model = pw.shard(copy.deepcopy(plain), mesh={"tp": 2}, parameter_plan={"head.weight": ("tp", None)})
        loss = model(x.double(), target)
        loss.backward()
    expected = plain(x.double(), target)
    expected.backward()
    (weight,) = model.parameters()
    found = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
    # the loss is in float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, plain.head.weight.grad, rtol=1e-5, atol=1e-7)


def test_a_loss_of_split_classes_is_the_same_compiled():
    check_classes()


@pytest.mark.parametrize("wrong", [101, -1])
def test_a_target_outside_of_the_classes_is_an_error_compiled_too(wrong):
    target = torch.full((4, 6), 3)
    target[1, 2] = wrong
    with pw.auto_parallel_context(backend="inductor"):
        model = pw.shard(Logits(101), mesh={"dp": 1})
        with pytest.raises(RuntimeError, match="an index is out of range of a dim of size 101"):
            model(torch.randn(4, 6, 16), target)


def test_results_of_a_stretch_are_its_own_unless_they_share_memory():
    def write(graph, x):
        y = graph.call_function(aten.neg.default, (x,))
        z = graph.call_function(aten.exp.default, (y,))
        flat = graph.call_function(aten.view.default, (z, [16]))
        seen = graph.call_function(aten.view.default, (x, [16]))
        return y, z, flat, seen

    made, _, compiler = compiled(graph_of(write))
    assert assemble_code(made, "forward").shared == (False, True, True, True)
    (region,) = compiler.seen
    assert len(region(torch.ones(4, 4))) == 3  # a view of a result is made of it outside
    assert run(made, torch.ones(4, 4))[2][0].shape == (16,)


def test_a_sum_over_ranks_is_written_into_what_a_stretch_has_made():
    module = graph_of(layers)
    made, _, _ = compiled(module)
    steps = assemble_code(made, "forward").instructions
    owned = [step.relayout.owned for step in steps if isinstance(step, ConvertLayout)]
    assert owned == [(True,)] * 3


class Mixture(nn.Module):
    def __init__(self, to=None):
        super().__init__()
        self.gate = nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(8, 8, 16) / 3), nn.Parameter(torch.randn(8, 16, 8) / 4)
        self.register_buffer("bias", torch.zeros(8))
        if to is not None:
            self.bias[to] = 100.0

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        ids = (scores + self.bias).topk(1, -1).indices
        rows, ends, where = pw.ops.dispatch(x, ids, 8)
        made = pw.ops.grouped_matmul(rows * rows.tanh(), self.up, ends)
        made = pw.ops.grouped_matmul(nn.functional.silu(made).square() + made, self.down, ends)
        return pw.ops.combine(made.exp() - 1, where, scores.gather(1, ids))


@pytest.mark.parametrize("to", [None, 5])
def test_rows_of_experts_are_compiled_for_any_number(to, monkeypatch):
    """With `to` all tokens go to one rank, and the others have no row."""
    unsized, compile_it = [], torch_internals.inductor

    def noted(module, examples, dims=()):
        unsized.append(any(dims))
        return compile_it(module, examples, dims)

    monkeypatch.setattr(inductor, "_region", inductor._region.__wrapped__)
    monkeypatch.setattr(compile_regions, "__defaults__", (noted,))
    torch.manual_seed(0)
    plain = Mixture(to).double()
    model = copy.deepcopy(plain)
    experts = {"up": ("x", None, None), "down": ("x", None, None)}
    with pw.auto_parallel_context(backend="inductor"):
        sharded = pw.shard(model, (("x", None),), mesh={"x": 4}, parameter_plan=experts)
        for _ in range(2):
            x = torch.randn(32, 8, dtype=torch.float64)
            found, expected = (call(x).square().sum() for call in (sharded, plain))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            found.backward()
            expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        whole = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        torch.testing.assert_close(whole, other.grad, rtol=1e-11, atol=1e-12)
    assert any(unsized)


def test_rows_whose_numbers_the_code_does_not_allow_run_without_it():
    """The two sizes were one when it was compiled."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, y)),))
    compiled = torch_internals.inductor(fx.GraphModule({}, graph), [torch.randn(5, 4)] * 2, ((0,), (0,)))
    for rows, others in ((5, 5), (9, 9), (0, 0), (1, 1), (1, 9), (9, 1)):
        one, other = torch.randn(rows, 4), torch.randn(others, 4)
        assert torch.equal(compiled(one, other)[0], one + other)


def in_a_process():
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double(), torch.rand(8, 8).double()
    with pw.auto_parallel_context(backend="inductor"):
        model = pw.shard(copy.deepcopy(plain), mesh={"dp": 2}, in_strategy=(("dp", None),))
        for _ in range(2):
            model(x).pow(2).sum().backward()
            plain(x).pow(2).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-10, atol=1e-10)
    check_classes()


@pytest.mark.gloo
@pytest.mark.slow
def test_processes_compile_their_steps(on_ranks):
    on_ranks(2, in_a_process)
