from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import partway as pw
from partway.fusion import Fusion, FusionMode, FusionPolicies, Member, gradient_collectives, member, weight_gathers
from partway.fusion import fuse as fuse_by
from partway.fusion.fuse import fuse_program
from partway.propagation.cost.profile import profile_of
from partway.propagation.graph.graph import Text
from partway.propagation.ops.collectives import convert, convert_group, kind_of
from partway.runtime.executors.simulate import Simulator
from partway.runtime.loaded import Loaded
from partway.strategy import Mesh
from partway.strategy.errors import ContextError
from partway.strategy.placement import Kind

RANKS = 4
MESH = Mesh({"dp": RANKS, "tp": RANKS, "a": RANKS, "b": RANKS})
ALL = Fusion(FusionMode.AUTO)


def index(*ends):
    return Fusion(FusionMode.INDEX, ends)


def fuse(module, tags, policy):
    """`module` with its gradient AllReduces grouped; `tags`: the conversions of parameters, that are whole at rest."""
    return fuse_by(module, dict.fromkeys(tags, ("R", "B")), FusionPolicies(policy), MESH, profile_of("h100"))


def gradient_all_reduces(graph, tags):
    return gradient_collectives(graph, dict.fromkeys(tags, ("R", "B")), Kind.ALL_REDUCE)


