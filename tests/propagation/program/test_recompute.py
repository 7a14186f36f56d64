"""What the backward computes again in place of keeping it gives the same numbers, and holds less."""

import functools

import pytest
import torch
import torch.nn.functional as F
from checks import (
    assert_same_gradients,
    assert_same_loss,
    assert_sends_as_planned,
    carried,
    gradients,
    gradients_of,
    tolerance,
)
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from zoo import CASES

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.graph.nodes import region_of
from partway.propagation.ops.collectives import convert, kind_of
from partway.strategy import CaptureError, StrategyError
from partway.strategy.placement import Kind

pytestmark = pytest.mark.deep

MESH = {"dp": 2, "tp": 2}
SAVED = functools.partial(checkpoint, use_reentrant=False)


class Net(nn.Module):
    """Blocks of two layers; `run` runs a block."""

    def __init__(self, run=lambda block, *args: block(*args), dropout=0.0, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.run, self.dropout = run, dropout
        self.double()

    def block(self, x, up, down):
        hidden = F.gelu(up(self.norm(x)))
        return x + F.dropout(torch.tanh(down(hidden)), self.dropout) * x.pow(2).mean(-1, keepdim=True)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = self.run(self.block, x, up, down)
        return x.sin().sum()


MEGATRON = {"up.*.weight": ("tp", None), "up.*.bias": ("tp",), "down.*.weight": (None, "tp")}


def batch(size=8):
    torch.manual_seed(1)
    return {"x": torch.randn(size, 8, dtype=torch.float64)}


def saved(model):
    """The values that the forward saves, without those that are inputs."""
    step = model.program
    (output,) = step.forward.graph.find_nodes(op="output")
    return [node for node in output.args[0][len(step.outputs) :] if node.op != "placeholder"]


def saved_bytes(model):
    """The bytes of what is saved; views of one tensor count once."""
    storages = {node.meta["val"].untyped_storage()._cdata: node.meta["val"] for node in saved(model)}
    return sum(v.untyped_storage().nbytes() for v in storages.values())


def gathers(model):
    """The all-gathers in the backward that runs."""
    graph = model.program.backward.graph
    found = graph.find_nodes(op="call_function", target=convert)
    return [node for node in found if kind_of(*node.args[1:3]) is Kind.ALL_GATHER]


def check(model, plain, given, relative=1e-12):
    torch.manual_seed(7)
    loss, expected = gradients(plain, given)
    torch.manual_seed(7)
    found_loss, found = gradients(model, given)
    assert_same_loss(found_loss, loss, relative)
    assert_same_gradients(found, expected, relative)


# -- torch.utils.checkpoint


@pytest.mark.parametrize("parameter_plan", [{}, MEGATRON], ids=["batch", "megatron"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_blocks_give_the_numbers_of_one_device_and_are_not_kept(parameter_plan, dropout):
    pw.set_auto_parallel_context(random_numbers="torch")
    options = {"mesh": MESH, "in_strategy": (("dp", None),), "parameter_plan": parameter_plan}
    whole = pw.shard(Net(dropout=dropout), **options)
    model = pw.shard(Net(SAVED, dropout), **options)
    check(whole, Net(dropout=dropout), batch())
    check(model, Net(dropout=dropout), batch())
    check(model, Net(SAVED, dropout), batch())
    assert saved_bytes(model) < 0.7 * saved_bytes(whole)
    assert not any("gelu" in node.name or "tanh" in node.name for node in saved(model))
    assert_sends_as_planned(model, batch())  # none runs twice


def test_memory_of_the_plan_leaves_out_what_is_computed_again():
    options = {"mesh": MESH, "in_strategy": (("dp", None),)}
    given = (), batch(64)
    whole, model = (pw.compile(Net(run), *given, **options).plan.memory for run in (lambda f, *a: f(*a), SAVED))
    assert model.activations < 0.6 * whole.activations
    assert (model.parameters, model.inputs) == (whole.parameters, whole.inputs)


def test_a_region_is_one_call_and_the_outermost_of_nested_calls():
    graph = capture(Net(SAVED, layers=3), (), batch())
    regions = [region_of(node) for node in graph.nodes]
    assert [r for r, before in zip(regions, [object(), *regions], strict=False) if r != before] == [0, 1, 2, None]

    def nested(x):
        return SAVED(lambda a: SAVED(torch.tanh, a.sin()).cos(), x)

    inner = torch.ones(4, requires_grad=True)
    graph = capture(nested, (inner,), {})
    assert [(node.name, region_of(node)) for node in graph.nodes] == [("sin", 0), ("tanh", 0), ("cos", 0)]
    assert graph.outputs[0].requires_grad
    (found,) = torch.autograd.grad(pw.shard(nested, mesh={"dp": 2}, in_strategy=(("dp",),))(inner).sum(), inner)
    torch.testing.assert_close(found, -torch.tanh(inner.sin()).sin() * (1 - torch.tanh(inner.sin()) ** 2) * inner.cos())


def test_what_two_regions_read_and_what_is_returned_are_kept():
    def function(x, w):
        first = SAVED(lambda a: torch.tanh(a @ w) * a, x)
        second, inner = SAVED(lambda a: ((b := torch.sigmoid(a @ w)) * a, b.exp()), first)
        return SAVED(lambda a, b: torch.tanh(a) * b, second, first).sum() + inner.sum(), inner

    x, w = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = pw.shard(function, mesh={"dp": 2}, in_strategy=(("dp", None), None))
    found, expected = ours(x, w), function(x, w)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    results = [sum(o.square().sum() for o in outputs) for outputs in (found, expected)]
    for a, b in zip(*(torch.autograd.grad(result, (x, w)) for result in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_sequential_in_segments():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())]).double()

    class Segmented(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build()

        def forward(self, x):
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False).sum()

    model = pw.shard(Segmented(), mesh={"dp": 2}, in_strategy=(("dp", None),))
    check(model, Segmented(), batch())
    assert {region_of(node) for node in model.program.forward.graph.nodes} >= {0}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # the name that all versions have
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_gradient_checkpointing_of_transformers(name):
    case = CASES[name]
    options = {"mesh": MESH, "in_strategy": case.batch_split("dp"), "parameter_plan": case.block_split("tp")}
    whole, inner = pw.shard(case.build().train(), **options), case.build().train()
    inner.gradient_checkpointing_enable()
    model = pw.shard(inner, **options)
    check(whole, case.build().train(), case.batch(), tolerance(torch.float64, case.single))
    check(model, case.build().train(), case.batch(), tolerance(torch.float64, case.single))
    assert saved_bytes(model) < 0.7 * saved_bytes(whole)


class Normed(nn.Module):
    """A BatchNorm and a dropout; `run` runs both."""

    def __init__(self, run=lambda block, *args: block(*args), momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 3)
        self.run = run
        self.double()

    def block(self, x):
        return F.dropout(torch.relu(self.norm(self.first(x))), 0.5, self.training)

    def forward(self, x):
        return self.last(self.run(self.block, x)).square().sum()


@pytest.mark.parametrize("split", [("dp", None), ("dp", "tp"), None])
def test_a_checkpointed_batch_norm_moves_its_statistics_once_a_step_and_says_so(split):
    """PyTorch's own recomputation moves them twice, which is no part of what checkpoint computes."""
    pw.set_auto_parallel_context(random_numbers="torch")
    model, plain, saved_plain = pw.shard(Normed(SAVED), mesh=MESH, in_strategy=(split,)), Normed(), Normed(SAVED)
    twice = pw.shard(Normed(SAVED, 1 - 0.9**2), mesh=MESH, in_strategy=(split,))
    said = (
        "norm.running_mean, norm.running_var, norm.num_batches_tracked are updated inside torch.utils.checkpoint: once "
        r"a call, as without checkpoint, where PyTorch on one device .* the momentum 1 - \(1 - momentum\)\*\*2"
    )
    given = {"x": torch.randn(8, 4, dtype=torch.float64)}
    for each in (model, twice):
        with pytest.warns(UserWarning, match=said):
            each(**given)
        each.norm.reset_running_stats()
    for _ in range(3):
        after = []
        for each in (plain, saved_plain, model, twice):
            each.zero_grad()
            torch.manual_seed(7)
            each(**given).backward()
            after.append(torch.get_rng_state())
        assert all(torch.equal(after[0], state) for state in after)
        for each in (saved_plain, model, twice):
            assert_same_gradients(gradients_of(each), gradients_of(plain), 1e-12)
        for name, buffer in plain.norm.named_buffers():
            torch.testing.assert_close(model.norm.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    assert (model.norm.num_batches_tracked, saved_plain.norm.num_batches_tracked) == (3, 6)
    for name in ("running_mean", "running_var"):
        again = saved_plain.norm.get_buffer(name)
        torch.testing.assert_close(twice.norm.get_buffer(name), again, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(model.norm.get_buffer(name), again)


def test_a_checkpoint_that_nothing_is_learned_of_updates_buffers_without_a_word():
    model, plain = pw.shard(Normed(SAVED).requires_grad_(False), mesh=MESH), Normed(SAVED).requires_grad_(False)
    x = torch.randn(8, 4, dtype=torch.float64)
    model(x), plain(x)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=1e-12, atol=1e-12)


def test_a_reentrant_checkpoint_is_refused():
    model = pw.shard(
        Net(functools.partial(checkpoint, use_reentrant=True)), mesh={"dp": 2}, in_strategy=(("dp", None),)
    )
    said = (
        r"torch.utils.checkpoint of Net.block with use_reentrant=True \(PyTorch's default\) runs it without gradients, "
        "so that none would be captured; pass use_reentrant=False, which computes the same"
    )
    with pytest.raises(CaptureError, match=said):
        model(**batch())


def test_a_context_fn_is_refused():
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model = pw.shard(Net(functools.partial(SAVED, context_fn=policy)), mesh={"dp": 2}, in_strategy=(("dp", None),))
    said = "torch.utils.checkpoint of Net.block with a context_fn: Partway itself chooses what the region keeps"
    with pytest.raises(CaptureError, match=said):
        model(**batch())


def test_a_checkpoint_around_the_sharded_function_is_no_region():
    model = pw.shard(Net(), mesh={"dp": 2}, in_strategy=(("dp", None),))
    for reentrant in (False, True):
        given = batch()["x"].requires_grad_()
        checkpoint(model, given, use_reentrant=reentrant).backward()
    assert all(region_of(node) is None for node in model.program.forward.graph.nodes)


# -- reshard_after_forward


def split_at_rest(reshard, build=Net, size=256, **algo):
    """A model whose parameters are split over the data axis, each gathered by itself."""
    pw.set_auto_parallel_context(
        comm_fusion={"openstate": False},
        parallel_mode="data_parallel",
        device_num=4,
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0},
        reshard_after_forward=reshard,
    )
    pw.set_algo_parameters(**algo)
    model = pw.shard(build())
    check(model, build(), batch(size))
    return model


def test_gathered_weights_are_gathered_again():
    kept, again = split_at_rest(False), split_at_rest(True)
    assert not gathers(kept)
    assert {c.tensor for c in again.program.collectives if c.phase == "backward" and str(c.kind) == "all_gather"} == {
        *(f"{layer}.{i}.weight" for layer in ("up", "down") for i in range(4)),
        "norm.weight",
        "norm.bias",
    }
    assert len(gathers(again)) == 10
    assert saved_bytes(again) < saved_bytes(kept)
    assert again.plan.memory.activations < kept.plan.memory.activations
    for model in (kept, again):
        assert_sends_as_planned(model, batch(256))


def test_a_gather_runs_right_before_its_first_use():
    backward = split_at_rest(True).program.backward.graph
    place = {node: i for i, node in enumerate(backward.nodes)}
    for node in gathers(split_at_rest(True)):
        assert min(place.get(user, 0) for user in node.users) - place.get(node, 0) <= 4


def test_a_gather_of_the_backward_is_explained():
    said = str(split_at_rest(True).plan.explain("up.0.weight"))
    of_gather = said.split("backward all_gather over d0 (4 ranks) of up.0.weight: 1.02 kB, 768 B sent")[1]
    assert "no plan does without it under these annotations" in of_gather


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "vit")), "convnet"]
)
def test_the_plan_lists_the_gathers_of_the_backward(name):
    pw.set_auto_parallel_context(
        parallel_mode="data_parallel", device_num=8, enable_parallel_optimizer=True, reshard_after_forward=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0},
    )  # fmt: skip
    case = CASES[name]
    given = case.batch(size=512 if name == "mlp" else 64)
    model = pw.shard(case.build())
    check(model, case.build(), given, tolerance(torch.float64, case.single))
    assert any(c.phase == "backward" and c.kind is Kind.ALL_GATHER for c in model.program.collectives)
    assert carried(model.program.collectives) == carried(model.plan.collectives)


