"""From a call to a graph: structure, state, gradients, and what is refused."""

import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.capture.tracing import capturing
from partway.propagation.graph.graph import verify
from partway.propagation.graph.nodes import describe, module_path, operator_name, source_line
from partway.propagation.graph.port import Role
from partway.propagation.graph.queries import constant_nodes, differentiated, gradient_flow
from partway.propagation.graph.structure import flatten, flatten_call
from partway.strategy import CaptureError, VerifyError

aten = torch.ops.aten


def names(graph, role):
    return [port.name for port in graph.inputs if port.role is role]


def operators(graph):
    return [operator_name(node).split(".")[1] for node in graph.nodes]


def run(graph, **tensors):
    """The outputs of a captured graph, its inputs given by name."""
    given = {**graph.constants, **tensors}
    return fx.Interpreter(graph.module).run(*(given[port.name] for port in graph.inputs))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_the_graph_of_a_tiny_mlp():
    graph = capture(MLP(), (torch.ones(2, 4),), {})
    assert str(graph).splitlines() == [
        "parameter up.weight: float32[8, 4]",
        "parameter up.bias: float32[8]",
        "parameter down.weight: float32[4, 8]",
        "input x: float32[2, 4]",
        "linear = aten.linear.default: float32[2, 8]",
        "relu = aten.relu.default: float32[2, 8]",
        "linear_1 = aten.linear.default: float32[2, 4]",
        "return result (result) = linear_1",
    ]


def test_every_operator_knows_its_module_and_its_line():
    up, relu, down = capture(MLP(), (torch.ones(2, 4),), {}).nodes
    assert [module_path(node) for node in (up, relu, down)] == ["up", "", "down"]
    assert source_line(down).endswith("in forward: return self.down(torch.relu(self.up(x)))")
    assert source_line(down).startswith("test_capture.py:")


# -- structure


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None


@dataclass
class Output:
    loss: torch.Tensor
    parts: dict
    note: str


def test_arguments_and_results_keep_their_structure():
    def fn(batch, others, *, power=2, unused=None):
        y = batch.x * batch.scale + others["a"][0] ** power
        return Output(y.sum(), {"y": y, "n": 3}, "done"), None

    x, a = torch.ones(2, 3), torch.full((3,), 2.0)
    graph = capture(fn, (Batch(x, 0.5),), {"others": {"a": (a, 7)}, "power": 3})
    assert names(graph, Role.INPUT) == ["batch[0]", "others[0]"]
    assert [port.argument for port in graph.inputs] == ["batch", "others"]
    assert [port.name for port in graph.outputs] == ["result[0]", "result[1]"]
    built, nothing = graph.result.build(list(run(graph, **{"batch[0]": x, "others[0]": a})))
    assert nothing is None
    assert isinstance(built, Output)
    assert built.note == "done"
    assert built.parts["n"] == 3
    torch.testing.assert_close(built.parts["y"], x * 0.5 + a**3)
    assert built.loss == built.parts["y"].sum()


class Memory:
    """Holds tensors, and what to do with them, as a cache of transformers does."""

    def __init__(self, *kept):
        self.layers = [*kept]
        self.make, self.length = torch.zeros_like, 0

    def add(self, x):
        self.layers.append(x)
        self.length += len(x)


def test_an_object_that_holds_tensors_is_a_result():
    def fn(x):
        memory = Memory()
        memory.add(x + 1)
        return x.sum(), memory

    x = torch.ones(2)
    graph = capture(fn, (x,), {})
    _, memory = graph.result.build(list(run(graph, x=x)))
    assert isinstance(memory, Memory)
    assert (memory.make, memory.length) == (torch.zeros_like, 2)
    torch.testing.assert_close(memory.layers, [x + 1])