def trace(fn, *shapes, dtypes=()):
    """The flat graph of `fn`, whose first input is the batch and whose others are parameters."""
    dtypes = [*dtypes, *[torch.float32] * (len(shapes) - len(dtypes))]
    with FakeTensorMode():
        x, *weights = (torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        return make_fx(fn)(x, *(weight.requires_grad_() for weight in weights))


def gradient(weight, tag, *axes):
    """What a parameter's conversion leaves in a backward graph: an AllReduce of its gradient."""
    return convert(weight, "P", "R", axes or ["dp"], RANKS, tag)


def mlp(*widths):
    """A data-parallel MLP's joint graph, its gradients the results; and the tags of its parameters."""

    def step(x, *weights):
        for tag, weight in enumerate(weights):
            x = torch.tanh(x @ convert(weight, "R", "B", ["dp"], RANKS, tag))
        loss = convert(x.pow(2).sum(), "P", "R", ["dp"], RANKS, len(weights))
        return [loss, *torch.autograd.grad(loss, weights)]

    shapes = list(pairwise(widths))
    return trace(step, (3, widths[0]), *shapes), frozenset(range(len(shapes)))


def all_reduce(ranks):
    total = ranks[0]
    for value in ranks[1:]:
        total = total + value
    return [total] * len(ranks)


def run(module, inputs):
    """Run `module` on all ranks in lock-step: every value is a list with one tensor per rank."""

    def meaning(ranks, source, target):
        what = kind_of(source, target)
        assert what in {Kind.ALL_REDUCE, Kind.NOTHING}
        return all_reduce(ranks) if what is Kind.ALL_REDUCE else ranks

    def call(node, rank):
        return node.target(*fx.map_arg(node.args, lambda operand: values[operand][rank]), **node.kwargs)

    values = {}
    waiting = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(waiting)
        elif node.op == "get_attr":
            values[node] = [getattr(module, node.target)] * RANKS
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
        elif node.target is convert:
            values[node] = meaning(values[node.args[0]], *node.args[1:3])
        elif node.target is convert_group:
            reduced = [meaning(values[operand], *node.args[1:3]) for operand in node.args[0]]
            values[node] = list(zip(*reduced, strict=True))
        else:
            values[node] = [call(node, rank) for rank in range(RANKS)]
    raise AssertionError("no output")


def inputs_of(module, seed=0):
    """Random inputs in the graph's own shapes: the batch differs by rank, the parameters do not."""
    generator = torch.Generator().manual_seed(seed)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    drawn = [[torch.randn(value.shape, generator=generator).to(value.dtype) for _ in range(RANKS)] for value in values]
    return [drawn[0], *([ranks[0]] * RANKS for ranks in drawn[1:])]


def assert_same_results(before, after):
    inputs = inputs_of(before)
    expected, found = run(before, inputs), run(after, inputs)
    for a, b in zip(expected, found, strict=True):
        assert len(a) == len(b) == RANKS
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def collectives(module, target=convert_group):
    return [node for node in module.graph.nodes if node.target is target]


def group_tags(module):
    return [node.args[5] for node in collectives(module)]


def order(module):
    return [node.name for node in module.graph.nodes]


def test_fused_gradients_are_those_of_the_unfused_graph_bit_for_bit():
    module, tags = mlp(5, 7, 6, 4, 3, 2)
    fused = fuse(module, tags, index(2, 4))
    assert group_tags(fused) == [[4, 3], [2, 1]]
    assert_same_results(module, fused)


def test_collectives_outside_the_tags_are_left_alone():
    module, tags = mlp(5, 7, 6)
    fused = fuse(module, tags, ALL)
    kept = [node.args[5] for node in collectives(fused, convert) if kind_of(*node.args[1:3]) is Kind.ALL_REDUCE]
    assert kept == [2]  # the loss
    assert group_tags(fuse(module, tags - {1}, ALL)) == []


def test_20_35_groups_50_gradients_as_20_15_and_the_rest():
    module, tags = mlp(*[2] * 51)
    fused = fuse(module, tags, index(20, 35))
    newest_first = list(range(49, -1, -1))
    assert group_tags(fused) == [newest_first[:20], newest_first[20:35], newest_first[35:]]
    assert_same_results(module, fused)


def test_too_large_index_is_rejected_naming_how_many_there_are():
    module, tags = mlp(5, 7, 6)
    with pytest.raises(ContextError, match="goes beyond the 2 gradient AllReduces of this program"):
        fuse(module, tags, index(1, 3))


def test_graph_without_gradients_is_copied_whatever_the_policy():
    module, _ = mlp(5, 7, 6)
    assert order(fuse(module, frozenset(), index(20, 35))) == order(module)


def test_without_a_policy_the_copy_is_as_the_graph_was():
    module, tags = mlp(5, 7, 6)
    copy = fuse(module, tags, None)
    assert copy is not module
    assert copy.graph is not module.graph
    assert str(copy.graph) == str(module.graph)


def test_input_graph_is_untouched():
    module, tags = mlp(5, 7, 6)
    before, metas = str(module.graph), [dict(node.meta) for node in module.graph.nodes]
    fused = fuse(module, tags, ALL)
    fused.graph.eliminate_dead_code()
    assert str(module.graph) == before
    assert [dict(node.meta) for node in module.graph.nodes] == metas


def test_group_stands_right_after_its_last_operand():
    module, tags = mlp(5, 7, 6, 4)
    fused = fuse(module, tags, index(2))
    (node,) = collectives(fused)
    assert node.prev in node.args[0]
    results = [node.next, node.next.next]
    assert [(each.target, each.args) for each in results] == [(operator.getitem, (node, i)) for i in range(2)]
    # The AllReduce that is alone is as early, wherever autograd had put it.
    (alone,) = [each for each in collectives(fused, convert) if each.args[5] == 0 and each.args[1] == "P"]
    assert alone.prev is alone.args[0]


def test_new_nodes_know_their_local_values():
    module, tags = mlp(5, 7, 6)
    fused = fuse(module, tags, ALL)
    (node,) = collectives(fused)
    assert [tuple(value.shape) for value in node.meta["val"]] == [(7, 6), (5, 7)]
    assert [tuple(user.meta["val"].shape) for user in node.users] == [(7, 6), (5, 7)]
    assert all(each.meta["val"] is not None for each in fused.graph.nodes if each.op == "call_function")


def test_other_dtypes_axes_and_targets_do_not_share_a_collective():
    def step(x, *weights):
        a, b, c, d, e, f = ((weight * x.sum()).to(weight.dtype) for weight in weights)
        return [
            gradient(a, 0),
            gradient(b, 1),
            gradient(c, 2, "tp"),
            convert(d, "P", "B", ["dp"], RANKS, 3),
            gradient(e, 4),
            gradient(f, 5),
        ]

    module = trace(step, (2,), *[(3,)] * 6, dtypes=[torch.float32, torch.float32, torch.float64])
    fused = fuse(module, frozenset(range(6)), ALL)
    assert group_tags(fused) == [[0, 4, 5]]
    assert_same_results(module, fused)


def test_gradients_are_counted_in_the_order_their_operands_are_produced():
    def step(x, *weights):
        grads = [weight * x.sum() for weight in weights]
        return [gradient(grad, tag) for tag, grad in reversed(list(enumerate(grads)))]

    module = trace(step, (2,), *[(3,)] * 4)
    assert [node.args[5] for node in gradient_all_reduces(module.graph, frozenset(range(4)))] == [0, 1, 2, 3]
    fused = fuse(module, frozenset(range(4)), index(2))
    assert group_tags(fused) == [[0, 1], [2, 3]]
    assert_same_results(module, fused)


def test_users_of_a_member_move_behind_the_group_and_all_else_keeps_its_order():
    def step(x, v, w):
        early = gradient(v * x.sum(), 0)
        used = torch.sin(early)
        twice = torch.cos(used)
        other = torch.exp(x)
        late = gradient(w * other.sum(), 1)
        return [twice, other, late]

    module = trace(step, (2,), (3,), (3,))
    assert order(module).index("sin") < order(module).index("exp")
    fused = fuse(module, frozenset({0, 1}), ALL)
    names = order(fused)
    moved = [name for name in names if name.startswith(("getitem", "convert_group", "sin", "cos"))]
    assert moved == ["convert_group", "getitem", "getitem_1", "sin", "cos"]
    kept = [name for name in order(module) if not name.startswith(("convert", "sin", "cos"))]
    assert [name for name in names if name in kept] == kept
    assert_same_results(module, fused)


def test_member_that_needs_another_member_is_not_in_its_group():
    def step(x, v, w, u):
        first = gradient(v * x.sum(), 0)
        free = gradient(u * x.sum(), 2)
        return [gradient(w * torch.sin(first), 1), free, first]

    module = trace(step, (2,), (3,), (3,), (3,))
    fused = fuse(module, frozenset(range(3)), ALL)
    assert group_tags(fused) == [[0, 2]]
    assert_same_results(module, fused)


def test_gradients_reduced_on_two_axes_make_one_group_for_each_axis():
    def step(x, *weights):
        return [gradient(gradient(w * x.sum(), 2 * i, "tp"), 2 * i + 1, "dp") for i, w in enumerate(weights)]

    module = trace(step, (2,), *[(3,)] * 3)
    fused = fuse(module, frozenset(range(6)), ALL)
    assert group_tags(fused) == [[0, 2, 4], [1, 3, 5]]
    assert_same_results(module, fused)


def test_gradients_reduced_on_the_same_axes_at_once_make_one_group():
    def step(x, *weights):
        sets = [("dp", "tp"), ("dp", "tp"), ("dp",), ("dp", "tp"), ("tp",), ("dp",)]
        return [gradient(w * x.sum(), i, *axes) for i, (w, axes) in enumerate(zip(weights, sets, strict=True))]

    module = trace(step, (2,), *[(3,)] * 6)
    fused = fuse(module, frozenset(range(6)), ALL)
    assert group_tags(fused) == [[0, 1, 3], [2, 5]]
    assert [node.args[3] for node in collectives(fused)] == [["dp", "tp"], ["dp"]]
    assert_same_results(module, fused)


def test_a_member_knows_its_axes_and_its_bytes():
    module = trace(lambda x, w: [gradient(w * x.sum(), 7, "dp", "tp")], (2,), (3, 5))
    (found,) = gradient_all_reduces(module.graph, frozenset({7}))
    assert member(found) == Member(7, "P", "R", ("dp", "tp"), torch.float32, 60)


def test_groups_that_would_wait_for_each_other_are_parted():
    def step(x, v, w):
        a = gradient(v * x.sum(), 0, "dp")
        b = gradient(torch.sin(a), 1, "tp")
        c = gradient(w * x.sum(), 2, "tp")
        d = gradient(torch.sin(c), 3, "dp")
        return [b, d]

    module = trace(step, (2,), (3,), (3,))
    fused = fuse(module, frozenset(range(4)), ALL)
    assert group_tags(fused) == [[0, 3]]
    assert_same_results(module, fused)


def test_inputs_stay_in_front_of_a_collective_of_an_input():
    def step(x, v, w):
        return [gradient(x, 0), gradient(x, 1), v + w]

    module = trace(step, (2,), (3,), (3,))
    fused = fuse(module, frozenset({0, 1}), ALL)
    assert [node.op for node in fused.graph.nodes][:3] == ["placeholder"] * 3
    assert group_tags(fused) == [[0, 1]]
    assert_same_results(module, fused)


def test_constants_of_the_graph_are_kept():
    graph = fx.Graph()
    constant, x = graph.get_attr("constant"), graph.placeholder("x")
    x.meta["val"] = constant.meta["val"] = torch.zeros(3)
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, constant))
    total.meta["val"] = torch.zeros(3)
    ends = [graph.call_function(convert, (total, "P", "R", ["dp"], RANKS, tag)) for tag in range(2)]
    for node in ends:
        node.meta["val"] = torch.zeros(3)
    graph.output(ends)
    root = torch.nn.Module()
    root.register_buffer("constant", torch.arange(3.0))
    module = fx.GraphModule(root, graph)
    module.meta["kept"] = "yes"
    fused = fuse(module, frozenset({0, 1}), ALL)
    assert group_tags(fused) == [[0, 1]]
    assert fused.meta["kept"] == "yes"
    assert_same_results(module, fused)


