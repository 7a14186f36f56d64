import operator
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from partway.propagation.cost.cost import wire_bytes
from partway.propagation.ops.collectives import convert, convert_group
from partway.runtime import Simulator, join, record_collectives, split
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.slices import Placed
from partway.strategy import BROADCAST, PARTIAL, REPLICATE, Kind, Layout, Mesh, Partial, Shard, kind
from partway.strategy.errors import VerifyError

aten = torch.ops.aten
PLACEMENTS = (Shard(0), Shard(1), REPLICATE, BROADCAST, PARTIAL)


@st.composite
def layouts(draw, placements=PLACEMENTS):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return Layout(Mesh.of_sizes(tuple(sizes)), tuple(draw(st.sampled_from(placements)) for _ in sizes))


@given(layouts((Shard(0), Shard(1), REPLICATE, BROADCAST)), st.booleans())
def test_a_tensor_that_is_split_and_joined_is_as_before(layout, turned):
    whole = torch.rand(layout.global_shape((2, 3)))
    whole = whole.t().contiguous().t() if turned else whole
    parts = split(whole, layout)
    assert len(parts) == layout.mesh.device_num
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(join(parts, layout), whole)


def test_what_is_cut_from_one_tensor_is_that_tensor_and_only_if_all_of_it_is_in_its_place():
    layout, whole = Layout(Mesh({"x": 2}), (Shard(0),)), torch.rand(4, 4)
    upper, lower = split(whole, layout)
    assert join([upper, lower], layout) is whole
    for parts in ([lower, upper], [upper, lower.clone()], [upper.clone(), lower]):
        joined = join(parts, layout)
        assert joined is not whole
        assert torch.equal(joined, torch.cat(parts))
    simulator = Simulator(layout.mesh)
    assert simulator.leave([[upper, lower]], [Placed(layout, (4, 4))], [False])[0] is whole
    (copied,) = simulator.leave([[upper, lower]], [Placed(layout, (4, 4))], [True])
    assert torch.equal(copied, whole)
    assert copied.data_ptr() != whole.data_ptr()


def parts_of(whole, layout):
    """The parts of `whole`, addends where the layout has Partial."""
    parts = split(whole, layout)
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if isinstance(placement, Partial):
            for first, *others in layout.mesh.groups(axis):
                addends = [torch.randint(-9, 9, parts[first].shape).to(whole.dtype) for _ in others]
                parts[first] = parts[first] - sum(addends)
                for rank, addend in zip(others, addends, strict=True):
                    parts[rank] = addend
    return parts


@given(layouts((Shard(0), Shard(1), REPLICATE, BROADCAST)), st.data())
def test_a_conversion_keeps_the_value_of_the_whole(layout, data):
    axis = data.draw(st.integers(0, len(layout.placements) - 1))
    source, target = data.draw(st.sampled_from(PLACEMENTS)), data.draw(st.sampled_from(PLACEMENTS))
    before, after = layout.replaced(axis, source), layout.replaced(axis, target)
    order = lambda found, dim: [i for i, p in enumerate(found.placements) if p == Shard(dim)]  # noqa: E731
    # Only the innermost of the axes that split a dim can be converted on its own.
    if any(axis in order(f, d) and order(f, d)[-1] != axis for f in (before, after) for d in (0, 1)):
        return
    size = layout.mesh.sizes[axis]
    scale = layout.mesh.device_num
    whole = torch.randint(-9, 9, (6 * scale, 6 * scale)).double()
    code = code_of(lambda g, x: g.call_function(convert, (x, str(source), str(target), [f"d{axis}"], size, 0)))
    (result,) = Simulator(layout.mesh).run(code, [parts_of(whole, before)])
    assert torch.equal(join(result, after), whole)