def test_weights_inside_checkpointed_blocks_are_gathered_again():
    def build():
        return Net(SAVED)

    kept, again = split_at_rest(False, build), split_at_rest(True, build)
    assert not gathers(kept)
    assert len(gathers(again)) == 18  # biases too: the layers run again
    assert saved_bytes(again) < saved_bytes(kept)
    assert carried(again.program.collectives) == carried(again.plan.collectives)


def test_weights_that_are_cast_are_gathered_again():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            w = self.w.double()
            return torch.tanh(torch.tanh(x @ w) @ w.t()).sum()

    again = split_at_rest(True, Cast, size=4096)
    assert gathers(again)
    assert not any(tuple(node.meta["val"].shape) == (8, 8) for node in saved(again))


def test_a_memory_limit_chooses_what_is_had_again():
    free = split_at_rest(None)
    held = free.plan.memory.total
    assert not gathers(free)
    asked = split_at_rest(None, memory_limit=0.54 * held)
    assert gathers(asked)
    assert asked.plan.memory.total <= 0.54 * held
    assert any(operator.fate == "again" and "linear" in operator.operator for operator in asked.plan.operators)
    assert asked.plan.predicted_time > free.plan.predicted_time
    assert carried(asked.program.collectives) == carried(asked.plan.collectives)
    kept = split_at_rest(False, memory_limit=0.7 * held)
    assert not gathers(kept)
    assert kept.plan.memory.total <= 0.7 * held
    with pytest.raises(
        StrategyError, match=r"no plan was found on the mesh d0=4 that holds less than \S+ k?B on a device"
    ):
        split_at_rest(False, memory_limit=0.5 * held)