def random_program(seeds, keys):
    """A straight-line program: each step multiplies, or reduces, one of the values before it."""

    def step(x, w):
        values = [x, w]
        for tag, (choice, reduce) in enumerate(seeds):
            value = values[choice % len(values)]
            key = keys[tag % len(keys)]
            values.append(gradient(value, tag, key) if reduce else value * 0.5 + w)
        return values[2:]

    return trace(step, (3,), (3,)), frozenset(range(len(seeds)))


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=14),
    st.sampled_from(["a", "ab", "aab"]),
    st.data(),
)
def test_any_program_and_config_gives_each_gradient_once_with_the_same_bits(seeds, keys, data):
    module, tags = random_program(seeds, keys)
    found = [node.args[5] for node in gradient_all_reduces(module.graph, tags)]
    policy = ALL
    if found and data.draw(st.booleans()):
        policy = index(*sorted(data.draw(st.sets(st.integers(1, len(found)), min_size=1))))
    fused = fuse(module, tags, policy)
    singles = [node.args[5] for node in gradient_all_reduces(fused.graph, tags)]
    assert sorted([*singles, *(tag for group in group_tags(fused) for tag in group)]) == sorted(found)
    for group in group_tags(fused):
        assert len(group) > 1
        assert group == sorted(group, key=found.index)
    assert_same_results(module, fused)


