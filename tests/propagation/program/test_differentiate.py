"""A step is what autograd makes of the whole program, though each of its repeated parts is traced once."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_gradients, assert_same_loss, gradients, tolerance
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import CASES

import partway as pw
from partway.propagation.ops.collectives import convert
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.program import differentiate as module
from partway.propagation.program.differentiate import differentiate, undo_views
from partway.propagation.program.lower import lower
from partway.propagation.program.segments import Like, pieces_of
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.torch_internals import FakeTensorMode
from partway.runtime.executors.simulate import Simulator
from partway.runtime.loaded import Loaded
from partway.strategy import REPLICATE, CaptureError, Layout, Shard, VerifyError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no rule"),  # such operators are part of what is tested
    pytest.mark.deep,
]
LAYERS, WIDTH = 6, 8


@pytest.fixture
def traced(monkeypatch):
    """The pieces that are traced, in order."""
    found = []
    derivative = module._derivative

    def counting(piece, *rest):
        found.append(piece)
        return derivative(piece, *rest)

    monkeypatch.setattr(module, "_derivative", counting)
    return found


def random(*shape, requires_grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)


def weights(layers=LAYERS):
    return [random(WIDTH, WIDTH, seed=i) for i in range(layers)]


def layer(x, w):
    hidden = torch.tanh(F.layer_norm(x, (WIDTH,)) @ w)
    return x + torch.sigmoid(hidden) * (hidden @ w.T)


def deep(x, *ws):
    for w in ws:
        x = layer(x, w)
    return x


def program_of(lab, fn, args, mesh=None):
    """The program of the cheapest plan of a call whose first argument is split, and its problem."""
    mesh = mesh or lab.LINE
    split = Layout(mesh, (Shard(0), *[REPLICATE] * (len(mesh.axes) - 1)))
    allowed = {fn.__code__.co_varnames[0]: ((split,), "a test")}
    problem = lab.problem_of(fn, args, mesh, allowed, on_unknown_op="warn")
    return lower(problem, dynamic_programming(problem).choice), problem


def cut(program):
    """The pieces that the program is cut into."""
    graph = program.lowered.graph
    with FakeTensorMode(), torch.enable_grad():
        inputs = {
            node: Like.whole(p.local_shape, p.dtype, torch.device("cpu"), p.port.requires_grad)
            for node, p in zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True)
        }
        return pieces_of(graph, inputs)[0]


def check(lab, fn, args, wanted=None):
    """Run the differentiated program of `fn` on simulated ranks and compare with plain PyTorch, which gives the same
    gradients, None alike. Returns the step."""
    program, problem = program_of(lab, fn, args)
    wanted = wanted or tuple(port.requires_grad for port in problem.graph.outputs)
    assert len({piece.key for piece in cut(program)}) < len(cut(program)), "nothing is shared in this test"
    step = Loaded(differentiate(program, wanted), Simulator(lab.LINE), lambda w: None)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    tensors = lab.call_tensors(problem, fn, args)
    torch.manual_seed(3)
    found = step(tensors)
    torch.manual_seed(3)
    expected = lab.as_tuple(fn(*args))
    lab.assert_same([o.detach() for o in found], [o.detach() for o in expected])
    chosen = [(f, e) for f, e, want in zip(found, expected, wanted, strict=True) if want]
    given = [random(*e.shape, requires_grad=False, seed=i) for i, (_, e) in enumerate(chosen)]
    ours = torch.autograd.grad([f for f, _ in chosen], leaves, given, allow_unused=True)
    theirs = torch.autograd.grad([e for _, e in chosen], leaves, given, allow_unused=True)
    assert [g is None for g in ours] == [g is None for g in theirs]
    lab.assert_same(ours, theirs)
    return step.program


# -- What is shared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "vit"))])
def test_a_model_has_the_loss_and_gradients_of_one_device_and_fewer_traces_than_pieces(name, traced, monkeypatch):
    monkeypatch.setattr("zoo.LAYERS", 4)  # the more of them, the more pieces are equal
    case = CASES[name]
    model = pw.shard(
        case.build(), mesh={"dp": 2, "tp": 2}, in_strategy=case.batch_split("dp"), parameter_plan=case.block_split("tp")
    )
    loss, found = gradients(model, case.batch())
    expected_loss, expected = gradients(case.build(), case.batch())
    relative = tolerance(torch.float64, case.single)
    assert_same_loss(loss, expected_loss, relative)
    assert_same_gradients(found, expected, relative)
    program = model.program
    assert sum(len(piece.nodes) for piece in traced) < 0.75 * len(program.lowered.graph.nodes)
    assert len(traced) < len(cut(program))


def test_depth_does_not_change_how_much_is_traced(lab, traced):
    sizes = []
    for layers in (6, 12, 24):
        traced.clear()
        step = check(lab, deep, (random(4, WIDTH), *weights(layers)))
        sizes.append([len(piece.nodes) for piece in traced])
        assert len(step.forward.graph.nodes) > 7 * layers
    assert sizes[1] == sizes[2]
    assert sum(sizes[2]) <= sum(sizes[0])


def test_what_does_not_repeat_is_traced_whole(lab, traced):
    program, _ = program_of(lab, lambda x, w: layer(x, w).sum(), (random(4, WIDTH), *weights(1)))
    differentiate(program, (True,))
    (piece,) = traced
    assert piece.nodes == tuple(n for n in program.lowered.graph.nodes if n.op == "call_function")


def gated(x, start, w):
    """A loop over time: each step takes an element of `x`, and puts its result into an element of another tensor."""
    state, result = start, torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = layer(state * 0.5 + x[:, t], w)
        result = torch.select_scatter(result, state * state, 1, t)
    return result.sum(1) + x[:, 1]


def cells(x, start, w):
    """A loop of which each step is one operator, and has two results."""
    h, c, found = start, start, []
    for t in range(x.shape[1]):
        h, c = torch.ops.aten.lstm_cell(x[:, t], [h, c], w, w)
        found.append(h)
    return torch.stack(found, 1) * x


@pytest.mark.parametrize("loop", [gated, cells])
def test_the_steps_of_a_loop_that_was_unrolled_are_traced_once(lab, traced, loop):
    w = random(WIDTH, WIDTH) if loop is gated else random(4 * WIDTH, WIDTH)
    numbered = (torch.ops.aten.select.int, torch.ops.aten.select_scatter.default)
    for steps in (16, 32):
        traced.clear()
        check(lab, loop, (random(4, steps, WIDTH, seed=8), random(4, WIDTH, seed=9), w))
        assert sum(len(piece.nodes) for piece in traced if piece.nodes[0].target not in numbered) < 60


def test_layers_that_differ_in_a_constant_or_in_what_they_read_are_not_taken_for_one_another(lab):
    def alternating(x, *ws):
        for i, w in enumerate(ws):
            x = layer(x, w) * (1.0 if i % 2 else 1) + (2.0 if i % 3 else -0.0)
            x = x - (x * w[0] if i % 2 else w[0] * w[0] * x)
        return x

    check(lab, alternating, (random(4, WIDTH), *weights(12)))


def test_each_copy_has_its_own_conversions(lab):
    program, _ = program_of(lab, deep, (random(4, WIDTH), *weights()), lab.SQUARE)
    pieces = cut(program)
    assert len({piece.key for piece in pieces}) < len(pieces)
    step = differentiate(program, (True,))
    tags = [node.args[-1] for node in program.lowered.graph.nodes if node.target is convert]
    assert tags
    assert [node.args[-1] for node in step.forward.graph.nodes if node.target is convert] == tags
    back = [node.args[-1] for node in step.backward.graph.nodes if node.target is convert]
    assert len(back) == len(set(back))
    assert set(back) <= set(tags)


# -- What passes between pieces -----------------------------------------------------------------------------------


def tied(ids, table, *ws):
    """The first and the last piece read one parameter."""
    return F.cross_entropy(deep(F.embedding(ids, table), *ws) @ table.T, ids)


def memory(x, shared, *ws):
    """Every layer reads one value that needs a gradient, computed before all of them."""
    shared = torch.exp(shared) * 0.1
    for w in ws:
        x = layer(x, w) + shared * x
    return x


def loss_and_hidden(x, *ws):
    """Outputs beside a loss: the layers' results."""
    hidden = []
    for w in ws:
        x = layer(x, w)
        hidden.append(x)
    return (x * x).sum(), *hidden


