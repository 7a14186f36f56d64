import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from partway.strategy import Mesh, RuntimeStateError, StrategyError
from partway.strategy.torch_mesh import from_device_mesh, to_device_mesh


@pytest.fixture
def eight_ranks():
    """A process group that answers without other processes."""
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_a_mesh_and_its_device_mesh_have_the_same_axes_and_ranks():
    mesh = Mesh({"dp": 2, "tp": 4})
    device_mesh = to_device_mesh(mesh, "cpu")
    assert device_mesh.mesh_dim_names == ("dp", "tp")
    assert tuple(device_mesh["tp"].mesh.tolist()) == mesh.group(0, "tp")
    assert from_device_mesh(device_mesh) == mesh


@pytest.mark.usefixtures("eight_ranks")
def test_axes_without_names_are_numbered():
    assert from_device_mesh(init_device_mesh("cpu", (2, 4))) == Mesh({"d0": 2, "d1": 4})


@pytest.mark.usefixtures("eight_ranks")
def test_a_device_mesh_in_another_order_is_rejected():
    with pytest.raises(
        StrategyError, match=r"holds the ranks \[0, 2, 1, 3\]; give one whose ranks ascend in row-major order"
    ):
        from_device_mesh(DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]])))


@pytest.mark.usefixtures("eight_ranks")
def test_a_mesh_of_another_size_than_the_process_group_is_rejected():
    with pytest.raises(RuntimeStateError, match=r"the mesh \(dp=4\) has 4 devices, but there are 8 ranks; start 4"):
        to_device_mesh(Mesh({"dp": 4}), "cpu")


def test_a_device_mesh_needs_a_process_group():
    with pytest.raises(RuntimeStateError, match="there is no process group; call"):
        to_device_mesh(Mesh({"dp": 1}), "cpu")
