import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import tensor as dt

from partway.strategy import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    Annotation,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    StrategyError,
    coarsest_mesh,
    from_dtensor,
    meshes_of,
    parse,
    to_dtensor,
    to_ints,
    to_names,
    to_placements,
)
from partway.strategy.layout import layout

MESH = Mesh({"dp": 2, "tp": 4})


@st.composite
def split_layouts(draw, ndim=3):
    """Layouts that every notation can write: splits of three dims."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    choices = st.sampled_from([REPLICATE, *map(Shard, range(ndim))])
    return layout(Mesh.of_sizes(tuple(sizes)), tuple(draw(choices) for _ in sizes))


def text(annotation: Annotation, shape: tuple[int, ...]) -> list[str]:
    return [str(one) for one in annotation.layouts(shape)]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (("dp", None), "[dp:S0 tp:R]"),
        ((None, "tp"), "[dp:R tp:S1]"),
        (("tp", "dp"), "[dp:S1 tp:S0]"),
        ((("dp", "tp"), None), "[dp:S0 tp:S0]"),
        ((("tp",), ()), "[dp:R tp:S0]"),
        ((None, None), "[dp:R tp:R]"),
        ((Shard(0), Replicate()), "[dp:S0 tp:R]"),
        ([dt.Shard(-1), dt.Replicate()], "[dp:S1 tp:R]"),
        ((dt.Shard(0), Shard(1)), "[dp:S0 tp:S1]"),
        (Layout(MESH, (Shard(1), Shard(1))), "[dp:S1 tp:S1]"),
    ],
)
def test_names_placements_and_layouts_say_exactly_one_layout(strategy, expected):
    assert text(parse(strategy, MESH, (8, 8)), (8, 8)) == [expected]


def test_split_counts_leave_the_axes_open():
    assert text(parse((2, 2), Mesh.flat(8), (8, 8)), (8, 8)) == [
        "[d0:S0 d1:S1 d2:R]",
        "[d0:S0 d1:R d2:S1]",
        "[d0:S1 d1:S0 d2:R]",
        "[d0:S1 d1:R d2:S0]",
        "[d0:R d1:S0 d2:S1]",
        "[d0:R d1:S1 d2:S0]",
    ]


def test_the_split_counts_of_a_matmul_can_be_aligned_on_the_contracted_dim():
    mesh = coarsest_mesh(8, [(2, 4), (4, 1)])
    (left,) = parse((2, 4), mesh, (8, 8)).layouts((8, 8))
    (right,) = parse((4, 1), mesh, (8, 8)).layouts((8, 8))
    assert left.axes_of(1) == right.axes_of(0) == ("d1",)


def test_a_count_may_be_made_up_of_several_axes():
    assert text(parse((8, 1), MESH, (8, 8)), (8, 8)) == ["[dp:S0 tp:S0]"]


def test_none_among_split_counts_leaves_the_dim_whole():
    assert parse((None, 4), MESH, (8, 8)) == parse((1, 4), MESH, (8, 8))


def test_an_axis_of_one_device_splits_nothing_in_the_ints_notation():
    assert text(parse((2, 1), Mesh({"a": 1, "b": 2}), (8, 8)), (8, 8)) == ["[a:R b:S0]"]


@pytest.mark.parametrize("strategy", [(), Layout.replicated(MESH), (Replicate(), Replicate())])
def test_a_tensor_without_dims_is_replicated(strategy):
    assert text(parse(strategy, MESH, ()), ()) == ["[dp:R tp:R]"]


def test_an_annotation_allows_its_layouts_and_no_others():
    annotation = parse((2, 1), Mesh.flat(4), (8, 8))
    mesh = annotation.mesh
    assert annotation.allows(Layout(mesh, (Shard(0), REPLICATE)), 2)
    assert annotation.allows(Layout(mesh, (REPLICATE, Shard(0))), 2)
    assert not annotation.allows(Layout(mesh, (Shard(0), Shard(0))), 2)
    assert not annotation.allows(Layout(mesh, (Shard(0), BROADCAST)), 2)
    assert not annotation.allows(Layout(mesh, (Shard(0), REPLICATE)), 3)


def test_an_annotation_allows_nothing_for_a_shape_with_nothing_to_split():
    assert parse((2, 4), MESH, (8, 8)).layouts((8, 1)) == ()
    assert parse((2, 4), MESH, (8, 8)).layouts((8, 6)) == parse((2, 4), MESH, (8, 8)).layouts((8, 8))


@pytest.mark.parametrize("strategy", [("dp", None), (2, 4), (("dp", "tp"), None), [dt.Shard(-1), dt.Replicate()]])
def test_an_annotation_prints_as_it_was_written(strategy):
    assert str(parse(strategy, MESH, (8, 8))) == repr(strategy)


def test_annotations_that_mean_the_same_are_equal_however_written():
    assert parse(("dp", "tp"), MESH, (8, 8)) == parse((Shard(0), Shard(1)), MESH, (8, 8))


def test_layouts_are_interned():
    (one,) = parse(("dp", None), MESH, (8, 8)).layouts((8, 8))
    assert one is layout(MESH, (Shard(0), REPLICATE))


@given(split_layouts())
def test_names_and_layouts_are_inverse(one):
    shape = one.global_shape((1, 2, 3))
    assert parse(to_names(one, 3), one.mesh, shape).layouts(shape) == (one,)


@given(split_layouts())
def test_ints_allow_the_layout_they_came_from_and_only_layouts_of_these_counts(one):
    shape = one.global_shape((1, 2, 3))
    annotation = parse(to_ints(one, 3), one.mesh, shape)
    assert annotation.allows(one, 3)
    assert {to_ints(other, 3) for other in annotation.layouts(shape)} == {to_ints(one, 3)}


@given(split_layouts())
def test_ints_allow_every_assignment_of_axes_once(one):
    counts = to_ints(one, 3)
    choices = [REPLICATE, *map(Shard, range(3))]
    every = (layout(one.mesh, placements) for placements in itertools.product(choices, repeat=len(one.mesh.axes)))
    shape = one.global_shape((1, 1, 1))
    allowed = parse(counts, one.mesh, shape).layouts(shape)
    assert len(set(allowed)) == len(allowed)
    assert set(allowed) == {other for other in every if other.splits(3) == counts}


@given(split_layouts())
def test_placements_ours_and_dtensors_and_layouts_are_inverse(one):
    shape = one.global_shape((1, 2, 3))
    assert parse(to_placements(one), one.mesh, shape).layouts(shape) == (one,)
    assert parse(to_dtensor(one), one.mesh, shape).layouts(shape) == (one,)
    assert from_dtensor(to_dtensor(one), one.mesh, 3) == one


def test_dtensor_partial_is_ours():
    assert from_dtensor((dt.Partial(), dt.Shard(-2)), MESH, 2) == Layout(MESH, (PARTIAL, Shard(0)))
    assert from_dtensor((PARTIAL, Shard(0)), MESH, 2) == Layout(MESH, (PARTIAL, Shard(0)))
    assert to_dtensor(Layout(MESH, (PARTIAL, Shard(0)))) == (dt.Partial(), dt.Shard(0))
    assert from_dtensor((dt.Partial("max"), dt.Shard(0)), MESH, 2) == Layout(MESH, (Partial("max"), Shard(0)))
    assert to_dtensor(Layout(MESH, (Partial("max"), Shard(0)))) == (dt.Partial("max"), dt.Shard(0))


def test_names_of_several_axes_are_tuples():
    assert to_names(Layout(MESH, (Shard(0), Shard(0))), 2) == (("dp", "tp"), None)
    assert to_names(Layout(MESH, (Shard(1), REPLICATE)), 2) == (None, "dp")


def test_broadcast_does_not_become_replicate_silently():
    with pytest.raises(
        StrategyError, match=r"the layout \[dp:B tp:R\] has a Broadcast, which DTensor cannot express; convert"
    ):
        to_dtensor(Layout(MESH, (BROADCAST, REPLICATE)))


@pytest.mark.parametrize(("convert", "form"), [(to_names, "axis names"), (to_ints, "split counts")])
@pytest.mark.parametrize(("placement", "name"), [(PARTIAL, "Partial"), (BROADCAST, "Broadcast")])
def test_a_layout_that_a_notation_cannot_say_is_rejected(convert, form, placement, name):
    with pytest.raises(StrategyError, match=f"is {name} on axis 'tp', which {form} cannot express; write placements"):
        convert(Layout(MESH, (Shard(0), placement)), 2)


@pytest.mark.parametrize("convert", [to_names, to_ints])
def test_a_split_dim_beyond_the_tensor_is_rejected(convert):
    with pytest.raises(StrategyError, match="splits dim 1, which a tensor of 1 dim lacks"):
        convert(Layout(MESH, (Shard(0), Shard(1))), 1)


def test_all_unreadable_dtensor_placements_are_reported_together():
    with pytest.raises(StrategyError) as error:
        from_dtensor((dt.Partial("avg"), dt.Shard(-3)), MESH, 2)
    assert str(error.value).splitlines() == [
        "the placements cannot be read:",
        "  - placement 0: Partial(avg) has no equivalent in Partway; write Shard(dim) or Replicate()",
        "  - placement 1: Shard(dim=-3) splits a dim that a tensor of 2 dims does not have; "
        "write a dim of 0 to 1, or Replicate()",
    ]


def test_from_dtensor_takes_one_placement_for_each_axis():
    with pytest.raises(StrategyError, match="takes 2 placements, not 1"):
        from_dtensor((dt.Replicate(),), MESH, 2)


def test_parse_reports_through_the_validator():
    with pytest.raises(StrategyError, match="the strategy: dim 1 has size 1, which axis 'tp' \\(4\\) does not divide"):
        parse(("dp", "tp"), MESH, (8, 1))


def test_parse_of_none_says_what_to_write():
    with pytest.raises(StrategyError, match="the strategy is None; write one entry per dim"):
        parse(None, MESH, (8, 6))


@pytest.mark.parametrize(
    ("device_num", "strategies", "sizes"),
    [
        (8, [], (8,)),
        (1, [], (1,)),
        (8, [(8, 1), (1, 1)], (8,)),
        (8, [(2, 4), (4, 1)], (2, 4)),
        (8, [(2, 2), (4, 1)], (2, 2, 2)),
        (8, [(2, 2, 2)], (2, 2, 2)),
        (8, [(2, 1), (4, 1)], (2, 4)),
        (12, [(3, 1), (1, 4)], (3, 4)),
        (12, [(2, 6)], (2, 6)),
        (16, [(2, 1)], (2, 8)),
        (16, [(4, 4), (2, 8)], (2, 2, 4)),
        (8, [(None, 4)], (2, 4)),
    ],
)
def test_the_coarsest_mesh_has_the_fewest_axes_and_then_the_smallest_sizes_first(device_num, strategies, sizes):
    assert coarsest_mesh(device_num, strategies) == Mesh.of_sizes(sizes)


@given(st.integers(2, 24), st.data())
def test_the_coarsest_mesh_can_write_all_strategies_and_no_mesh_of_fewer_axes_can(device_num, data):
    divisors = [n for n in range(1, device_num + 1) if device_num % n == 0]
    pairs = [pair for pair in itertools.product(divisors, repeat=2) if device_num % math.prod(pair) == 0]
    strategies = data.draw(st.lists(st.sampled_from(pairs), max_size=3))
    mesh = coarsest_mesh(device_num, strategies)

    def writes(other: Mesh) -> bool:
        return all(
            any(Layout(other, placements).splits(2) == counts for placements in every_placement(other))
            for counts in strategies
        )

    assert mesh.device_num == device_num
    assert writes(mesh)
    key = (len(mesh.sizes), mesh.sizes)
    better = (sizes for sizes in ordered_factorisations(device_num) if (len(sizes), sizes) < key)
    assert not any(writes(Mesh.of_sizes(sizes)) for sizes in better)


def every_placement(mesh):
    return itertools.product((REPLICATE, Shard(0), Shard(1)), repeat=len(mesh.axes))


def ordered_factorisations(n):
    """All orders of all factorisations of n into factors above 1."""
    if n == 1:
        return [()]
    return [(d, *rest) for d in range(2, n + 1) if n % d == 0 for rest in ordered_factorisations(n // d)]


def test_strategies_that_no_mesh_can_write_are_reported_together():
    with pytest.raises(StrategyError) as error:
        coarsest_mesh(8, [(3, 1), (2, 4), (0, 2), (4, 4), ("dp", None)])
    assert str(error.value).splitlines() == [
        "no mesh of 8 devices fits:",
        "  - strategy (3, 1): no mesh of 8 devices allows it; write a tuple of split counts whose product divides 8",
        "  - strategy (0, 2): no mesh of 8 devices allows it; write a tuple of split counts whose product divides 8",
        "  - strategy (4, 4): no mesh of 8 devices allows it; write a tuple of split counts whose product divides 8",
        "  - strategy ('dp', None): it is not a tuple of ints; write one split count per dim",
    ]


@pytest.mark.parametrize(
    ("device_num", "strategies", "node", "sizes"),
    [
        (1, [], None, [(1,)]),
        (7, [], None, [(7,)]),
        (8, [], None, [(8,), (2, 4), (4, 2), (2, 2, 2)]),
        (12, [], None, [(12,), (2, 6), (3, 4), (4, 3), (6, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2)]),
        # split counts that need axes of their own
        (8, [(2, 4)], None, [(2, 4), (4, 2), (2, 2, 2)]),
        (8, [(2, 2)], None, [(2, 2, 2)]),
        (8, [(None, 4)], None, [(2, 4), (4, 2), (2, 2, 2)]),
        (12, [(3, 4)], None, [(3, 4), (4, 3), (2, 2, 3), (2, 3, 2), (3, 2, 2)]),
        (12, [(3, 1), (1, 6)], None, [(2, 2, 3), (2, 3, 2), (3, 2, 2)]),
        (12, [(3, 1), (4, 1), (1, 12)], None, [(3, 4), (4, 3), (2, 2, 3), (2, 3, 2), (3, 2, 2)]),
        (8, [(8, 1)], None, [(8,), (2, 4), (4, 2), (2, 2, 2)]),
        # more axes than are looked at otherwise
        (16, [(2, 2, 2, 2)], None, [(2, 2, 2, 2)]),
        # nodes: the inner axes fill one
        (16, [], 8, [(2, 8), (2, 2, 4), (2, 4, 2)]),
        (16, [(4, 4)], 8, [(2, 2, 4), (2, 4, 2)]),
        (24, [], 8, [(3, 8), (3, 2, 4), (3, 4, 2)]),
        (12, [], 6, [(2, 6), (2, 2, 3), (2, 3, 2)]),
        (8, [], 8, [(8,), (2, 4), (4, 2), (2, 2, 2)]),
        (4, [], 8, [(4,), (2, 2)]),
        (12, [], 8, [(12,), (2, 6), (3, 4), (4, 3), (6, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2)]),
        # what was asked for comes before what the network likes
        (32, [(2, 2, 2, 4)], 16, [(2, 2, 2, 4)]),
    ],
)
def test_the_meshes_to_search_are_all_orders_of_at_most_three_sizes(device_num, strategies, node, sizes):
    assert meshes_of(device_num, strategies, node) == [Mesh.of_sizes(found) for found in sizes]


@given(st.integers(1, 32), st.sampled_from([None, 2, 4, 8]), st.data())
def test_the_meshes_to_search_can_write_all_strategies_and_keep_within_nodes(device_num, node, data):
    divisors = [n for n in range(1, device_num + 1) if device_num % n == 0]
    pairs = [pair for pair in itertools.product(divisors, repeat=2) if device_num % math.prod(pair) == 0]
    strategies = data.draw(st.lists(st.sampled_from(pairs), max_size=2))
    found = meshes_of(device_num, strategies, node)

    def fits(sizes):
        mesh = Mesh.of_sizes(sizes)
        splits = {Layout(mesh, placements).splits(2) for placements in every_placement(mesh)}
        return splits.issuperset(strategies)

    def within(sizes):
        """Whether an axis is either inside all nodes or between them."""
        if node is None or device_num <= node or device_num % node:
            return True
        inner = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return all(step >= node or step * size <= node for step, size in zip(inner, sizes, strict=True))

    every = ordered_factorisations(device_num) if device_num > 1 else [(1,)]
    expected = {sizes for sizes in every if len(sizes) <= 3 and fits(sizes) and within(sizes)}
    assert {mesh.sizes for mesh in found} == (expected or {coarsest_mesh(device_num, strategies).sizes})
    assert len(set(found)) == len(found)
    assert [len(mesh.sizes) for mesh in found] == sorted(len(mesh.sizes) for mesh in found)


def test_meshes_to_search_are_refused_as_the_coarsest_mesh_is():
    wrong = [(3, 1), (None, 3), (2, 4), (0, 2), ("dp", None)]
    messages = []
    for call in (coarsest_mesh, meshes_of):
        with pytest.raises(StrategyError) as error:
            call(8, iter(wrong))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[1].splitlines() == [
        "no mesh of 8 devices fits:",
        "  - strategy (3, 1): no mesh of 8 devices allows it; write a tuple of split counts whose product divides 8",
        "  - strategy (None, 3): no mesh of 8 devices allows it; write a tuple of split counts whose product divides 8",
        "  - strategy (0, 2): no mesh of 8 devices allows it; write a tuple of split counts whose product divides 8",
        "  - strategy ('dp', None): it is not a tuple of ints; write one split count per dim",
    ]


def test_many_devices_are_factored_quickly():
    assert coarsest_mesh(4096, [(64, 8), (8, 64), (2, 2)]).device_num == 4096


def test_planning_with_names_and_ints_does_not_import_torch_distributed():
    # The package above is left out by an empty one in its place: it may import torch.
    code = """
import importlib.util, sys, types
package = types.ModuleType("partway")
package.__path__ = list(importlib.util.find_spec("partway").submodule_search_locations)
sys.modules["partway"] = package
from partway.strategy import Mesh, parse
parse(("dp", None), Mesh({"dp": 2}), (4, 4))
parse((2, 1), Mesh({"dp": 2}), (4, 4))
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