def test_an_object_that_holds_tensors_is_an_argument_and_stays_as_it_was():
    def fn(memory, x):
        memory.add(memory.layers[0] * x)
        return memory

    given, x = Memory(torch.full((2,), 3.0)), torch.full((2,), 2.0)
    graph = capture(fn, (given, x), {})
    assert names(graph, Role.INPUT) == ["memory[0]", "x"]
    memory = graph.result.build(list(run(graph, **{"memory[0]": given.layers[0], "x": x})))
    torch.testing.assert_close(memory.layers, [given.layers[0], given.layers[0] * x])
    assert len(given.layers) == 1
    assert given.length == 0


def test_an_object_that_the_function_fills_is_not_the_callers():
    given = Memory()
    graph = capture(lambda memory, x: memory.add(x + 1) or memory, (given, torch.ones(2)), {})
    assert graph.result.count() == 1
    assert given.layers == []


def test_calls_with_equal_objects_have_one_structure():
    def key(*tensors):
        return flatten_call(lambda memory: memory, (Memory(*tensors),), {}).structure.key()

    assert key() == key()
    assert key(torch.ones(2)) == key(torch.zeros(2))
    assert key() != key(torch.ones(2))


def test_an_object_that_holds_itself_or_what_cannot_be_copied_stays_whole():
    ring, opened = Memory(), Memory()
    ring.layers.append(ring)
    opened.layers.append(iter(()))
    for given in (ring, opened):
        assert flatten(given)[1].build([]) is given


def test_arguments_are_named_by_the_signature():
    graph = capture(
        lambda first, *rest, last: first + rest[0] + last, (torch.ones(2), torch.ones(2)), {"last": torch.ones(2)}
    )
    assert names(graph, Role.INPUT) == ["first", "arg1", "last"]


def test_a_result_that_is_an_input_or_a_number_is_allowed():
    graph = capture(lambda x: (x, 5, x + 1), (torch.ones(2),), {})
    assert [port.name for port in graph.outputs] == ["result[0]", "result[1]"]
    assert graph.result.build(["a", "b"]) == ("a", 5, "b")


# -- state


def test_a_distribution_is_not_checked_while_it_is_captured():
    def fn(mean, x):
        found = torch.distributions.Normal(mean, 2.0)
        return found.log_prob(x).sum(), found

    mean, x = torch.zeros(3), torch.ones(3)
    graph = capture(fn, (mean, x), {})
    likely, found = graph.result.build(list(run(graph, mean=mean, x=x)))
    assert likely == fn(mean, x)[0]
    assert torch.equal(found.loc, mean)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(mean, -1.0)


class Routed(nn.Module):
    """As the routers of some mixtures of experts, which compute in a dtype of their own."""

    def __init__(self, dtype):
        super().__init__()
        self.router, self.dtype = nn.Linear(4, 3), dtype

    def forward(self, x):
        self.router = self.router.to(self.dtype)
        return self.router(x.to(self.dtype)).sum()


def test_a_module_may_be_converted_to_what_it_is():
    model = Routed(torch.float32)
    weight = model.router.weight
    graph = capture(model, (torch.ones(2, 4),), {})
    assert names(graph, Role.PARAMETER) == ["router.weight", "router.bias"]
    assert model.router.weight is weight
    assert "_apply" not in vars(model.router)


def test_a_conversion_that_changes_a_module_is_refused():
    with pytest.raises(
        CaptureError, match=r"converts 'weight' of a Linear from float32 on cpu to float64 on cpu.* before shard"
    ):
        capture(Routed(torch.float64), (torch.ones(2, 4),), {})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += 1
        return self.head(self.embed(ids)) * self.scale


def test_a_tied_weight_is_one_input_with_two_names():
    graph = capture(Tied(), (torch.tensor([1, 2]),), {})
    assert names(graph, Role.PARAMETER) == ["embed.weight"]
    assert graph.aliases == {"head.weight": "embed.weight"}
    (port,) = (port for port in graph.inputs if port.role is Role.PARAMETER)
    assert sorted(operator_name(user) for user in port.node.users) == ["aten.embedding.default", "aten.linear.default"]