# -- what the plan chooses


@pytest.mark.parametrize(
    "name", ["mlp", "convnet", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "vit"))]
)
def test_with_everything_computed_again_no_bit_changes(name):
    case = CASES[name]
    given = case.batch(size=512 if name == "mlp" else 64)
    found = {}
    for recompute in ("none", "auto", "all"):
        pw.set_algo_parameters(recompute=recompute)
        first, tensor = next(iter(given.items()))
        model = pw.shard(case.build(), mesh=MESH, in_strategy={first: ("dp", *[None] * (tensor.dim() - 1))})
        torch.manual_seed(7)
        found[recompute] = (*gradients(model, given), saved_bytes(model))
    loss, expected, most = found["none"]
    for recompute in ("auto", "all"):
        again_loss, again, held = found[recompute]
        assert torch.equal(torch.as_tensor(again_loss), torch.as_tensor(loss))
        assert all(torch.equal(again[key], expected[key]) for key in expected)
        assert held <= most
    assert found["all"][2] <= found["auto"][2]
    assert found["all"][2] < most or name == "mlp"  # whose ReLUs have nothing to compute again


class Noisy(nn.Module):
    """Dropout, a BatchNorm and experts of which each token takes one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.double()

    def forward(self, x):
        y = F.dropout(F.gelu(self.norm(self.conv(x))), 0.3).mean(-1)
        shares = self.gate(y).softmax(-1)
        mixed = sum(torch.tanh(expert(y)) * shares[:, i : i + 1] for i, expert in enumerate(self.experts))
        return (mixed + y).square().sum()


@pytest.mark.parametrize("numbers", ["counter", "torch"])
def test_random_numbers_and_running_statistics_are_the_same_when_computed_again(numbers):
    torch.manual_seed(1)
    x = torch.randn(16, 4, 6, dtype=torch.float64)
    found = []
    for recompute in ("none", "all"):
        pw.set_auto_parallel_context(random_numbers=numbers)
        pw.set_algo_parameters(recompute=recompute)
        model = pw.shard(Noisy(), mesh=MESH, in_strategy=(("dp", None, None),))
        for _ in range(2):
            torch.manual_seed(7)
            loss, grads = gradients(model, {"x": x})
        found.append(
            (loss, grads, {name: buffer.clone() for name, buffer in model.named_buffers()}, saved_bytes(model))
        )
    (loss, grads, buffers, most), (again_loss, again, again_buffers, held) = found
    assert torch.equal(torch.as_tensor(again_loss), torch.as_tensor(loss))
    assert all(torch.equal(again[key], grads[key]) for key in grads)
    assert all(torch.equal(again_buffers[name], buffers[name]) for name in buffers)
    assert held < most


class Squares(nn.Module):
    """Of what a norm reads, its sum of squares needs a slice, and its product the whole."""

    def __init__(self, square=torch.square, sine=torch.sin):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.square, self.sine = square, sine

    def forward(self, x):
        y = torch.tanh(self.into(x))
        return self.square(y).sum().sin() * self.out(self.sine(y)).sin().sum()


@pytest.mark.parametrize("split", [("dp", None), (None, "dp")], ids=["rows", "columns"])
def test_a_slice_of_which_the_whole_is_kept_too_is_taken_out_of_it(split):
    pw.set_algo_parameters(recompute="none")
    square = pw.shard(torch.square, in_strategy=(split,))
    sine = pw.shard(torch.sin, in_strategy=((None, None),))
    into = {"into": {"out_strategy": (split,)}}
    model = pw.shard(Squares(square, sine), mesh={"dp": 4}, in_strategy=((None, None),), module_plan=into)
    check(model, Squares(), batch())
    assert any(node.target is convert for node in saved(model))
    assert not [node for node in saved(model) if node.name.startswith(("tanh", "detach"))]
    calls = model.program.backward.graph.find_nodes(op="call_function", target=convert)
    assert Kind.SLICE in {kind_of(*node.args[1:3]) for node in calls}
    assert carried(model.program.collectives) == carried(model.plan.collectives)


def test_a_value_is_kept_in_place_of_an_operand_that_is_as_large_and_kept_for_it_alone():
    """A plan keeps what a norm gives with its statistics, and says that its ReLU costs nothing to have again."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
            self.double()

        def forward(self, x):
            return self.last(F.relu(self.norm(self.first(x)))).square().sum()

    torch.manual_seed(1)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    with pw.auto_parallel_context(device_num=2, batch_norm_parts=2):
        model = pw.shard(Normed(), mesh={"dp": 2}, in_strategy=(("dp", None, None, None),))
        model(x).backward()
    again = [node.target for node in model.program.backward.graph.nodes]
    assert torch.ops.aten.relu.default not in again
    assert torch.ops.aten.threshold_backward.default in again
    plain = Normed()
    torch.stack([plain(part) for part in x.chunk(2)]).sum().backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
