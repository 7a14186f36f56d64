"""The program of a plan: which conversions it has, and that the plan lists exactly the collectives of its graphs."""

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from checks import assert_same_gradients, assert_same_loss, gradients
from torch import nn

import partway as pw
import partway.propagation.program.lower as lower_module
from partway.fusion import Fusion, FusionMode, FusionPolicies
from partway.fusion.fuse import fuse_program
from partway.propagation.graph.graph import differentiated
from partway.propagation.ops.collectives import convert
from partway.propagation.program.collective import collective
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.program.program import Program, verify_program
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import REPLICATE, Layout, Shard, VerifyError

MEGATRON = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


class MLP(nn.Module):
    def __init__(self, width=512, hidden=2048):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) * self.k(x) * self.v(x)


def compile_mlp(requires_grad=True, batch=1024, **changes):
    with torch.device("meta"):
        module, x = MLP(), torch.empty(batch, 512, requires_grad=requires_grad)
    split = (("dp", None),)
    arguments = {"in_strategy": split, "out_strategy": split, "parameter_plan": MEGATRON, **changes}
    return pw.compile(module, (x,), mesh={"dp": 2, "tp": 4}, **arguments)


def conversions(graph):
    """Each conversion of a graph as `P -> R over tp`."""
    return [f"{n.args[1]} -> {n.args[2]} over {','.join(n.args[3])}" for n in graph.nodes if n.target is convert]


def test_the_program_of_a_megatron_mlp():
    compiled = compile_mlp()
    assert str(compiled.local).splitlines() == [
        "on dp=2, tp=4",
        "",
        "forward",
        "parameter up.weight    # [512, 512] of [2048, 512] [dp:R tp:S0]",
        "parameter up.bias    # [512] of [2048] [dp:R tp:S0]",
        "parameter down.weight    # [512, 512] of [512, 2048] [dp:R tp:S1]",
        "parameter down.bias    # [128] of [512] [dp:R tp:S0]",
        "input x    # [512, 512] of [1024, 512] [dp:S0 tp:R]",
        "# up: test_lower.py:35, in forward: return self.down(torch.relu(self.up(x)))",
        "convert_default = unchanged(x) over tp, R -> B",
        "convert_default_1 = unchanged(up.weight) over dp, R -> B",
        "convert_default_2 = unchanged(up.bias) over dp, R -> B",
        "linear_default = aten.linear.default(convert_default, convert_default_1, convert_default_2)",
        "# test_lower.py:35, in forward: return self.down(torch.relu(self.up(x)))",
        "relu_default = aten.relu.default(linear_default)",
        "# down: test_lower.py:35, in forward: return self.down(torch.relu(self.up(x)))",
        "convert_default_3 = unchanged(down.weight) over dp, R -> B",
        "convert_default_4 = unchanged(down.bias) over dp, R -> B",
        "convert_default_5 = pad(convert_default_4) over tp, S0 -> P",
        "linear_default_1 = aten.linear.default(relu_default, convert_default_3, convert_default_5)",
        "#",
        "convert_default_6 = all_reduce(linear_default_1) over tp, P -> R",
        "    # 4 ranks send 1.57 MB each, 20.2 us",
        "    # of linear_1: aten.linear.default linear_1 (dp:_1 tp:k) meets result result [dp:S0 tp:R]",
        "return result = convert_default_6",
    ]


def test_a_megatron_mlp_sends_one_all_reduce_forward_one_backward_and_the_gradients():
    compiled = compile_mlp()
    assert [(c.phase, c.kind, c.axes, c.tensor, c.payload_bytes) for c in compiled.plan.collectives] == [
        ("forward", "all_reduce", ("tp",), "linear_1", 512 * 512 * 4),
        ("backward", "all_reduce", ("tp",), "x", 512 * 512 * 4),
        ("backward", "all_reduce", ("dp",), "up.weight", 512 * 512 * 4),
        ("backward", "all_reduce", ("dp",), "up.bias", 512 * 4),
        ("backward", "all_reduce", ("dp",), "down.weight", 512 * 512 * 4),
        ("backward", "all_reduce", ("dp",), "down.bias", 128 * 4),
    ]
    step = compiled.program
    assert sum("P -> R over tp" in text for text in conversions(step.forward.graph)) == 1
    assert sum("P -> R over tp" in text for text in conversions(step.backward.graph)) == 1