def test_buffers_are_inputs_and_what_is_written_to_them_is_an_output():
    module = Tied()
    graph = capture(module, (torch.tensor([1, 2]),), {})
    assert names(graph, Role.BUFFER) == ["scale", "seen"]
    assert [(port.role, port.name) for port in graph.outputs] == [(Role.BUFFER_UPDATE, "seen"), (Role.RESULT, "result")]
    assert module.seen == 0


def test_a_frozen_parameter_needs_no_gradient():
    module = MLP()
    module.up.weight.requires_grad_(False)
    graph = capture(module, (torch.ones(2, 4),), {})
    assert {port.name: port.requires_grad for port in graph.inputs} == {
        "up.weight": False,
        "up.bias": True,
        "down.weight": True,
        "x": False,
    }


def test_a_tensor_that_is_closed_over_is_a_constant():
    table = torch.arange(4.0)
    graph = capture(lambda x: x * table + torch.tensor([1.0, 2.0, 3.0, 4.0]), (torch.ones(4),), {})
    assert len(names(graph, Role.CONSTANT)) == 2
    (out,) = run(graph, x=torch.ones(4))
    assert out.tolist() == [1, 3, 5, 7]


def test_a_parameter_that_is_closed_over_is_refused_for_no_gradient_would_reach_it():
    weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"float32\[3, 4\]\); shard the module they belong to, or pass them"):
        capture(lambda x: F.linear(x, weight), (torch.ones(2, 4),), {})


def test_what_depends_on_no_input_is_constant():
    graph = capture(lambda x: x + torch.arange(4).float().cos(), (torch.ones(4),), {})
    constant = constant_nodes(graph)
    assert [operator_name(node) in ("aten.add.Tensor",) for node in graph.nodes if node not in constant] == [True]


# -- gradients


def test_a_no_grad_region_stops_gradients(lab):
    def fn(x):
        with torch.no_grad():
            scale = x.sum() * 2
        return x * scale

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    graph = capture(fn, (x,), {})
    lab.check_optimum(graph, fn, (x,), lab.LINE)
    assert "detach" in operators(graph)


def test_nested_no_grad_and_enable_grad(lab):
    def fn(x):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
            y = y + 1
        return (x * y * z).sum()

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    lab.check_optimum(capture(fn, (x,), {}), fn, (x,), lab.LINE)


def test_a_loss_is_what_is_differentiated():
    weight = torch.ones(3, requires_grad=True)
    assert differentiated(capture(lambda x, w: ((x * w).sum(), x * w), (torch.ones(3), weight), {})) == (True, False)
    assert differentiated(capture(lambda x, w: (x * w, x * 2), (torch.ones(3), weight), {})) == (True, False)


def test_gradients_flow_between_parameters_and_the_loss_only():
    def fn(x, w):
        y = x.exp()
        return (y * w).sum(), (y * 2).sum()

    graph = capture(fn, (torch.ones(3), torch.ones(3, requires_grad=True)), {})
    assert {operator_name(v.node) for v in graph.differentiable if v.node.op != "placeholder"} == {
        "aten.mul.Tensor",
        "aten.sum.default",
    }
    flows = gradient_flow(graph, differentiated(graph))
    assert sorted(v.node.name for v in flows if v.node.op != "placeholder") == ["mul", "sum_1"]


# -- what PyTorch code does


def test_autocast_becomes_casts():
    def fn(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, w).float()

    graph = capture(fn, (torch.ones(2, 4), torch.ones(3, 4)), {})
    assert operators(graph).count("_to_copy") == 3
    (linear,) = (node for node in graph.nodes if node.target is aten.linear.default)
    assert describe(linear) == "bfloat16[2, 3]"