# -- Weights that are split, and their gradients ---------------------------------------------------------------------


class Wide(nn.Module):
    """Layers of unequal widths, with biases, and a loss; the first weight is used twice."""

    def __init__(self):
        super().__init__()
        self.up, self.same, self.down = nn.Linear(8, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x):
        for _ in range(2):
            x = self.down(torch.tanh(self.same(torch.relu(self.up(x)))))
        return x.square().mean()


SPLIT = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}


@functools.cache
def whole_step(axes, split, dtype=torch.float32):
    """A step of `Wide` whose batch is split over dp, nothing grouped; `split`: its parameters are too."""
    model, x = Wide().to(dtype), torch.zeros(16, 8, dtype=dtype)
    alone = {"comm_fusion": {"openstate": False}}
    with pw.auto_parallel_context(parallel_mode="data_parallel", **alone, **(SPLIT if split else {})):
        return pw.compile(model, (x,), mesh=dict(axes)).program


def results_of(program):
    """What every rank of `program` computes, simulated: the outputs and gradients, for random inputs."""
    step, simulator = program, Simulator(program.mesh)
    compiled = Loaded(step, simulator, lambda wanted: None)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in step.inputs]
    values = compiled.forward.run(simulator.enter(tensors, step.inputs))
    count = len(step.outputs)
    tangents = [[torch.ones(p.local_shape, dtype=p.dtype)] * simulator.mesh.device_num for p in step.outputs]
    return values[:count], compiled.backward.run([*values[count:], *tangents])


