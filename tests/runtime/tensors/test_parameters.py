import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from partway.runtime import as_dtensor, device_mesh, distribute, placed_part, redistribute, shard_tensor
from partway.strategy import BROADCAST, REPLICATE, Layout, Mesh, RuntimeStateError, Shard, StrategyError

MESH = Mesh({"dp": 2, "tp": 2})
ROWS, WHOLE = Layout(MESH, (Shard(0), REPLICATE)), Layout.replicated(MESH)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def round_trip():
    mesh = device_mesh(MESH)
    whole = torch.arange(32.0).view(4, 8)
    for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(1)), (REPLICATE, Shard(0)), (REPLICATE, REPLICATE)):
        layout = Layout(MESH, placements)
        made = shard_tensor(whole, layout)
        assert made.shape == whole.shape
        assert made.stride() == whole.stride()
        assert torch.equal(made.full_tensor(), whole)
        assert torch.equal(as_dtensor(local(placed_part(made, layout)), layout, (4, 8), mesh).full_tensor(), whole)
        assert torch.equal(shard_tensor(made, ROWS).full_tensor(), whole)
    short = torch.arange(3.0)
    assert torch.equal(shard_tensor(short, ROWS).full_tensor(), short)
    with pytest.raises(StrategyError, match=r"cuts the shape \[9\] as no DTensor is cut"):
        shard_tensor(torch.zeros(9), Layout(MESH, (Shard(0), Shard(0))))
    with pytest.raises(StrategyError, match="which DTensor cannot express"):
        shard_tensor(whole, Layout(MESH, (BROADCAST, REPLICATE)))


@pytest.mark.gloo
def test_a_tensor_becomes_a_dtensor_without_communication_and_back(on_ranks):
    on_ranks(4, round_trip)