def test_an_input_that_needs_no_gradient_costs_nothing_backward():
    tensors = [c.tensor for c in compile_mlp(requires_grad=False).plan.collectives if c.phase == "backward"]
    assert "x" not in tensors
    assert len(tensors) == 4


def test_a_collective_tells_why_it_is_there():
    (first, *_) = compile_mlp().plan.collectives
    assert first.group_size == 4
    assert first.wire_bytes == 2 * 3 / 4 * first.payload_bytes
    assert first.producer == "aten.linear.default linear_1 (dp:_1 tp:k)"
    assert first.consumer == "result result [dp:S0 tp:R]"
    assert first.where == "output result"
    assert "self.down(torch.relu(self.up(x)))" in first.source
    assert first.members == ("linear_1",)
    assert str(first) == (
        "forward all_reduce over tp (4 ranks) of linear_1, 1,048,576 bytes: "
        "aten.linear.default linear_1 (dp:_1 tp:k) -> result result [dp:S0 tp:R]"
    )


def test_consumers_share_a_conversion_and_their_gradients_one_all_reduce():
    with torch.device("meta"):
        module, x = Heads(), torch.empty(4096, 256, requires_grad=True)
    compiled = pw.compile(
        module,
        (x,),
        mesh={"tp": 4},
        in_strategy=((None, None),),
        out_strategy=((None, "tp"),),
        parameter_plan={"*.weight": ("tp", None)},
    )
    assert conversions(compiled.program.forward.graph) == ["R -> B over tp"]
    assert conversions(compiled.program.backward.graph) == ["P -> R over tp"]
    assert [(c.kind, c.tensor) for c in compiled.plan.collectives] == [("all_reduce", "x")]


# -- conversions over several axes at once


BOTH = ((("dp", "tp"), None),)  # the batch over both axes
WHOLE = {"*.weight": (None, None), "*.bias": (None,)}


def test_a_step_along_two_axes_is_one_conversion_and_one_collective():
    compiled = compile_mlp(batch=65536, in_strategy=BOTH, out_strategy=((None, None),), parameter_plan=WHOLE)
    lines = str(compiled.local).splitlines()
    assert "convert_default = unchanged(up.weight) over dp,tp, R -> B" in lines
    assert "convert_default_6 = all_gather(linear_default_1) over dp,tp, S0 -> R" in lines
    found = {c.tensor: c for c in compiled.plan.collectives}
    gathered, reduced = found["linear_1"], found["up.weight"]
    assert (gathered.phase, gathered.kind, gathered.axes, gathered.group_size) == (
        "forward", "all_gather", ("dp", "tp"), 8,
    )  # fmt: skip
    assert gathered.payload_bytes == 65536 * 512 * 4
    assert gathered.wire_bytes == 7 / 8 * gathered.payload_bytes
    assert (reduced.phase, reduced.kind, reduced.axes, reduced.group_size) == (
        "backward", "all_reduce", ("dp", "tp"), 8,
    )  # fmt: skip
    assert reduced.wire_bytes == 2 * 7 / 8 * 2048 * 512 * 4
    assert str(reduced).startswith("backward all_reduce over dp,tp (8 ranks) of up.weight, 4,194,304 bytes: ")
    assert "backward all_reduce over dp,tp (8 ranks) of up.weight: 4.19 MB" in str(compiled.plan.explain("up"))
    assert "all_reduce(dp,tp)" in str(compiled.plan.table(every=True))
    step = compiled.program
    assert conversions(step.forward.graph)[-1] == "S0 -> R over dp,tp"
    profile = compiled.problem.settings.profile
    collectives = fuse_program(step, FusionPolicies(Fusion(FusionMode.AUTO))).collectives
    (fused,) = (c for c in collectives if c.members == ("down.weight", "up.weight"))
    assert (fused.phase, fused.axes, fused.group_size) == ("backward", ("dp", "tp"), 8)
    assert collectives.index(fused) >= len(collectives) - 3  # the biases are small: fewer messages, axis by axis
    done = found_in(verify_and_differentiate(compiled), compiled.mesh, profile)
    assert counted(compiled.plan.collectives) == counted(done)