def assert_same_bits(found, expected):
    for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def counted(collectives):
    return sorted((c.phase, str(c.kind), name) for c in collectives for name in c.members)


MODES = st.sampled_from(
    [None, Fusion(FusionMode.AUTO), Fusion(FusionMode.OVERLAP), Fusion(FusionMode.SIZE, 1), Fusion(FusionMode.SIZE, 7)]
)


@examples(30)
@given(st.sampled_from([(("dp", 4),), (("dp", 2), ("tp", 2))]), st.booleans(), MODES, MODES, MODES, st.data())
def test_any_policies_give_the_gradients_of_the_unfused_step_bit_for_bit(axes, split, reduce, gather, scatter, data):
    plain = whole_step(axes, split)
    count = sum(c.phase == "backward" and c.kind is Kind.ALL_REDUCE for c in plain.collectives)
    if count and data.draw(st.booleans()):
        reduce = index(*sorted(data.draw(st.sets(st.integers(1, count), min_size=1))))
    fused = fuse_program(plain, FusionPolicies(reduce, gather, scatter))
    assert counted(fused.collectives) == counted(plain.collectives)
    for graph in (fused.forward.graph, fused.backward.graph):
        graph.lint()
    assert_same_bits(results_of(fused), results_of(plain))


def test_each_kind_is_grouped_by_its_own_policy():
    plain, auto = whole_step((("dp", 4),), split=True), Fusion(FusionMode.AUTO)
    kinds = {(c.phase, c.kind) for c in plain.collectives if len(c.tensor) and "." in c.tensor}
    assert kinds == {("forward", Kind.ALL_GATHER), ("backward", Kind.REDUCE_SCATTER)}

    def sizes(**policies):
        found = fuse_program(plain, FusionPolicies(**policies)).collectives
        found = [c for c in found if "." in c.members[0]]
        return tuple([len(c.members) for c in found if c.kind is k] for k in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))

    assert sizes() == sizes(allreduce=auto) == ([1] * 5, [1] * 5)
    assert sizes(allgather=auto) == ([5], [1] * 5)
    assert sizes(reducescatter=auto) == ([1] * 5, [5])
    assert sizes(allgather=auto, reducescatter=auto) == ([5], [5])


def test_overlap_groups_gradients_that_stand_back_for_a_group_of_another_kind():
    def step(x, u, v, w):
        part = convert(torch.tanh(u), "P", "S0", ["tp"], RANKS, 0)
        ready = gradient(torch.tanh(v), 2)
        last = convert(torch.tanh(w), "P", "S0", ["tp"], RANKS, 3)
        return [gradient(part, 1), ready, last]

    module, tags = trace(step, (3,), (8, 8), (8, 8), (8, 8)), range(4)
    for scatter in (None, ALL):  # with it the first all_reduce waits for the last reduce_scatter
        policies = FusionPolicies(Fusion(FusionMode.OVERLAP), None, scatter)
        fused = fuse_by(module, dict.fromkeys(tags, ("R", "B")), policies, MESH, profile_of("h100"))
        alone = {node.args[5] for node in fused.graph.find_nodes(op="call_function", target=convert)}
        grouped = [tag for group in group_tags(fused) for tag in group]
        assert sorted([*alone, *grouped]) == [0, 1, 2, 3]


