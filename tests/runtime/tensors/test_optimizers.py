"""Optimizers whose parameters were replaced or laid out anew: what they do at their next step."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import partway as pw
from partway.runtime.tensors import optimizers
from partway.runtime.tensors.replaced import replace


def trained(parameters):
    """An optimizer of parameters that have gradients, after a step."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def replaced(parameter):
    """What takes the place of `parameter`."""
    new = nn.Parameter(parameter.detach().clone())
    replace(parameter, new, "weight")
    optimizers.changed(nn.Linear(1, 1))
    return new


def test_an_optimizer_of_a_parameter_that_was_replaced_gets_the_new_one_with_the_states_of_the_old_one():
    model, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    alone.load_state_dict(model.state_dict())
    early, other = trained([model.weight, model.bias]), trained([alone.weight, alone.bias])
    held = early.param_groups[0]["params"]
    new = replaced(model.weight)
    early.zero_grad()
    for parameter in (new, model.bias, alone.weight, alone.bias):
        parameter.grad = torch.full_like(parameter, 3.0)
    early.step()
    other.step()
    assert early.param_groups[0]["params"] is held
    assert held[0] is new
    assert early.state[new]["step"] == 2
    assert set(early.state) == {new, model.bias}
    assert torch.equal(new, alone.weight)
    assert torch.equal(model.bias, alone.bias)


def test_a_parameter_that_an_optimizer_gets_later_is_looked_at():
    old, optimizer = nn.Parameter(torch.ones(2)), trained([nn.Parameter(torch.ones(2))])
    new = replaced(old)
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    optimizer.step()
    assert optimizer.param_groups[1]["params"] == [new]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=False),
    ],
    ids=["AdamW", "SGD", "LBFGS", "RMSprop"],
)
def test_each_kind_of_optimizer_steps_what_took_the_place_of_its_parameters(make):
    old, alone = nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.arange(3.0))
    one, other = make([old]), make([alone])
    new = replaced(old)
    for _ in range(3):
        for optimizer, parameter in ((one, new), (other, alone)):
            optimizer.zero_grad()
            (parameter - 1).square().sum().backward()
            optimizer.step(lambda p=parameter: (p - 1).square().sum())
    assert torch.equal(new, alone)


def test_what_is_kept_of_a_parameter_that_is_one_number_is_told_apart_by_its_name():
    scale, weight = torch.ones(()), torch.ones(3, 2)
    assert optimizers.by_element("exp_avg", (), scale)
    assert optimizers.by_element("exp_avg", (3, 2), weight)
    assert not optimizers.by_element("exp_avg", (3,), weight)
    for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD):
        optimizer = kind([parameter := nn.Parameter(weight.clone())])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        numbers = [key for key, value in optimizer.state[parameter].items() if not value.dim()]
        assert numbers
        assert not any(optimizers.by_element(key, (), scale) for key in numbers)


def test_an_optimizer_that_was_made_before_shard_trains_simulated_ranks():
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    steps = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]
    sharded = pw.shard(model, mesh={"dp": 2}, in_strategy=(("dp", None),))
    for module, optimizer in zip((sharded, plain), steps, strict=True):
        module(torch.ones(4, 4)).square().sum().backward()
        optimizer.step()
    assert torch.allclose(model.weight, plain.weight)


def made_at_any_time():
    """Optimizers with states, made before shard or between shard and the first call, against one of a plain module."""
    found = []
    for before in (True, False):
        torch.manual_seed(0)
        model, plain = nn.Linear(4, 2), nn.Linear(4, 2)
        plain.load_state_dict(model.state_dict())
        first = trained(list(plain.parameters()))
        second = trained(list(model.parameters())) if before else None
        early = list(model.parameters())
        sharded = pw.shard(model, mesh={"dp": 2}, in_strategy=(("dp", None),), parameter_plan={"weight": ("dp", None)})
        assert {p.device_mesh.mesh_dim_names for p in sharded.parameters()} == {("dp",)}
        second = second or trained(list(sharded.parameters()))
        norms = []
        for module, optimizer, parameters in ((plain, first, list(plain.parameters())), (sharded, second, early)):
            for _ in range(2):
                optimizer.zero_grad()
                module(torch.ones(4, 4)).square().sum().backward()
                norm = nn.utils.clip_grad_norm_(parameters, 0.5)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                optimizer.step()
        weight = sharded.weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape == (1, 4)
        assert second.state[weight]["exp_avg"].placements == weight.placements
        torch.testing.assert_close(weight.full_tensor(), plain.weight)
        torch.testing.assert_close(norms[2:], norms[:2])
        found.append(sorted(type(v).__name__ for v in second.state[sharded.bias].values()))
    return found


@pytest.mark.gloo
def test_an_optimizer_with_states_made_before_shard_or_the_first_call_trains_like_that_of_one_device(on_ranks):
    assert on_ranks(2, made_at_any_time) == [[["SplitTensor", "SplitTensor", "Tensor"]] * 2] * 2
