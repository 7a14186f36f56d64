"""Where a code is cut, and that ranks one after another give what ranks in lock-step give."""

import functools
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from torch import fx

from partway.propagation.ops.collectives import convert, convert_group
from partway.runtime import Simulator, record_collectives
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.instructions import CallOperator
from partway.runtime.code.sections import levels, stretches_of
from partway.runtime.code.straight_line import _in_few_variables
from partway.runtime.executors.simulate import split
from partway.strategy import REPLICATE, Layout, Mesh

aten = torch.ops.aten


class Writer:
    """Writes a graph of values of one shape."""

    def __init__(self, mesh):
        self.mesh, self.graph = mesh, fx.Graph()

    def input(self, shape=(4, 4)):
        return self._of(self.graph.placeholder(f"x{len(self.graph.nodes)}"), shape)

    def call(self, target, *args, shape=(4, 4), **kwargs):
        node = self._of(self.graph.call_function(target, args, kwargs), shape)
        if target in (aten.t.default, *UNARY):  # lies in memory as its operand does
            node.meta["val"] = target(args[0].meta["val"])
        return node

    def convert(self, x, source, target, *axes, shape=(4, 4)):
        return self.call(convert, x, source, target, list(axes), self.mesh.size(*axes), 0, shape=shape)

    def convert_group(self, xs, source, target, *axes, shape=(4, 4)):
        group = self.graph.call_function(
            convert_group, (xs, source, target, list(axes), self.mesh.size(*axes), [0] * len(xs))
        )
        return [self.call(operator.getitem, group, i, shape=shape) for i in range(len(xs))]

    def code(self, *outputs):
        self.graph.output(outputs)
        return assemble_code(fx.GraphModule(torch.nn.Module(), self.graph), "backward")

    def _of(self, node, shape):
        node.meta["val"] = torch.empty(shape, device="meta")
        return node


def cut(code):
    """The names of the instructions of each stretch."""
    return [[step.name for step in stretch.steps] for stretch in stretches_of(code)]


# -- Where a code is cut ---------------------------------------------------------------------------------------------


def test_a_result_that_is_read_begins_a_stretch():
    w = Writer(Mesh({"x": 2}))
    x = w.input()
    one = w.convert(w.call(aten.neg.default, x), "P", "R", "x")
    other = w.convert(w.call(aten.exp.default, x), "P", "R", "x")
    both = w.call(aten.add.Tensor, one, other)
    code = w.code(w.convert(both, "P", "R", "x"), x)
    assert cut(code) == [
        ["neg_default", "convert_default", "exp_default", "convert_default_1"],
        ["add_tensor", "convert_default_2"],
    ]
    first, second = stretches_of(code)
    assert (first.frees, first.keeps, first.gives) == ((), (0,), ())
    assert (second.frees, second.keeps, second.gives) == ((2, 4), (), ())


def test_what_is_done_with_reduced_gradients_does_not_cut_the_backward():
    w = Writer(Mesh({"x": 2}))
    gradient, outputs = w.input(), []
    for _ in range(3):
        gradient = w.call(aten.neg.default, gradient)
        outputs.append(w.call(aten.div.Tensor, w.convert(gradient, "P", "R", "x"), 2))
    code = w.code(*outputs)
    assert cut(code) == [
        ["neg_default", "convert_default", "neg_default_1", "convert_default_1", "neg_default_2", "convert_default_2"],
        ["div_tensor", "div_tensor_1", "div_tensor_2"],
    ]


def test_what_is_computed_late_in_the_program_is_not_computed_early():
    w = Writer(Mesh({"x": 2}))
    x = w.input()
    reduced = w.convert(x, "P", "R", "x")
    used = w.convert(w.call(aten.neg.default, reduced), "P", "R", "x")
    again = w.call(aten.exp.default, x)
    code = w.code(w.call(aten.add.Tensor, used, again))
    assert cut(code) == [["convert_default"], ["neg_default", "convert_default_1", "exp_default"], ["add_tensor"]]


def test_random_numbers_are_drawn_in_the_order_of_the_program():
    w = Writer(Mesh({"x": 2}))
    x = w.input()
    first = w.call(aten.bernoulli.p, w.convert(x, "P", "R", "x"), 0.5)
    second = w.call(aten.bernoulli.p, x, 0.5)
    code = w.code(first, second)
    assert levels(code) == [0, 1, 1]
    values = [[torch.ones(4, 4)] * 2]
    torch.manual_seed(3)
    drawn = [torch.bernoulli(torch.ones(4, 4), 0.5) for _ in range(2)]
    torch.manual_seed(3)
    for parts, expected in zip(Simulator(w.mesh).run(code, values), drawn, strict=True):
        assert all(torch.equal(part, expected) for part in parts)


