"""A loaded program, on simulated ranks and on gloo ranks, computes what plain torch computes."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.fusion.fuse import fuse_program
from partway.propagation.capture.capture import CaptureOptions, capture
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.graph.graph import differentiated
from partway.propagation.graph.port import Role
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import Settings
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.program.program import verify_program
from partway.propagation.search.exact import dynamic_programming
from partway.runtime import (
    Loaded,
    Simulator,
    Worker,
    as_dtensor,
    distribute,
    join,
    placed_part,
    record_collectives,
    redistribute,
)
from partway.strategy import REPLICATE, Kind, Layout, Mesh, RuntimeStateError, Shard
from partway.strategy.layout import layout


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, target):
        hidden = F.dropout(F.gelu(self.up(x)), 0.25, self.training)
        logits = self.down(hidden)
        return F.cross_entropy(logits, target), logits


class Attention(nn.Module):
    """A block whose embedding is its output, tied."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x, target):
        x = self.embedding(x)
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(x + self.out(mixed))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


def example(which):
    """A model in float64 and the arguments of a call, the same wherever it is made."""
    torch.manual_seed(0)
    if which == "mlp":
        return MLP().double(), {"x": torch.randn(8, 8).double(), "target": torch.randint(0, 4, (8,))}
    return Attention().double(), {"x": torch.randint(0, 16, (8, 4)), "target": torch.randint(0, 16, (8, 4))}


# What people annotate: nothing, the batch on the first axis, weights split at rest on the last, a split result.
ANNOTATIONS = {
    "free": {},
    "batch": {"x": 0},
    "result": {"x": 0, "result[1]": 0},
    "weights": {"x": 0, "up.weight": 1, "down.weight": 0, "qkv.weight": 0, "embedding.weight": 1},
}


def plan(which, axes, annotation, fused=False):
    """The model, its arguments, and a function from an executor to the loaded program."""
    model, arguments = example(which)
    options, mesh = CaptureOptions(random_numbers=RandomNumbers.TORCH), Mesh(axes)
    graph = capture(model, (), arguments, options)
    allowed = {}
    for port in (*graph.inputs, *graph.outputs):
        if port.name in ANNOTATIONS[annotation]:
            axis = len(mesh.axes) - 1 if port.role is Role.PARAMETER else 0
            found = Layout.replicated(mesh).replaced(axis, Shard(ANNOTATIONS[annotation][port.name]))
            allowed[port.name] = (found,), "a test"
    settings = Settings(mesh, profile_of("cuda"), WEIGHTS[Level.COMMUNICATION])
    problem = formulate(graph, settings, allowed)
    program = verify_program(lower(problem, dynamic_programming(problem).choice))

    def compiled(executor):
        @functools.cache
        def build(wanted):
            step = differentiate(program, wanted)
            if fused and step.backward:
                auto = Fusion(FusionMode.AUTO)
                step = fuse_program(step, FusionPolicies(auto, auto, auto))
            return Loaded(step, executor, build)

        return build(differentiated(graph))

    return model, arguments, compiled


def tensors_of(compiled, model, arguments):
    given = {**arguments, **dict(model.named_parameters(remove_duplicate=False))}
    return [given[placed.port.name] for placed in compiled.program.inputs]


def results(compiled, outputs):
    names = [placed.port.name for placed in compiled.program.outputs]
    return outputs[names.index("result[0]")], outputs[names.index("result[1]")]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def simulated(which, axes, annotation, fused):
    model, arguments, compiled = plan(which, axes, annotation, fused)
    step = compiled(Simulator(Mesh(axes)))
    torch.manual_seed(1)
    loss, logits = results(step, step(tensors_of(step, model, arguments)))
    return loss.detach(), logits.detach(), gradients(model, loss)


def plain(which):
    model, arguments = example(which)
    torch.manual_seed(1)
    loss, logits = model(**arguments)
    return loss.detach(), logits.detach(), gradients(model, loss)


def assert_equal_runs(got, wanted):
    for one, other in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert got[2].keys() == wanted[2].keys()
    for name in wanted[2]:
        torch.testing.assert_close(got[2][name], wanted[2][name], rtol=1e-12, atol=1e-12, msg=name)


CASES = [
    ("mlp", "free", False),
    ("mlp", "batch", True),
    ("mlp", "result", False),
    ("mlp", "weights", False),
    ("attention", "batch", False),
    ("attention", "weights", True),
]


@pytest.mark.parametrize("axes", [{"x": 2}, {"dp": 2, "tp": 2}, {"x": 1}], ids=str)
@pytest.mark.parametrize(("which", "annotation", "fused"), CASES)
def test_simulated_ranks_compute_the_loss_and_gradients_of_plain_torch(which, annotation, fused, axes):
    assert_equal_runs(simulated(which, axes, annotation, fused), plain(which))