def integers(x, positions, *ws):
    """What has no gradient: integers, comparisons, detached values."""
    later = positions + 1
    for w in ws:
        x = layer(x, w) * (later > 2) + x.detach() * later
    return x, later


def several_results(x, *ws):
    """Operators with several results, of which not all are read or have a gradient."""
    for w in ws:
        left, _, right = torch.split(torch.cat([x, x @ w, x * x], 1), WIDTH, 1)
        values, order = torch.sort(left + torch.sigmoid(right), 1)
        x = values + torch.tanh(order * 0.1) + x
    return x


def unread(x, nobody, *ws):
    """An input that nobody reads, and one that no gradient reaches."""
    return deep(x, *ws[:-1]) + ws[-1][0].floor().detach()


def passed_on(x, *ws):
    """An input for an output, an output twice, and a view of an output."""
    y = deep(x, *ws)
    return x, y, y, y.transpose(0, 1)


def views(x, *ws):
    """Pieces that end in views, and gradients that come with other strides than their values have."""
    for w in ws:
        x = layer(x.reshape(2, 2, WIDTH).transpose(0, 1).reshape(4, WIDTH), w)
        x = x.T.reshape(WIDTH, 4).transpose(0, 1).expand(4, WIDTH)
    return x.unsqueeze(0).expand(3, 4, WIDTH).sum(0)