def code_of(*steps):
    """A graph of one input, on which each of `steps` puts a node more."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for step in steps:
        node = step(graph, node)
    graph.output((node,))
    return assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward")


def on_one(code, *values):
    found = Simulator(Mesh({"x": 1})).run(code, [[value] for value in values])
    return [None if parts is None else parts[0] for parts in found]


@torch.library.custom_op("partway_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """x + 1, which lies in memory otherwise than its fake implementation says."""
    return (x.mT + 1).contiguous().mT


turned.register_fake(torch.empty_like)


@pytest.mark.parametrize("given", [(4, 3), (3, 4)], ids=["as traced", "transposed"])
def test_a_kernel_reads_the_strides_that_were_traced_whatever_comes_in_or_a_kernel_gives(given):
    seen = []

    def see(x):
        seen.append(x.stride())
        return x * 2

    def traced(node, strides=(4, 1)):
        node.meta["val"] = torch.empty_strided((3, 4), strides, device="meta")
        return node

    graph = fx.Graph()
    x = traced(graph.placeholder("x"))
    last = x
    for target in (see, torch.ops.partway_tests.turned.default, see):
        last = traced(graph.call_function(target, (last,)))
    graph.output((last,))
    code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward")
    value = torch.arange(12.0).view(given)
    value = value if given == (3, 4) else value.t()
    (found,) = on_one(code, value)
    assert torch.equal(found, (value * 2 + 1) * 2)
    assert [*seen, found.stride()] == [(4, 1)] * 3


def test_a_value_unlike_what_was_traced_is_an_error_where_that_is_asked_for(monkeypatch):
    def node_of(g, x):
        made = g.call_function(torch.ops.aten.relu.default, (x,))
        made.meta["val"] = torch.empty((3,), device="meta")
        return made

    monkeypatch.setenv("PARTWAY_VERIFY", "1")
    code = code_of(node_of)
    with pytest.raises(VerifyError, match=r"relu_default has the shape and strides .*\(2,\).* traced with"):
        on_one(code, torch.ones(2))


def test_how_no_elements_lie_is_no_matter(monkeypatch):
    def node_of(g, x):
        made = g.call_function(torch.ops.aten.relu.default, (x,))
        made.meta["val"] = torch.empty_strided((0, 1), (1, 7), device="meta")
        return made

    monkeypatch.setenv("PARTWAY_VERIFY", "1")
    assert on_one(code_of(node_of), torch.ones(0, 1))[0].shape == (0, 1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda g, x: g.call_function(torch.ops.aten.cat.default, ([x, x], 1)), [[1, 2, 1, 2], [3, 4, 3, 4]]),
        (lambda g, x: g.call_function(torch.ops.aten.sub.Tensor, (5, x)), [[4, 3], [2, 1]]),
        (lambda g, x: g.call_function(torch.ops.aten.sum.dim_IntList, (x, [0]), {"keepdim": True}), [[4, 6]]),
        (lambda g, x: g.call_function(torch.ops.aten.add.Tensor, (x, x), {"alpha": 2}), [[3, 6], [9, 12]]),
        (lambda g, x: g.call_function(torch.ops.aten.where.self, (x, x, x)), None),
    ],
)
def test_arguments_of_every_form_reach_the_operator(step, expected):
    code = code_of(step)
    if expected is None:
        assert on_one(code, torch.tensor([True, False]))[0].tolist() == [True, False]
    else:
        assert on_one(code, torch.tensor([[1, 2], [3, 4]]))[0].tolist() == expected


class Spy:
    """An operator that remembers which of its results are alive, and how many were when it was called."""

    def __init__(self):
        self.__name__, self.made, self.seen = "spy", [], []

    def __call__(self, x):
        self.seen.append(sum(made() is not None for made in self.made))
        result = x + 1
        self.made.append(weakref.ref(result))
        return result


def test_a_value_is_let_go_after_its_last_use_and_before_the_next_rank_begins():
    spy = Spy()
    code = code_of(*[lambda g, x: g.call_function(spy, (x,))] * 3, lambda g, x: g.call_function(aten.sum.default, (x,)))
    values = [torch.ones(2) * rank for rank in range(3)]
    (sums,) = Simulator(Mesh({"x": 3})).run(code, [values])
    assert [int(one) for one in sums] == [6, 8, 10]
    assert [value.tolist() for value in values] == [[rank] * 2 for rank in range(3)]
    assert spy.seen == [0, 1, 1] * 3


@pytest.mark.parametrize(("source", "target"), [("P", "R"), ("P", "S0"), ("Pmax", "R")])
def test_what_is_reduced_is_there_as_a_total_and_one_part(source, target):
    spy = Spy()
    code = code_of(
        lambda g, x: g.call_function(spy, (x,)), lambda g, x: g.call_function(convert, (x, source, target, ["x"], 4, 0))
    )
    (parts,) = Simulator(Mesh({"x": 4})).run(code, [[torch.full((4,), float(rank)) for rank in range(4)]])
    assert {float(part[0]) for part in parts} == {10 if source == "P" else 4}
    # What a function that nobody knows gives may be shared: the first part stays until a second makes the total.
    assert spy.seen == [0, 1, 0, 0]


def test_an_input_that_nothing_reads_and_an_output_that_is_none_are_known():
    graph = fx.Graph()
    graph.placeholder("unread")
    x = graph.placeholder("x")
    graph.output((x, None))
    code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward")
    assert code.outputs == (1, None)
    assert on_one(code, 1, 2) == [2, None]


def test_a_member_of_a_group_is_taken_out_right_before_it_is_used():
    graph = fx.Graph()
    x = graph.placeholder("x")
    group = graph.call_function(convert_group, ([x, x], "P", "R", ["d0"], 2, [0, 1]))
    one, two = (graph.call_function(operator.getitem, (group, i)) for i in range(2))
    busy = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (busy, one)), two))
    code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "backward")
    assert [step.name for step in code.instructions] == [
        "convert_group_default", "neg_default", "getitem", "add_tensor", "getitem_1",
    ]  # fmt: skip


def test_random_numbers_are_drawn_once_for_all_ranks():
    code = code_of(lambda g, x: g.call_function(torch.ops.aten.bernoulli.p, (x, 0.5)))
    torch.manual_seed(0)
    (parts,) = Simulator(Mesh({"x": 4})).run(code, [[torch.ones(64)] * 4])
    assert len({part.tolist().__str__() for part in parts}) == 1


@pytest.mark.parametrize(
    ("source", "target", "payload"),
    [(PARTIAL, REPLICATE, 64), (Shard(0), REPLICATE, 128), (PARTIAL, Shard(0), 64), (Shard(0), Shard(1), 64)],
)
def test_a_collective_is_recorded_with_its_payload(source, target, payload):
    mesh = Mesh({"dp": 3, "x": 2})
    code = code_of(
        lambda g, x: g.call_function(convert, (x, str(source), str(target), ["x"], 2, 5)),
        lambda g, x: g.call_function(convert, (x, "R", "B", ["dp"], 3, 6)),
    )
    with record_collectives() as outer, record_collectives() as inner:
        Simulator(mesh).run(code, [[torch.zeros(4, 4)] * 6])
    Simulator(mesh).run(code, [[torch.zeros(4, 4)] * 6])
    (event,) = outer
    assert outer == inner
    assert (event.kind, event.axes, event.group_size, event.tags) == (kind(source, target), ("x",), 2, (5,))
    assert (event.payload_bytes, event.phase) == (payload, "forward")
    assert event.wire_bytes == wire_bytes(event.kind, payload, 2)


def test_a_group_is_one_event_and_its_bytes_are_those_of_all():
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "ab"]
    group = graph.call_function(convert_group, (inputs, "P", "R", ["x"], 2, [3, 4]))
    graph.output((graph.call_function(operator.getitem, (group, 1)),))
    code = assemble_code(fx.GraphModule(torch.nn.Module(), graph), "backward")
    with record_collectives() as events:
        (got,) = Simulator(Mesh({"x": 2})).run(code, [[torch.ones(2)] * 2, [torch.ones(3), torch.ones(3)]])
    assert [part.tolist() for part in got] == [[2, 2, 2]] * 2
    assert [(e.kind, e.payload_bytes, e.tags, e.phase) for e in events] == [(Kind.ALL_REDUCE, 20, (3, 4), "backward")]


def test_a_recorder_stops_at_the_end_of_its_block_even_after_an_error():
    code = code_of(lambda g, x: g.call_function(convert, (x, "P", "R", ["x"], 2, 0)))
    simulator = Simulator(Mesh({"x": 2}))
    with pytest.raises(TypeError), record_collectives() as events:
        simulator.run(code, [None])
    simulator.run(code, [[torch.ones(2)] * 2])
    assert not events