def check_worker(which, axes, annotation, fused):
    model, arguments, compiled = plan(which, axes, annotation, fused)
    worker, simulator = Worker(Mesh(axes)), Simulator(Mesh(axes))
    step, reference = compiled(worker), compiled(simulator)
    inputs = step.program.inputs
    whole = tensors_of(step, model, arguments)
    parts = [
        worker.cut(t.detach(), placed.layout).requires_grad_(t.requires_grad)
        for t, placed in zip(whole, inputs, strict=True)
    ]
    with record_collectives() as said:
        torch.manual_seed(1)
        loss, logits = results(step, step(parts))
        loss.backward()
    with record_collectives() as expected:
        torch.manual_seed(1)
        loss_of_all, logits_of_all = results(reference, reference(whole))
        loss_of_all.backward()
    assert said == expected
    outputs = step.program.outputs
    for wanted, wanted_logits in ((loss_of_all, logits_of_all), plain(which)[:2]):
        part = worker.cut(wanted_logits, outputs[-1].layout)
        assert_equal_runs((loss, logits, {}), (wanted, part, {}))
    for t, part, placed in zip(whole, parts, inputs, strict=True):
        if t.requires_grad:
            wanted = worker.cut(t.grad, placed.layout)
            torch.testing.assert_close(part.grad, wanted, rtol=1e-12, atol=1e-12, msg=placed.port.name)
    return {event.kind for event in said}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "axes", [*(pytest.param({"x": n}, marks=pytest.mark.slow) for n in (2, 4)), {"dp": 2, "tp": 2}], ids=str
)
def test_gloo_ranks_compute_the_loss_and_gradients_of_simulated_ranks(on_ranks, axes):
    n, kinds = Mesh(axes).device_num, set()
    for case in CASES:
        for found in on_ranks(n, check_worker, case[0], axes, *case[1:]):
            kinds |= found
    assert Kind.ALL_REDUCE in kinds
    assert len(kinds) > 1


# -- Training: DTensor parameters and ordinary optimizers -------------------------------------------------------------

# Adam scales up what should be zero (the gradient of the bias of attention's keys): a large eps keeps it small.
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, eps=1e-4, foreach=True),
    "one by one": functools.partial(torch.optim.AdamW, lr=0.1, eps=1e-4, foreach=False),
}


def check_training(which, axes, optimizer, steps):
    mesh = Mesh(axes)
    model, arguments, compiled = plan(which, axes, "weights")
    reference, _ = example(which)
    worker = Worker(mesh)
    step = compiled(worker)
    inputs = step.program.inputs
    layouts = {placed.port.name: placed.layout for placed in inputs if placed.port.role is Role.PARAMETER}
    distribute(model)
    kept = list(model.parameters())
    mine, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    redistribute(model, layouts)
    for held in (kept, mine.param_groups[0]["params"]):
        assert [id(p) for p in held] == [id(p) for p in model.parameters()]
    assert any(p.to_local().shape != p.shape for p in kept)
    outputs = [placed.layout for placed in step.program.outputs]
    for number in range(steps):
        given = [
            placed_part(t, placed.layout) for t, placed in zip(tensors_of(step, model, arguments), inputs, strict=True)
        ]
        torch.manual_seed(number)
        loss, logits = results(step, step(given))
        mine.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(kept, 0.1)
        mine.step()
        torch.manual_seed(number)
        wanted, _ = reference(**arguments)
        theirs.zero_grad()
        wanted.backward()
        norm_of_all = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        theirs.step()
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm, norm_of_all, rtol=1e-12, atol=1e-12)
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.grad.placements == one.placements
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-10, atol=1e-12, msg=name)
    assert as_dtensor(logits, outputs[-1], tuple(logits.shape), worker.device_mesh).full_tensor().shape == logits.shape


@pytest.mark.gloo
@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "one by one"))]
)
def test_an_optimizer_made_before_the_parameters_are_split_trains_as_on_one_device(on_ranks, optimizer):
    for which in ("mlp", "attention"):
        on_ranks(2, check_training, which, {"x": 2}, optimizer, 3)
        on_ranks(4, check_training, which, {"dp": 2, "tp": 2}, optimizer, 3)


# -- Calls that were not planned for ----------------------------------------------------------------------------------


def unplanned(which, executor, model, arguments, compiled):
    """Gradients of the logits, which nobody planned to differentiate."""
    step = compiled(executor)
    torch.manual_seed(1)
    loss, logits = results(step, step(tensors_of(step, model, arguments)))
    return gradients(model, (logits * logits).sum() + loss)