def test_writing_in_place_to_a_fresh_tensor(lab):
    def fn(x):
        y = x * 2
        y += 1
        y.sub_(0.5)
        return y.mul_(2) * x

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    graph = capture(fn, (x,), {})
    verify(graph)
    lab.check_optimum(graph, fn, (x,), lab.LINE)


@pytest.mark.filterwarnings("ignore::partway.strategy.errors.UnknownOperatorWarning")
def test_writing_in_place_to_a_view(lab):
    def fn(x):
        y = x.clone()
        y[0] = 1.0
        y[:, 1] += 2
        y[1:3].mul_(3)
        return y * x

    x = torch.randn(4, 4, dtype=torch.float64)
    graph = verify(capture(fn, (x,), {}))
    (out,) = run(graph, x=x)
    torch.testing.assert_close(out, fn(x))


def test_an_input_that_is_written_to_is_an_output():
    graph = capture(lambda x: x.add_(1) * 2, (torch.ones(3),), {})
    assert [(port.role, port.name) for port in graph.outputs] == [(Role.INPUT_UPDATE, "x"), (Role.RESULT, "result")]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "its course depends on the values of tensors"),
        (lambda x: torch.full((3,), x[0].item()), "on the values of tensors|its course depends"),
        (lambda x: x.nonzero(), "depends on the values of tensors"),
        (lambda x: x @ torch.ones(5, 5), "could not capture .* as one static graph: RuntimeError"),
        (lambda x: x[7], "could not capture .* as one static graph: IndexError"),
        (lambda x: x.no_such_method(), "AttributeError"),
    ],
)
def test_what_cannot_be_captured_is_refused(fn, message, capfd):
    with pytest.raises(CaptureError, match=message):
        capture(fn, (torch.ones(3),), {})
    assert not capturing()
    assert capfd.readouterr().err == ""  # torch.export prints its graph


def test_capturing_is_known_inside_only():
    seen = []
    capture(lambda x: seen.append(capturing()) or x + 1, (torch.ones(2),), {})
    assert set(seen) == {True}
    assert not capturing()


def test_meta_tensors_are_captured_like_others():
    with torch.device("meta"):
        module, x = MLP(), torch.ones(2, 4)
    graph = capture(module, (x,), {})
    assert graph.device == "meta"
    assert str(graph) == str(capture(MLP(), (torch.ones(2, 4),), {}))


def test_the_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    capture(module, (torch.randn(4, 3, generator=torch.Generator()),), {})
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_verify_refuses_a_graph_with_other_calls():
    graph = capture(lambda x: x + 1, (torch.ones(2),), {})
    (node,) = graph.nodes
    node.target = torch.add
    with pytest.raises(VerifyError, match="which is not an operator"):
        verify(graph)
    node.target = aten.add_.Tensor
    with pytest.raises(VerifyError, match="writes to its operands"):
        verify(graph)
    node.target = aten.add.Tensor
    del node.meta["val"]
    with pytest.raises(VerifyError, match="has no value"):
        verify(graph)


def test_the_operators_of_a_plain_function_name_its_lines():
    def half_of_a_product(x):
        y = x @ x
        return y / 2

    graph = capture(half_of_a_product, (torch.ones(4, 4),), {})
    lines = [source_line(node) for node in graph.nodes]
    assert [line.split(", in ", 1)[1] for line in lines] == [
        "half_of_a_product: y = x @ x",
        "half_of_a_product: return y / 2",
    ]
    assert all(line.startswith("test_capture.py:") for line in lines)