def spectra(x, *ws):
    """Backward formulas that fill a buffer, complex values in between."""
    for w in ws:
        x = layer(torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=WIDTH, dim=1), w)
    return x


def real_parts(x, *ws):
    """Values that are not lazy, gradients that would be."""
    z = torch.fft.rfft(x, dim=1)
    for w in ws:
        z = torch.view_as_complex(torch.view_as_real(z) * 0.5)
        z = z * torch.sigmoid(w[0, 0]) + torch.fft.rfft(layer(torch.fft.irfft(z * z, n=WIDTH, dim=1), w), dim=1)
    return torch.fft.irfft(z, n=WIDTH, dim=1)


def conjugated(x, *ws):
    """Conjugates, which are carried out at once."""
    for w in ws:
        z = torch.fft.rfft(x, dim=1)
        x = layer(torch.view_as_real(torch.conj(z).resolve_conj() * z).sum((1, 2)).unsqueeze(1) + x, w)
    return x


def random_numbers(x, *ws):
    """Dropout in every layer."""
    for w in ws:
        x = layer(F.dropout(x, 0.5), w)
    return x


def rms_norms(x, *ws):
    """Norms that PyTorch writes as other operators, one of them in place."""
    for w in ws:
        x = layer(F.rms_norm(x, (WIDTH,), w[0], 0.1), w)
    return x


def maxima(x, *ws):
    """Whose gradient fills what is not the maximum."""
    for w in ws:
        x = torch.maximum(layer(x, w), x.tanh())
    return x


def no_dropout(x, *ws):
    """Operators that return their operand."""
    for w in ws:
        x = F.dropout(layer(x, w), 0.5, training=False).contiguous().to(torch.float64)
    return x