@pytest.mark.parametrize("which", ["mlp", "attention"])
def test_a_gradient_of_an_output_that_was_not_planned_for_is_right_and_draws_the_same_numbers_again(which):
    model, arguments, compiled = plan(which, {"dp": 2, "tp": 2}, "batch")
    assert compiled(Simulator(Mesh({"dp": 2, "tp": 2}))).program.wanted.count(True) == 1
    got = unplanned(which, Simulator(Mesh({"dp": 2, "tp": 2})), model, arguments, compiled)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    loss, logits = model(**arguments)
    assert torch.equal(torch.get_rng_state(), after), "the backward used the generator up"
    wanted = gradients(model, (logits * logits).sum() + loss)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-12, atol=1e-12)


def test_backward_can_run_twice_while_the_graph_is_retained():
    model, arguments, compiled = plan("mlp", {"x": 2}, "batch")
    step = compiled(Simulator(Mesh({"x": 2})))
    loss, _ = results(step, step(tensors_of(step, model, arguments)))
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters())
    with pytest.raises(RuntimeStateError, match="a backward has run through this call before, and freed"):
        loss.backward()


def test_a_gradient_of_a_gradient_is_that_of_one_device():
    model, arguments, compiled = plan("mlp", {"x": 2}, "batch")
    step = compiled(Simulator(Mesh({"x": 2})))
    found = []
    for call in (lambda: results(step, step(tensors_of(step, model, arguments)))[0], lambda: model(**arguments)[0]):
        torch.manual_seed(1)
        loss = call()
        (first,) = torch.autograd.grad(loss, [model.up.weight], create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_parameter_changed_between_forward_and_backward_is_an_error():
    model, arguments, compiled = plan("mlp", {"x": 1}, "batch")
    step = compiled(Simulator(Mesh({"x": 1})))
    loss, _ = results(step, step(tensors_of(step, model, arguments)))
    with torch.no_grad():
        model.down.weight.add_(1)
    with pytest.raises(
        RuntimeStateError,
        match=r"parameter down\.weight was changed in place after the forward",
    ):
        loss.backward()


def test_without_gradients_nothing_is_saved_and_the_results_are_the_same():
    model, arguments, compiled = plan("attention", {"dp": 2, "tp": 2}, "weights")
    step = compiled(Simulator(Mesh({"dp": 2, "tp": 2})))
    assert len(step.inference.code.outputs) == len(step.program.outputs) < len(step.forward.code.outputs)
    with torch.no_grad():
        loss, logits = results(step, step(tensors_of(step, model, arguments)))
    assert not loss.requires_grad
    assert_equal_runs((loss, logits, {}), (*plain("attention")[:2], {}))


def check_shapes():
    model, arguments, compiled = plan("mlp", {"x": 2}, "weights")
    step = compiled(Worker(Mesh({"x": 2})))
    with pytest.raises(
        RuntimeStateError, match=r"up\.weight of shape \[16, 8\]; its part under \[x:S1\] has .* \[16, 4\]"
    ):
        step(tensors_of(step, model, arguments))
    return dist.get_rank()


@pytest.mark.gloo
def test_a_whole_tensor_where_a_rank_takes_its_part_is_rejected(on_ranks):
    assert on_ranks(2, check_shapes) == [0, 1]


def check_unplanned_worker(axes):
    model, arguments, compiled = plan("mlp", axes, "result")
    worker = Worker(Mesh(axes))
    step = compiled(worker)
    inputs, out = step.program.inputs, step.program.outputs[-1].layout
    whole = tensors_of(step, model, arguments)
    parts = [
        worker.cut(t.detach(), placed.layout).requires_grad_(t.requires_grad)
        for t, placed in zip(whole, inputs, strict=True)
    ]
    torch.manual_seed(1)
    _, logits = results(step, step(parts))
    shape = (8, 4)
    as_dtensor(logits, out, shape, worker.device_mesh).pow(2).sum().backward()
    torch.manual_seed(1)
    model(**arguments)[1].pow(2).sum().backward()
    for t, part, placed in zip(whole, parts, inputs, strict=True):
        if t.requires_grad:
            torch.testing.assert_close(part.grad, worker.cut(t.grad, placed.layout), rtol=1e-12, atol=1e-12)
    return tuple(logits.shape)


@pytest.mark.gloo
def test_a_split_output_as_a_dtensor_can_be_differentiated(on_ranks):
    assert on_ranks(2, check_unplanned_worker, {"x": 2}) == [(4, 4)] * 2


def test_a_part_that_every_rank_holds_is_joined_once():
    mesh = Mesh({"x": 2})
    part = torch.ones(3)
    assert join([part, part], layout(mesh, (REPLICATE,))) is part