@pytest.mark.parametrize("out", [(None, None), ("dp", None), (None, ("dp", "tp")), (("dp", "tp"), None)])
def test_a_model_with_conversions_along_two_axes_computes_what_one_device_computes(out):
    torch.manual_seed(0)
    plain, x = MLP(16, 32).double(), torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    model = pw.shard(copy.deepcopy(plain), mesh={"dp": 2, "tp": 2}, in_strategy=BOTH, out_strategy=(out,))
    results, gradients = [], []
    for fn in (plain, model):
        y = fn(x)
        gradients.append(torch.autograd.grad((y * y).sum(), [x, *fn.parameters()]))
        results.append(y)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)
    assert any(len(c.axes) == 2 for c in model.plan.collectives)


# -- the plan lists what the graphs do


@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 1}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 1}])
def test_over_an_axis_of_one_device_nothing_is_sent(mesh):
    torch.manual_seed(0)
    plain = MLP(8, 16).double()
    split = (("dp", None),)
    model = pw.shard(copy.deepcopy(plain), mesh=mesh, in_strategy=split, out_strategy=split, parameter_plan=MEGATRON)
    x = torch.rand(8, 8).double()
    (loss, found), (expected, wanted) = (
        (y := each(x).square().sum(), torch.autograd.grad(y, [*each.parameters()])) for each in (model, plain)
    )
    torch.testing.assert_close((loss, found), (expected, wanted), rtol=1e-12, atol=1e-12)
    assert all(c.group_size > 1 for c in model.program.collectives)
    assert bool(model.program.collectives) == (max(mesh.values()) > 1)


def counted(collectives):
    return Counter((c.phase, c.kind, c.axes, c.payload_bytes, c.tag) for c in collectives)


def found_in(step, mesh, profile):
    """The collectives of the traced graphs, by their tags."""
    graphs = {"forward": step.forward.graph, "backward": step.backward.graph}
    for phase, graph in graphs.items():
        for node in graph.nodes:
            if node.target is convert:
                found = collective(step.conversions[node.args[5]], phase, mesh, profile)
                if found is not None:
                    yield found


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    ids = torch.zeros(8, 16, dtype=torch.int64)
    return transformers.GPT2LMHeadModel(config).eval(), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def resnet():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=4
    )
    labels = torch.zeros(8, dtype=torch.int64)
    return transformers.ResNetForImageClassification(config), (torch.zeros(8, 3, 32, 32),), {"labels": labels}


def mlp_with_loss():
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Flatten(0))
    return module, (torch.zeros(8, 16),), {}


@pytest.mark.parametrize("model", [mlp_with_loss, gpt2, resnet])
@pytest.mark.parametrize("mesh", [{"dp": 8}, {"dp": 2, "tp": 4}])
def test_the_plan_lists_exactly_the_collectives_of_its_graphs(model, mesh):
    module, args, kwargs = model()
    name = next(iter(kwargs)) if not args else None
    first = kwargs[name] if name else args[0]
    batch = ("dp", *[None] * (first.dim() - 1))
    compiled = pw.compile(module, args, kwargs, mesh=mesh, in_strategy={name: batch} if name else (batch,))
    step = verify_and_differentiate(compiled)
    profile = compiled.problem.settings.profile
    assert counted(compiled.plan.collectives) == counted(found_in(step, compiled.mesh, profile))
    assert compiled.plan.collectives


def verify_and_differentiate(compiled):
    return differentiate(verify_program(compiled.local), differentiated(compiled.graph))


# -- the verifier


def small(lab) -> Program:
    x = torch.ones(4, 4, requires_grad=True)
    problem = lab.problem_of(lambda x: (x * 2).sum(), (x,), lab.LINE, {"x": ((Layout(lab.LINE, (Shard(0),)),), "")})
    return lower(problem, dynamic_programming(problem).choice)


def test_a_conversion_that_is_not_in_the_list_is_refused(lab):
    program = small(lab)
    assert program.conversions
    with pytest.raises(VerifyError, match="are not those of its list"):
        verify_program(dataclasses.replace(program, conversions=()))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"size": 3}, "x is of 3"), ({"axes": ("x", "x"), "size": 4}, "x,x is of 4"), ({"axes": ("y",)}, "y")],
)
def test_a_conversion_that_does_not_fit_the_mesh_is_refused(lab, change, said):
    program = small(lab)
    wrong = tuple(dataclasses.replace(c, **change) for c in program.conversions)
    with pytest.raises(VerifyError, match=rf"^the conversion of \w+ over {said}.* ranks; the mesh is x=2$"):
        verify_program(dataclasses.replace(program, conversions=wrong))