def test_an_lstm_that_gets_its_states_by_name_is_captured():
    def fn(x, h, w, u):
        return torch.lstm(
            x, hx=[h, h], params=[w, u], has_biases=False, num_layers=1, dropout=0.0, train=True, bidirectional=False,
            batch_first=False,
        )  # fmt: skip

    args = torch.randn(3, 4, 3), torch.randn(1, 4, 2), torch.randn(8, 3), torch.randn(8, 2)
    graph = capture(fn, args, {})
    for found, expected in zip(fx.Interpreter(graph.module).run(*args), fn(*args), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_reduction_that_ctc_loss_has_not_is_refused():
    x, labels, lengths = torch.randn(5, 2, 4).log_softmax(2), torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2])
    with pytest.raises(CaptureError, match="ValueError: average is not a valid value for reduction"):
        capture(lambda x: torch.nn.functional.ctc_loss(x, labels, lengths, lengths, reduction="average"), (x,), {})


# -- what capture leaves behind, and what it cannot keep


class Caches(nn.Module):
    """A module that keeps what it made, as ALiBi and rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.length, self.by_length = 0, {}
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if self.length < x.shape[0]:
            self.length = x.shape[0]
            self.register_buffer("bias", torch.arange(4.0) * 2, persistent=False)
            self.plain = torch.ones(4)
            self.by_length[self.length] = torch.zeros(4)
            self.made = nn.ReLU()
        return self.inner(x) * self.bias * self.plain + self.by_length[self.length]


def test_no_fake_tensor_is_left_in_a_module():
    module = Caches()
    before = {name: value for name, value in vars(module).items() if name != "_modules"}
    for size in (2, 3):
        pw.compile(module, (torch.ones(size, 4),), mesh={"x": 1})
        assert {name: value for name, value in vars(module).items() if name != "_modules"} == before
        assert (list(module._buffers), list(module._modules), module.by_length) == ([], ["inner"], {})
    out = module(torch.ones(2, 4))
    assert type(out) is torch.Tensor
    assert module.length == 2


def expanded(x):
    return x[:1].expand(8, 4).add_(1)


@pytest.mark.parametrize(
    "fn", [expanded, lambda x: x[0].expand(8, 4).mul_(x), lambda x: torch.empty(1).expand(8).fill_(x[0, 0])]
)
def test_a_write_to_what_was_expanded_is_refused(fn):
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
        fn(torch.ones(8, 4))
    with pytest.raises(
        CaptureError, match=r"writes in place .* to a tensor that was expanded, whose elements share memory"
    ):
        capture(fn, (torch.ones(8, 4),), {})


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_python_s_random_numbers_are_refused(draw):
    def drops(x):
        return x * 2 if draw() < 0.5 else x

    with pytest.raises(CaptureError, match=r"random numbers of Python's module (numpy.)?random are drawn in .*drops"):
        capture(drops, (torch.ones(2),), {})


def test_threads_that_draw_nothing_do_not_turn_the_refusal_into_a_warning():
    idle = threading.Event()
    ours = threading.Thread(target=idle.wait, name="partway watch")
    ours.start()
    with pytest.raises(CaptureError, match="random numbers of Python's module random are drawn"):
        capture(lambda x: x * random.random(), (torch.ones(2),), {})
    idle.set()
    ours.join()


def test_python_s_random_numbers_of_another_thread_are_warned_of():
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    with pytest.warns(
        UserWarning, match="if not by another thread, random numbers of Python's module random are drawn"
    ):
        capture(lambda x: x * random.random(), (torch.ones(2),), {})
    idle.set()
    other.join()


@pytest.mark.parametrize("lookup", [F.embedding, F.embedding_bag])
def test_an_embedding_that_renormalises_its_weight_is_refused(lookup):
    with pytest.raises(CaptureError, match=rf"{lookup.__name__} with max_norm=1.0 writes to its weight in place"):
        capture(lambda i, w: lookup(i, w, max_norm=1.0), (torch.tensor([[0, 1]]), torch.ones(8, 4)), {})


def test_a_generator_argument_is_refused():
    with pytest.raises(CaptureError, match=r"a Generator; a torch.Generator is not needed: random numbers follow"):
        capture(lambda x, g: x + torch.rand(4, generator=g), (torch.ones(4), torch.Generator()), {})
