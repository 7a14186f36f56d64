import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partway.strategy import Mesh, StrategyError

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda sizes: Mesh.of_sizes(tuple(sizes)))


def test_the_last_axis_joins_neighbouring_ranks():
    mesh = Mesh({"dp": 2, "tp": 4})
    assert mesh.group("tp", 5) == (4, 5, 6, 7)
    assert mesh.group("dp", 5) == (1, 5)
    assert (mesh.stride("dp"), mesh.stride("tp")) == (4, 1)


def test_groups_are_in_the_order_of_their_first_ranks():
    assert Mesh({"dp": 2, "tp": 2}).groups("dp") == ((0, 2), (1, 3))


@given(meshes)
def test_rank_and_coordinate_are_inverse(mesh):
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.device_num)] == list(range(mesh.device_num))


@given(meshes)
def test_the_groups_of_an_axis_hold_every_rank_once(mesh):
    for axis in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.device_num))
        assert {len(group) for group in groups} == {mesh.size(axis)}


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
    assert [mesh.position(rank, ("dp", "tp")) for rank in range(12)] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert [mesh.position(rank, mesh.axes) for rank in range(12)] == list(range(12))
    assert mesh.position(11, ()) == 0
    with pytest.raises(StrategyError, match="the mesh has no axis 'pp'; its axes are dp=2, cp=3, tp=2"):
        mesh.position(0, ("pp",))


def test_a_rank_off_the_mesh_is_rejected():
    with pytest.raises(StrategyError, match="rank 8 is not on the mesh dp=2, tp=4; its ranks are 0 to 7"):
        Mesh({"dp": 2, "tp": 4}).coordinate(8)


@pytest.mark.parametrize("device_num", [0, -1, 2.0, True])
def test_a_wrong_device_num_is_rejected(device_num):
    with pytest.raises(StrategyError, match="it must be an int of 1 or more"):
        Mesh.flat(device_num)