def test_a_port_that_does_not_fit_its_layout_is_refused(lab):
    program = small(lab)
    (port,) = program.inputs
    wrong = dataclasses.replace(port, shape=(1, 4), layout=Layout(lab.LINE, (Shard(0),)))
    with pytest.raises(VerifyError, match="x does not fit its layout"):
        verify_program(dataclasses.replace(program, inputs=(wrong,)))


def test_a_value_is_converted_at_most_once_into_each_layout(lab):
    def fn(x):
        return x.exp().sum() + x.sin().sum() + (x * x).sum()

    x = torch.ones(512, 8, requires_grad=True)
    split = Layout(lab.LINE, (Shard(0),))
    whole = Layout(lab.LINE, (REPLICATE,))
    for layout in (split, whole):
        problem = lab.problem_of(fn, (x,), lab.LINE, {"x": ((layout,), "")})
        program = verify_program(lower(problem, dynamic_programming(problem).choice))
        taken = [(n.args[0], n.args[2], *n.args[3]) for n in program.lowered.graph.nodes if n.target is convert]
        assert len(taken) == len(set(taken))


# -- Constants


class Masked(nn.Module):
    """Scores of all pairs of a sequence, of which a mask that no input decides leaves some: by blocks that differ from
    one sequence of the batch to the next, and from one place to a later one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 8).double()

    def forward(self, x):
        batch, length, _ = x.shape
        place, number = torch.arange(length), torch.arange(batch)
        blocks = (place[None, :] // 4 + number[:, None]) % 3
        rows, columns = number[:, None, None], place[None, :, None]
        alike = blocks[rows, columns] == blocks[rows, place[None, None, :]]
        mask = (alike & (place[:, None] >= place[None, :])).expand(batch, length, length)
        scores = self.project(x) @ x.transpose(1, 2)
        return scores.masked_fill(~mask, 0.0).sin().sum()


@pytest.mark.parametrize("split", [("dp", None, None), (None, "dp", None), (("dp", "tp"), None, None)])
def test_a_part_of_a_large_constant_is_computed_as_such(split, monkeypatch):
    monkeypatch.setattr(lower_module, "LARGE_CONSTANT", 0.0)
    x = torch.randn(8, 16, 8, dtype=torch.float64)
    model = pw.shard(Masked(), mesh={"dp": 4, "tp": 2}, in_strategy=(split,))
    loss, expected = gradients(Masked(), {"x": x})
    found_loss, found = gradients(model, {"x": x})
    assert_same_loss(found_loss, loss, 1e-12)
    assert_same_gradients(found, expected, 1e-12)
    masks = [node.meta["val"] for node in model.program.forward.graph.nodes if "bitwise" in str(node.target)]
    assert masks
    whole = 8 * 16 * 16
    assert max(mask.numel() for mask in masks) < whole


def test_a_small_constant_and_one_that_is_split_unevenly_are_cut_out_of_the_whole(monkeypatch):
    x = torch.randn(6, 16, 8, dtype=torch.float64)
    for large in (0.0, 1e6):  # 6 over 4 ranks
        monkeypatch.setattr(lower_module, "LARGE_CONSTANT", large)
        model = pw.shard(Masked(), mesh={"dp": 4}, in_strategy=(("dp", None, None),))
        loss, expected = gradients(Masked(), {"x": x})
        found_loss, found = gradients(model, {"x": x})
        assert_same_loss(found_loss, loss, 1e-12)
        assert_same_gradients(found, expected, 1e-12)


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.empty, lambda *size: torch.full(size, 2.0)])
def test_a_part_of_a_large_constant_of_equal_elements_is_made_as_such(make, monkeypatch):
    monkeypatch.setattr(lower_module, "LARGE_CONSTANT", 0.0)

    def fn(x):
        made = make(8, 16)
        return (x + made.index_copy(1, torch.arange(16), x)).sum()

    x = torch.randn(8, 16, requires_grad=True)
    compiled = pw.compile(fn, (x,), mesh={"dp": 4}, in_strategy=(("dp", None),))
    sizes = [node.args[0] for node in compiled.program.forward.graph.nodes if not node.all_input_nodes and node.args]
    assert [2, 16] in sizes
    assert [8, 16] not in sizes