def test_a_code_without_instructions_has_no_stretch():
    w = Writer(Mesh({"x": 2}))
    x = w.input()
    code = w.code(x, x)
    assert stretches_of(code) == ()
    assert Simulator(w.mesh).run(code, [[1, 2]]) == [[1, 2], [1, 2]]


# -- What is written into --------------------------------------------------------------------------------------------


def writes(code):
    return {step.name: step.private for step in code.instructions if isinstance(step, CallOperator) and step.in_place}


def test_a_rank_writes_into_what_it_has_made_and_not_into_what_ranks_share():
    w = Writer(Mesh({"x": 2}))
    x = w.input()
    made = w.call(aten.neg.default, w.call(aten.t.default, w.call(aten.exp.default, x)))
    reduced = w.call(aten.neg.default, w.convert(x, "P", "R", "x"))
    drawn = w.call(aten.neg.default, w.call(aten.bernoulli.p, x, 0.5))
    constant = w.call(aten.neg.default, w.call(aten.ones.default, [4, 4]))
    given = w.call(aten.neg.default, x)
    code = w.code(made, reduced, drawn, constant, given)
    assert writes(code) == {
        "neg_default": True, "neg_default_1": False, "neg_default_2": False, "neg_default_3": False,
    }  # fmt: skip


@pytest.mark.parametrize("private", [True, False])
def test_the_first_part_becomes_the_total_where_it_is_that_ranks_own(private):
    w = Writer(Mesh({"x": 2, "y": 2}))
    x = w.input()
    part = w.call(aten.neg.default, x) if private else w.convert(x, "P", "R", "x")
    code = w.code(w.convert(part, "P", "R", "y"))
    last = code.instructions[-1].relayout
    assert (last.owned, last.private) == ((True,), (private,))


# -- Ranks one after another give what ranks in lock-step give -------------------------------------------------------

UNARY = (aten.neg.default, aten.relu.default, aten.tanh.default, aten.clone.default, aten.detach.default)
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)
MESHES = ({"x": 1}, {"x": 3}, {"x": 2, "y": 2})