def parts():
    """The loss of a rank is the sum of its part times its rank's number."""
    for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(1)), (REPLICATE, REPLICATE)):
        layout = Layout(MESH, placements)
        whole = torch.rand(4, 8)
        here = layout.slices((4, 8), dist.get_rank())
        split = any(isinstance(p, Shard) for p in placements)
        expected = torch.zeros(4, 8)
        for rank in range(4):
            expected[layout.slices((4, 8), rank)] = rank if split else dist.get_rank()
        for tensor in (whole.clone().requires_grad_(), nn.Parameter(shard_tensor(whole, layout))):
            assert isinstance(tensor, nn.Parameter) <= (placed_part(tensor, layout) is tensor)
            part = local(placed_part(tensor, layout))
            assert torch.equal(part.cpu(), whole[here]) or not isinstance(tensor, DTensor)
            (part * dist.get_rank()).sum().backward()
            if isinstance(tensor, DTensor):
                assert tensor.grad.placements == tensor.placements
                assert torch.equal(tensor.grad.to_local(), expected[here])
            else:
                assert torch.equal(tensor.grad, expected)
        assert torch.equal(placed_part(whole, layout), whole[here])
        assert placed_part(whole, layout, whole=False) is whole
    assert placed_part(whole, WHOLE) is whole
    given = shard_tensor(torch.arange(8.0).view(4, 2), Layout(MESH, (Shard(1), REPLICATE)))
    assert local(placed_part(given, ROWS)).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]][dist.get_rank() // 2]
    with pytest.raises(RuntimeStateError, match=r"a DTensor on the mesh .* was given where the plan has"):
        placed_part(given, Layout(Mesh({"x": 4}), (Shard(0),)))


@pytest.mark.gloo
def test_the_part_of_a_tensor_has_a_gradient_that_fits_the_tensor(on_ranks):
    on_ranks(4, parts)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.first.weight.decay = False


def tied():
    torch.manual_seed(0)
    return Tied()


def take_over():
    model = tied()
    early = torch.optim.SGD([model.first.bias], lr=0.1)
    frozen = model.frozen
    model.first.weight.grad = torch.ones(4, 4)
    earlier = model.first(torch.ones(4)).sum()
    names = [name for name, _ in model.named_parameters()]
    distribute(model)
    weight = model.first.weight
    early.zero_grad()
    model.first.bias.grad = torch.ones_like(model.first.bias)
    before = model.first.bias.full_tensor().clone()
    early.step()
    assert torch.equal(model.first.bias.full_tensor(), before - 0.1)
    model.first.bias.grad = None
    assert isinstance(weight, DTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.decay is False
    assert model.second.weight is weight
    assert [name for name, _ in model.named_parameters()] == names
    assert not model.frozen.requires_grad
    assert model.frozen is not frozen
    assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 4))
    distribute(model)
    assert model.first.weight is weight
    with pytest.raises(
        RuntimeStateError, match=r"a gradient reached what was parameter first.(weight|bias) before its"
    ):
        earlier.backward()
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": 0.5}, {"params": [model.first.bias]}])
    for parameter in (weight, model.first.bias):
        parameter.grad = shard_tensor(torch.ones(parameter.shape), Layout.replicated(Mesh.of_sizes((4,))))
    optimizer.step()
    with pytest.raises(
        RuntimeStateError, match="there is no parameter third that is a DTensor; there are: frozen, fir"
    ):
        redistribute(model, {"third": ROWS})
    with pytest.raises(RuntimeStateError, match=r"first.weight and second.weight are one parameter, but their layouts"):
        redistribute(model, {"first.weight": ROWS, "second.weight": WHOLE})
    values = weight.full_tensor()
    redistribute(model, {"first.weight": ROWS, "second.weight": ROWS, "first.bias": WHOLE, "frozen": ROWS})
    assert model.first.weight is model.second.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.to_local().shape == (2, 4)
    assert weight.decay is False
    assert torch.equal(weight.full_tensor(), values)
    assert weight.grad.placements == weight.placements
    assert optimizer.state[weight]["step"] == 1
    weight.grad = None
    (local(placed_part(weight, ROWS)) * 2).sum().backward()
    assert weight.grad.placements == weight.placements
    assert torch.equal(weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    weight.grad = shard_tensor(torch.ones(4, 4), ROWS)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].placements == weight.placements
    assert optimizer.state[weight]["step"] == 2
    optimizer.zero_grad()
    assert weight.grad is None
    redistribute(model, {"first.weight": Layout(MESH, (Shard(1), Shard(1)))})
    assert weight.to_local().shape == (4, 1)
    alone = tied()
    optimizer = torch.optim.AdamW([{"params": [alone.first.weight], "lr": 0.5}, {"params": [alone.first.bias]}])
    for _ in range(2):
        for parameter in (alone.first.weight, alone.first.bias):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.allclose(weight.full_tensor(), alone.first.weight)
    assert set(model.state_dict()) == set(alone.state_dict())


@pytest.mark.gloo
def test_dtensors_take_the_place_of_parameters_and_are_split_in_place_under_their_optimizer(on_ranks):
    on_ranks(4, take_over)


def still_needed():
    model = nn.Linear(4, 4, bias=False)
    distribute(model)
    weight, known = model.weight, weakref.ref(model.weight)
    loss = model.weight.pow(2).sum()
    redistribute(model, {"weight": ROWS})
    assert known() is model.weight is weight
    loss.backward()
    assert torch.equal(weight.grad.full_tensor(), 2 * weight.full_tensor().detach())
    plain = nn.Linear(4, 4)
    with pytest.raises(
        RuntimeStateError,
        match=r"no parameter weight that is a DTensor; there are: none\. What a module gets "
        r"after shard is not split: change the module first, and shard it then",
    ):
        redistribute(plain, {"weight": ROWS})


@pytest.mark.gloo
def test_a_parameter_that_a_graph_still_needs_is_split(on_ranks):
    on_ranks(4, still_needed)


def let_go():
    model = nn.Linear(8, 8, bias=False)
    storage = model.weight.untyped_storage().data_ptr()
    distribute(model)
    redistribute(model, {"weight": Layout(MESH, (Shard(0), Shard(1)))})
    gc.collect()
    held = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and not o.is_sparse]
    assert not [t for t in held if t.untyped_storage().data_ptr() == storage]
    assert model.weight.to_local().untyped_storage().nbytes() == 8 * 8 * 4 // 4


@pytest.mark.gloo
def test_the_memory_of_a_whole_parameter_is_let_go(on_ranks):
    on_ranks(4, let_go)
