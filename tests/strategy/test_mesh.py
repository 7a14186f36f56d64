import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partway.strategy import Mesh, StrategyError

MESH = Mesh({"dp": 2, "tp": 4})
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda sizes: Mesh.of_sizes(tuple(sizes)))


def test_the_last_axis_joins_neighbouring_ranks():
    mesh = Mesh({"dp": 2, "tp": 4})
    assert mesh.group(5, "tp") == (4, 5, 6, 7)
    assert mesh.group(5, "dp") == (1, 5)
    assert (mesh.stride("dp"), mesh.stride("tp")) == (4, 1)


def test_groups_are_in_the_order_of_their_first_ranks():
    assert Mesh({"dp": 2, "tp": 2}).groups("dp") == ((0, 2), (1, 3))


@given(meshes)
def test_rank_and_coordinate_are_inverse(mesh):
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.device_num)] == list(range(mesh.device_num))


def sets_of(axes):
    return [found for n in range(len(axes) + 1) for found in itertools.combinations(axes, n)]


@given(meshes)
def test_the_groups_along_any_axes_hold_every_rank_once(mesh):
    for axes in sets_of(mesh.axes):
        groups = mesh.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.device_num))
        assert {len(group) for group in groups} == {mesh.size(*axes)}
        assert sorted(groups) == list(groups)
        assert all(mesh.group(rank, *axes) == group for group in groups for rank in group)


@given(meshes)
def test_ranks_of_a_group_are_in_row_major_order_of_its_axes(mesh):
    for axes in sets_of(mesh.axes):
        part = Mesh({axis: mesh.size(axis) for axis in axes} or {"one": 1})
        for rank in range(mesh.device_num):
            there = dict(zip(mesh.axes, mesh.coordinate(rank), strict=True))
            position = part.rank(tuple(there[axis] for axis in axes) or (0,))
            assert mesh.group(rank, *axes)[position] == rank
            assert mesh.position(rank, *axes) == position


def test_a_group_along_several_axes_need_not_be_neighbours():
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    assert mesh.groups("a", "c") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups("a", "b", "c") == (tuple(range(8)),)
    assert mesh.groups() == tuple((rank,) for rank in range(8))


@pytest.mark.parametrize("axes", [("tp", "dp"), ("dp", "tp", "dp"), ("tp", "dp", "tp")])
def test_axes_of_a_group_in_another_order_are_rejected_saying_the_order(axes):
    message = f"^the axes {', '.join(axes)} of a group .* the order of the mesh dp=2, tp=4, each once; write dp, tp$"
    for ask in (lambda: MESH.group(0, *axes), lambda: MESH.groups(*axes), lambda: MESH.position(0, *axes)):
        with pytest.raises(StrategyError, match=message):
            ask()


@pytest.mark.parametrize(("devices", "sizes"), [(1, (1,)), (2, (2,)), (8, (2, 2, 2)), (12, (2, 2, 3)), (7, (7,))])
def test_a_flat_mesh_has_an_axis_for_each_prime_factor(devices, sizes):
    mesh = Mesh.flat(devices)
    assert mesh.sizes == sizes
    assert math.prod(mesh.sizes) == mesh.device_num == devices
    assert mesh.axes == tuple(f"d{i}" for i in range(len(sizes)))


def test_meshes_with_the_same_axes_are_equal_and_hash_alike():
    assert Mesh({"dp": 2, "tp": 4}) == Mesh({"dp": 2, "tp": 4})
    assert hash(Mesh({"dp": 2, "tp": 4})) == hash(Mesh({"dp": 2, "tp": 4}))
    assert Mesh({"dp": 2, "tp": 4}) != Mesh({"tp": 4, "dp": 2})


def test_a_mesh_prints_as_what_makes_it():
    assert str(Mesh({"dp": 2, "tp": 4})) == "dp=2, tp=4"
    assert repr(Mesh({"dp": 2, "tp": 4})) == "Mesh({'dp': 2, 'tp': 4})"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "Mesh takes a dict of axis names and sizes"),
        ([("dp", 2)], "Mesh takes a dict of axis names and sizes"),
        ({"": 2}, "mesh axis name '' must be an identifier, such as 'dp'"),
        ({3: 2}, "mesh axis name 3 must be an identifier"),
        ({"dp": 0}, "mesh axis 'dp' has size 0; a size is an int of 1 or more"),
        ({"dp": 2.0}, "mesh axis 'dp' has size 2.0"),
        ({"dp": True}, "mesh axis 'dp' has size True"),
    ],
)
def test_a_wrong_mesh_is_rejected_saying_what_to_write(axes, message):
    with pytest.raises(StrategyError, match=message):
        Mesh(axes)


def test_an_unknown_axis_is_rejected_listing_the_axes():
    with pytest.raises(StrategyError, match="the mesh has no axis 'pp'; its axes are dp=2, tp=4"):
        Mesh({"dp": 2, "tp": 4}).size("pp")


def test_the_position_of_a_rank_on_several_axes():
    mesh = Mesh({"dp": 2, "cp": 3, "tp": 2})
    assert [mesh.position(rank, "dp", "tp") for rank in range(12)] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert [mesh.position(rank, *mesh.axes) for rank in range(12)] == list(range(12))
    assert mesh.position(11) == 0
    with pytest.raises(StrategyError, match="the mesh has no axis 'pp'; its axes are dp=2, cp=3, tp=2"):
        mesh.position(0, "pp")


def test_a_rank_off_the_mesh_is_rejected():
    with pytest.raises(StrategyError, match="rank 8 is not on the mesh dp=2, tp=4; its ranks are 0 to 7"):
        Mesh({"dp": 2, "tp": 4}).coordinate(8)


@pytest.mark.parametrize("device_num", [0, -1, 2.0, True])
def test_a_wrong_device_num_is_rejected(device_num):
    with pytest.raises(StrategyError, match="it must be an int of 1 or more"):
        Mesh.flat(device_num)


@pytest.mark.parametrize("ranks", [(1,), (0, 0), (3, 2), (-1, 0), (0, True), ("0", "1"), "01", 2], ids=str)
def test_ranks_of_a_part_of_a_job_are_one_for_each_device_and_ascend(ranks):
    with pytest.raises(StrategyError) as error:
        Mesh({"tp": 2}, ranks)
    assert str(error.value) == (
        f"the mesh tp=2 has 2 devices, and its ranks are {ranks!r}; name as many ranks of the job, each once, in "
        "ascending order"
    )


def test_a_part_of_a_job_has_ranks_of_its_own_and_of_the_job():
    part = Mesh({"dp": 2, "tp": 2}, ranks=[2, 3, 6, 7])
    assert part.is_part
    assert not Mesh({"dp": 2, "tp": 2}).is_part
    assert part != Mesh({"dp": 2, "tp": 2})
    assert (part.own_rank(6), part.processes(6, "tp"), part.processes(6, "dp")) == (2, (6, 7), (2, 6))
    assert eval(repr(part)) == part
    with pytest.raises(
        StrategyError, match=r"rank 4 of the job is not on the mesh dp=2, tp=2 on ranks 2, 3, 6, 7; let"
    ):
        part.own_rank(4)