def test_other_gathers_and_the_gathers_of_gradients_are_left_alone():
    def step(x, v, w):
        return [
            convert(x, "S0", "R", ["dp"], RANKS, 0),  # no parameter
            convert(v, "S0", "R", ["dp"], RANKS, 1),  # the gradient of one that is whole at rest
            convert(w, "S0", "R", ["dp"], RANKS, 2),
            convert(w + 1, "S0", "R", ["dp"], RANKS, 3),
        ]

    module = trace(step, (2,), (3,), (3,))
    parameters = {1: ("R", "S0"), 2: ("S0", "R"), 3: ("S0", "R")}
    fused = fuse_by(module, parameters, FusionPolicies(allgather=ALL), MESH, profile_of("h100"))
    assert group_tags(fused) == [[2, 3]]


def test_weights_that_the_backward_gathers_again_are_grouped_in_the_order_in_which_it_uses_them():
    def step(tangent, *parts):
        gradients = []
        for tag, part in reversed(list(enumerate(parts))):
            weight = convert(part, "S0", "B", ["dp"], RANKS, tag)
            gradients.append(convert(torch.outer(tangent.sum(0), tangent[0]), "P", "S0", ["dp"], RANKS, tag))
            tangent = torch.tanh(tangent) @ weight
        return gradients

    module = trace(step, (3, 512), *[(128, 512)] * 6)  # weights of 1 MB
    parameters = dict.fromkeys(range(6), ("S0", "B"))
    assert [node.args[5] for node in weight_gathers(module.graph, parameters)] == [5, 4, 3, 2, 1, 0]
    sizes = FusionPolicies(None, Fusion(FusionMode.SIZE, 2), Fusion(FusionMode.SIZE, 3))
    fused = fuse_by(module, parameters, sizes, MESH, profile_of("h100"))
    groups = [(node.args[1], node.args[5]) for node in collectives(fused)]
    assert [tags for source, tags in groups if source == "S0"] == [[5, 4], [3, 2], [1, 0]]
    assert [tags for source, tags in groups if source == "P"] == [[5, 4, 3], [2, 1, 0]]
    names = order(fused)
    first, second, third = [
        names.index(node.name)
        for node in fused.graph.nodes
        if node.target in (convert, convert_group) and node.args[1] == "S0"
    ]
    products = [i for i, name in enumerate(names) if name.startswith("mm")]
    assert first < products[0] - 1
    assert second == products[0] - 3  # its two weights are taken out between: the group before is first used here
    assert products[1] < third < products[2]


def test_a_weight_that_the_backward_gathers_again_is_listed_as_a_gather_of_the_backward():
    plain = whole_step((("dp", 4),), split=True)
    step = plain
    weight = next(c for c in step.conversions if c.tensor == "same.weight")
    graph = fx.Graph()
    copies = {}
    returned = graph.graph_copy(step.backward.graph, copies)
    with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
        part = graph.placeholder("part")
    conversions = step.conversions
    repeated = replace(weight, tag=len(conversions), again=True)
    how = str(weight.source), str(weight.target), list(weight.axes), weight.size, repeated.tag
    again = graph.call_function(convert, (part, *how))
    graph.output((*returned, again))
    with FakeTensorMode():
        part.meta["val"], again.meta["val"] = torch.empty(4, 16), torch.empty(16, 16)
    conversions = (*conversions, repeated)
    again_gathered = replace(step, conversions=conversions, backward=Text(step.backward, graph))
    for policies in (FusionPolicies(), FusionPolicies(allgather=ALL)):
        listed = fuse_program(again_gathered, policies).collectives
        found = [c for c in listed if c.phase == "backward" and c.kind is Kind.ALL_GATHER]
        assert [(c.tensor, c.axes, c.payload_bytes) for c in found] == [("same.weight", ("dp",), 16 * 16 * 4)]
    assert len(found[0].members) == 1