X, IDS = random(4, WIDTH, seed=9), torch.arange(4)
CASES_OF_PASSING = [
    (tied, (IDS, random(6, WIDTH, seed=8), *weights())),
    (memory, (X, random(4, WIDTH, seed=8), *weights())),
    (integers, (X, torch.arange(WIDTH), *weights())),
    (several_results, (X, *weights())),
    (unread, (X, random(3), *weights())),
    (views, (X, *weights())),
    (spectra, (X, *weights())),
    (real_parts, (X, *weights())),
    (random_numbers, (X, *weights())),
    (no_dropout, (X, *weights())),
    (rms_norms, (X, *weights())),
    (maxima, (X, *weights())),
]


@pytest.mark.parametrize(("fn", "args"), CASES_OF_PASSING, ids=lambda value: getattr(value, "__name__", ""))
def test_a_step_computes_what_autograd_does(lab, fn, args):
    step = check(lab, fn, args)
    for node in (*step.forward.graph.nodes, *step.backward.graph.nodes):  # else the plan would have no form on disk
        assert not getattr(node.target, "_schema", None) or not node.target._schema.is_mutable


def test_layers_that_drop_are_traced_once(lab, traced):
    """Their keys come from one operator, so that they compute the same."""
    layers = 8

    def deep(x, *ws):
        for w in ws:
            x = layer(F.dropout(x, 0.5), w)
        return x.sum()

    args = (X, *(random(WIDTH, WIDTH, seed=i) for i in range(layers)))
    problem = lab.problem_of(deep, args, lab.LINE, random_numbers=RandomNumbers.COUNTER)
    step = differentiate(lower(problem, dynamic_programming(problem).choice), (True,))
    assert step.backward is not None
    assert len(traced) <= layers // 2


@pytest.mark.parametrize("wanted", [(True, *[False] * LAYERS), (True,) * (LAYERS + 1), (False, True, *[False] * 5)])
def test_any_outputs_can_be_differentiated(lab, wanted):
    check(lab, loss_and_hidden, (X, *weights()), wanted)


def test_inputs_and_views_may_be_outputs_and_an_output_may_come_twice(lab):
    args = (X, *weights())
    for wanted in ((True,) * 4, (True, False, False, False), (False, True, True, False), (False, False, False, True)):
        check(lab, passed_on, args, wanted)


def test_no_piece_ends_between_a_conjugation_and_what_carries_it_out(lab):
    args = (X, *weights())
    program, _ = program_of(lab, conjugated, args)
    assert len(cut(program)) > 1
    program = replaced(program, torch.ops.aten.conj_physical.default, torch.ops.aten._conj.default)
    assert len(cut(program)) == 1


def test_a_value_that_several_pieces_save_is_saved_once(lab):
    step = check(lab, memory, (X, random(4, WIDTH, seed=8), *weights()))
    returned = step.forward.graph.find_nodes(op="output")[0].args[0]
    saved = returned[len(step.outputs) :]
    assert len(saved) == len(set(saved))
    assert len(step.backward.graph.find_nodes(op="placeholder")) == len(saved) + 1
    assert all(node.users for node in step.backward.graph.find_nodes(op="placeholder"))


def test_nothing_is_differentiated_where_no_output_or_no_input_asks_for_it(lab, traced):
    program, _ = program_of(lab, deep, (X, *weights()))
    step = differentiate(program, (False,))
    assert step.backward is None
    assert not any(step.needed)
    program, _ = program_of(lab, deep, (X.detach(), *(w.detach() for w in weights())))
    assert differentiate(program, (True,)).backward is None
    assert traced == []


# -- Calls that are no part of captured programs ------------------------------------------------------------------


