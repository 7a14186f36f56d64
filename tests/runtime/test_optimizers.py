"""Optimizers whose parameters were replaced or laid out anew: what they do at their next step."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import partway as pw
from partway.runtime import optimizers
from partway.strategy import REPLICATE, Layout, Mesh, RuntimeStateError

WHOLE = Layout(Mesh({"x": 2}), (REPLICATE,))


def trained(parameters):
    """An optimizer of parameters that have gradients, after a step."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_step_of_a_parameter_that_was_replaced_is_refused_until_it_is_dropped():
    model = nn.Linear(2, 2)
    early, other = trained([model.weight, model.bias]), trained([nn.Parameter(torch.ones(2))])
    optimizers.replaced({model.weight: "fc.weight"})
    before = model.bias.detach().clone()
    for _ in range(2):
        with pytest.raises(
            RuntimeStateError, match=r"AdamW was made of parameter fc\.weight before its module was sha"
        ):
            early.step()
    assert torch.equal(model.bias, before)
    other.step()
    early.param_groups[0]["params"].remove(model.weight)
    early.step()
    assert not torch.equal(model.bias, before)


def test_a_parameter_that_an_optimizer_gets_later_is_looked_at():
    old, optimizer = nn.Parameter(torch.ones(2)), trained([nn.Parameter(torch.ones(2))])
    optimizers.replaced({old: "weight"})
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    with pytest.raises(RuntimeStateError, match="made of parameter weight before"):
        optimizer.step()


def test_what_was_replaced_is_not_kept_alive():
    old = nn.Parameter(torch.ones(2))
    optimizers.replaced({old: "a name"})
    known = len(optimizers._replaced)
    del old
    gc.collect()
    assert len(optimizers._replaced) == known - 1


def test_states_like_their_parameter_are_laid_out_once_after_each_change():
    model, asked = nn.Linear(3, 2), []
    optimizer = trained([model.weight, model.bias])

    def lay_out(state, layout):
        asked.append((tuple(state.shape), layout))
        return state.clone()

    before = optimizer.state[model.weight]["exp_avg"]
    optimizers.laid_out(model, {"weight": WHOLE}, lay_out)
    assert not asked
    optimizer.step()
    optimizer.step()
    assert asked == [((2, 3), WHOLE)] * 2  # exp_avg and exp_avg_sq, not the number of steps
    assert optimizer.state[model.weight]["exp_avg"] is not before
    optimizers.laid_out(model, {"bias": WHOLE}, lay_out)
    optimizer.step()
    assert asked[2:] == [((2, 3), WHOLE)] * 2 + [((2,), WHOLE)] * 2


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


def made_between():
    """An optimizer with states, made between shard and the first call, against one of a plain module."""
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    first = trained(list(plain.parameters()))
    sharded = pw.shard(model, mesh={"dp": 2}, in_strategy=(("dp", None),), parameter_plan={"weight": ("dp", None)})
    second = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    for parameter in sharded.parameters():
        parameter.grad = torch.ones_like(parameter)
    second.step()
    for module, optimizer in ((plain, first), (sharded, second)):
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(4, 4)).square().sum().backward()
            optimizer.step()
    weight = sharded.weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (1, 4)
    assert second.state[weight]["exp_avg"].placements == weight.placements
    assert torch.allclose(weight.full_tensor(), plain.weight)
    with pytest.raises(RuntimeStateError, match=r"SGD was made of parameter weight before its module was sharded"):
        early.step()


@pytest.mark.gloo
def test_an_optimizer_with_states_made_between_shard_and_the_first_call_trains_like_that_of_one_device(on_ranks):
    on_ranks(2, made_between)