@st.composite
def graphs(draw):
    """A writer, what its graph gives for one input after another, and the code."""
    mesh = Mesh(draw(st.sampled_from(MESHES)))
    w, n = Writer(mesh), 12
    nodes = [w.input((n, n)), w.input((n, n))]
    for _ in range(draw(st.integers(1, 14))):
        some = st.sampled_from(nodes[-4:]) | st.sampled_from(nodes)
        axes = draw(st.sampled_from([mesh.axes, mesh.axes[:1], mesh.axes[-1:]]))
        size, whole = mesh.size(*axes), (n, n)
        match draw(st.integers(0, 10)):
            case 0 | 1:
                nodes.append(w.call(draw(st.sampled_from(UNARY)), draw(some), shape=whole))
            case 2 | 3:
                nodes.append(w.call(draw(st.sampled_from(BINARY)), draw(some), draw(some), shape=whole))
            case 4:
                nodes.append(w.call(aten.t.default, draw(some), shape=whole))
            case 5:
                source = draw(st.sampled_from(["P", "Pmax"]))
                nodes.append(w.convert(draw(some), source, "R", *axes, shape=whole))
            case 6:
                source, target = draw(st.sampled_from([("P", "S1"), ("R", "S1"), ("S0", "S1")]))
                shape = (n * size, n // size) if source == "S0" else (n, n // size)
                part = w.convert(draw(some), source, target, *axes, shape=shape)
                back = ("S1", "S0") if source == "S0" else ("S1", "R")
                nodes.append(w.convert(w.call(aten.relu.default, part, shape=shape), *back, *axes, shape=whole))
            case 7:
                nodes.append(w.convert(draw(some), "R", "P", *axes, shape=whole))
            case 8:
                nodes += w.convert_group([draw(some), draw(some)], "P", "R", *axes, shape=whole)
            case 9:
                nodes.append(w.call(aten.bernoulli.p, draw(some), 0.5, shape=whole))
            case _:
                nodes.append(w.call(aten.ones.default, [n, n], shape=whole))
    outputs = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
    return w, w.code(*outputs), outputs


def converted(mesh, parts, source, target, axes):
    """`parts` after a conversion, each in memory of its own, by what placements mean."""
    found = list(parts)
    for group in mesh.groups(*axes):
        members, whole = [parts[rank] for rank in group], None
        if source in ("P", "Pmax"):
            whole = functools.reduce(torch.maximum if source == "Pmax" else torch.add, members)
        elif source[0] == "S":
            whole = torch.cat(members, int(source[1]))
        for i, rank in enumerate(group):
            mine = parts[rank] if whole is None else whole
            if target[0] == "S":
                mine = mine.chunk(len(group), int(target[1]))[i]
            found[rank] = torch.zeros_like(mine) if target == "P" and i else mine.clone()
    return found


def in_lock_step(w, outputs, inputs):
    """Each node on every rank before the next one, in memory of its own."""
    values, given = {}, iter(inputs)

    def called(node, rank):
        result = node.target(*(values[a][rank] if isinstance(a, fx.Node) else a for a in node.args))
        return result if node.target is operator.getitem else result.clone()

    ranks = range(w.mesh.device_num)
    for node in w.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.target is convert:
            values[node] = converted(w.mesh, values[node.args[0]], *node.args[1:4])
        elif node.target is convert_group:
            each = [converted(w.mesh, values[x], *node.args[1:4]) for x in node.args[0]]
            values[node] = list(zip(*each, strict=True))
        elif node.target in (aten.bernoulli.p, aten.ones.default):
            values[node] = [called(node, 0)] * len(ranks)
        elif node.op == "call_function":
            values[node] = [called(node, rank) for rank in ranks]
    return [values[node] for node in outputs]


@examples(150)
@given(graphs(), st.integers(0, 99))
def test_ranks_one_after_another_give_bit_for_bit_what_ranks_in_lock_step_give(drawn, seed):
    w, code, outputs = drawn
    generator = torch.Generator().manual_seed(seed)
    n, shape = w.mesh.device_num, (12, 12)
    replicated = split(torch.rand(shape, generator=generator), Layout(w.mesh, (REPLICATE,) * len(w.mesh.axes)))
    inputs = [replicated, [torch.rand(shape, generator=generator) for _ in range(n)]]
    before = [[part.clone() for part in parts] for parts in inputs]
    simulator = Simulator(w.mesh)
    run = simulator.load(code)
    for _ in range(2):
        torch.manual_seed(seed)
        expected = in_lock_step(w, outputs, inputs)
        torch.manual_seed(seed)
        with record_collectives() as events:
            found = run(list(inputs))
        for parts, others in zip(found, expected, strict=True):
            assert [torch.equal(part, other) for part, other in zip(parts, others, strict=True)] == [True] * n
        ran = [step.relayout for step in code.instructions if step.communicates]
        assert [(event.kind, event.axes) for event in events] == [(c.kind, c.axes) for c in ran]
    for parts, others in zip(inputs, before, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(parts, others, strict=True))


# -- What is written -------------------------------------------------------------------------------------------------


def test_a_long_code_has_few_variables():
    w = Writer(Mesh({"x": 2}))
    x = w.input()
    for _ in range(100):
        x = w.call(aten.add.Tensor, x, w.call(aten.neg.default, x))
    run = Simulator(w.mesh).load(w.code(x))
    (frame,) = {id(loaded.first): loaded.first.__code__ for loaded in run.args[0]}.values()
    assert frame.co_nlocals < 10
    (found,) = run([[torch.ones(4, 4)] * 2])
    assert torch.equal(found[0], torch.zeros(4, 4))


def test_texts_in_a_code_are_no_variables():
    w = Writer(Mesh({"x": 2}))
    x = w.call(aten.neg.default, w.input())
    quotient = w.call(aten.div.Tensor_mode, x, 2, rounding_mode="floor")
    code = w.code(quotient)
    lines = [f"    v7 = f({text!r}, v3)  # v9" for text in ("v1", "it's v1", 'a "v1"', "\\")]
    assert [*_in_few_variables(lines)] == [line.replace("v7", "v0").replace("v3", "v1") for line in lines]
    assert Simulator(w.mesh).run(code, [[torch.ones(4, 4)] * 2])[0][0][0, 0] == -1