def replaced(program, target, other):
    """`program` with calls of `other` in place of those of `target`."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(program.lowered.graph, {}))
    for node in graph.find_nodes(op="call_function", target=target):
        node.target = other
    return dataclasses.replace(program, lowered=torch.fx.GraphModule(torch.nn.Module(), graph))


LIBRARY = torch.library.Library("partway_differentiate_tests", "DEF")
TABLES = {"rising": [1.0 + i for i in range(WIDTH)], "falling": [-1.0 * i for i in range(WIDTH)]}
for name, table in TABLES.items():
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, lambda x, t=table: x * torch.tensor(t, dtype=x.dtype), "CompositeImplicitAutograd")


def test_constants_that_a_formula_makes_are_each_their_own(lab):
    def fn(x, *ws):
        for i, w in enumerate(ws):
            x = layer(torch.sin(x) if i % 2 else torch.cos(x), w)
        return x

    def expected(x, *ws):
        for i, w in enumerate(ws):
            x = layer(x * torch.tensor(TABLES["rising" if i % 2 else "falling"], dtype=x.dtype), w)
        return x

    args = (X, *weights())
    program, problem = program_of(lab, fn, args)
    operators = torch.ops.partway_differentiate_tests
    program = replaced(program, torch.ops.aten.sin.default, operators.rising.default)
    program = replaced(program, torch.ops.aten.cos.default, operators.falling.default)
    assert len({piece.key for piece in cut(program)}) < len(cut(program))
    step = Loaded(differentiate(program, (True,)), Simulator(lab.LINE), lambda w: None)
    found = lab.value_and_gradients(step(lab.call_tensors(problem, fn, args)), args)
    lab.assert_same(found, lab.value_and_gradients((expected(*args),), args))


def test_an_operator_that_writes_to_an_input_is_refused(lab):
    def fn(x, y):
        return torch.neg(y) * x

    program, _ = program_of(lab, fn, (random(4), random(4, requires_grad=False)))
    program = replaced(program, torch.ops.aten.neg.default, torch.ops.aten.neg_.default)
    with pytest.raises(VerifyError, match=r"the traced program writes in place: .*copy_"):
        differentiate(program, (True,))


def test_a_gradient_that_asks_for_values_is_refused(lab):
    def fn(x):
        u, s, v = torch.linalg.svd(torch.complex(x, x), full_matrices=False)
        return (u * s @ v).real

    with pytest.raises(
        CaptureError,
        match=r"the gradient of one of aten\.complex\.default, aten\.linalg_svd\.default, .* depends on the values of "
        r"tensors, as PyTorch computes it: it asks for aten\.allclose\.default\. Compute it outside",
    ):
        differentiate(program_of(lab, fn, (random(4, 4),))[0], (True,))


@pytest.mark.parametrize("split", [(None, "tp"), ("tp", None), None])
def test_no_program_transposes_what_was_transposed(split):
    model = pw.shard(
        torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).double(), mesh={"tp": 2},
        parameter_plan={"1.weight": split} if split else None, in_strategy=((1, 1),),
    )  # fmt: skip
    model(random(4, 8)).sum().backward()
    for graph in (model.program.forward.graph, model.program.backward.graph):
        transposes = graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)
        assert not [node for node in transposes if node.args[0] in transposes]


def test_a_view_of_a_view_is_what_it_was_of_where_it_is_that_again():
    def views(x):
        back = x.view(1, 4, 6).view(4, 6)
        return back.unsqueeze(0).squeeze(0) + back.t().t(), x.view(2, 12).view(4, 6).view(24)

    traced = make_fx(views)(torch.randn(4, 6))
    undo_views(traced.graph)
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [torch.ops.aten.add.Tensor, torch.ops.aten.view.default]
    assert {operand.op for node in calls for operand in node.all_input_nodes} == {"placeholder"}
    turned = make_fx(lambda x: x.t().reshape(24).reshape(6, 4).t().reshape(24).reshape(4, 6))(torch.randn(4, 6))
    undo_views(turned.graph)
    x = torch.randn(4, 6)
    torch.testing.assert_close(turned(x), x, rtol=0, atol=0)
